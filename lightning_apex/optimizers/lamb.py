"""LAMB."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_apex.casting import HALF
from lightning_apex.masters import MasterWeights
from lightning_apex.optimizers._base import FusedOptimizer, GroupWork, ParamsT, StepInputs
from lightning_apex.optimizers._checks import check_betas, check_number, check_state_dtype
from lightning_apex.sharding import sum_of_squares


class FusedLAMB(FusedOptimizer):
    r"""LAMB: AdamW whose step is made as long as each parameter's norm asks for, for large batches.

    .. math::
        g &\leftarrow g / \max(1, \lVert G \rVert / C), \qquad
        m \leftarrow \beta_1 m + (1 - \beta_1) g, \qquad v \leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        u &= \frac{m / c_1}{\sqrt{v / c_2} + \epsilon} + \lambda p, \qquad
        p \leftarrow p - \eta \frac{\lVert p \rVert}{\lVert u \rVert} u, \qquad c_i = 1 - \beta_i^t

    from You et al., "Large Batch Optimization for Deep Learning" (2020), algorithm 2, where :math:`G` are the gradients
    of all groups and :math:`C` is ``max_grad_norm``. The ratio of norms is 1 where a norm is 0, and where
    :math:`\lambda = 0` unless ``use_nvlamb``. Gradients are not written.

    Formulas and arguments are those of Apex's class. Different: ``max_grad_norm`` is each group's own, and also from a
    loaded state, where Apex takes the first default for all; a parameter has its own step count; bf16 and fp64 work.
    The paper clips no gradient (``max_grad_norm=None``) and bounds the norms, here the identity. torch has no LAMB.

    Args:
        params: Parameters or parameter groups; fp32, fp16, bf16, or fp64.
        lr: Learning rate :math:`\eta`, a float or a one-element tensor.
        bias_correction: Whether to divide by :math:`c_i`.
        betas: Decay rates :math:`\beta_1, \beta_2` of the moments.
        eps: :math:`\epsilon`, added outside the root.
        weight_decay: :math:`\lambda`.
        amsgrad: Must be False; accepted for old code.
        adam_w_mode: Decay joins :math:`u`, rather than the gradient.
        grad_averaging: Whether the gradient enters :math:`m` times :math:`1 - \beta_1` rather than 1.
        set_grad_none: What ``zero_grad()`` does by default.
        max_grad_norm: :math:`C`; ``None`` and 0 do not clip. The factor is fp32, for fp64 parameters too.
        use_nvlamb: Apply the ratio to parameters without weight decay too.
        maximize: Ascend instead of descend.
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
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
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
            "adam_w_mode": adam_w_mode,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
            "use_nvlamb": use_nvlamb,
            "maximize": maximize,
            "set_grad_none": set_grad_none,
            "state_dtype": state_dtype,
        }
        super().__init__(params, defaults)

    def _row(self, group: dict[str, Any]) -> str:
        return "lamb"

    def _inputs_by_group(self, inputs: StepInputs, planned: Sequence[GroupWork]) -> Sequence[StepInputs]:
        limits = [group["max_grad_norm"] for group in self.param_groups]
        if not any(limits):
            return super()._inputs_by_group(inputs, planned)
        squares, given = inputs.sum_of_squares, inputs.multiplier
        if squares is None:
            squares = sum_of_squares(part for work in planned for part in work.by_place())
        norm = squares.sqrt()
        if given is not None:
            given = given.to(norm.device, torch.float64)
            norm = norm * given
        by_limit = {None: inputs, 0: inputs}
        for limit in limits:
            if limit not in by_limit:
                factor = (limit / norm).clamp_(max=1)
                factor = factor if given is None else factor * given
                by_limit[limit] = replace(inputs, multiplier=factor.float())
        return [by_limit[limit] for limit in limits]

    def _check(self, group: dict[str, Any]) -> None:
        check_number("lr", group["lr"], 0)
        check_betas(group["betas"])
        check_number("eps", group["eps"], 0)
        check_number("weight_decay", group["weight_decay"], 0)
        if group["max_grad_norm"] is not None:
            check_number("max_grad_norm", group["max_grad_norm"], 0)
        check_state_dtype(group["state_dtype"])
        if group.get("amsgrad"):
            raise ValueError("amsgrad=True is invalid: LAMB has no such variant; use FusedAdam(amsgrad=True).")


