"""Groups of ranks that share statistics."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def create_syncbn_process_group(group_size: int) -> Any | None:
    """Divides the ranks into groups of neighbours: 0 and 1, 2 and 3, ... for a size of 2.

    Every rank must call it, as often as the others. With a group size, the statistics of a large job stay those of a
    batch of moderate size, and are exchanged within a machine.

    Args:
        group_size: Ranks in a group, a divisor of the world size; 0 for all ranks.

    Returns:
        The group of the calling rank, for `SyncBatchNorm` and `convert_syncbn_model`; None for all ranks.

    Raises:
        ValueError: If the ranks cannot be divided so.
        RuntimeError: If the default process group does not exist.
    """
    if group_size == 0:
        return None
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"create_syncbn_process_group({group_size}) divides the ranks of a running job: call "
            "torch.distributed.init_process_group() first, or give 0."
        )
    ranks = dist.get_world_size()
    if not 0 < group_size <= ranks or ranks % group_size:
        raise ValueError(f"group_size={group_size} does not divide the {ranks} rank(s): give a divisor, or 0 for all.")
    own = None
    for first in range(0, ranks, group_size):
        members = range(first, first + group_size)
        group = dist.new_group(list(members))
        if dist.get_rank() in members:
            own = group
    return own
