"""Compiles roofline.cpp and runs it on the buffers that the optimizers of a row use."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

_SOURCE = Path(__file__).with_name("roofline.cpp")
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")


class RooflineError(RuntimeError):
    """The roofline cannot be measured here."""


def _cache() -> Path:
    """A folder for what is compiled, this user's own."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "lightning_apex"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="lightning_apex-"))


@functools.cache
def _library() -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        raise RooflineError("the roofline is measured with a small C++ loop, and there is no g++ here: install g++")
    cpu = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0] if Path("/proc/cpuinfo").exists() else ""
    flags = next((line for line in cpu.splitlines() if line.startswith("flags")), "")
    key = hashlib.sha256(_SOURCE.read_bytes() + " ".join(_FLAGS).encode() + flags.encode()).hexdigest()[:12]
    library = _cache() / f"roofline-{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:  # another process may be at it too
            made = Path(folder) / library.name
            done = subprocess.run([compiler, *_FLAGS, str(_SOURCE), "-o", str(made)], capture_output=True, text=True)
            if done.returncode != 0:
                raise RooflineError(f"g++ could not compile {_SOURCE.name}: {done.stderr.strip()[:300]}")
            made.replace(library)
    return ctypes.CDLL(str(library))


@dataclass
class Stream:
    """A list of tensors that a sweep over memory reads, and writes in place if `written`."""

    tensors: Sequence[Tensor]
    written: bool = False

    @property
    def bytes(self) -> int:
        """What it moves for an element."""
        return self.tensors[0].element_size() * (2 if self.written else 1)


Sweep = Sequence[Stream]


def bytes_of(sweeps: Sequence[Sweep]) -> int:
    """What the sweeps move for an element."""
    return sum(stream.bytes for sweep in sweeps for stream in sweep)


def traffic(sweeps: Sequence[Sweep], threads: int) -> Callable[[], None]:
    """A call that makes the sweeps, one after the other, and leaves every value as it is."""
    function = _library().traffic
    function.restype = ctypes.c_uint64
    streams = [stream for sweep in sweeps for stream in sweep]
    addresses = [t.data_ptr() for stream in streams for t in stream.tensors]
    arguments = (
        (ctypes.c_void_p * len(addresses))(*addresses),
        _integers([stream.tensors[0].element_size() for stream in streams]),
        _integers([stream.written for stream in streams]),
        _integers([len(sweep) for sweep in sweeps]),
        ctypes.c_int64(len(sweeps)),
        _integers([t.numel() for t in streams[0].tensors]),
        ctypes.c_int64(len(streams[0].tensors)),
        ctypes.c_int(threads),
        ctypes.c_uint64(0),
    )

    def run() -> None:
        function(*arguments)

    return run


def _integers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)
