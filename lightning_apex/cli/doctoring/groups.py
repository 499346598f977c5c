"""Whether processes on this machine can sum a tensor: what DDP does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import torch

from lightning_apex.cli.doctoring.findings import GroupResult

# Not a module of this package: importing it needs the extension, which may be missing.
_PROGRAM = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
backend, device, rank, processes = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
if device == "cuda":
    torch.cuda.set_device(rank)
dist.init_process_group(backend, rank=rank, world_size=processes, timeout=timedelta(seconds=30))
tensor = torch.full((1000,), float(rank + 1), device=device)
dist.all_reduce(tensor)
expected = processes * (processes + 1) / 2
wrong = int((tensor != expected).sum())
dist.destroy_process_group()
if wrong:
    sys.exit(f"the sum is wrong in {wrong} of 1000 places")
"""


def backends() -> list[tuple[str, int]]:
    """What can be tried here, and with how many processes."""
    found = [("gloo", 2)] if torch.distributed.is_available() and torch.distributed.is_gloo_available() else []
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        found.append(("nccl", min(2, torch.cuda.device_count())))
    return found


def sum_in_processes(backend: str, processes: int, timeout: float = 90.0) -> GroupResult:
    """Starts processes that sum a tensor, as torchrun would.

    Args:
        backend: ``"gloo"`` or ``"nccl"``.
        processes: How many.
        timeout: In seconds; then they are ended.
    """
    device = "cuda" if backend == "nccl" else "cpu"
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _PROGRAM, backend, device, str(rank), str(processes)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    failure = None
    try:
        for child in children:
            _, said = child.communicate(timeout=max(0.1, start + timeout - time.perf_counter()))
            if child.returncode != 0 and failure is None:
                failure = _last_line(said) or f"exit status {child.returncode}"
    except subprocess.TimeoutExpired:
        failure = failure or f"no answer within {timeout:g} s"
    finally:
        for child in children:
            child.kill()
            child.communicate()
    return GroupResult(backend, processes, None if failure else time.perf_counter() - start, failure)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
