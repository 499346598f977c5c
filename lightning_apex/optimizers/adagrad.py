"""Adagrad."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_apex.optimizers._base import FusedOptimizer, ParamsT
from lightning_apex.optimizers._checks import check_number, check_state_dtype


class FusedAdagrad(FusedOptimizer):
    r"""Adagrad in one pass over memory.

    .. math::
        g \leftarrow g + \lambda p, \qquad s \leftarrow s + g^2, \qquad
        p \leftarrow p - \eta \frac{g}{\sqrt{s} + \epsilon}

    from Duchi, Hazan & Singer, "Adaptive Subgradient Methods" (2011). With ``adagrad_w_mode=True`` the decay does not
    join the gradient: :math:`p \leftarrow p - \eta (g / (\sqrt{s} + \epsilon) + \lambda p)`. Equal to
    ``torch.optim.Adagrad`` with ``lr_decay=0``, whose state dicts load here and take ours. Apex's class is the same
    without ``initial_accumulator_value`` and ``maximize``; like it, this one has no ``lr_decay``.

    Args:
        params: Parameters or parameter groups; fp32, fp16, bf16, or fp64.
        lr: Learning rate :math:`\eta`, a float or a one-element tensor.
        eps: :math:`\epsilon`, added outside the root.
        weight_decay: :math:`\lambda`.
        set_grad_none: What ``zero_grad()`` does by default.
        adagrad_w_mode: Decoupled weight decay rather than L2.
        initial_accumulator_value: What :math:`s` starts from.
        lr_decay: Must be 0. A learning-rate scheduler does what torch's argument does.
        maximize: Ascend instead of descend.
        state_dtype: ``torch.bfloat16`` halves the memory of :math:`s`, which is fp32 by default. It then stops growing
            where a gradient's square is below 1/512 of it.

    Raises:
        ValueError: If an argument is out of range; the message names it.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
        *,
        initial_accumulator_value: float = 0.0,
        lr_decay: float = 0.0,
        maximize: bool = False,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "eps": eps,
            "weight_decay": weight_decay,
            "adagrad_w_mode": adagrad_w_mode,
            "initial_accumulator_value": initial_accumulator_value,
            "lr_decay": lr_decay,
            "maximize": maximize,
            "set_grad_none": set_grad_none,
            "state_dtype": state_dtype,
        }
        super().__init__(params, defaults)

    def _row(self, group: dict[str, Any]) -> str:
        return "adagrad"

    def _new_state(self, state: dict[str, Any], name: str, param: Tensor, group: dict[str, Any]) -> None:
        super()._new_state(state, name, param, group)
        state[name].fill_(group["initial_accumulator_value"])

    def state_dict(self) -> dict[str, Any]:
        """The state of every parameter, as of torch's Adagrad: of those without a step too."""
        for group in self.param_groups:
            for param in group["params"]:
                if not self.state.get(param):
                    self._complete(self.state[param], ["sum"], param, group)
        return super().state_dict()

    def _check(self, group: dict[str, Any]) -> None:
        check_number("lr", group["lr"], 0)
        check_number("eps", group["eps"], 0)
        check_number("weight_decay", group["weight_decay"], 0)
        check_number("initial_accumulator_value", group["initial_accumulator_value"], 0)
        check_state_dtype(group["state_dtype"])
        if group["lr_decay"] != 0:
            raise ValueError(
                f"lr_decay={group['lr_decay']!r} is invalid: it must be 0; give the optimizer to "
                "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t * decay)) instead."
            )
