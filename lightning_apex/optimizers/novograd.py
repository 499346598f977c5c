"""NovoGrad."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_apex.optimizers._base import FusedOptimizer, ParamsT
from lightning_apex.optimizers._checks import check_betas, check_number, check_state_dtype


class FusedNovoGrad(FusedOptimizer):
    r"""NovoGrad: Adam with one second moment a parameter, so that a step keeps half of Adam's state.

    .. math::
        v &\leftarrow \beta_2 v + (1 - \beta_2) \lVert g \rVert^2 \quad (v = \lVert g \rVert^2 \text{ at first}),
        \qquad d = \sqrt{v / c_2} + \epsilon \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g, \qquad
        p \leftarrow p - \eta \left( \frac{m / c_1}{d} + \lambda p \right), \qquad c_i = 1 - \beta_i^t

    from Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments" (2019). With
    ``reg_inside_moment=True``, as in the paper's algorithm 1, the normalised gradient and the decay go into the moment:
    :math:`m \leftarrow \beta_1 m + (1 - \beta_1) (g / d + \lambda p)` and :math:`p \leftarrow p - \eta\, m / c_1`.
    The paper has neither bias correction nor the factor :math:`1 - \beta_1`: ``bias_correction=False`` and
    ``grad_averaging=False`` give its form.

    Formulas and arguments are those of Apex's class. Different is the state: :math:`v` is a number in the state of each
    parameter (0-dim, fp32, under ``exp_avg_sq``) and what the formula says, a blend of squares, where Apex keeps
    vectors of its roots in the parameter groups; Apex's state dicts are taken over. A parameter has its own step count
    and first step, parameters may join and lack gradients, bf16 and fp64 work. With the infinity norm :math:`v` blends
    :math:`\max |g|`, and :math:`d = v / c_2 + \epsilon` where Apex divides by :math:`\sqrt{c_2}`. torch has no
    NovoGrad.

    Args:
        params: Parameters or parameter groups; fp32, fp16, bf16, or fp64.
        lr: Learning rate :math:`\eta`, a float or a one-element tensor.
        bias_correction: Whether to divide by :math:`c_i`.
        betas: Decay rates :math:`\beta_1, \beta_2` of the moments.
        eps: :math:`\epsilon`, added outside the root.
        weight_decay: :math:`\lambda`.
        amsgrad: Must be False; accepted for old code.
        reg_inside_moment: Whether normalisation and decay happen before the moment rather than after it.
        grad_averaging: Whether the gradient enters the moment times :math:`1 - \beta_1` rather than 1.
        norm_type: 2, or 0 (also ``math.inf``) for the largest absolute value.
        init_zero: Whether :math:`v` starts from 0 rather than from the first gradient.
        set_grad_none: What ``zero_grad()`` does by default.
        maximize: Ascend instead of descend.
        state_dtype: ``torch.bfloat16`` halves the memory of the moment; it is fp32 by default.

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
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: float = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
        *,
        maximize: bool = False,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "reg_inside_moment": reg_inside_moment,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
            "maximize": maximize,
            "set_grad_none": set_grad_none,
            "state_dtype": state_dtype,
        }
        super().__init__(params, defaults)

    def _row(self, group: dict[str, Any]) -> str:
        return "novograd"

    def _norms_combine_by(self, group: dict[str, Any]) -> Literal["sum", "max"]:
        return "sum" if group["norm_type"] == 2 else "max"

    def _translated(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        groups = [dict(group) for group in state_dict["param_groups"]]
        state = dict(state_dict["state"])
        for own, group in zip(self.param_groups, groups, strict=False):
            if roots := group.pop("exp_avg_sq", None):
                squared = group.get("norm_type", own["norm_type"]) == 2
                members = [(i, p) for i, p in zip(group["params"], own["params"], strict=False) if i in state]
                for index, root in _apart(roots, members):
                    state[index] = state[index] | {"exp_avg_sq": root.square() if squared else root}
        return state_dict | {"state": state, "param_groups": groups}

    def _check(self, group: dict[str, Any]) -> None:
        check_number("lr", group["lr"], 0)
        check_betas(group["betas"])
        check_number("eps", group["eps"], 0)
        check_number("weight_decay", group["weight_decay"], 0)
        check_state_dtype(group["state_dtype"])
        if group["norm_type"] not in (0, 2, math.inf):
            raise ValueError(f"norm_type={group['norm_type']!r} is invalid: use 2, or 0 for the largest magnitude.")
        if group.get("amsgrad"):
            raise ValueError("amsgrad=True is invalid: NovoGrad has no such variant; use FusedAdam(amsgrad=True).")


def _apart(roots: list[Tensor], members: list[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
    """Gives each parameter with a state its number of Apex's two vectors, of fp16 and of fp32 parameters."""
    half, wide = roots
    if wide.numel() == 0 or half.numel() == 0:  # whatever dtype the parameters had when this was saved
        first, second = (members, []) if half.numel() else ([], members)
    else:
        first = [member for member in members if member[1].dtype is torch.float16]
        second = [member for member in members if member[1].dtype is not torch.float16]
    if (len(first), len(second)) != (half.numel(), wide.numel()):
        raise ValueError(
            f"The state holds exp_avg_sq of {half.numel()} fp16 and {wide.numel()} fp32 parameters, and this optimizer "
            f"{len(first)} and {len(second)} with a state: build it from the parameters it was saved for."
        )
    numbers = [*half.unbind(), *wide.unbind()]
    return [(index, number) for (index, _), number in zip(first + second, numbers, strict=True)]
