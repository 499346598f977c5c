"""Jobs for several gloo processes on the CPU, which a Trainer joins as it would join those of torchrun."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RANKS = 2
Job = tuple[str, Callable[..., Any], dict[str, Any]]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _rank_main(rank: int, ranks: int, port: int, folder: str, jobs: list[Job]) -> None:
    """One rank: runs each (name, function, kwargs) and stores what it returns, or its traceback."""
    sys.path.insert(0, str(Path(__file__).parent))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0", "GROUP_RANK": "0"}
    # what torchrun sets, so that Lightning joins these processes instead of starting its own
    os.environ |= {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results = {}
    for name, function, kwargs in jobs:
        try:
            torch.manual_seed(0)
            results[name] = function(rank, **kwargs)
        except BaseException:
            results[name] = traceback.format_exc()
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
    torch.save(results, Path(folder) / f"{rank}.pt")


def spawn(folder: Path, jobs: list[Job], ranks: int = RANKS) -> dict[str, list[Any]]:
    """Runs jobs one after the other in several processes; starting processes is what takes time."""
    multiprocessing.set_forkserver_preload(["lightning.pytorch", "lightning_apex"])  # imported once, not twice
    arguments = (ranks, free_port(), str(folder), jobs)
    torch.multiprocessing.start_processes(_rank_main, arguments, nprocs=ranks, start_method="forkserver")
    of_ranks = [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(ranks)]
    for name, _, _ in jobs:
        for result in of_ranks:
            assert not isinstance(result[name], str), f"{name}:\n{result[name]}"
    return {name: [result[name] for result in of_ranks] for name, _, _ in jobs}
