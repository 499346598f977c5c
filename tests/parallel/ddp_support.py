"""Jobs for two gloo processes; what they return comes back to the test."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RANKS = 2
Job = tuple[str, Callable[..., Any], dict[str, Any]]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _rank_main(rank: int, port: int, folder: str, jobs: list[Job]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    results: dict[str, Any] = {}
    for name, function, kwargs in jobs:
        try:
            torch.manual_seed(rank)  # ranks differ until something makes them equal
            results[name] = function(rank, **kwargs)
        except BaseException:
            results[name] = traceback.format_exc()
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def on_two_ranks(folder: Path, jobs: list[Job]) -> dict[str, list[Any]]:
    """Runs jobs one after the other in two processes; starting processes is what takes time."""
    multiprocessing.set_forkserver_preload(["lightning_apex"])
    torch.multiprocessing.start_processes(
        _rank_main, (free_port(), str(folder), jobs), nprocs=RANKS, start_method="forkserver"
    )
    both = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]
    for name, _, _ in jobs:
        for result in both:
            assert not isinstance(result[name], str), f"{name}:\n{result[name]}"
    return {name: [result[name] for result in both] for name, _, _ in jobs}
