"""What works across the ranks of a distributed run and with large batches, under Apex's names."""

from lightning_apex.parallel.convert import convert_syncbn_model, revert_syncbn_model
from lightning_apex.parallel.distributed import DistributedDataParallel
from lightning_apex.parallel.larc import LARC
from lightning_apex.parallel.process_groups import create_syncbn_process_group
from lightning_apex.parallel.sync_batchnorm import SyncBatchNorm

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
    "revert_syncbn_model",
]
