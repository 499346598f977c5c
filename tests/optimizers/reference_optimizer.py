"""The float64 formulas of tests/reference as an optimizer: the witness where torch has none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import reference
import torch
from torch import Tensor, nn

from lightning_apex import ops
from lightning_apex.optimizers._base import FusedOptimizer

TABLE = {row["name"]: row for row in ops.optimizer_table()}


class Reference(torch.optim.Optimizer):
    """Does what an optimizer of ours should, tensor by tensor; states are float64 and have the names that ours have.

    Args:
        params: Parameters or groups.
        like: The class whose arguments and rows of the kernel table it follows.
        **arguments: For that class.
    """

    def __init__(self, params: Any, like: type[FusedOptimizer], **arguments: Any) -> None:
        self._like = like([nn.Parameter(torch.zeros(1))], **arguments)
        super().__init__(params, dict(self._like.defaults))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))
        for group in self.param_groups:
            limit = group.get("max_grad_norm")
            factor = limit / norm if limit and norm > limit else 1.0
            row = TABLE[self._like._row(group)]
            names = row["hypers"]
            hypers = dict(zip(names, [float(group["lr"]), *self._like._hypers(group, names[1:])], strict=True))
            for param in group["params"]:
                if param.grad is not None:
                    self._update(row, hypers, param, param.grad.double() * factor)
        return loss

    def _update(self, row: dict[str, Any], hypers: dict[str, float], param: Tensor, grad: Tensor) -> None:
        state = self.state[param]
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
        for names, like in ((row["states"], param), (row["tensor_states"], param.new_empty(()))):
            for name in names:
                if name not in state:
                    state[name] = torch.zeros_like(like, dtype=torch.float64)
        names = row["states"] + row["tensor_states"]
        state["step"] = state["step"] + 1
        states = [state[name].double() for name in names]
        value, states = reference.OPTIMIZERS[row["name"]](param.double(), grad, states, int(state["step"]), hypers)
        param.copy_(value)
        state.update(zip(names, states, strict=True))
