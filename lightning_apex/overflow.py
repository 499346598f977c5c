"""Which gradients were not finite: reports for people, delivered without stalling the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning_apex.step import OptimizerStep

_NAMES_SHOWN = 8


class LossScaleError(RuntimeError):
    """Too many steps in a row were skipped because gradients were not finite."""


@dataclass(frozen=True)
class OverflowReport:
    """One skipped step.

    Attributes:
        update: Which update of the scale it was, counted from 1 in this process.
        parameters: Names of the parameters whose gradients held an inf or a NaN.
        old_scale: The loss scale the gradients were computed with.
        new_scale: The loss scale from then on.
        consecutive_skips: Skipped steps in a row, this one included.
        skipped_steps: Skipped steps so far, this one included.
    """

    update: int
    parameters: tuple[str, ...]
    old_scale: float
    new_scale: float
    consecutive_skips: int
    skipped_steps: int

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that own these parameters, each once."""
        return tuple(dict.fromkeys(name.rpartition(".")[0] or name for name in self.parameters))

    def __str__(self) -> str:
        change = (
            f"loss scale {self.old_scale:g} -> {self.new_scale:g}"
            if self.new_scale != self.old_scale
            else f"loss scale stays at {self.old_scale:g}"
        )
        return f"step skipped, {change}; gradients not finite in {_shorten(self.modules)}"


def _shorten(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown + (f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else "") or "(unknown)"


class OverflowWatch:
    """Carries the outcome of scale updates from the device to the host."""

    def __init__(self) -> None:
        self.last: OverflowReport | None = None
        self._updates = 0
        self._under_way: deque[_Letter] = deque()
        self._unread: deque[OverflowReport] = deque(maxlen=100)

    def post(
        self, steps: Sequence[OptimizerStep], found_inf: Tensor, before: Tensor, scale: Tensor, trackers: Tensor
    ) -> None:
        """Sends off the outcome of one update; all tensors as they are after it, except ``before``."""
        self._updates += 1
        self._under_way.append(_Letter(self._updates, steps, found_inf, before, scale, trackers))

    def take_unread(self) -> list[OverflowReport]:
        """Reports that nobody has taken yet, oldest first; the last hundred are kept."""
        reports = list(self._unread)
        self._unread.clear()
        return reports

    def deliver(self, max_consecutive_skips: int | None, *, wait: bool) -> list[OverflowReport]:
        """Reports that have arrived; see `LossScaler.check`."""
        reports = []
        while self._under_way and (wait or self._under_way[0].arrived()):
            report = self._under_way.popleft().read()
            if report is None:
                continue
            self.last = report
            reports.append(report)
            self._unread.append(report)
            if max_consecutive_skips is not None and report.consecutive_skips >= max_consecutive_skips:
                raise LossScaleError(_hopeless(report))
        return reports


def _hopeless(report: OverflowReport) -> str:
    return (
        f"{report.consecutive_skips} steps in a row were skipped (max_consecutive_skips): the gradients of "
        f"{_shorten(report.parameters)} are not finite even at a loss scale of {report.old_scale:g}. "
        "Look there for a division by zero, a log of 0, a learning rate that is too high, or bad input data."
    )


class _Letter:
    """The outcome of one update on its way to the host."""

    def __init__(
        self,
        update: int,
        steps: Sequence[OptimizerStep],
        found_inf: Tensor,
        before: Tensor,
        scale: Tensor,
        trackers: Tensor,
    ) -> None:
        self._update = update
        flags = [(step, params, mask) for step in steps for params, mask in step.nonfinite]
        self._names = [(step.name_of, params) for step, params, _ in flags]
        numbers = torch.cat([t.reshape(-1).float() for t in (found_inf, before, scale, trackers)])
        self._event: torch.cuda.Event | None = None
        if found_inf.is_cuda:
            # Pinned memory and an event: the host looks later, the device goes on.
            self._numbers = _send(numbers)
            self._masks = [_send(mask) for _, _, mask in flags]
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._numbers, self._masks = numbers, [mask for _, _, mask in flags]

    def arrived(self) -> bool:
        return self._event is None or self._event.query()

    def read(self) -> OverflowReport | None:
        if self._event is not None:
            self._event.synchronize()
        found_inf, old, new, _, _, consecutive, skipped = self._numbers.tolist()
        if not found_inf:
            return None
        names = tuple(
            name_of(param)
            for (name_of, params), mask in zip(self._names, self._masks, strict=True)
            for param, bad in zip(params, mask.tolist(), strict=True)
            if bad
        )
        return OverflowReport(self._update, names, old, new, int(consecutive), int(skipped))


def _send(tensor: Tensor) -> Tensor:
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
