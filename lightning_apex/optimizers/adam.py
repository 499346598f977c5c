"""Adam, and AdamW by its own name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_apex.optimizers._base import FusedOptimizer, ParamsT
from lightning_apex.optimizers._checks import check_betas, check_number, check_state_dtype


class FusedAdam(FusedOptimizer):
    r"""AdamW, or Adam with ``adam_w_mode=False``, in one pass over memory.

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) g, \qquad v \leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        p &\leftarrow p - \eta \left( \frac{m / c_1}{\sqrt{v / c_2} + \epsilon} + \lambda p \right),
        \qquad c_i = 1 - \beta_i^t

    from Loshchilov & Hutter, "Decoupled Weight Decay Regularization" (2019). With ``adam_w_mode=False`` the decay
    joins the gradient instead, :math:`g \leftarrow g + \lambda p`, as in Kingma & Ba, "Adam" (2015). Equal to
    ``torch.optim.AdamW`` and ``torch.optim.Adam``, whose state dicts load here and take ours.

    Args:
        params: Parameters or parameter groups; fp32, fp16, bf16, or fp64.
        lr: Learning rate :math:`\eta`, a float or a one-element tensor.
        bias_correction: Whether to divide by :math:`c_i`.
        betas: Decay rates :math:`\beta_1, \beta_2` of the moments.
        eps: :math:`\epsilon`, added outside the root.
        adam_w_mode: Decoupled weight decay (AdamW) rather than L2 (Adam).
        weight_decay: :math:`\lambda`.
        amsgrad: Divide by the running maximum of :math:`v` (Reddi et al. 2018).
        set_grad_none: What ``zero_grad()`` does by default.
        maximize: Ascend instead of descend.
        capturable: Accepted for old code; step counts are always device tensors, so a step can be captured.
        state_dtype: ``torch.bfloat16`` halves the memory of the moments; they are fp32 by default.

    Raises:
        ValueError: If an argument is out of range; the message names it.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        *,
        maximize: bool = False,
        capturable: bool = True,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "adam_w_mode": adam_w_mode,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "set_grad_none": set_grad_none,
            "state_dtype": state_dtype,
        }
        super().__init__(params, defaults)

    def _row(self, group: dict[str, Any]) -> str:
        return "adam_amsgrad" if group["amsgrad"] else "adam"

    def _check(self, group: dict[str, Any]) -> None:
        check_number("lr", group["lr"], 0)
        check_betas(group["betas"])
        check_number("eps", group["eps"], 0)
        check_number("weight_decay", group["weight_decay"], 0)
        check_state_dtype(group["state_dtype"])


class FusedAdamW(FusedAdam):
    """`FusedAdam` with the arguments of ``torch.optim.AdamW``, and its weight decay of 0.01 by default.

    Args:
        params: Parameters or parameter groups; fp32, fp16, bf16, or fp64.
        lr: Learning rate, a float or a one-element tensor.
        betas: Decay rates of the moments.
        eps: Added outside the root.
        weight_decay: Decoupled weight decay.
        amsgrad: Divide by the running maximum of the second moment.
        maximize: Ascend instead of descend.
        capturable: Accepted for old code; see `FusedAdam`.
        set_grad_none: What ``zero_grad()`` does by default.
        state_dtype: ``torch.bfloat16`` halves the memory of the moments; they are fp32 by default.

    Raises:
        ValueError: If an argument is out of range; the message names it.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        capturable: bool = True,
        set_grad_none: bool = True,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            set_grad_none=set_grad_none,
            maximize=maximize,
            capturable=capturable,
            state_dtype=state_dtype,
        )
