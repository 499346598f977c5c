"""A copy of an optimizer that holds masters, for ``step()`` to work on."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_apex.casting import HALF
from lightning_apex.masters import MasterWeights, widen_state

_OWN = ("param_groups", "state")
_MISSING = object()


class StandIn:
    """What torch's ``step()`` gets as ``self``, where an optimizer updates masters.

    The optimizer itself never holds a master, so that a step that raises leaves it as it was.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.copy: Optimizer = object.__new__(type(optimizer))
        self.copy.__dict__.update(optimizer.__dict__)
        self._masters: MasterWeights | None = None
        self._pairs: list[tuple[Tensor, Tensor]] = []

    @staticmethod
    def fits(optimizer: Optimizer) -> bool:
        """Whether an optimizer can be copied so; one that wraps another cannot."""
        values = vars(optimizer)
        return all(name in values for name in _OWN) and not any(isinstance(v, Optimizer) for v in values.values())

    def fill(self, masters: MasterWeights) -> None:
        """Puts masters, with the gradients of their parameters, in the copy."""
        optimizer = self._optimizer
        halves = [p for group in optimizer.param_groups for p in group["params"] if p.dtype in HALF]
        masters.reconcile(halves)
        self._masters, self._pairs = masters, [(p, masters.of(p)) for p in halves]
        for param, master in self._pairs:
            widen_state(optimizer.state.get(param, {}), param)
            master.requires_grad_(param.requires_grad)
            master.grad = None if param.grad is None else param.grad.float()
        to_master = dict(self._pairs)
        groups = [g | {"params": [to_master.get(p, p) for p in g["params"]]} for g in optimizer.param_groups]
        state: Any = defaultdict(dict, {to_master.get(key, key): value for key, value in optimizer.state.items()})
        vars(self.copy).update(param_groups=groups, state=state)

    def take_back(self) -> None:
        """After the step: takes the copy's state over, and rounds masters into their parameters."""
        optimizer, changed = self._optimizer, vars(self.copy)
        for name, value in changed.items():
            if name not in _OWN and vars(optimizer).get(name, _MISSING) is not value:
                vars(optimizer)[name] = value
        if self._masters is None:
            return
        for group, copied in zip(optimizer.param_groups, changed["param_groups"], strict=True):
            group.update({name: value for name, value in copied.items() if name != "params"})
        to_param = {master: param for param, master in self._pairs}
        for key, value in changed["state"].items():
            optimizer.state[to_param.get(key, key)] = value
        self._masters.write([param for param, _ in self._pairs])

    def leave(self) -> None:
        """Lets masters be masters again, whether or not the step was made; the copy holds none from now on."""
        vars(self.copy).update(param_groups=self._optimizer.param_groups, state=self._optimizer.state)
        self._masters = None
        for _, master in self._pairs:
            master.grad = None
            master.requires_grad_(False)
        self._pairs = []
