"""The CUDA runtime of tests/cuda_stub: how it is built, loaded and asked what the host side did."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_SOURCE = Path(__file__).parent / "cuda_stub" / "cudart.cpp"
_FOLDER = Path(__file__).parents[1] / "build" / "cuda_stub"
_FLAGS = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]


def headers() -> Path | None:
    """The folder of a toolkit's cuda_runtime_api.h."""
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    nvcc = shutil.which("nvcc")
    homes += [] if nvcc is None else [Path(nvcc).parent.parent, Path(nvcc).resolve().parent.parent]
    folders = [home / "include" for home in [*homes, *sorted(Path("/usr/local").glob("cuda*"))]]
    wanted = ("cuda.h", "cuda_runtime_api.h", "crt/host_defines.h")
    return next((folder for folder in folders if all((folder / name).exists() for name in wanted)), None)


def build(include: Path) -> Path:
    """Compiles the stub, unless that was done."""
    command = [os.environ.get("CXX", "g++"), *_FLAGS, f"-I{include}", str(_SOURCE)]
    digest = hashlib.sha256(_SOURCE.read_bytes() + " ".join(command).encode()).hexdigest()[:16]
    library = _FOLDER / f"cudart-{digest}.so"
    if not library.exists():
        _FOLDER.mkdir(parents=True, exist_ok=True)
        part = library.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, "-o", str(part)], check=True)
        part.rename(library)
    return library



@dataclass(frozen=True)
class Launch:
    kernel: str
    device: int
    stream: int


@dataclass
class Log:
    """What was asked of the runtime: launches, and all else as lines such as ``copy h2d 0 4112``."""

    launches: list[Launch]
    others: list[str]

    @property
    def ours(self) -> list[Launch]:
        return [launch for launch in self.launches if "lightning_apex" in launch.kernel]

    def copies(self) -> list[str]:
        return [line for line in self.others if line.startswith("copy")]


class Stub:
    """The runtime that this process has."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["LD_PRELOAD"])
        self._library.stub_log.restype = ctypes.c_char_p

    def log_of(self, call: Callable[[], object]) -> Log:
        self._library.stub_clear()
        call()
        log = Log([], [])
        for line in self._library.stub_log().decode().splitlines():
            what, *words = line.split(" ")
            if what == "launch":
                log.launches.append(Launch(words[0], int(words[1]), int(words[2])))
            else:
                log.others.append(line)
        return log

    @contextmanager
    def failing(self, kernel: str) -> Iterator[None]:
        """Launches of kernels whose mangled name has this in it fail."""
        self._library.stub_fail(kernel.encode())
        try:
            yield
        finally:
            self._library.stub_fail(b"")

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Every stream says that it is being captured into a graph."""
        self._library.stub_capture(True)
        try:
            yield
        finally:
            self._library.stub_capture(False)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """The device is far behind the host: no event is reached."""
        self._library.stub_busy(True)
        try:
            yield
        finally:
            self._library.stub_busy(False)


@cache
def stub() -> Stub:
    return Stub()
