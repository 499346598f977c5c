"""What happens inside ``optimizer.step()`` of an initialised optimizer: hooks around torch's own method."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_apex import passes
from lightning_apex.amp.gradients import Gradients
from lightning_apex.amp.stand_in import StandIn
from lightning_apex.masters import MasterSwap, before_post_hooks
from lightning_apex.optimizers._base import FusedOptimizer, StepInputs
from lightning_apex.schedulers import SchedulerGate
from lightning_apex.step import narrow_gradients, replace_grad

if TYPE_CHECKING:
    from lightning_apex.amp.context import Context


_WRAPPER_FILE = Optimizer.profile_hook_step.__code__.co_filename


class StepHooks:
    """The hooks on one optimizer, which keep what initialize() knows of it."""

    def __init__(self, context: Context, optimizer: Optimizer) -> None:
        self.gradients = Gradients(context, optimizer)
        self.gate = SchedulerGate()
        self._context = context
        self._swap: MasterSwap | None = None
        self._stand_in: StandIn | None = None
        self._parked: _Parked | None = None
        self._fused = isinstance(optimizer, FusedOptimizer)
        self._prepared = False
        self._depth = 0  # of step() calls, as one that calls super().step() runs the hooks twice
        self._handles: list[RemovableHandle] = []
        before = optimizer.register_step_pre_hook(self.before)
        after = before_post_hooks(optimizer, self.after)
        assert after is not None
        self._before_id = before.id
        self._handles += [before, after]

    @property
    def context(self) -> Context:
        """Whom the optimizer belongs to."""
        return self._context

    def remove(self) -> None:
        """Makes an ordinary optimizer of it again."""
        self.heal()
        self.gradients.take_edits()
        self.gradients.unscale()
        narrow_gradients(self.gradients.params())
        self.gate.release()
        for handle in self._handles:
            handle.remove()

    def heal(self) -> None:
        """Puts everything in its place after a step that raised; during a step, that is in a closure, does nothing."""
        open_ended = self._stand_in or self._swap or self._parked
        if open_ended is not None and not _calls_of_step(self.gradients.optimizer):
            self._clear()

    def _clear(self) -> None:
        if self._stand_in is not None:
            self._stand_in.leave()
            self._stand_in = None
        if self._swap is not None:
            swap, self._swap = self._swap, None
            swap.leave()
        if self._parked is not None:
            self._parked.restore()
            self._parked = None

    def come_last(self) -> None:
        """Lets hooks that the user has registered meanwhile see the gradients first."""
        hooks = cast("OrderedDict[int, Any]", self.gradients.optimizer._optimizer_step_pre_hooks)
        hooks.move_to_end(self._before_id)

    # --- the hooks ----------------------------------------------------------------------------------------------

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The step pre-hook."""
        if optimizer is not self.gradients.optimizer:
            return None  # the stand-in's step calls super().step(), which has hooks of its own
        self._depth = self._depth + 1 if self._depth and _calls_of_step(optimizer) > 1 else 1
        if self._depth > 1:
            return None
        passes.heal()
        self._clear()
        self._prepared = False
        closure, where = _closure_in(args, kwargs)
        if self._context.engine.masters is not None and not self._fused and StandIn.fits(optimizer):
            self._stand_in = StandIn(optimizer)
            args = (self._stand_in.copy, *args[1:])
        if closure is None:
            self._prepare(optimizer)
            return args, kwargs

        def closure_then_prepare() -> Any:
            self._finish()  # a closure may be called more than once
            result = closure()
            self._prepare(optimizer)
            return result

        if where == "closure":
            return args, {**kwargs, "closure": closure_then_prepare}
        return (args[0], closure_then_prepare, *args[2:]), kwargs

    def after(self, optimizer: Optimizer, *_: Any) -> None:
        """The step post-hook."""
        if optimizer is not self.gradients.optimizer:
            return
        self._depth -= 1
        if self._depth <= 0:
            self._finish()
            self._stand_in = None

    def _prepare(self, optimizer: Optimizer) -> None:
        gradients = self.gradients
        self._prepared = True
        gradients.take_edits()
        if self._fused and any(p.grad is not None and p.grad.is_sparse for p in gradients.params()):
            return  # it will refuse them
        gradients.complete()
        gradients.check_unchanged()
        found_inf = gradients.found_inf
        gradients.settle()
        self.gate.note(optimizer, found_inf)
        masters = self._context.engine.masters
        if self._fused:
            inputs = gradients.inputs()
            cast(FusedOptimizer, optimizer).hand(inputs)
        elif found_inf is not None and bool(found_inf):
            self._parked = _Parked(optimizer)
        elif masters is not None and self._stand_in is not None:
            self._stand_in.fill(masters)
        elif masters is not None:
            self._swap = MasterSwap(masters, optimizer)

    def _finish(self) -> None:
        if not self._prepared:
            return
        self._prepared = False
        swap, stand_in = self._swap, self._stand_in
        if stand_in is not None and self._parked is None:
            stand_in.take_back()
        self._clear()
        self._stand_in = stand_in
        gradients = self.gradients
        if self._fused:
            cast(FusedOptimizer, gradients.optimizer).hand(StepInputs())
        gradients.used()
        narrow_gradients(gradients.params())
        if swap is not None:
            swap.check()


class _Parked:
    """Gradients out of sight during a step that must change nothing; an optimizer updates only what has a gradient."""

    def __init__(self, optimizer: Optimizer) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self._grads = [(p, p.grad) for p in params if p.grad is not None]
        # Some optimizers count steps in their groups, or themselves.
        self._optimizer, self._attributes = optimizer, dict(vars(optimizer))
        self._groups = [(group, {k: _copied(v) for k, v in group.items()}) for group in optimizer.param_groups]
        for param, _ in self._grads:
            param.grad = None

    def restore(self) -> None:
        for param, grad in self._grads:
            if param.grad is None:
                replace_grad(param, grad) if grad.dtype is not param.dtype else setattr(param, "grad", grad)
        for group, values in self._groups:
            group.update({k: v for k, v in values.items() if k != "params"})
        vars(self._optimizer).update(self._attributes)


def _calls_of_step(optimizer: Optimizer) -> int:
    """How many calls of an optimizer's step() are under way."""
    count, frame = 0, sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "wrapper" and code.co_filename == _WRAPPER_FILE and frame.f_locals.get("self") is optimizer:
            count += 1
        frame = frame.f_back  # type: ignore[assignment]
    return count


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _closure_in(args: Any, kwargs: Any) -> tuple[Callable[[], Any] | None, str]:
    if callable(kwargs.get("closure")):
        return kwargs["closure"], "closure"
    if len(args) > 1 and callable(args[1]):
        return args[1], "args"
    return None, ""


def hooks_of(optimizer: Any) -> StepHooks | None:
    """The hooks that initialize() left on an optimizer, if any."""
    for hook in getattr(optimizer, "_optimizer_step_pre_hooks", {}).values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, StepHooks):
            return owner
    return None
