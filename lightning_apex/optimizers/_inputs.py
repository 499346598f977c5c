"""What an update is made from: what was handed over for it, and what the groups hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_apex.optimizers._plan import GroupPlan
from lightning_apex.sharding import Place

if TYPE_CHECKING:
    from lightning_apex.masters import MasterWeights


@dataclass(frozen=True)
class StepInputs:
    """What a mixed-precision engine hands a fused optimizer for one step.

    Attributes:
        masters: Masters of the half parameters; ``None`` to update half parameters directly.
        multiplier: fp32 0-dim factor for every gradient, such as ``clip / scale``; ``None`` for 1.
        found_inf: fp32; where it is not 0 the step changes nothing.
        sum_of_squares: float64 0-dim, of all gradients before the multiplier; ``None`` if nobody has measured it.
    """

    masters: MasterWeights | None = None
    multiplier: Tensor | None = None
    found_inf: Tensor | None = None
    sum_of_squares: Tensor | None = None


@dataclass(frozen=True)
class GroupWork:
    """What an update of a group is about: its row of the kernel table, its gradients and its plan."""

    row: dict[str, Any]
    grads: list[Tensor | None]
    plan: GroupPlan

    def by_place(self) -> Iterator[tuple[Place, list[Tensor]]]:
        """The gradients, as this process has them."""
        return ((bucket.place, bucket.grads(self.grads)) for bucket in self.plan.buckets)
