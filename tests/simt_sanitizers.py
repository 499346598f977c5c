"""Runs tests of the emulated CUDA kernels under a sanitizer.

    python tests/simt_sanitizers.py address              out of bounds, misaligned, overflow (ASan, UBSan)
    python tests/simt_sanitizers.py thread -k lamb       data races (TSan); more arguments are pytest's

Python itself is not instrumented, so the sanitizer's library is loaded before it, and it is started directly.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from simt import build

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = {"address": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}
# Python's own leaks are Python's. A report ends the process: what runs after it has little to say.
OPTIONS: dict[str, dict[str, str]] = {
    "plain": {},
    "address": {
        "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0:log_path={log}",
        "UBSAN_OPTIONS": "print_stacktrace=1:log_path={log}",
    },
    "thread": {"TSAN_OPTIONS": "report_signal_unsafe=0:halt_on_error=1:exitcode=66:log_path={log}"},
}
ROWS = ["tests/test_simt_shapes.py", "-k", "64x1024-random", "-m", "not slow"]


class Outcome(NamedTuple):
    """How a child ended: its exit status, what it printed, and what the sanitizer wrote."""

    status: int
    output: str
    report: str


def _fixed_addresses() -> None:
    """Some kernels place memory where the sanitizers of some compilers do not look for it, unless asked not to."""
    addr_no_randomize = 0x0040000
    ctypes.CDLL(None).personality(addr_no_randomize)


def run(variant: str, command: list[str], environment: dict[str, str] | None = None) -> Outcome:
    """Runs a command with the sanitizer's options set."""
    with TemporaryDirectory() as folder:
        log = Path(folder) / "report"
        options = {name: value.format(log=log) for name, value in OPTIONS[variant].items()}
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | options | (environment or {}),
            capture_output=True,
            text=True,
            preexec_fn=_fixed_addresses,
        )
        report = "".join(file.read_text() for file in sorted(log.parent.iterdir()))
    return Outcome(done.returncode, done.stdout + done.stderr, report)


def run_fault(variant: str, name: str) -> Outcome:
    """Runs one kernel of simt/faults.cu."""
    return run(variant, [str(build.build_faults(build.VARIANTS[variant])), name])


def run_rows(variant: str, arguments: list[str], library: Path | None = None) -> Outcome:
    """Runs rows of the tests of the emulated kernels, from `library` or the variant's own."""
    library = library or build.build(build.VARIANTS[variant])
    find = [[build.CXX, f"-print-file-name={name}"] for name in LIBRARIES[variant]]
    environment = {
        "SIMT_LIBRARY": str(library),
        "LD_PRELOAD": ":".join(subprocess.check_output(command, text=True).strip() for command in find),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    return run(variant, [*pytest, *ROWS, *arguments], environment)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in LIBRARIES:
        raise SystemExit(__doc__)
    outcome = run_rows(sys.argv[1], sys.argv[2:])
    print(outcome.output, outcome.report)
    raise SystemExit(outcome.status)
