"""What the fused optimizers share: gathering lists of tensors for the kernel that does the maths."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from lightning_apex import ops
from lightning_apex.levels import is_number
from lightning_apex.optimizers._plan import GroupPlan

if TYPE_CHECKING:
    from lightning_apex.masters import MasterWeights

_ROWS: dict[str, dict[str, Any]] = {row["name"]: row for row in ops.optimizer_table()}


@dataclass(frozen=True)
class StepInputs:
    """What a mixed-precision engine hands a fused optimizer for one step.

    Attributes:
        masters: Masters of the half parameters; ``None`` to update half parameters directly.
        multiplier: fp32 0-dim factor for every gradient, such as ``clip / scale``; ``None`` for 1.
        found_inf: fp32; where it is not 0 the step changes nothing.
    """

    masters: MasterWeights | None = None
    multiplier: Tensor | None = None
    found_inf: Tensor | None = None


_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_NO_INPUTS = StepInputs()


class FusedOptimizer(Optimizer):
    """Base of the fused optimizers.

    A subclass names the kernel of a parameter group (`_row`) and validates its arguments. Hyperparameters are read from
    the group under the names the kernel's row lists, so a subclass holds no maths.
    """

    # Class attributes, because an unpickled or deep-copied optimizer has only what Optimizer.__getstate__ keeps.
    _inputs: StepInputs = _NO_INPUTS
    _known_states: list[dict[str, Any]] | None = None  # of all parameters, as the plans below have met them
    _plans: dict[int, GroupPlan]

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._check(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, after validating it."""
        self._check(self.defaults | param_group)
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if param.dtype not in _DTYPES:
                self.param_groups.pop()
                raise ValueError(
                    f"params holds a {param.dtype} parameter of shape {tuple(param.shape)}: {type(self).__name__} "
                    "updates float32, float16, bfloat16 and float64; give others to an optimizer of torch.optim."
                )

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clears gradients; ``None`` means the constructor's ``set_grad_none``."""
        super().zero_grad(bool(self.defaults["set_grad_none"]) if set_to_none is None else set_to_none)

    def _check(self, group: dict[str, Any]) -> None:
        """Raises ValueError where a group's hyperparameters are invalid."""
        raise NotImplementedError

    def _row(self, group: dict[str, Any]) -> str:
        """The row of the kernel table that updates a group."""
        raise NotImplementedError

    def hand(self, inputs: StepInputs) -> None:
        """Gives the next update its masters, gradient factor and skip flag."""
        self._inputs = inputs

    @contextmanager
    def handed(self, inputs: StepInputs) -> Iterator[None]:
        """`hand`, forgotten at the end if no step took it."""
        self._inputs = inputs
        try:
            yield
        finally:
            self._inputs = _NO_INPUTS

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one optimizer step; gradients are not written.

        Args:
            closure: Computes the loss and the gradients, and returns the loss.

        Returns:
            The closure's loss, or ``None`` without a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        inputs, self._inputs = self._inputs, _NO_INPUTS
        for group in self.param_groups:
            if not isinstance(group["lr"], Tensor):
                check_number("lr", group["lr"], 0)
        if not self._state_is_known():
            self._plans = {}
        with torch.no_grad():
            for index, group in enumerate(self.param_groups):
                self._update_group(index, group, inputs)
        return loss

    def forget_plans(self) -> None:
        """Lets go of the tensors that the last steps updated; the next step finds them again."""
        self._known_states = None
        self._plans = {}

    def _state_is_known(self) -> bool:
        known, present = self._known_states, self.state.values()
        if known is not None and len(known) == len(present) and all(map(is_, known, present)):
            return True
        self._known_states = list(present)
        return False

    def _update_group(self, index: int, group: dict[str, Any], inputs: StepInputs) -> None:
        row = _ROWS[self._row(group)]
        lr = group["lr"]
        device_lr = lr if isinstance(lr, Tensor) and lr.device.type != "cpu" else None
        hypers = [0.0 if device_lr is not None else float(lr), *self._hypers(group, row["hypers"][1:])]
        params = group["params"]
        grads = [param.grad for param in params]
        plan = self._plans.get(index)
        if plan is None or plan.names != row["states"] or not plan.fits(params, grads, inputs.masters):
            plan = self._plans[index] = self._plan(group, row["states"], grads, inputs.masters)
        for bucket in plan.buckets:
            ops.fused_step_(
                row["name"],
                bucket.params,
                bucket.grads(grads),
                bucket.masters,
                bucket.moments(row["states"]),
                bucket.steps(),
                hypers,
                _to(device_lr, bucket.device),
                _to(inputs.multiplier, bucket.device),
                _to(inputs.found_inf, bucket.device),
            )

    def _hypers(self, group: dict[str, Any], names: list[str]) -> list[float]:
        betas = dict(zip(("beta1", "beta2"), group.get("betas", ()), strict=False))
        return [float(betas[name]) if name in betas else float(group[name]) for name in names]

    def _plan(
        self, group: dict[str, Any], names: list[str], grads: list[Tensor | None], masters: MasterWeights | None
    ) -> GroupPlan:
        if any(grad is not None and grad.is_sparse for grad in grads):
            raise RuntimeError(
                f"{type(self).__name__} does not support sparse gradients: build the embedding with sparse=False, or "
                "give its parameters to torch.optim.SparseAdam."
            )
        if any(param.is_meta for param in group["params"]):
            raise RuntimeError(
                f"{type(self).__name__}.step() found a parameter on the meta device, which has no values: materialise "
                "the model (to_empty() and load its weights) first."
            )

        def state_of(param: Tensor) -> dict[str, Any]:
            state: dict[str, Any] = self.state[param]
            _normalise_step(state, param)
            for name in names:
                if state.get(name) is None:
                    self._new_state(state, name, param, group["state_dtype"])
            return state

        plan = GroupPlan(group["params"], grads, names, masters, state_of)
        self._known_states = list(self.state.values())
        return plan

    def _new_state(self, state: dict[str, Any], name: str, param: Tensor, dtype: torch.dtype | None) -> None:
        state[name] = torch.zeros_like(
            param, dtype=moment_dtype(param, dtype), memory_format=torch.preserve_format, requires_grad=False
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the state of this optimizer, of torch's unfused one, or of Apex's.

        Moments keep the dtype they were saved in: ``torch.optim.Optimizer`` would round them to a half parameter's.
        """
        own = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        saved: dict[str, Any] = {}

        def take_over(optimizer: Optimizer) -> None:
            for group, saved_group, defaults in zip(self.param_groups, saved["param_groups"], own, strict=True):
                for name, value in defaults.items():
                    group.setdefault(name, value)
                for param, index in zip(group["params"], saved_group["params"], strict=True):
                    if index in saved["state"]:
                        self.state[param] = self._loaded(saved["state"][index], param, group)

        # Hooks of the user may replace the dictionary before us, and see the finished state after us.
        handles = (
            self.register_load_state_dict_pre_hook(lambda _, final: saved.update(final)),
            self.register_load_state_dict_post_hook(take_over, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _loaded(self, saved: dict[str, Any], param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for name, value in saved.items():
            if name != "step" and isinstance(value, Tensor):
                dtype = moment_dtype(param, group["state_dtype"]) if value.is_floating_point() else value.dtype
                value = value.detach().to(device=param.device, dtype=dtype, copy=True)
            state[name] = value
        moments = [v for k, v in state.items() if k != "step" and v is not None]
        # Apex counts steps once a group; torch's SGD not at all.
        count = saved.get("step", group.get("step", 1 if moments else 0))
        state["step"] = torch.tensor(float(count), dtype=torch.float32, device=param.device)
        return {name: value for name, value in state.items() if value is not None}


def moment_dtype(param: Tensor, state_dtype: torch.dtype | None) -> torch.dtype:
    """Moments are fp32 whatever the parameter is, but fp64 for fp64 and half if asked for."""
    if param.dtype is torch.float64:
        return torch.float64
    return state_dtype or torch.float32


def _normalise_step(state: dict[str, Any], param: Tensor) -> None:
    """Makes the step count an fp32 tensor on the parameter's device; it may have been a number, or left behind."""
    step = state.get("step")
    if not isinstance(step, Tensor):
        state["step"] = torch.tensor(float(step or 0), dtype=torch.float32, device=param.device)
    elif step.device != param.device or step.dtype is not torch.float32:
        state["step"] = step.to(param.device, torch.float32)


def _to(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return tensor if tensor is None or tensor.device == device else tensor.to(device, non_blocking=True)


# --- validation: every message names the argument, the value and what to use instead --------------------------------


def check_number(name: str, value: Any, low: float, high: float = math.inf, *, open_above: bool = False) -> None:
    """Requires ``low <= value <= high`` (``< high`` if ``open_above``), and a finite value."""
    if isinstance(value, Tensor) and name == "lr":
        if value.numel() != 1:
            raise ValueError(f"lr={value} has {value.numel()} elements: give a float or a tensor of one element.")
        if value.device.type != "cpu":
            return  # reading it would wait for the device
        value = value.item()
    fine = is_number(value) and low <= value <= high and not (open_above and value == high)
    if not fine:
        lower = "" if low == -math.inf else f" of at least {low:g}"
        upper = "" if high == math.inf else f" and {'below' if open_above else 'at most'} {high:g}"
        raise ValueError(f"{name}={value!r} is invalid: it must be a finite number{lower}{upper}.")


def check_betas(betas: Any) -> None:
    """Requires two numbers in [0, 1)."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"betas={betas!r} is invalid: give two numbers, such as (0.9, 0.999).")
    for i, beta in enumerate(betas):
        check_number(f"betas[{i}]", beta, 0, 1, open_above=True)


def check_state_dtype(dtype: torch.dtype | None) -> None:
    """Requires None, fp32 or bf16."""
    if dtype not in (None, torch.float32, torch.bfloat16):
        raise ValueError(f"state_dtype={dtype!r} is invalid: use None or torch.float32 (fp32), or torch.bfloat16.")


__all__ = ["FusedOptimizer", "ParamsT", "StepInputs", "check_betas", "check_number", "check_state_dtype"]
