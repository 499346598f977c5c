"""Lion."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_apex.optimizers._base import FusedOptimizer, ParamsT
from lightning_apex.optimizers._checks import check_betas, check_number, check_state_dtype


class FusedLion(FusedOptimizer):
    r"""Lion in one pass over memory, with one moment to keep.

    .. math::
        p &\leftarrow p - \eta \left( \operatorname{sign}(\beta_1 m + (1 - \beta_1) g) + \lambda p \right) \\
        m &\leftarrow \beta_2 m + (1 - \beta_2) g

    from Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), algorithm 2; the sign of 0 is 0. Every
    step has the same length, so the authors take a learning rate 3 to 10 times below AdamW's and a weight decay as
    much above it. Neither Apex nor torch has it.

    Args:
        params: Parameters or parameter groups; fp32, fp16, bf16, or fp64.
        lr: Learning rate :math:`\eta`, a float or a one-element tensor.
        betas: :math:`\beta_1` of the step and :math:`\beta_2` of the moment.
        weight_decay: :math:`\lambda`, decoupled.
        set_grad_none: What ``zero_grad()`` does by default.
        maximize: Ascend instead of descend.
        state_dtype: ``torch.bfloat16`` halves the memory of the moment; it is fp32 by default.

    Raises:
        ValueError: If an argument is out of range; the message names it.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        *,
        maximize: bool = False,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "set_grad_none": set_grad_none,
            "state_dtype": state_dtype,
        }
        super().__init__(params, defaults)

    def _row(self, group: dict[str, Any]) -> str:
        return "lion"

    def _check(self, group: dict[str, Any]) -> None:
        check_number("lr", group["lr"], 0)
        check_betas(group["betas"])
        check_number("weight_decay", group["weight_decay"], 0)
        check_state_dtype(group["state_dtype"])
