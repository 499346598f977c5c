"""What the compiler made of the CUDA kernels: registers, memory, spills and the width of loads and stores.

    python tools/kernel_report.py                          the built extension
    python tools/kernel_report.py --compile 9.0            compiles csrc/cuda for one architecture (minutes)
    python tools/kernel_report.py LIBRARY --arch sm_80     another library, object file or cubin; one architecture of it
    python tools/kernel_report.py --json FILE              and writes what it found

It needs cuobjdump, of the CUDA toolkit or of Triton, which comes with a CUDA build of torch. No GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Where a kernel's parameters begin in its constant memory, by the major number of the architecture.
_PARAMETERS_BEGIN = {7: 0x160, 8: 0x160, 9: 0x210, 10: 0x380, 11: 0x380, 12: 0x380}


@dataclass
class Kernel:
    """One kernel of one architecture.

    Attributes:
        name: Without namespaces, as ``fused_step_kernel<StepCase<Adam, float, float, float, false>>``.
        arch: As ``sm_90``.
        registers: Of a thread.
        shared_bytes: Of a block, static.
        stack_bytes: Of a thread: arrays that registers cannot hold, and what did not fit into registers.
        parameter_bytes: What a launch passes.
        local_accesses: Instructions that read or write the stack: spills, if it is no array.
        load_bytes: The widest load of global memory.
        store_bytes: The widest store to it.
    """

    name: str
    arch: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    parameter_bytes: int
    local_accesses: int = 0
    load_bytes: int = 0
    store_bytes: int = 0

    @property
    def family(self) -> str:
        """The name of the template."""
        return self.name.partition("<")[0]


def find_cuobjdump() -> str | None:
    """Finds it in CUDA_HOME, PATH or Triton."""
    folders = [Path(os.environ[name], "bin") for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    triton = find_spec("triton")
    if triton is not None and triton.origin is not None:
        folders.append(Path(triton.origin).parent / "backends" / "nvidia" / "bin")
    return next(filter(None, (shutil.which("cuobjdump", path=f) for f in [*folders, None])), None)  # type: ignore[arg-type]


def _lines(cuobjdump: str, option: str, library: Path, arch: str | None) -> Iterator[str]:
    chosen = [] if arch is None else ["-arch", arch]
    command = [cuobjdump, option, *chosen, str(library)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        yield from process.stdout
        error = process.stderr.read()
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed: {error.strip()}")


def architectures(library: Path, cuobjdump: str) -> set[str]:
    """The architectures that a library has code for, as sm_90; compute_90 where it has PTX."""
    listed = " ".join(_lines(cuobjdump, "--list-elf", library, None))
    ptx = " ".join(_lines(cuobjdump, "--list-ptx", library, None))
    return set(re.findall(r"\.(sm_\w+)\.cubin", listed)) | {
        name.replace("sm_", "compute_") for name in re.findall(r"\.(sm_\w+)\.ptx", ptx)
    }


def _readable(names: Iterable[str]) -> dict[str, str]:
    """What mangled names mean; themselves where there is no c++filt."""
    mangled = sorted(set(names))
    if shutil.which("c++filt") is None:
        return {name: name for name in mangled}
    run = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True)
    return {name: _short(text) for name, text in zip(mangled, run.stdout.splitlines(), strict=True)}


def _short(text: str) -> str:
    text = text.replace("(anonymous namespace)::", "").removeprefix("void ")
    depth, end = 0, len(text)
    for i, letter in enumerate(text):  # up to the parameters: the first parenthesis outside of <>
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            end = i
            break
    text = re.sub(r"\((int|bool)\)", "", text[:end])
    return re.sub(r"\b(lightning_apex|c10)::", "", text)


def _resources(lines: Iterable[str]) -> Iterator[Kernel]:
    arch = name = ""
    for line in lines:
        if line.startswith("arch = "):  # not in a cubin, which is of one architecture
            arch = line.split()[2]
        elif found := re.match(r" Function (\S+):", line):
            name = found[1]
        elif "REG:" in line:
            of = {key: int(value) for key, value in re.findall(r"([A-Z]+(?:\[0\])?):(\d+)", line)}
            begin = _PARAMETERS_BEGIN.get(int(re.findall(r"\d+", arch)[0]) // 10, 0)
            yield Kernel(name, arch, of["REG"], of["SHARED"], of["STACK"], of["CONSTANT[0]"] - begin)


_ACCESS = re.compile(r"\s(LDG|STG|LDL|STL)((?:\.\w+)*)\s")


def _width(suffixes: str) -> int:
    """The bytes that an instruction such as LDG.E.128.CONSTANT moves a thread."""
    for word, size in {".256": 32, ".128": 16, ".64": 8, "16": 2, "8": 1}.items():
        if any(part.endswith(word.strip(".")) for part in suffixes.split(".") if part[-1:].isdigit()):
            return size
    return 4


def _accesses(lines: Iterable[str], kernels: dict[tuple[str, str], Kernel]) -> None:
    arch, kernel = "", None
    for line in lines:
        if "Function : " in line:
            kernel = kernels[arch, line.split()[-1]]
        elif line.startswith("arch = "):
            arch = line.split()[2]
        elif kernel is not None and (found := _ACCESS.search(line)):
            if found[1].endswith("L"):
                kernel.local_accesses += 1
            elif found[1] == "LDG":
                kernel.load_bytes = max(kernel.load_bytes, _width(found[2]))
            else:
                kernel.store_bytes = max(kernel.store_bytes, _width(found[2]))


def report(library: Path, arch: str | None = None, *, accesses: bool = True) -> list[Kernel]:
    """Reads a library.

    Args:
        library: A shared library, an object file or a cubin.
        arch: Only this architecture, as ``sm_90``.
        accesses: Whether to look at instructions too, which takes a quarter of a minute an architecture.
    """
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        raise SystemExit(
            "there is no cuobjdump in CUDA_HOME, in PATH or beside Triton: set CUDA_HOME to a CUDA toolkit"
        )
    kernels = {(k.arch, k.name): k for k in _resources(_lines(cuobjdump, "--dump-resource-usage", library, arch))}
    if accesses:
        _accesses(_lines(cuobjdump, "--dump-sass", library, arch), kernels)
    names = _readable(name for _, name in kernels)
    for kernel in kernels.values():
        kernel.name = names[kernel.name]
    return sorted(kernels.values(), key=lambda k: (k.arch, k.name))


def compile_kernels(arch: str, folder: Path) -> list[Path]:
    """Compiles the CUDA files as setup.py does, for one architecture."""
    from torch.utils import cpp_extension

    if cpp_extension.CUDA_HOME is None:
        raise SystemExit("--compile needs nvcc: set CUDA_HOME to a CUDA toolkit")
    nvcc = Path(os.environ.get("CUDA_HOME") or cpp_extension.CUDA_HOME, "bin", "nvcc")
    include = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    flags = ["-O3", "-std=c++20", "--expt-relaxed-constexpr", *include, f"-arch=sm_{arch.replace('.', '')}", "-cubin"]

    def compile_one(source: Path) -> Path:
        target = folder / f"{source.stem}.cubin"
        subprocess.run([str(nvcc), *flags, "-o", str(target), str(source)], check=True)
        return target

    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
        return list(pool.map(compile_one, sorted((ROOT / "csrc" / "cuda").glob("*.cu"))))


def summary(kernels: list[Kernel]) -> list[dict[str, object]]:
    """A row for each template and architecture: how many instantiations, and the most that any takes."""
    rows: list[dict[str, object]] = []
    for (arch, family), count in sorted(Counter((k.arch, k.family) for k in kernels).items()):
        these = [k for k in kernels if (k.arch, k.family) == (arch, family)]
        most = {
            key: max(getattr(k, key) for k in these)
            for key in ("registers", "shared_bytes", "parameter_bytes", "load_bytes", "store_bytes")
        }
        with_stack = sum(k.stack_bytes > 0 for k in these)
        rows.append({"arch": arch, "kernel": family, "instantiations": count, **most, "with_stack": with_stack})
    return rows


def _print(kernels: list[Kernel], every: bool) -> None:
    rows = [asdict(k) for k in kernels] if every else summary(kernels)
    if not rows:
        raise SystemExit("there are no kernels in it: was it built with CUDA?")
    title = [key.replace("_bytes", " B").replace("_", " ") for key in rows[0]]
    table = [title, *([str(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    for k in kernels:
        if k.stack_bytes:
            print(f"stack: {k.arch} {k.name}: {k.stack_bytes} B, {k.local_accesses} accesses, {k.registers} registers")


def _built() -> Path:
    found = sorted((ROOT / "lightning_apex").glob("_C*.so"))
    if not found:
        raise SystemExit(f"there is no built extension in {ROOT / 'lightning_apex'}: name a library, or --compile 9.0")
    return found[0]


def main() -> None:
    """Reads the command line and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", nargs="?", type=Path)
    parser.add_argument("--compile", metavar="ARCH", help="compile the sources for it, as 9.0")
    parser.add_argument("--arch", help="only this one, as sm_90")
    parser.add_argument("--all", action="store_true", help="a line for every instantiation")
    parser.add_argument("--json", type=Path, help="write all lines to this file")
    given = parser.parse_args()
    if given.compile:
        with tempfile.TemporaryDirectory() as folder:
            kernels = [k for cubin in compile_kernels(given.compile, Path(folder)) for k in report(cubin)]
    else:
        kernels = report(given.library or _built(), given.arch)
    _print(kernels, given.all)
    if given.json:
        record = {"summary": summary(kernels), "kernels": [asdict(k) for k in kernels]}
        given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
