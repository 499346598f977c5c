"""Runs functions in two gloo processes on the CPU."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RANKS = 2
Jobs = dict[str, tuple[Callable[..., Any], dict[str, Any]]]


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _rank_main(rank: int, port: int, folder: str, jobs: Jobs) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # A rank that has raised leaves the other waiting.
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, timeout=timedelta(seconds=20))
    results = {}
    for name, (function, arguments) in jobs.items():
        try:
            torch.manual_seed(0)
            results[name] = function(rank, **arguments)
        except BaseException:
            results[name] = traceback.format_exc()
        dist.barrier()
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def run_jobs(folder: Path, jobs: Jobs) -> dict[str, list[Any]]:
    """Runs each function with the rank and its arguments, one after the other: starting processes takes the time.

    Returns:
        What each job returned on both ranks; the traceback where it raised.
    """
    multiprocessing.set_forkserver_preload(["torch", "lightning_apex"])  # imported once, not twice
    arguments = (_free_port(), str(folder), jobs)
    torch.multiprocessing.start_processes(_rank_main, arguments, nprocs=RANKS, start_method="forkserver")
    both = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]
    return {name: [results[name] for results in both] for name in jobs}
