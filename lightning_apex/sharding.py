"""Tensors that are spread over processes (DTensor): each process works on its shard, and norms are of the whole."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lightning_apex import ops

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Place", "Sharding", "by_place", "is_spread", "like_local", "local", "place_of", "sum_of_squares"]


@dataclass(frozen=True)
class Sharding:
    """Over which processes the shards of a tensor lie.

    Attributes:
        mesh: The processes.
        dims: The dimensions of the mesh along which the tensor is cut; along the others every process has the same.
    """

    mesh: DeviceMesh
    dims: tuple[int, ...]

    def all_reduce_(self, values: Tensor, op: Literal["sum", "max"]) -> None:
        """Makes what each process computed of its shard that of the whole, in place and alike on all processes."""
        import torch.distributed as dist

        if op == "sum":
            for dim in self.dims:
                dist.all_reduce(values, group=self.mesh.get_group(dim))
        elif self.dims:
            # The largest of numbers is not NaN where one of them is.
            both = torch.stack([values.nan_to_num(-math.inf, math.inf, -math.inf), values.isnan().to(values.dtype)])
            for dim in self.dims:
                dist.all_reduce(both, dist.ReduceOp.MAX, group=self.mesh.get_group(dim))
            values.copy_(both[0].masked_fill(both[1] > 0, math.nan))

    def of_the_whole(self, sum_of_squares: Tensor, flags: Tensor) -> tuple[Tensor, Tensor]:
        """What was measured of shards, as it is of the whole tensors; one exchange.

        Args:
            sum_of_squares: Of this process's shards (float64, 0-dim).
            flags: For each of them, whether it holds what is not finite.
        """
        numbers = torch.cat([sum_of_squares.reshape(1), flags.to(sum_of_squares.dtype)])
        self.all_reduce_(numbers, "sum")
        return numbers[0], (numbers[1:] > 0).to(flags.dtype)


_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Tensors of one place can be given to a kernel together.
Place = tuple[torch.device, Sharding | None]


def is_spread(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    if type(tensor) in _PLAIN:
        return False
    # Nobody has one who has not imported its module, which takes long.
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def place_of(tensor: Tensor) -> Place:
    """Where a tensor lies.

    Raises:
        ValueError: If the processes hold summands of it, of which only the sum would mean anything.
    """
    return tensor.device, _sharding_of(tensor) if is_spread(tensor) else None


def _sharding_of(tensor: Any) -> Sharding:
    placements = tensor.placements
    if any(p.is_partial() for p in placements):
        raise ValueError(
            f"A DTensor of shape {tuple(tensor.shape)} has the placements {placements}: redistribute() it to Shard or "
            "Replicate first."
        )
    return Sharding(tensor.device_mesh, tuple(i for i, p in enumerate(placements) if not p.is_replicate()))


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor: the memory itself, of a tensor that is not spread the tensor."""
    if not is_spread(tensor):
        return tensor
    part: Any = tensor.to_local() if not torch.is_grad_enabled() else tensor.detach().to_local()  # type: ignore[attr-defined]
    # What a collective has not delivered yet is waited for.
    delivered: Tensor = part.wait() if hasattr(part, "trigger_wait") else part
    return delivered


def like_local(tensor: Tensor, wanted: Tensor) -> Tensor:
    """This process's part of a tensor, cut as ``wanted`` is."""
    if is_spread(wanted) and is_spread(tensor) and tensor.placements != wanted.placements:  # type: ignore[attr-defined]
        tensor = tensor.redistribute(wanted.device_mesh, wanted.placements)  # type: ignore[attr-defined]
    return local(tensor)


def by_place(tensors: Iterable[Tensor]) -> dict[Place, list[Tensor]]:
    """This process's parts of tensors, apart by where they lie."""
    places: dict[Place, list[Tensor]] = {}
    for tensor in tensors:
        places.setdefault(place_of(tensor), []).append(local(tensor))
    return places


def sum_of_squares(places: Iterable[tuple[Place, list[Tensor]]]) -> Tensor:
    """The square of the global norm of tensors (float64, 0-dim), on the first one's device; of none 0.

    Args:
        places: This process's parts of the tensors, with where they lie.
    """
    total: Tensor | None = None
    for (_, sharding), parts in merged(places).items():
        part, _ = ops.measure_gradients(parts)
        if sharding is not None:
            sharding.all_reduce_(part, "sum")
        total = part if total is None else total + part.to(total.device)
    return torch.zeros((), dtype=torch.float64) if total is None else total


def merged(places: Iterable[tuple[Place, list[Tensor]]]) -> dict[Place, list[Tensor]]:
    """One list a place."""
    lists: dict[Place, list[Tensor]] = {}
    for place, parts in places:
        lists.setdefault(place, []).extend(parts)
    return lists
