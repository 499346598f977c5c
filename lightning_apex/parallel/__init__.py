"""Data-parallel training: torch's DistributedDataParallel, taking the arguments of Apex's."""

from lightning_apex.parallel.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
