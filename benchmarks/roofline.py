"""Compiles roofline.cpp and runs it on the buffers that the optimizers of a row use."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

_SOURCE = Path(__file__).with_name("roofline.cpp")
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-ffp-contract=fast", "-shared", "-fPIC")


@functools.cache
def _library() -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        sys.exit("The roofline is measured with a small C++ loop, and there is no g++ here: install g++ and try again.")
    cpu = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0] if Path("/proc/cpuinfo").exists() else ""
    flags = next((line for line in cpu.splitlines() if line.startswith("flags")), "")
    key = hashlib.sha256(_SOURCE.read_bytes() + " ".join(_FLAGS).encode() + flags.encode()).hexdigest()[:12]
    library = _SOURCE.parents[1] / "build" / "benchmarks" / f"roofline-{key}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([compiler, *_FLAGS, str(_SOURCE), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def traffic(
    params: Sequence[Tensor], grads: Sequence[Tensor], moments: Sequence[Sequence[Tensor]], threads: int
) -> Callable[[], None]:
    """A call that reads and writes these fp32 tensors once; their values drift but stay finite."""
    function = _library().traffic
    function.restype = None
    lists = [_addresses(tensors) for tensors in (params, grads, *moments)]
    sizes = (ctypes.c_int64 * len(params))(*[p.numel() for p in params])
    count = ctypes.c_int64(len(params))
    return lambda: function(*lists, sizes, count, ctypes.c_int(threads))


def _addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*[t.data_ptr() for t in tensors])
