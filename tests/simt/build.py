"""Compiles the CUDA operators for the SIMT machine and loads them as ``torch.ops.lightning_apex_simt``.

There are variants of the library for those who look closer: see VARIANTS, and sanitize.py and coverage.py, which use
them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parent.parent
_CSRC = _ROOT / "csrc"
_TORCH = Path(torch.__file__).resolve().parent
_BUILD = _ROOT / "build" / "simt"
CXX = os.environ.get("CXX", "g++")
_FLAGS = [
    "-std=c++20",
    "-O1",
    "-g1",
    "-fPIC",
    "-ffp-contract=off",  # as the CPU kernels, to be compared with them to the bit
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",  # unroll
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
    # Its symbols are its own: the real extension may be in the same process.
    "-fvisibility=hidden",
    "-fno-gnu-unique",
    f"-I{_HERE}",
    f"-isystem{_TORCH / 'include'}",
]


_SANITIZE_ADDRESS = ("-fsanitize=address,alignment,signed-integer-overflow,shift", "-fno-sanitize-recover=all")
_SANITIZE_THREAD = ("-fsanitize=thread", "-Wno-tsan")


class Variant(NamedTuple):
    """A way to compile the library: more flags for some of its files. All others are those of the plain library."""

    name: str
    kernels: tuple[str, ...] = ()  # the .cu files
    launches: tuple[str, ...] = ()  # the .cpp files beside them
    machine: tuple[str, ...] = ()
    link: tuple[str, ...] = ()
    without: tuple[str, ...] = ()  # kernel files that nobody looks at: more types of what others have

    def flags(self, source: Path) -> tuple[str, ...]:
        if source.parent == _HERE and source.suffix == ".cpp":
            return self.machine
        if source.parent == _CSRC or source.stem in self.without:
            return ()
        return self.kernels if source.suffix == ".cu" else self.launches


_MORE_HALVES = ("fused_step_bf16", "fused_step_norms_bf16")
_MORE_TYPES = (*_MORE_HALVES, "fused_step_f64", "fused_step_norms_f64")
PLAIN = Variant("plain")
VARIANTS = {
    "plain": PLAIN,
    "address": Variant("address", _SANITIZE_ADDRESS, (), ("-DSIMT_ADDRESS",), _SANITIZE_ADDRESS, _MORE_HALVES),
    "thread": Variant("thread", _SANITIZE_THREAD, (), ("-DSIMT_THREAD",), _SANITIZE_THREAD, _MORE_TYPES),
    "coverage": Variant("coverage", ("-O0", "--coverage"), ("-O0", "--coverage"), (), ("--coverage",), _MORE_TYPES),
}


def sources() -> list[Path]:
    """The kernels, their host files and what these stand on, and the machine."""
    files = [f for folder in (_CSRC / "cuda", _HERE) for f in folder.iterdir() if f.suffix in (".cu", ".cpp")]
    shared = [_CSRC / f"{name}.cpp" for name in ("schemas", "step_call", "tensor_lists")]
    rest = [f for f in files if f.name != "faults_main.cpp"]
    return [*shared, *sorted(_CSRC.glob("batch_norm_*.cpp")), *sorted(rest)]


def _digest(files: list[Path], *more: str) -> str:
    digest = hashlib.sha256("\0".join([torch.__version__, CXX, *_FLAGS, *more]).encode())
    for file in files:
        digest.update(file.read_bytes() if file.exists() else b"gone")
    return digest.hexdigest()[:20]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def _command(source: Path, target: Path, *more: str) -> list[str]:
    door = [] if source.parent == _CSRC else ["-DSIMT_EMU"]  # what knows no device is compiled as it always is
    return [CXX, *_FLAGS, *door, *more, "-x", "c++", "-c", str(source), "-o", str(target)]


def _object(source: Path, variant: Variant) -> Path:
    return _BUILD / (variant if variant.flags(source) else PLAIN).name / f"{source.name}.o"


def _compile(source: Path, variant: Variant) -> Path:
    """Compiles one file, unless it was already, from the same files."""
    target, flags = _object(source, variant), variant.flags(source)
    record, listing = target.with_suffix(".json"), target.with_suffix(".d")
    if target.exists() and record.exists():
        known = json.loads(record.read_text())
        if known["digest"] == _digest([Path(f) for f in known["files"]], *flags):
            return target
    record.unlink(missing_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    _run(_command(source, target, *flags, "-MMD", "-MF", str(listing)))
    files = listing.read_text().replace("\\\n", " ").split(": ", 1)[1].split()
    record.write_text(json.dumps({"digest": _digest([Path(f) for f in files], *flags), "files": files}))
    return target


def _in_order(objects: list[Path]) -> list[Path]:
    """The variant's own first: of an inline function that several files have, the first is the one that is linked."""
    return sorted(objects, key=lambda path: path.parent.name == PLAIN.name)


