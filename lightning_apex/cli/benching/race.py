"""Interleaved rounds of contenders in one process, and ratios within a round."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

import torch

OURS = "ours"
BUSY = 0.08  # a round in which other processes took more of the machine than this is left out where possible
SAMPLE_SECONDS = 0.01  # a contender without preparation is repeated until a sample takes so long


@dataclass
class Contender:
    """One way to do the work of a row.

    Attributes:
        name: As the report names it.
        run: The work that is timed.
        prepare: Sets the stage before each sample, untimed; then a sample is one call of ``run``.
    """

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] | None = None


@dataclass
class Spread:
    """A median with its quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """That of some values."""
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, _, high = quantiles(values, n=4, method="inclusive")
        return cls(low, median(values), high)


@dataclass
class Race:
    """The seconds that each contender took in each round."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    others: list[float] = field(default_factory=list)
    keep_all: bool = False

    def kept(self) -> list[int]:
        """The rounds that count: those without much going on elsewhere, or the quietest third if there are few."""
        quietest = sorted(range(len(self.others)), key=self.others.__getitem__)
        clean = [i for i in quietest if self.others[i] <= BUSY]
        enough = len(quietest) if self.keep_all else min(len(quietest), max(5, len(quietest) // 3))
        return clean if len(clean) >= enough else quietest[:enough]

    def ratio(self, numerator: str, denominator: str, factor: float = 1.0) -> Spread:
        """Seconds over seconds, round by round."""
        above, below = self.seconds[numerator], self.seconds[denominator]
        return Spread.of([factor * above[i] / below[i] for i in self.kept()])

    def milliseconds(self) -> dict[str, float]:
        """The median of each contender."""
        return {name: round(1e3 * median(values[i] for i in self.kept()), 4) for name, values in self.seconds.items()}


def race(
    contenders: Sequence[Contender],
    rounds: int,
    *,
    sync: Callable[[], object] = lambda: None,
    keep_all: bool = False,
    pause: float = 0.005,
) -> Race:
    """Lets contenders take turns in one process, each round beginning with another one.

    Args:
        contenders: Who takes part.
        rounds: How often each is timed.
        sync: Waits for the device, before and after the timed work.
        keep_all: Whether rounds disturbed by other processes count as well.
        pause: Least seconds of rest before a sample, in which thread pools fall asleep. The rest is longer after a long
            sample, so that a shared machine's other processes get on and have less to catch up within samples.
    """
    repeats = {contender.name: _warm_up(contender, sync) for contender in contenders}
    result = Race({contender.name: [] for contender in contenders}, keep_all=keep_all)
    took = 0.0
    for turn in range(rounds):
        clock = MachineClock()
        for i in range(len(contenders)):
            contender = contenders[(i + turn) % len(contenders)]
            if contender.prepare is not None:
                contender.prepare()
            sync()
            time.sleep(max(pause, min(0.8 * took, 20 * pause)))
            start = time.perf_counter()
            for _ in range(repeats[contender.name]):
                contender.run()
            sync()
            took = time.perf_counter() - start
            result.seconds[contender.name].append(took / repeats[contender.name])
        result.others.append(clock.share_of_others())
    return result


def _warm_up(contender: Contender, sync: Callable[[], object]) -> int:
    """Runs a contender twice, and says how often it must run for a sample."""
    for _ in range(2):
        if contender.prepare is not None:
            contender.prepare()
        sync()
        start = time.perf_counter()
        contender.run()
        sync()
        seconds = time.perf_counter() - start
    return 1 if contender.prepare is not None else max(1, round(SAMPLE_SECONDS / seconds))


class MachineClock:
    """How much of the machine other processes took since it was made; 0 where the system does not tell."""

    def __init__(self) -> None:
        self._start = self._read()

    @staticmethod
    def _read() -> tuple[float, float, float]:
        try:
            jiffies = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        except OSError:
            return 0.0, 0.0, time.process_time()
        return sum(jiffies) / 100, (jiffies[3] + jiffies[4]) / 100, time.process_time()

    def share_of_others(self) -> float:
        """Between 0 and 1."""
        total, idle, own = (now - then for now, then in zip(self._read(), self._start, strict=True))
        return max(0.0, (total - idle - own) / total) if total > 0 else 0.0


def settle(threads: int) -> None:
    """Sets the number of CPU threads, and undoes a setting that would be charged to others."""
    torch.set_num_threads(threads)
    # Lightning sets this. On a machine without a driver a CUDA build's optimizers then look for NVML at every step
    # (0.2 ms), which is no peer's fault.
    os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
