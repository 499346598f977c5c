"""What one call of `initialize` set up, and how to find it again."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_apex import passes
from lightning_apex.amp import forward, stepping
from lightning_apex.amp.gradients import Gradients, ScaleInUse
from lightning_apex.engine import PrecisionEngine
from lightning_apex.scaler import LossScaler
from lightning_apex.step import OptimizerStep

# For calls that name neither a model nor an optimizer. Neither set keeps anything alive.
_alive: WeakSet[Context] = WeakSet()
_disabled: WeakSet[Any] = WeakSet()  # models and optimizers given with enabled=False


class Context:
    """Models and optimizers that were initialised together. Hooks on them hold it; it holds no optimizer."""

    def __init__(self, engine: PrecisionEngine, scalers: Sequence[LossScaler], verbosity: int) -> None:
        self.engine = engine
        self.scalers = list(scalers)
        self.moves = [0] * len(self.scalers)  # how often each scale may have changed
        self.verbosity = verbosity
        self._measured: dict[int, list[OptimizerStep]] = {}
        self.models: WeakSet[nn.Module] = WeakSet()
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._handles: list[RemovableHandle] = []

    def start(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], device: str, outputs: torch.dtype | None
    ) -> None:
        """Casts the models and registers all hooks."""
        self.engine.convert(models, device)
        self.engine.adopt(optimizers)
        for model in models:
            hooks = forward.ForwardHooks(self.engine.level, outputs, self)
            self._handles += hooks.attach(model)
            self.models.add(model)
            _disabled.discard(model)
            if not optimizers:
                hooks.keep(self)
        for optimizer in optimizers:
            stepping.StepHooks(self, optimizer)
            self._optimizers.add(optimizer)
            _disabled.discard(optimizer)
        _alive.add(self)

    def release(self) -> None:
        """Gives models and optimizers back as they were, with fp32 weights."""
        _alive.discard(self)
        for optimizer in self._optimizers:
            hooks = stepping.hooks_of(optimizer)
            if hooks is not None:
                hooks.remove()
        for handle in self._handles:
            handle.remove()
        self.engine.restore()

    # --- loss scales --------------------------------------------------------------------------------------------

    def measured(self, loss_id: int, step: OptimizerStep) -> None:
        """Remembers what was found in the gradients of a loss."""
        self._measured.setdefault(loss_id, []).append(step)

    def move_scale(self, loss_id: int) -> None:
        """Moves a loss scale by what was found since it last moved.

        Raises:
            LossScaleError: See `LossScaler.update`.
        """
        steps = self._measured.pop(loss_id, [])
        if not steps:
            return
        self.moves[loss_id] += 1
        scaler = self.scalers[loss_id]
        try:
            scaler.follow(steps)
        finally:
            for report in scaler.watch.take_unread():
                which = f" (loss {loss_id})" if len(self.scalers) > 1 else ""
                self.say(f"amp: {report}{which}")

    @contextmanager
    def scaled(self, loss: Tensor, all_gradients: Sequence[Gradients], loss_id: int, delay: bool) -> Iterator[Tensor]:
        """The scaled loss; afterwards gradients are unscaled."""
        scale = ScaleInUse(self, loss_id, loss.device)
        for gradients in all_gradients:
            gradients.begin(scale)
        try:
            yield self.scalers[loss_id].scale(loss)
        except BaseException:
            for gradients in all_gradients:
                gradients.cancel()
            raise
        local = self._in_no_sync()
        found = [f for f in [gradients.end(scale, delay, local) for gradients in all_gradients] if f is not None]
        for gradients in all_gradients:  # an overflow skips the steps of all optimizers of the loss
            for found_inf in found:
                gradients.note(found_inf)

    def _in_no_sync(self) -> bool:
        """Whether DDP leaves gradients to be exchanged with those of a later backward pass."""
        return any(hooks.local for hooks in map(forward.hooks_of, self.models) if hooks is not None)

    def heal(self) -> None:
        """Mends what an exception, or an interrupted notebook cell, has left open."""
        passes.heal()
        self.heal_steps()

    def heal_steps(self) -> None:
        """Mends what a step that raised has left open, before anybody uses the parameters."""
        for optimizer in self._optimizers:
            step = stepping.hooks_of(optimizer)
            if step is not None:
                step.heal()

    def say(self, line: str) -> None:
        """Tells the user something, on one rank."""
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self.verbosity > 0 and (not distributed or torch.distributed.get_rank() == 0):
            print(line)


def of_optimizer(optimizer: Any, caller: str) -> stepping.StepHooks | None:
    """The hooks of an initialised optimizer; ``None`` if amp was disabled for it.

    Raises:
        RuntimeError: If it was not initialised.
    """
    hooks = stepping.hooks_of(optimizer)
    if hooks is not None:
        return hooks
    if optimizer in _disabled:
        return None
    raise RuntimeError(
        f"{caller} got a {type(optimizer).__name__} that amp.initialize() does not know: call model, optimizer = "
        "amp.initialize(model, optimizer) first, and give the optimizer that it returns."
    )


def existing(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> list[Context]:
    """The contexts that any of these belong to."""
    found: dict[Context, None] = {}
    for model in models:
        hooks = forward.hooks_of(model)
        if hooks is not None and hooks.context is not None:
            found[hooks.context] = None
    for optimizer in optimizers:
        step = stepping.hooks_of(optimizer)
        if step is not None:
            found[step.context] = None
    return list(found)


def disable(objects: Sequence[Any]) -> None:
    """Remembers that amp does nothing for these."""
    for item in objects:
        _disabled.add(item)


def the_one(of: Any, caller: str) -> Context | None:
    """The context of a model or optimizer, or the only one there is; ``None`` if amp was disabled.

    Raises:
        RuntimeError: If ``of`` was not initialised, or there are several to choose from.
    """
    if of is not None:
        found = existing([of] if isinstance(of, nn.Module) else [], [of] if isinstance(of, Optimizer) else [])
        if not found and of not in _disabled:
            raise RuntimeError(f"{caller} got a {type(of).__name__} that amp.initialize() does not know.")
        return found[0] if found else None
    if len(_alive) > 1:
        gc.collect()  # of models that are gone
    contexts = list(_alive)
    if len(contexts) > 1:
        raise RuntimeError(
            f"{caller} must choose between {len(contexts)} calls of amp.initialize(): give it a model or an optimizer "
            "of the one you mean."
        )
    return contexts[0] if contexts else None


def any_disabled() -> bool:
    """Whether anything alive was given with ``enabled=False``."""
    return len(_disabled) > 0


def forward_context_of(of: Any) -> AbstractContextManager[Any]:
    """What forward passes run in; where it is the same in all contexts, nobody needs to choose one."""
    if of is None and len(_alive) > 1:
        kinds = {(c.engine.level.autocasts, c.engine.level.half_dtype, c.engine.device_type) for c in _alive}
        if len(kinds) == 1:
            return next(iter(_alive)).engine.forward_context()
    context = the_one(of, "amp.autocast()")
    return nullcontext() if context is None else context.engine.forward_context()
