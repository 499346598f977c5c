"""One optimizer step: measure the gradients, unscale, clip, then update or skip."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from lightning_apex import ops
from lightning_apex.masters import match_grad_dtype
from lightning_apex.optimizers._base import FusedOptimizer, StepInputs
from lightning_apex.overflow import PositionsIn
from lightning_apex.sections import measuring
from lightning_apex.sharding import Place, Sharding, local, place_of

if TYPE_CHECKING:
    from lightning_apex.masters import MasterWeights
    from lightning_apex.scaler import LossScaler


class OptimizerStep:
    """The step that one optimizer is about to make with the gradients its parameters hold.

    With a fused optimizer the gradients are read twice and written never: one read measures them, the update multiplies
    them by ``clip / scale`` as it reads them. Once `expose` was called they are written, unscaled, for a user to see
    and edit; then half parameters with masters hold fp32 gradients until the step is over, since unscaled fp16 would
    flush what loss scaling had saved.

    Attributes:
        params: The parameters that have a gradient.
        norm: The global L2 norm of the unscaled gradients before clipping (fp32, 0-dim), once measured.
        found_inf: fp32, 1 where a gradient was not finite; ``None`` while not measured or without a loss scale.
        nonfinite: Pairs of parameters and their uint8 flags of which gradients were not finite.
        exposed: Whether `expose` was called.
        measures_always: Set it to have `norm` even where neither scaling nor clipping needs it.
        number: Set it to have reports call the step by a number of the caller's.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scaler: LossScaler,
        masters: MasterWeights | None = None,
        names_of: Callable[[Sequence[Tensor]], list[str]] | None = None,
    ) -> None:
        self.params: list[Tensor] = [
            p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        self.norm: Tensor | None = None
        self.found_inf: Tensor | None = None
        self.nonfinite: list[tuple[list[Tensor], Tensor]] = []
        self.measures_always = False
        self.number: int | None = None
        self.names_of = names_of or PositionsIn(optimizer)
        self.sections = scaler.sections
        self._optimizer, self._scaler, self._masters = optimizer, scaler, masters
        self._fused = isinstance(optimizer, FusedOptimizer)
        self.exposed = False
        self._max_norm = 0.0

    def is_of(self, optimizer: Optimizer) -> bool:
        """Whether this is a step of that optimizer."""
        return self._optimizer is optimizer

    # --- what happens between the backward pass and the update --------------------------------------------------

    def clip_norm(self, max_norm: float) -> None:
        """Clips the gradients to a global L2 norm of ``max_norm``; at or below 0 does nothing."""
        if max_norm <= 0:
            return
        if self._fused and not self.exposed:
            self._max_norm = min(self._max_norm or max_norm, max_norm)
            return
        self.expose()
        self._clip_written(max_norm)

    @measuring
    def _clip_written(self, max_norm: float) -> None:
        groups = self._by_place()
        total = self._sum_of_squares(groups)
        for grads in groups.values():
            unused = grads[0].new_zeros((), dtype=torch.float32)
            sum_of_squares = total.to(unused.device)
            norm, factor = ops.step_factors(sum_of_squares, _no_flags(unused), None, max_norm, unused)
            ops.unscale_(grads, factor)
            self.norm = norm if self.norm is None else self.norm

    def clip_value(self, clip_value: float) -> None:
        """Clips each element of the gradients to ``[-clip_value, clip_value]``; at or below 0 does nothing."""
        if clip_value > 0:
            self.expose()
            with self.sections("measure"):
                if present := [p for p in self.params if p.grad is not None]:
                    torch.nn.utils.clip_grad_value_(present, clip_value)

    def expose(self) -> None:
        """Writes the unscaled gradients to ``param.grad``, where a user may look at them and edit them."""
        if self.exposed:
            return
        self.exposed = True
        self._write_unscaled()
        if self._max_norm:
            self.clip_norm(self._max_norm)

    @measuring
    def _write_unscaled(self) -> None:
        for (device, sharding), params in self._params_by_place().items():
            inverse = self._scaler.scale_on(device).reciprocal() if self._scaler.is_enabled() else None
            plain: list[Tensor] = []
            dense: list[Tensor] = []
            for param in params:
                if self._masters is None or param not in self._masters:
                    plain.append(param)
                elif param.grad is not None and param.grad.is_sparse:
                    replace_grad(param, param.grad.coalesce().float())
                    plain.append(param)
                else:
                    dense.append(param)
            if dense:
                self._note(dense, self._widen(dense, inverse), sharding)
            if plain and inverse is not None:
                grads = [dense_values(p) for p in plain]
                self._note(plain, ops.unscale_(grads, inverse), sharding)
        self._merge_flags()

    def finish(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the step, or skips it; arguments are handed to ``optimizer.step``."""
        if _has_step_pre_hooks(self._optimizer):
            self.expose()
        if self._fused and not self.exposed:
            with self._optimizer.handed(self.inputs()), self.sections("update"):  # type: ignore[attr-defined]
                return self._optimizer.step(*args, **kwargs)
        self.expose()
        self.measure()
        try:
            with self.sections("update"):
                return self._update(*args, **kwargs)
        finally:
            self._narrow()

    def reopen(self) -> None:
        """Scales written gradients again, because more scaled ones are about to be added to them."""
        if self._scaler.is_enabled():
            for (device, _), grads in self._by_place().items():
                factor = self._scaler.scale_on(device)
                if self.found_inf is not None:
                    # An overflow that clipping has hidden must still be found at the step.
                    factor = factor / (1 - self.found_inf.to(device))
                ops.unscale_(grads, factor)
        self._narrow()

    def abandon(self) -> None:
        """Ends a step that will not be made; its gradients stay as they are, in their parameters' dtype."""
        if self.exposed:
            self._narrow()

    def measure(self) -> None:
        """Fills in `norm` from written gradients, if somebody wants it and nothing has measured them yet."""
        if self.measures_always and self.norm is None and self.params:
            with self.sections("measure"):
                self.norm = self._sum_of_squares(self._by_place()).sqrt().float()

    def inputs(self) -> StepInputs:
        """What a fused optimizer needs to make this step; measures the gradients if anything depends on it."""
        if not self.params or not (self._scaler.is_enabled() or self._max_norm or self.measures_always):
            return StepInputs(self._masters)
        return self._measured_inputs()

    @measuring
    def _measured_inputs(self) -> StepInputs:
        groups = self._by_place()
        if not groups:
            return StepInputs(self._masters)
        sum_of_squares = self._sum_of_squares(groups, note=True)
        device = sum_of_squares.device
        found_inf = torch.zeros((), dtype=torch.float32, device=device)
        flags = [mask.to(device) for _, mask in self.nonfinite]
        flags_on_device = flags[0] if len(flags) == 1 else torch.cat(flags)
        scale = self._scaler.scale_on(device) if self._scaler.is_enabled() else None
        self.norm, factor = ops.step_factors(sum_of_squares, flags_on_device, scale, self._max_norm, found_inf)
        if scale is not None:
            self.found_inf = found_inf
        return StepInputs(self._masters, factor, self.found_inf, sum_of_squares)

    def was_skipped(self) -> bool:
        """Whether the step was skipped; waits for the device."""
        return self.found_inf is not None and bool(self.found_inf)

    # --- how ----------------------------------------------------------------------------------------------------

    def _update(self, *args: Any, **kwargs: Any) -> Any:
        if self._fused:
            with self._optimizer.handed(StepInputs(self._masters, None, self.found_inf)):  # type: ignore[attr-defined]
                return self._optimizer.step(*args, **kwargs)
        if self.was_skipped():
            # A scheduler that finds no step made warns about its order; the order was right.
            self._optimizer._opt_called = True  # type: ignore[attr-defined]
            return None
        with self._masters.swapped_into(self._optimizer) if self._masters is not None else nullcontext():
            return self._optimizer.step(*args, **kwargs)

    def _widen(self, params: list[Tensor], inverse: Tensor | None) -> Tensor:
        half = [p.grad for p in params if p.grad is not None]
        wide = [torch.empty_like(grad, dtype=torch.float32) for grad in half]
        with torch.no_grad():
            flags = ops.copy_scaled_([local(grad) for grad in wide], [local(grad) for grad in half], inverse)
        for param, grad in zip(params, wide, strict=True):
            replace_grad(param, grad)
        return flags

    def _narrow(self) -> None:
        """After the step gradients have their parameters' dtype again, as DDP and accumulation expect."""
        narrow_gradients(self.params)

    def _params_by_place(self) -> dict[Place, list[Tensor]]:
        groups: dict[Place, list[Tensor]] = {}
        for param in self.params:
            if param.grad is not None:  # a hook may have dropped it
                groups.setdefault(place_of(param), []).append(param)
        return groups

    def _by_place(self) -> dict[Place, list[Tensor]]:
        groups = self._params_by_place()
        return {place: [dense_values(p) for p in params] for place, params in groups.items()}

    def _sum_of_squares(self, groups: dict[Place, list[Tensor]], note: bool = False) -> Tensor:
        total: Tensor | None = None
        params = self._params_by_place() if note else {}
        for place, grads in groups.items():
            part, flags = ops.measure_gradients(grads)
            if place[1] is not None:
                part, flags = place[1].of_the_whole(part, flags)
            total = part if total is None else total + part.to(total.device)
            if note:
                self.nonfinite.append((params[place], flags))
        return torch.zeros((), dtype=torch.float64) if total is None else total

    def _note(self, params: list[Tensor], flags: Tensor, sharding: Sharding | None) -> None:
        if not self._scaler.is_enabled():
            return
        if sharding is not None:  # what any process has found in its shards is found by all
            _, flags = sharding.of_the_whole(torch.zeros((), dtype=torch.float64, device=flags.device), flags)
        self.nonfinite.append((params, flags))

    def _merge_flags(self) -> None:
        for _, flags in self.nonfinite:
            found = flags.any().to(torch.float32)
            known = self.found_inf
            self.found_inf = found if known is None else torch.maximum(known, found.to(known.device))


def _has_step_pre_hooks(optimizer: Optimizer) -> bool:
    """Whether somebody looks at the gradients between here and the update."""
    # A wrapper around an optimizer may never have called Optimizer.__init__.
    return bool(getattr(optimizer, "_optimizer_step_pre_hooks", None) or _global_optimizer_pre_hooks)


def replace_grad(param: Tensor, grad: Tensor) -> None:
    """Sets a gradient of another dtype than the parameter's."""
    param.grad = None
    param.grad_dtype = None  # any
    param.grad = grad


def dense_values(param: Tensor) -> Tensor:
    """The memory that holds a gradient's values; a sparse gradient is coalesced first."""
    grad = param.grad
    assert grad is not None
    if grad.is_complex() and not grad.is_sparse:
        return torch.view_as_real(grad)
    if not grad.is_sparse:
        return local(grad)
    if not grad.is_coalesced():
        param.grad = grad = grad.coalesce()
    return grad._values()


def _no_flags(like: Tensor) -> Tensor:
    return torch.zeros(0, dtype=torch.uint8, device=like.device)


def narrow_gradients(params: Iterable[Tensor]) -> None:
    """Gives gradients their parameters' dtype again."""
    for param in params:
        grad = param.grad
        if grad is not None and grad.dtype is not param.dtype:
            param.grad = None
            match_grad_dtype(param)
            param.grad = grad.to(param.dtype)