def _link(objects: list[Path], library: Path, *flags: str) -> None:
    link = ["-shared", "-Wl,-Bsymbolic", "-Wl,-z,defs", f"-L{_TORCH / 'lib'}", "-lc10", "-ltorch_cpu"]
    _run([CXX, *flags, *map(str, objects), *link, "-o", str(library)])


def _make(files: list[Path], variant: Variant, name: str, link: Callable[[list[Path], Path], None]) -> Path:
    """Compiles what is not compiled yet, and links it, to ``name`` with a digest in it."""
    _BUILD.mkdir(parents=True, exist_ok=True)
    with open(_BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes may start at once
        jobs = int(os.environ.get("MAX_JOBS", min(4, os.cpu_count() or 1)))
        with ThreadPoolExecutor(jobs) as pool:
            objects = _in_order(list(pool.map(lambda file: _compile(file, variant), files)))
        stem, suffix = name.split(".")
        folder = _BUILD / variant.name
        target = folder / f"{stem}-{_digest(objects, *variant.link)}.{suffix}"
        if not target.exists():
            folder.mkdir(exist_ok=True)
            for stale in folder.glob(f"{stem}-*.{suffix}"):
                stale.unlink()
            link(objects, target)
    return target


def build(variant: Variant = PLAIN) -> Path:
    """The library, compiled if it must be."""

    def link(objects: list[Path], target: Path) -> None:
        _link(objects, target, *variant.link)

    return _make(sources(), variant, "lightning_apex_simt.so", link)


def build_faults(variant: Variant = PLAIN) -> Path:
    """A program that runs the faults whose names it is given, without Python or torch."""

    def link(objects: list[Path], target: Path) -> None:
        _run([CXX, *variant.link, *map(str, objects), "-o", str(target)])

    knows_torch = ("module.cpp",)
    files = [f for f in sorted(_HERE.iterdir()) if f.suffix in (".cu", ".cpp") and f.name not in knows_torch]
    return _make(files, variant, "faults.bin", link)


def build_mutant(folder: Path, file: str, old: str, new: str, affected: list[str], variant: Variant = PLAIN) -> Path:
    """A library in which one place of ``csrc/cuda/<file>`` is another, for the kernel files that are ``affected``."""
    build(variant)
    shutil.copytree(_CSRC, folder / "csrc")
    text = (folder / "csrc" / "cuda" / file).read_text()
    if text.count(old) != 1:
        raise RuntimeError(f"csrc/cuda/{file} has {text.count(old)} times: {old}")
    (folder / "csrc" / "cuda" / file).write_text(text.replace(old, new))
    mutated = [folder / f"{name}.o" for name in affected]
    for name, target in zip(affected, mutated, strict=True):
        flags = variant.flags(_CSRC / "cuda" / name)
        _run(_command(folder / "csrc" / "cuda" / name, target, "-Wno-error", *flags))
    rest = _in_order([_object(source, variant) for source in sources() if source.name not in affected])
    _link([*mutated, *rest], folder / "mutant.so", *variant.link)
    return folder / "mutant.so"


@cache
def load() -> Any:
    """Builds if needed, and returns the namespace of operators. SIMT_LIBRARY names another library."""
    torch.ops.load_library(os.environ.get("SIMT_LIBRARY") or str(build()))
    return torch.ops.lightning_apex_simt


if __name__ == "__main__":
    print(build(VARIANTS[sys.argv[1] if len(sys.argv) > 1 else "plain"]))
