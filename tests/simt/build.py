"""Compiles the CUDA operators for the SIMT machine of this folder and loads them as ``torch.ops.lightning_apex_simt``."""

from __future__ import annotations

import fcntl
import hashlib
import os
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
    return [_CSRC / "tensor_lists.cpp", *sorted(files)]


def _digest(files: list[Path], *more: str) -> str:
    digest = hashlib.sha256("\0".join(more).encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:20]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def _compile(source: Path, common: str) -> Path:
    target = _BUILD / f"{source.stem}-{_digest([source], common, str(source))}.o"
    if not target.exists():
        for stale in _BUILD.glob(f"{source.stem}-{'?' * 20}.o"):
            stale.unlink()
        partial = target.with_suffix(".partial")
        door = [] if source.parent == _CSRC else ["-DSIMT_EMU"]  # what knows no device is compiled as it always is
        _run([_CXX, *_FLAGS, *door, "-x", "c++", "-c", str(source), "-o", str(partial)])
        partial.rename(target)
    return target


def build() -> Path:
    """Compiles what is not compiled yet and returns the library."""
    _BUILD.mkdir(parents=True, exist_ok=True)
    headers = sorted(f for folder in (_CSRC, _HERE) for f in folder.rglob("*.*") if f.suffix in (".h", ".cuh"))
    common = _digest(headers, torch.__version__, _CXX, *_FLAGS)
    with open(_BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes may start at once
        jobs = int(os.environ.get("MAX_JOBS", min(4, os.cpu_count() or 1)))
        with ThreadPoolExecutor(jobs) as pool:
            objects = list(pool.map(lambda source: _compile(source, common), sources()))
        library = _BUILD / f"lightning_apex_simt-{_digest(objects)}.so"
        if not library.exists():
            for stale in _BUILD.glob("lightning_apex_simt-*.so"):
                stale.unlink()
            link = ["-shared", "-Wl,-Bsymbolic", f"-L{_TORCH / 'lib'}", "-lc10", "-ltorch_cpu"]
            _run([_CXX, *map(str, objects), *link, "-o", str(library)])
    return library


@cache
def load() -> Any:
    """Builds if needed, and returns the namespace of operators."""
    torch.ops.load_library(str(build()))
    return torch.ops.lightning_apex_simt


if __name__ == "__main__":
    print(build())
