"""Learning-rate schedulers that stand still while their optimizer's steps are skipped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_apex.step import OptimizerStep


class SchedulerGate:
    """Lets a scheduler advance only if its optimizer has made a step since the scheduler last advanced.

    A scheduler counts what it is told are optimizer steps; an overflow at the start of training would otherwise use up
    warm-up steps in which nothing was learnt. Schedulers that follow a metric are left alone.
    """

    def __init__(self) -> None:
        self._last_steps: WeakKeyDictionary[Optimizer, list[OptimizerStep]] = WeakKeyDictionary()
        self._gated: dict[LRScheduler, type[LRScheduler]] = {}

    def watch(self, schedulers: Iterable[Any]) -> None:
        """Gates these schedulers; may be called again with the same ones.

        ``step`` is overridden in a subclass of the scheduler's class, made for it: an attribute on the object would end
        up in its ``state_dict()``.
        """
        for scheduler in schedulers:
            if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
                continue
            if scheduler not in self._gated:
                original = type(scheduler)
                self._gated[scheduler] = original
                scheduler.__class__ = self._gated_class(original)

    def _gated_class(self, original: type[LRScheduler]) -> type[LRScheduler]:
        gate = self

        def step(scheduler: LRScheduler, *args: Any, **kwargs: Any) -> None:
            if gate.lets_pass(scheduler.optimizer):
                original.step(scheduler, *args, **kwargs)

        # The name appears in logs and messages, so it stays.
        return type(original.__name__, (original,), {"step": step, "__module__": original.__module__})

    def note(self, optimizer: Optimizer, step: OptimizerStep) -> None:
        """Remembers a step that was made or skipped."""
        self._last_steps.setdefault(optimizer, []).append(step)

    def lets_pass(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer has made a step, or tried none, since it was last asked."""
        steps = self._last_steps.pop(optimizer, [])
        return not steps or not all(step.was_skipped() for step in steps)

    def release(self) -> None:
        """Gives the schedulers their own class back."""
        for scheduler, original in self._gated.items():
            scheduler.__class__ = original
        self._gated.clear()
        self._last_steps.clear()
