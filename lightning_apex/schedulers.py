"""Learning-rate schedulers that stand still while their optimizer's steps are skipped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau


class SchedulerGate:
    """Lets a scheduler advance only if its optimizer has made a step since the scheduler last advanced.

    A scheduler counts what it is told are optimizer steps; an overflow at the start of training would otherwise use up
    warm-up steps in which nothing was learnt. Schedulers that follow a metric are left alone.
    """

    def __init__(self) -> None:
        self._gated: dict[LRScheduler, type[LRScheduler]] = {}
        # 1 where all steps since a scheduler was last asked were skipped; missing where there was none.
        self._skipped: dict[LRScheduler, Tensor] = {}

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
            if gate.lets_pass(scheduler):
                original.step(scheduler, *args, **kwargs)

        def reduce(scheduler: LRScheduler, protocol: Any) -> Any:  # copies and pickles are of the scheduler's own class
            parts: Any = original.__reduce_ex__(scheduler, protocol)
            return (_remake, (original,), *parts[2:])

        # The name appears in logs and messages, so it stays.
        overrides = {"step": step, "__reduce_ex__": reduce, "__module__": original.__module__}
        return type(original.__name__, (original,), overrides)

    def note(self, optimizer: Optimizer, found_inf: Tensor | None) -> None:
        """Remembers a step that was made, or skipped where ``found_inf`` is 1."""
        if found_inf is None:
            return
        for scheduler in self._gated:
            if scheduler.optimizer is optimizer:
                before = self._skipped.get(scheduler)
                both = found_inf if before is None else torch.minimum(before, found_inf)
                self._skipped[scheduler] = both

    def lets_pass(self, scheduler: LRScheduler) -> bool:
        """Whether a scheduler's optimizer has made a step, or tried none, since this was last asked of it."""
        skipped = self._skipped.pop(scheduler, None)
        return skipped is None or not bool(skipped)

    def release(self) -> None:
        """Gives the schedulers their own class back."""
        for scheduler, original in self._gated.items():
            scheduler.__class__ = original
        self._gated.clear()
        self._skipped.clear()


def _remake(kind: type[LRScheduler]) -> LRScheduler:
    return kind.__new__(kind)
