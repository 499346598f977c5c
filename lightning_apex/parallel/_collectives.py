"""The two collectives of a synchronised BatchNorm, and what they say when another rank does not come."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.14 gave it a new name and warns of the old one.
_gather_flat: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


def group_to_sync(process_group: Any | None) -> Any | None:
    """The group over which statistics are shared now; None where this process is alone."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD if process_group is None else process_group
    # World size -1: a group that this process is no member of
    return group if dist.get_world_size(group) > 1 else None


def all_gather(local: Tensor, group: Any) -> Tensor:
    """Every rank's vector: ``[ranks, len(local)]``."""
    ranks = dist.get_world_size(group)
    gathered = local.new_empty(ranks * local.numel())
    try:
        _gather_flat(gathered, local, group)
    except RuntimeError as error:
        raise _alone("forward", group) from error
    return gathered.view(ranks, -1)


class SumOverRanks:
    """A sum over ranks under way."""

    def __init__(self, tensor: Tensor, group: Any) -> None:
        """Starts to replace ``tensor`` by its sum."""
        self._tensor, self._group = tensor, group
        try:
            self._work = dist.all_reduce(tensor, group=group, async_op=True)
        except RuntimeError as error:
            raise _alone("backward", group) from error

    def wait(self) -> Tensor:
        """The sum. On CUDA the stream waits, not the host."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _alone("backward", self._group) from error
        return self._tensor


def _alone(which: str, group: Any) -> RuntimeError:
    return RuntimeError(
        f"SyncBatchNorm's {which} pass on rank {dist.get_rank()} could not exchange statistics with the other "
        f"{dist.get_world_size(group) - 1} rank(s) of its process group: all of them must run the same SyncBatchNorm "
        "layers in the same order, in training mode, with an input that requires a gradient on all ranks or on none. "
        "A rank in eval() mode, one that skips a batch, or one that raised an error leaves the others waiting."
    )


def local_statistics(mean: Tensor, m2: Tensor, count: int) -> Tensor:
    """What a rank has to say: its means, its sums of squared deviations, and how many values they are of."""
    return torch.cat((mean, m2, torch.full((1,), count, dtype=mean.dtype, device=mean.device)))
