"""The gradients of one optimizer between `scale_loss` and ``optimizer.step()``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from lightning_apex import ops
from lightning_apex.casting import HALF
from lightning_apex.masters import match_grad_dtype
from lightning_apex.optimizers._base import FusedOptimizer, StepInputs
from lightning_apex.scaler import LossScaler
from lightning_apex.step import OptimizerStep, dense_values, narrow_gradients, replace_grad

if TYPE_CHECKING:
    from lightning_apex.amp.context import Context


class ScaleInUse:
    """A loss scale as it was when a loss was multiplied by it; stands in for its scaler at the unscaling."""

    def __init__(self, context: Context, loss_id: int, device: torch.device) -> None:
        self.loss_id = loss_id
        self.scaler: LossScaler = context.scalers[loss_id]
        self.sections = self.scaler.sections
        self._move = context.moves[loss_id]
        self._value = self.scaler.scale_on(device).clone()

    def is_enabled(self) -> bool:
        """Whether there is anything to unscale."""
        return self.scaler.is_enabled()

    def scale_on(self, device: torch.device) -> Tensor:
        """The scale, on a device."""
        return self._value.to(device, non_blocking=True)

    def same_as(self, other: ScaleInUse) -> bool:
        """Whether gradients of both may be added."""
        return self.scaler is other.scaler and self._move == other._move


class Gradients:
    """What is known of the gradients that an optimizer's parameters hold.

    Without loss scaling: nothing, they are what the backward pass made of them. With it they are in one of three
    states. *Scaled* while ``delay_unscale`` accumulates. *Measured*: still scaled, half, and never written, where a
    fused optimizer updates masters, because it unscales as it reads. *Unscaled* in all other cases, for a user to
    see; gradients of half parameters with masters are fp32 then.

    When another scaled backward pass begins, unscaled gradients are put aside, in fp32, and added to its own
    afterwards: each loss has a scale of its own, and an inf is held against the right one.
    """

    def __init__(self, context: Context, optimizer: Optimizer) -> None:
        self.context = context
        self.found_inf: Tensor | None = None
        self.busy = False  # inside scale_loss
        self._optimizer = ref(optimizer)
        self._fused = isinstance(optimizer, FusedOptimizer)
        self._scale: ScaleInUse | None = None  # what they are scaled by
        self._inputs: StepInputs | None = None  # what a fused optimizer needs to use measured ones
        self._used = False  # measured ones, by a step
        self._local = False  # this rank's alone
        self._seen: list[tuple[Tensor, Tensor, int]] = []  # measured ones, to notice edits
        self._aside: dict[Tensor, Tensor] = {}
        self._shown: dict[Tensor, Tensor | None] = {}  # masters' gradients, as a user saw them
        self._loss_ids: set[int] = set()  # whose scales wait for the step

    @property
    def optimizer(self) -> Optimizer:
        """Whose gradients."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    def params(self) -> list[Tensor]:
        """The parameters that have a gradient."""
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]

    # --- around a backward pass ---------------------------------------------------------------------------------

    def begin(self, scale: ScaleInUse) -> None:
        """Makes room for gradients that are scaled by ``scale``."""
        self.busy = True
        accumulating = self._scale is not None and self._inputs is None
        if accumulating and self._scale is not None and self._scale.same_as(scale):
            return
        if self._local:
            self._rescale_to(scale)
        else:
            self._put_aside()

    def cancel(self) -> None:
        """Ends a backward pass that failed: what it left is dropped, what was there before is back."""
        self.busy = False
        if self._scale is None:  # else the new gradients were added to others already
            for param in self.params():
                param.grad = None
            self._merge_aside()

    def end(self, scale: ScaleInUse, delay: bool, local: bool) -> Tensor | None:
        """After the backward pass: unscales, unless that is delayed; returns 1 where a gradient was not finite.

        Gradients that DDP has not exchanged yet must stay where it finds them, so that unscaling is delayed, too.
        """
        self.busy = False
        self._local, delay = local, delay or local
        self._scale, self._inputs, self._used = scale, None, False
        self._loss_ids.add(scale.loss_id)
        return None if delay else self._measure(self._may_stay_scaled())

    def note(self, found_inf: Tensor | None) -> None:
        """Takes an overflow into account, of this optimizer's gradients or of others' of the same loss."""
        if found_inf is not None:
            known = self.found_inf
            self.found_inf = found_inf if known is None else torch.maximum(known, found_inf.to(known.device))

    def _measure(self, keep_scaled: bool = False) -> Tensor | None:
        scale = self._scale
        assert scale is not None
        step = self._new_step()
        if keep_scaled:
            self._inputs = step.inputs()
            self._seen = [(p, p.grad, p.grad._version) for p in self.params() if p.grad is not None]
        else:
            step.expose()
            self._scale = None
            self._merge_aside()
        self.context.measured(scale.loss_id, step)
        return step.found_inf

    def _may_stay_scaled(self) -> bool:
        looked_at = len(self.optimizer._optimizer_step_pre_hooks) > 1 or bool(_global_optimizer_pre_hooks)
        return self._fused and self.context.engine.masters is not None and not self._aside and not looked_at

    def _new_step(self) -> OptimizerStep:
        engine = self.context.engine
        return OptimizerStep(self.optimizer, cast(LossScaler, self._scale), engine.masters, engine.names_of)

    def unscale(self) -> None:
        """Writes unscaled gradients where they are not unscaled yet."""
        if self._scale is None:
            return
        if self._inputs is None:
            self.note(self._measure())
            return
        self._new_step().expose()  # what it finds was found before
        self._scale = self._inputs = None
        self._seen.clear()

    def _rescale_to(self, scale: ScaleInUse) -> None:
        """Brings gradients, scaled or not, to another scale, where they are."""
        self.take_edits()
        for param in self.params():
            values = dense_values(param)
            factor = scale.scale_on(values.device)
            if self._scale is not None:
                factor = factor / self._scale.scale_on(values.device)
            ops.unscale_([values], factor)
        narrow_gradients(self.params())
        self._scale = scale

    def _put_aside(self) -> None:
        self.take_edits()
        if not self.params():  # dropped by zero_grad(): they count for their scale, and for no step
            self.settle()
            self.forget()
            return
        used = self._used
        self.unscale()
        for param in self.params():
            assert param.grad is not None
            self._aside[param], param.grad = param.grad, None
            match_grad_dtype(param)
        if used:
            self.found_inf = None
        elif self.found_inf is not None:  # an overflow of gradients that were zeroed since is past
            device = self.found_inf.device
            anything = torch.stack([grad.any().to(device) for grad in self._aside.values()]).any()
            self.found_inf = self.found_inf * anything

    @torch.no_grad()
    def _merge_aside(self) -> None:
        """Adds the gradients that were put aside; an inf among them is no fault of the present loss scale."""
        aside, self._aside = self._aside, {}
        for param, grad in aside.items():
            if param.grad is None:
                replace_grad(param, grad)
            elif param.grad.is_sparse or grad.is_sparse:
                replace_grad(param, param.grad + grad)
            else:
                param.grad.add_(grad)
        by_device: dict[torch.device, list[Tensor]] = {}
        for param in aside:
            by_device.setdefault(param.device, []).append(dense_values(param))
        for values in by_device.values():
            _, flags = ops.measure_gradients(values)
            self.note(flags.any().float())

    # --- between the backward pass and the step -----------------------------------------------------------------

    def show(self) -> list[Tensor]:
        """The tensors that the optimizer updates, with their unscaled gradients."""
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        masters = self.context.engine.masters
        if not self.busy:
            self.take_edits()
            self.unscale()
        if masters is None:
            return params
        halves = [p for p in params if p.dtype in HALF]
        masters.reconcile(halves)
        if not self.busy:
            for param in halves:
                self._show_one(param, masters.of(param))
        return [masters.of(p) if p.dtype in HALF else p for p in params]

    def _show_one(self, param: Tensor, master: Tensor) -> None:
        if param.grad is not None and param.grad.dtype in HALF:
            replace_grad(param, param.grad.float())
        master.requires_grad_(param.requires_grad)
        master.grad = self._shown[param] = param.grad

    def take_edits(self) -> None:
        """Takes over gradients that a user gave masters; edits in place are in the parameters' gradients already."""
        masters = self.context.engine.masters
        shown, self._shown = self._shown, {}
        for param, grad in shown.items():
            master = masters.of(param) if masters is not None else None
            if master is None:
                continue
            given, master.grad = master.grad, None
            master.requires_grad_(False)
            if given is None and grad is not None:
                param.grad = None
            elif given is not None and given is not grad:
                replace_grad(param, given)

    def inputs(self) -> StepInputs:
        """What a fused optimizer needs to make its step."""
        if self._inputs is None:
            return StepInputs(self.context.engine.masters, None, self.found_inf)
        return replace(self._inputs, found_inf=self.found_inf)

    def check_unchanged(self) -> None:
        """Raises RuntimeError if gradients were changed while they were scaled."""
        if not any(p.grad is not None and (p.grad is not g or g._version != version) for p, g, version in self._seen):
            return
        if self._used:  # zeroed, after their step
            self.unscale()
            return
        raise RuntimeError(
            f"Gradients of {type(self.optimizer).__name__}'s half parameters were changed between amp.scale_loss() and "
            "step(), while they are multiplied by the loss scale: change those of amp.master_params(optimizer) instead."
        )

    def complete(self) -> None:
        """Before the step: measures what ``delay_unscale`` left scaled."""
        if self._scale is not None and self._inputs is None:
            self.note(self._measure(self._may_stay_scaled()))

    def settle(self) -> None:
        """Moves the loss scales that wait for these gradients' step."""
        loss_ids, self._loss_ids = self._loss_ids, set()
        for loss_id in sorted(loss_ids):
            self.context.move_scale(loss_id)

    def used(self) -> None:
        """After the step: measured gradients stay scaled for as long as they are there."""
        if self._inputs is not None:
            self._used = True
        else:
            self.forget()

    def forget(self) -> None:
        """The gradients are ordinary ones from now on, or gone."""
        self._scale = self._inputs = self.found_inf = None
        self._used = self._local = False
        self._seen.clear()
