"""Compiles the CUDA operators for the SIMT machine and loads them as ``torch.ops.lightning_apex_simt``."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parent.parent
_CSRC = _ROOT / "csrc"
_TORCH = Path(torch.__file__).resolve().parent
_BUILD = _ROOT / "build" / "simt"
_CXX = os.environ.get("CXX", "g++")
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


def sources() -> list[Path]:
    """The kernels, their host files and what these stand on, and the machine."""
    files = [f for folder in (_CSRC / "cuda", _HERE) for f in folder.iterdir() if f.suffix in (".cu", ".cpp")]
    shared = [_CSRC / f"{name}.cpp" for name in ("schemas", "step_call", "tensor_lists")]
    return [*shared, *sorted(_CSRC.glob("batch_norm_*.cpp")), *sorted(files)]


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256("\0".join([torch.__version__, _CXX, *_FLAGS]).encode())
    for file in files:
        digest.update(file.read_bytes() if file.exists() else b"gone")
    return digest.hexdigest()[:20]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def _command(source: Path, target: Path, *more: str) -> list[str]:
    door = [] if source.parent == _CSRC else ["-DSIMT_EMU"]  # what knows no device is compiled as it always is
    return [_CXX, *_FLAGS, *door, *more, "-x", "c++", "-c", str(source), "-o", str(target)]


def _compile(source: Path) -> Path:
    """Compiles one file, unless it was already, from the same files."""
    target, record = _BUILD / f"{source.name}.o", _BUILD / f"{source.name}.json"
    if target.exists() and record.exists():
        known = json.loads(record.read_text())
        if known["digest"] == _digest([Path(f) for f in known["files"]]):
            return target
    record.unlink(missing_ok=True)
    listing = _BUILD / f"{source.name}.d"
    _run(_command(source, target, "-MMD", "-MF", str(listing)))
    files = listing.read_text().replace("\\\n", " ").split(": ", 1)[1].split()
    record.write_text(json.dumps({"digest": _digest([Path(f) for f in files]), "files": files}))
    return target


def _link(objects: list[Path], library: Path) -> None:
    link = ["-shared", "-Wl,-Bsymbolic", "-Wl,-z,defs", f"-L{_TORCH / 'lib'}", "-lc10", "-ltorch_cpu"]
    _run([_CXX, *map(str, objects), *link, "-o", str(library)])


def build() -> Path:
    """Compiles what is not compiled yet and returns the library."""
    _BUILD.mkdir(parents=True, exist_ok=True)
    with open(_BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes may start at once
        jobs = int(os.environ.get("MAX_JOBS", min(4, os.cpu_count() or 1)))
        with ThreadPoolExecutor(jobs) as pool:
            objects = list(pool.map(_compile, sources()))
        library = _BUILD / f"lightning_apex_simt-{_digest(objects)}.so"
        if not library.exists():
            for stale in _BUILD.glob("lightning_apex_simt-*.so"):
                stale.unlink()
            _link(objects, library)
    return library


def build_mutant(folder: Path, file: str, old: str, new: str, affected: list[str]) -> Path:
    """A library in which one place of ``csrc/cuda/<file>`` is another, for the kernel files that are ``affected``."""
    build()
    shutil.copytree(_CSRC, folder / "csrc")
    text = (folder / "csrc" / "cuda" / file).read_text()
    if text.count(old) != 1:
        raise RuntimeError(f"csrc/cuda/{file} has {text.count(old)} times: {old}")
    (folder / "csrc" / "cuda" / file).write_text(text.replace(old, new))
    # The first definition of an inline function is the one that is linked.
    mutated = [folder / f"{name}.o" for name in affected]
    for name, target in zip(affected, mutated, strict=True):
        _run(_command(folder / "csrc" / "cuda" / name, target, "-Wno-error"))
    rest = [_BUILD / f"{source.name}.o" for source in sources() if source.name not in affected]
    _link([*mutated, *rest], folder / "mutant.so")
    return folder / "mutant.so"


@cache
def load() -> Any:
    """Builds if needed, and returns the namespace of operators. SIMT_LIBRARY names another library."""
    torch.ops.load_library(os.environ.get("SIMT_LIBRARY") or str(build()))
    return torch.ops.lightning_apex_simt


if __name__ == "__main__":
    print(build())
