"""LARS."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_apex.optimizers._base import ParamsT
from lightning_apex.optimizers._checks import check_number
from lightning_apex.optimizers.sgd import MomentumOptimizer


class FusedLARS(MomentumOptimizer):
    r"""LARS: SGD with momentum whose gradients are scaled parameter by parameter, for large batches.

    .. math::
        r = \kappa \frac{\lVert p \rVert}{\lVert g \rVert + \lambda \lVert p \rVert + \epsilon}, \qquad
        b \leftarrow \mu b + (1 - \tau)\, r\, (g + \lambda p), \qquad
        p \leftarrow p - \eta\, b \quad (\text{Nesterov: } p - \eta (r (g + \lambda p) + \mu b))

    from You, Gitman & Ginsburg, "Large Batch Training of Convolutional Networks" (2017). Where a norm is 0,
    :math:`r = 1` and the weight decay stays. The paper has the learning rate inside the momentum; here it is outside,
    as in ``torch.optim.SGD``, which is the same while it does not change. Biases and norms are commonly trained without
    decay and ratio: give them to a `FusedSGD`, or to a group with ``weight_decay=0``, which keeps the ratio (Apex's
    ``is_skipped`` groups are not known here). torch has no LARS. `lightning_apex.LARC` does the same around any
    optimizer, and can limit the ratio.

    Args:
        params: Parameters or parameter groups; fp32, fp16, bf16, or fp64.
        lr: Learning rate :math:`\eta`, a float or a one-element tensor.
        momentum: :math:`\mu`; at 0 there is no state to keep.
        dampening: :math:`\tau`.
        weight_decay: :math:`\lambda`.
        trust_coefficient: :math:`\kappa`.
        eps: :math:`\epsilon`.
        nesterov: Nesterov's form; needs a momentum and no dampening.
        wd_after_momentum: Add :math:`r \lambda p` to the step instead of to the gradient.
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
        trust_coefficient: float = 0.001,
        eps: float = 0.0,
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
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "nesterov": nesterov,
            "wd_after_momentum": wd_after_momentum,
            "maximize": maximize,
            "set_grad_none": set_grad_none,
            "state_dtype": state_dtype,
        }
        super().__init__(params, defaults)

    def _row(self, group: dict[str, Any]) -> str:
        return "lars_momentum" if group["momentum"] else "lars"

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        check_number("trust_coefficient", group["trust_coefficient"], 0)
        check_number("eps", group["eps"], 0)
