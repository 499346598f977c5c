"""Stochastic gradient descent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_apex.optimizers._base import FusedOptimizer, ParamsT
from lightning_apex.optimizers._checks import check_number, check_state_dtype


class MomentumOptimizer(FusedOptimizer):
    """SGD and its relatives: what they do with their momentum."""

    def _new_state(self, state: dict[str, Any], name: str, param: Tensor, group: dict[str, Any]) -> None:
        # A momentum switched on later starts at the gradient, like one that was there from the first step.
        state["step"].zero_()
        super()._new_state(state, name, param, group)

    def _check(self, group: dict[str, Any]) -> None:
        check_number("lr", group["lr"], 0)
        check_number("momentum", group["momentum"], 0)
        check_number("weight_decay", group["weight_decay"], 0)
        check_number("dampening", group["dampening"], -float("inf"))
        check_state_dtype(group["state_dtype"])
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError(
                f"nesterov=True with momentum={group['momentum']!r} and dampening={group['dampening']!r} is invalid: "
                "Nesterov's form needs a momentum above 0 and dampening=0."
            )


class FusedSGD(MomentumOptimizer):
    r"""SGD with momentum, dampening and Nesterov's form, in one pass over memory.

    .. math::
        g \leftarrow g + \lambda p, \qquad b \leftarrow \mu b + (1 - \tau) g, \qquad
        p \leftarrow p - \eta\, b \quad (\text{Nesterov: } p - \eta (g + \mu b))

    from Sutskever et al., "On the importance of initialization and momentum in deep learning" (2013), in the form of
    ``torch.optim.SGD``: :math:`b = g` at a parameter's first step. Equal to it, and state dicts load both ways.

    Args:
        params: Parameters or parameter groups; fp32, fp16, bf16, or fp64.
        lr: Learning rate :math:`\eta`, a float or a one-element tensor.
        momentum: :math:`\mu`; at 0 there is no state to keep.
        dampening: :math:`\tau`.
        weight_decay: :math:`\lambda`.
        nesterov: Nesterov's form; needs a momentum and no dampening.
        wd_after_momentum: Add the decay to the step instead of to the gradient: :math:`p - \eta (b + \lambda p)`.
        set_grad_none: What ``zero_grad()`` does by default.
        maximize: Ascend instead of descend.
        state_dtype: ``torch.bfloat16`` halves the memory of the momentum; it is fp32 by default.

    Raises:
        ValueError: If an argument is out of range; the message names it.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        *,
        set_grad_none: bool = True,
        maximize: bool = False,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "wd_after_momentum": wd_after_momentum,
            "maximize": maximize,
            "set_grad_none": set_grad_none,
            "state_dtype": state_dtype,
        }
        super().__init__(params, defaults)

    def _row(self, group: dict[str, Any]) -> str:
        return "sgd_momentum" if group["momentum"] else "sgd"
