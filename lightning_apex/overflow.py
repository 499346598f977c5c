"""Which gradients were not finite: reports for people, delivered without stalling the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from lightning_apex.step import OptimizerStep

_NAMES_SHOWN = 8


class LossScaleError(RuntimeError):
    """Too many steps in a row were skipped because gradients were not finite."""


@dataclass(frozen=True)
class OverflowReport:
    """One skipped step.

    Attributes:
        step: Which optimizer step it was, counted from 1: what ``trainer.global_step`` is after it. Without a Trainer,
            which update of the scale in this process.
        parameters: Names of the parameters whose gradients held an inf or a NaN, in the order in which the model
            defines them, which is mostly that of its forward pass.
        old_scale: The loss scale the gradients were computed with.
        new_scale: The loss scale from then on.
        consecutive_skips: Skipped steps in a row, this one included.
        skipped_steps: Skipped steps so far, this one included.
    """

    step: int
    parameters: tuple[str, ...]
    old_scale: float
    new_scale: float
    consecutive_skips: int
    skipped_steps: int

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that own these parameters, each once, in the same order."""
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
        self._unchecked: deque[OverflowReport] = deque()
        self._unread: deque[OverflowReport] = deque(maxlen=100)

    def post(
        self, steps: Sequence[OptimizerStep], found_inf: Tensor, before: Tensor, scale: Tensor, trackers: Tensor
    ) -> None:
        """Sends off the outcome of one update; all tensors as they are after it, except ``before``."""
        self._updates += 1
        number = next((step.number for step in steps if step.number is not None), self._updates)
        self._under_way.append(_Letter(number, steps, found_inf, before, scale, trackers))

    def take_unread(self) -> list[OverflowReport]:
        """Reports that nobody has taken yet, oldest first; the last hundred are kept."""
        reports = list(self._unread)
        self._unread.clear()
        return reports

    def collect(self, *, wait: bool) -> None:
        """Takes in what has arrived; with ``wait``, what is under way, too."""
        while self._under_way and (wait or self._under_way[0].arrived()):
            report = self._under_way.popleft().read()
            if report is not None:
                self.last = report
                self._unchecked.append(report)
                self._unread.append(report)

    def deliver(self, max_consecutive_skips: int | None, *, wait: bool) -> list[OverflowReport]:
        """Reports that have arrived since; see `LossScaler.check`."""
        self.collect(wait=wait)
        reports = []
        while self._unchecked:
            report = self._unchecked.popleft()
            reports.append(report)
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
        number: int,
        steps: Sequence[OptimizerStep],
        found_inf: Tensor,
        before: Tensor,
        scale: Tensor,
        trackers: Tensor,
    ) -> None:
        self._number = number
        flags = [(step, params, mask) for step in steps for params, mask in step.nonfinite]
        self._measured = [(step.names_of, params) for step, params, _ in flags]
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
        bad: dict[Callable[[Sequence[Tensor]], list[str]], list[Tensor]] = {}
        for (names_of, params), mask in zip(self._measured, self._masks, strict=True):
            bad.setdefault(names_of, []).extend(
                param for param, flag in zip(params, mask.tolist(), strict=True) if flag
            )
        names = tuple(name for names_of, params in bad.items() for name in names_of(params))
        return OverflowReport(self._number, names, old, new, int(consecutive), int(skipped))


class PositionsIn:
    """Names parameters by their places in an optimizer, where nobody knows better names."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def __call__(self, params: Sequence[Tensor]) -> list[str]:
        """The names, in the optimizer's order."""
        wanted = set(params)
        return [
            f"parameter {i} of group {g}"
            for g, group in enumerate(self._optimizer.param_groups)
            for i, param in enumerate(group["params"])
            if param in wanted
        ]


def _send(tensor: Tensor) -> Tensor:
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
