"""What the fused optimizers share: gathering lists of tensors for the kernel that does the maths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from lightning_apex import ops
from lightning_apex.optimizers._checks import check_number, check_state_shapes
from lightning_apex.optimizers._inputs import GroupWork, StepInputs
from lightning_apex.optimizers._plan import GroupPlan, gradients_of

if TYPE_CHECKING:
    from lightning_apex.masters import MasterWeights

_ROWS: dict[str, dict[str, Any]] = {row["name"]: row for row in ops.optimizer_table()}


_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_NO_INPUTS = StepInputs()


class FusedOptimizer(Optimizer):
    """Base of the fused optimizers.

    A subclass names the kernel of a parameter group (`_row`) and validates its arguments. Hyperparameters are read from
    the group under the names the kernel's row lists, and states are made as the row names them: a subclass holds no
    maths. What few need beyond that: `_hypers`, `_new_state`, `_inputs_by_group`, `_translated`.
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
            inputs = self._with_masters(inputs)
            planned = [self._planned(i, group, inputs.masters) for i, group in enumerate(self.param_groups)]
            by_group = self._inputs_by_group(inputs, planned)
            for group, work, its_inputs in zip(self.param_groups, planned, by_group, strict=True):
                self._update_group(group, work, its_inputs)
        return loss

    def _with_masters(self, inputs: StepInputs) -> StepInputs:
        """What was handed over, with masters where a subclass has some of its own."""
        return inputs

    def _inputs_by_group(self, inputs: StepInputs, planned: Sequence[GroupWork]) -> Sequence[StepInputs]:
        """What each group's update gets of what was handed over."""
        return [inputs] * len(self.param_groups)

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

    def _planned(self, index: int, group: dict[str, Any], masters: MasterWeights | None) -> GroupWork:
        row = _ROWS[self._row(group)]
        names = row["states"] + row["tensor_states"]
        params = group["params"]
        grads, kinds = gradients_of(params)
        plan = self._plans.get(index)
        if plan is None or plan.names != names or not plan.fits(params, kinds, masters):
            plan = self._plans[index] = self._plan(group, names, grads, kinds, masters)
        return GroupWork(row, grads, plan)

    def _update_group(self, group: dict[str, Any], work: GroupWork, inputs: StepInputs) -> None:
        row, plan = work.row, work.plan
        lr = group["lr"]
        device_lr = lr if isinstance(lr, Tensor) and lr.device.type != "cpu" else None
        hypers = [0.0 if device_lr is not None else float(lr), *self._hypers(group, row["hypers"][1:])]
        for bucket in plan.buckets:
            lists = (
                bucket.params,
                bucket.grads(work.grads),
                bucket.masters,
                bucket.moments(plan.names),
                bucket.steps(),
                hypers,
                _to(device_lr, bucket.device),
                _to(inputs.multiplier, bucket.device),
                _to(inputs.found_inf, bucket.device),
            )
            if bucket.sharding is None or not row["n_norms"]:
                ops.fused_step_(row["name"], *lists)
            else:
                norms = ops.fused_norms_(row["name"], *lists)
                bucket.sharding.all_reduce_(norms, self._norms_combine_by(group))
                ops.fused_step_(row["name"], *lists, norms)

    def _norms_combine_by(self, group: dict[str, Any]) -> Literal["sum", "max"]:
        """How the norms of shards make the norm of the whole."""
        return "sum"

    def _hypers(self, group: dict[str, Any], names: list[str]) -> list[float]:
        betas = dict(zip(("beta1", "beta2"), group.get("betas", ()), strict=False))
        return [float(betas[name]) if name in betas else float(group[name]) for name in names]

    def _plan(
        self,
        group: dict[str, Any],
        names: list[str],
        grads: list[Tensor | None],
        kinds: object,
        masters: MasterWeights | None,
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
            self._complete(state, names, param, group)
            return state

        plan = GroupPlan(group["params"], grads, kinds, names, masters, state_of)
        self._known_states = list(self.state.values())
        return plan

    def _complete(self, state: dict[str, Any], names: list[str], param: Tensor, group: dict[str, Any]) -> None:
        """Makes what is missing of a parameter's state."""
        _normalise_step(state, param)
        for name in names:
            if state.get(name) is None:
                self._new_state(state, name, param, group)

    def _new_state(self, state: dict[str, Any], name: str, param: Tensor, group: dict[str, Any]) -> None:
        dtype = self._state_dtype(name, param, group)
        if name in self._tensor_states(group):
            state[name] = torch.zeros((), dtype=dtype, device=param.device)
        else:
            state[name] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False)

    def _tensor_states(self, group: dict[str, Any]) -> list[str]:
        """The states that are one number a parameter."""
        names: list[str] = _ROWS[self._row(group)]["tensor_states"]
        return names

    def _state_dtype(self, name: str, param: Tensor, group: dict[str, Any]) -> torch.dtype:
        """Moments are fp32 whatever the parameter is, but fp64 for fp64 and half if asked for."""
        if param.dtype is torch.float64:
            return torch.float64
        if name in self._tensor_states(group):
            return torch.float32
        return group["state_dtype"] or torch.float32

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

        def look(optimizer: Optimizer, final: dict[str, Any]) -> dict[str, Any]:
            saved.update(self._translated(final))
            for group, saved_group in zip(self.param_groups, saved["param_groups"], strict=False):
                merged = group | saved_group
                self._check(merged)
                row = _ROWS[self._row(merged)]
                for param, index in zip(group["params"], saved_group["params"], strict=False):
                    check_state_shapes(saved["state"].get(index), index, param, row["states"], row["tensor_states"])
            return saved

        # Hooks of the user may replace the dictionary before us, and see the finished state after us.
        handles = (
            self.register_load_state_dict_pre_hook(look),
            self.register_load_state_dict_post_hook(take_over, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _translated(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A saved state as this class lays it out."""
        return state_dict

    def _loaded(self, saved: dict[str, Any], param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for name, value in saved.items():
            if name != "step" and isinstance(value, Tensor):
                dtype = self._state_dtype(name, param, group) if value.is_floating_point() else value.dtype
                value = value.detach().to(device=param.device, dtype=dtype, copy=True)
            state[name] = value
        moments = [v for k, v in state.items() if k != "step" and v is not None]
        # Apex counts steps once a group; torch's SGD not at all.
        count = saved.get("step", group.get("step", 1 if moments else 0))
        state["step"] = torch.tensor(float(count), dtype=torch.float32, device=param.device)
        return {name: value for name, value in state.items() if value is not None}


def _normalise_step(state: dict[str, Any], param: Tensor) -> None:
    """Makes the step count an fp32 tensor on the parameter's device; it may have been a number, or left behind."""
    step = state.get("step")
    if not isinstance(step, Tensor):
        state["step"] = torch.tensor(float(step or 0), dtype=torch.float32, device=param.device)
    elif step.device != param.device or step.dtype is not torch.float32:
        state["step"] = step.to(param.device, torch.float32)


def _to(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return tensor if tensor is None or tensor.device == device else tensor.to(device, non_blocking=True)


__all__ = ["FusedOptimizer", "GroupWork", "ParamsT", "StepInputs"]
