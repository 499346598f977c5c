"""Which tensors one call of the kernel updates, remembered from step to step.

Sorting a long list of small tensors anew would cost more than updating them.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_apex._extension import _C
from lightning_apex.casting import HALF
from lightning_apex.sharding import Place, Sharding, like_local, local, place_of

if TYPE_CHECKING:
    from lightning_apex.masters import MasterWeights

StateOf = Callable[[Tensor], dict[str, Any]]


class Bucket:
    """The parameters of a group that one call updates: in one place, all with masters or all without.

    Attributes:
        place: Where they are.
        device: On which device.
        sharding: Over which processes they are spread; ``None`` if they are not.
        has_masters: Whether they have masters.
    """

    def __init__(self, place: Place, has_masters: bool) -> None:
        self.place = place
        self.device: torch.device = place[0]
        self.sharding: Sharding | None = place[1]
        self.has_masters = has_masters
        self.positions: list[int] = []
        self.params: list[Tensor] = []
        self.masters: list[Tensor] = []
        self.states: list[dict[str, Any]] = []
        self._whole: list[Tensor] = []
        self._entries: list[int] = []

    def add(self, position: int, param: Tensor, state: dict[str, Any], master: Tensor | None) -> None:
        """Takes one more parameter."""
        self.positions.append(position)
        self._whole.append(param)
        self.params.append(local(param))
        self.states.append(state)
        self._entries.append(len(state))
        if master is not None:
            self.masters.append(local(master))

    def is_complete(self) -> bool:
        """Whether no parameter's state has lost an entry."""
        return list(map(len, self.states)) == self._entries

    def grads(self, of_group: list[Tensor | None]) -> list[Tensor]:
        """This bucket's gradients among those of its group."""
        grads: list[Tensor] = [of_group[i] for i in self.positions]  # type: ignore[misc]
        if self.sharding is None:
            return grads
        return [like_local(grad, param) for grad, param in zip(grads, self._whole, strict=True)]

    def steps(self) -> list[Tensor]:
        """The step counts, as they are now."""
        return [state["step"] for state in self.states]

    def moments(self, names: list[str]) -> list[Tensor]:
        """All first states, then all second, and so on, as they are now."""
        moments = [state[name] for name in names for state in self.states]
        return moments if self.sharding is None else [local(moment) for moment in moments]


class GroupPlan:
    """The buckets of a parameter group, for as long as nothing about its parameters changes.

    Args:
        params: The parameters of the group.
        grads: Their gradients, ``None`` where there is none.
        kinds: What `gradients_of` found them to be.
        names: The names of the states that the update needs.
        masters: The masters of half parameters, if they have any.
        state_of: Gives a parameter's complete state, made if it is missing.
    """

    def __init__(
        self,
        params: list[Tensor],
        grads: list[Tensor | None],
        kinds: object,
        names: list[str],
        masters: MasterWeights | None,
        state_of: StateOf,
    ) -> None:
        self.names = names
        self._params = list(params)
        self._kinds = kinds
        self._masters = masters
        buckets: dict[tuple[Place, bool], Bucket] = {}
        for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
            if grad is None:
                continue
            key = (place_of(param), masters is not None and param.dtype in HALF)
            bucket = buckets.get(key) or buckets.setdefault(key, Bucket(*key))
            master = masters.of(param) if masters is not None and bucket.has_masters else None
            bucket.add(i, param, state_of(param), master)
        self.buckets = list(buckets.values())
        self._masters_version = 0 if masters is None else masters.version

    def fits(self, params: list[Tensor], kinds: object, masters: MasterWeights | None) -> bool:
        """Whether the plan still holds, given that no parameter's state was replaced."""
        return (
            masters is self._masters
            and (masters is None or masters.version == self._masters_version)
            and len(params) == len(self._params)
            and all(map(is_, params, self._params))
            and kinds == self._kinds
            and all(bucket.is_complete() for bucket in self.buckets)
        )


def gradients_of(params: list[Tensor]) -> tuple[list[Tensor | None], object]:
    """The gradients, and what a plan depends on: which parameters have one, of which layout, and dtypes and devices.

    A cast or a move to another device changes a parameter in place.
    """
    if torch.compiler.is_compiling():
        grads = [param.grad for param in params]
        layouts = [None if grad is None else grad.layout for grad in grads]
        return grads, [(p.dtype, p.device, layout) for p, layout in zip(params, layouts, strict=True)]
    found: tuple[list[Tensor | None], object] = _C.gradients_of(params)
    return found
