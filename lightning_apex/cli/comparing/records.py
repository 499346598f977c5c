"""What is known of one run: a model trained at one opt level with one seed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

FINISHED, FAILED, KILLED, OUT_OF_MEMORY, BAD_INPUT = "finished", "failed", "killed", "out of memory", "bad input"


@dataclass
class Memory:
    """Bytes by kind, as the live tensors add up.

    Attributes:
        weights: Parameters and buffers as the model holds them.
        masters: fp32 copies of half weights.
        gradients: Of the parameters, at the end of a step.
        optimizer: The optimizers' state.
        activations: The most that was saved for a backward pass at one time.
        cuda_peak: The most that CUDA's allocator held for tensors; ``None`` on a CPU.
    """

    weights: int = 0
    masters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    cuda_peak: int | None = None

    @property
    def total(self) -> int:
        """All kinds together."""
        return self.weights + self.masters + self.gradients + self.optimizer + self.activations


MEMORY_KINDS = ("weights", "masters", "gradients", "optimizer", "activations")


@dataclass
class Overflow:
    """A skipped step: its number from 1, the loss scale before and after, and where gradients were not finite."""

    step: int
    old_scale: float
    new_scale: float
    modules: list[str]


@dataclass
class OutOfRange:
    """What of an O0 run fp16 could not hold.

    Attributes:
        activations: The first module, in forward order, with a finite output above 65504; ``None`` without one.
        gradients: The first one, in backward order, with such a gradient, before any loss scale.
        flushed_share: The share of all gradient values that fp16 makes 0 without a loss scale.
        not_finite: The first module with an output, or else gradients, that are not finite in fp32 already.
    """

    activations: str | None
    gradients: str | None
    flushed_share: float
    not_finite: str | None = None


@dataclass
class Run:
    """One run.

    Attributes:
        level: ``"O0"`` to ``"O5"``.
        seed: For everything that is drawn.
        status: ``"finished"``, ``"failed"``, ``"killed"``, ``"out of memory"`` or ``"bad input"``.
        error: Why it did not finish, in one sentence.
        losses: By name, one value a step; the name is ``"loss"`` unless the model optimizes by hand and returns none.
        seconds: Of each step; data loading is left out.
        timed: Whether a step's time counts: nothing else was measured in it, and it is no first step.
        scales: The loss scale after each step.
        overflows: Skipped steps.
        memory: Measured in one of the first steps; ``None`` if the run ended before.
        out_of_range: At O0, for one of the seeds.
        device: Where it ran.
        half_dtype: The 16-bit type it computed in; empty at O0.
        notes: What was left out of the config.
    """

    level: str
    seed: int
    status: str = KILLED
    error: str = ""
    losses: dict[str, list[float]] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    timed: list[bool] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    overflows: list[Overflow] = field(default_factory=list)
    memory: Memory | None = None
    out_of_range: OutOfRange | None = None
    device: str = ""
    half_dtype: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """How many steps it made, skipped ones included."""
        return len(self.seconds)

    @property
    def finished(self) -> bool:
        """Whether it made all its steps."""
        return self.status == FINISHED

    @property
    def step_seconds(self) -> float:
        """The median time of a step that counts, or of all where none does; NaN where there is none."""
        counted = [s for s, timed in zip(self.seconds, self.timed, strict=True) if timed]
        return median(counted or self.seconds) if self.seconds else math.nan

    @property
    def first_not_finite(self) -> int | None:
        """The first step, from 1, whose loss is not finite although the step was not skipped."""
        skipped = {overflow.step for overflow in self.overflows}
        for values in self.losses.values():
            for step, value in enumerate(values, start=1):
                if not math.isfinite(value) and step not in skipped:
                    return step
        return None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Run:
        """What `to_json` made of a run."""
        run = cls(**data)
        run.overflows = [Overflow(**item) for item in data["overflows"]]
        run.memory = Memory(**data["memory"]) if data["memory"] else None
        run.out_of_range = OutOfRange(**data["out_of_range"]) if data["out_of_range"] else None
        run.losses = {name: _numbers(values) for name, values in data["losses"].items()}
        run.scales = _numbers(data["scales"])
        return run


def _numbers(values: Iterable[float | None]) -> list[float]:
    """JSON has no NaN: ``null`` stands for what is not finite."""
    return [math.nan if value is None else float(value) for value in values]


# --- events ---------------------------------------------------------------------------------------------------------


def run_of_events(level: str, seed: int, events: Iterable[Mapping[str, Any]]) -> Run:
    """Puts together what a child process wrote, one event after another."""
    run = Run(level, seed)
    for event in events:
        _ADD[event["kind"]](run, {key: value for key, value in event.items() if key != "kind"})
    return run


def _begin(run: Run, event: Mapping[str, Any]) -> None:
    run.device, run.half_dtype, run.notes = event["device"], event["half_dtype"], list(event["notes"])


def _step(run: Run, event: Mapping[str, Any]) -> None:
    for name in [*run.losses, *(name for name in event["losses"] if name not in run.losses)]:
        value = event["losses"].get(name)
        values = run.losses.setdefault(name, [math.nan] * run.steps)
        values.append(math.nan if value is None else float(value))
    run.seconds.append(event["seconds"])
    run.timed.append(event["timed"])
    run.scales.append(event["scale"])


def _end(run: Run, event: Mapping[str, Any]) -> None:
    run.status, run.error = event["status"], event["error"]


def _overflow(run: Run, event: Mapping[str, Any]) -> None:
    run.overflows.append(Overflow(**event))


def _memory(run: Run, event: Mapping[str, Any]) -> None:
    run.memory = Memory(**event)


def _peak(run: Run, event: Mapping[str, Any]) -> None:
    if run.memory is not None:
        run.memory.cuda_peak = event["bytes"]


def _ranges(run: Run, event: Mapping[str, Any]) -> None:
    run.out_of_range = OutOfRange(**event)


_ADD = {
    "begin": _begin,
    "step": _step,
    "overflow": _overflow,
    "memory": _memory,
    "peak": _peak,
    "ranges": _ranges,
    "end": _end,
}


def read_events(path: Path) -> list[dict[str, Any]]:
    """The whole lines of an event file; none where there is no such file. A line cut short by a kill is left out."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