class FusedMixedPrecisionLamb(FusedLAMB):
    """`FusedLAMB` that keeps fp32 masters of half parameters by itself, in a loop without an opt level.

    Under an opt level with masters (O2, O5) those are used, and this class is `FusedLAMB`. Its own masters are made
    from the half value at a parameter's first step, lie in the optimizer's state as ``master``, and are saved with it
    (Apex's are not). The arguments are those of Apex's class; where its ``step`` takes a ``grad_scaler``, call
    ``LossScaler.step(optimizer)`` or ``torch.amp.GradScaler.step(optimizer)``.

    Args:
        params: See `FusedLAMB`.
        lr: See `FusedLAMB`.
        step: How many steps parameters have behind them at their first.
        bias_correction: See `FusedLAMB`.
        betas: See `FusedLAMB`.
        eps: See `FusedLAMB`.
        weight_decay: See `FusedLAMB`.
        amsgrad: See `FusedLAMB`.
        adam_w_mode: See `FusedLAMB`.
        grad_averaging: See `FusedLAMB`.
        max_grad_norm: See `FusedLAMB`.
        use_nvlamb: See `FusedLAMB`.
        reduced_precision_dtype: Parameters of this dtype get masters; ``None`` for none.
        set_grad_none: See `FusedLAMB`.
        maximize: See `FusedLAMB`.
        state_dtype: See `FusedLAMB`.

    Raises:
        ValueError: If an argument is out of range; the message names it.
    """

    _own_masters: MasterWeights | None = None

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
        *,
        set_grad_none: bool = True,
        maximize: bool = False,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        check_number("step", step, 0)
        if reduced_precision_dtype not in (None, *HALF):
            raise ValueError(
                f"reduced_precision_dtype={reduced_precision_dtype!r} is invalid: use torch.float16, torch.bfloat16 or "
                "None."
            )
        super().__init__(
            params,
            lr,
            bias_correction,
            betas,
            eps,
            weight_decay,
            amsgrad,
            adam_w_mode,
            grad_averaging,
            set_grad_none,
            max_grad_norm,
            use_nvlamb,
            maximize=maximize,
            state_dtype=state_dtype,
        )
        self.defaults |= {"step": int(step), "reduced_precision_dtype": reduced_precision_dtype}

    def _with_masters(self, inputs: StepInputs) -> StepInputs:
        return inputs if inputs.masters is not None else replace(inputs, masters=self._masters())

    def _masters(self) -> MasterWeights | None:
        """The masters as the state has them: loaded, unpickled and copied state brings its own."""
        dtype = self.defaults["reduced_precision_dtype"]
        if dtype is None:
            return None
        masters = self._own_masters = self._own_masters or MasterWeights()
        for group in self.param_groups:
            for param in group["params"]:
                if param.dtype is dtype and param.grad is not None:
                    state = self.state[param]
                    if "master" not in state:
                        state["master"] = param.detach().float()
                    if param not in masters or masters.of(param) is not state["master"]:
                        masters.put(param, state["master"])
        return masters

    def _complete(self, state: dict[str, Any], names: list[str], param: Tensor, group: dict[str, Any]) -> None:
        state.setdefault("step", self.defaults["step"])
        super()._complete(state, names, param, group)

    def _state_dtype(self, name: str, param: Tensor, group: dict[str, Any]) -> torch.dtype:
        return torch.float32 if name == "master" else super()._state_dtype(name, param, group)
