"""What the runs say: how far each level is from O0, and which level to use. Pure functions of the runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median

from lightning_apex.cli.comparing.records import Run

REFERENCE = "O0"
NOISE_FACTOR = 1.5  # how many times O0's own spread a level may be from O0
LEAST_TOLERANCE = 0.01  # of O0's loss, where seeds differ less than that
TOLERANCE_OF_ONE_SEED = 0.02  # of O0's loss, where the spread is not known
LATE_SKIPS = 0.05  # of the steps of the second half: a scale that was found does not skip more
SAME = 1.05  # times and memory this close are the same
WITHOUT_MASTERS = 1.2  # how many times as fast as every other level O3 must be
_GIVE_A_LOSS = (
    'return one from training_step or, of a model that optimizes by hand, log it with self.log("train_loss", loss).'
)
_WITHOUT_FP32_WEIGHTS = "O3"
_SIMPLEST = ("O0", "O4", "O1", "O5", "O2", "O3")


@dataclass
class Distance:
    """How far a level's loss is from O0's, over the second half of the smoothed curves.

    Attributes:
        name: Of the loss; of several, the one that is farthest off.
        distance: The mean of absolute differences between runs of the same seed.
        difference: The mean of signed ones: above 0 where the level's loss is higher.
        spread: The mean of absolute differences between O0's own runs; ``None`` with one seed.
        tolerance: Up to which distance the level counts as equal.
    """

    name: str
    distance: float
    difference: float
    spread: float | None
    tolerance: float

    @property
    def equal(self) -> bool:
        """Whether the level learns as O0 does, or better."""
        return self.distance <= self.tolerance or (self.name == "loss" and self.difference <= 0)

    @property
    def called(self) -> str:
        """The loss in a sentence."""
        return self.name if "loss" in self.name else f"{self.name} loss"


@dataclass
class Judgement:
    """What one level came to.

    Attributes:
        level: ``"O0"`` to ``"O5"``.
        trouble: Why it cannot be used, in half a sentence; empty where nothing stands against it.
        seconds: The median time of a step; NaN where there is none.
        memory: Bytes of all kinds; ``None`` where they were not measured.
        distance: ``None`` at O0 and where there is nothing to compare.
        skipped: Skipped steps in all its runs.
        finished: Whether all its runs did.
        has_loss: Whether a loss could be read in all its runs.
    """

    level: str
    trouble: str
    seconds: float
    memory: int | None
    distance: Distance | None
    skipped: int
    finished: bool
    has_loss: bool


@dataclass
class Recommendation:
    """The level to use, ``None`` where that cannot be said, and why."""

    level: str | None
    reason: str


def judge(runs: Sequence[Run]) -> list[Judgement]:
    """Judges each level, in the order of the runs."""
    levels = list(dict.fromkeys(run.level for run in runs))
    return [_judge_level(level, runs) for level in levels]


def _judge_level(level: str, runs: Sequence[Run]) -> Judgement:
    own = [run for run in runs if run.level == level]
    distance = None if level == REFERENCE else distance_to_reference(level, runs)
    seconds = [run.step_seconds for run in own if run.finished]
    memory = [run.memory.total for run in own if run.memory is not None]
    return Judgement(
        level=level,
        trouble=_trouble(own, distance),
        seconds=median(seconds) if seconds else math.nan,
        memory=max(memory) if memory else None,
        distance=distance,
        skipped=sum(len(run.overflows) for run in own),
        finished=all(run.finished for run in own),
        has_loss=all(run.losses for run in own),
    )


def _trouble(own: Sequence[Run], distance: Distance | None) -> str:
    for run in own:
        if not run.finished:
            return f"it did not finish (seed {run.seed}: {run.error or run.status})"
        if (step := run.first_not_finite) is not None:
            return f"its loss is not finite at step {step} (seed {run.seed})"
    for run in own:
        late = sum(overflow.step > run.steps // 2 for overflow in run.overflows)
        if late > LATE_SKIPS * (run.steps - run.steps // 2):
            return f"it still skips steps late in training ({late} of {run.steps - run.steps // 2}, seed {run.seed})"
    if distance is None and own[0].level != REFERENCE:
        return "its loss could not be compared with O0's"
    if distance is not None and not distance.equal:
        return f"its {distance.called} is {_than_reference(distance)}"
    return ""


def _than_reference(distance: Distance) -> str:
    if distance.spread is None:
        known = "O0's spread is not known from one seed"
    else:
        known = f"O0's own spread over seeds is {distance.spread:.2g}"
    return f"{distance.distance:.2g} from O0's, and {known}"


# --- distances ------------------------------------------------------------------------------------------------------


def smooth(values: Sequence[float]) -> list[float]:
    """A running mean over a twentieth of the curve; values that are not finite are left out."""
    width = max(1, len(values) // 20)
    result: list[float] = []
    for end in range(1, len(values) + 1):
        window = [value for value in values[max(0, end - width) : end] if math.isfinite(value)]
        result.append(fmean(window) if window else (result[-1] if result else math.nan))
    return result


def distance_to_reference(level: str, runs: Sequence[Run]) -> Distance | None:
    """See `Distance`; ``None`` where there are no two finished runs of the same seed."""
    reference = {run.seed: run for run in runs if run.level == REFERENCE and run.finished}
    own = {run.seed: run for run in runs if run.level == level and run.finished and run.seed in reference}
    if not own:
        return None
    names = [name for name in next(iter(reference.values())).losses if all(name in run.losses for run in own.values())]
    distances = [_distance(name, own, reference) for name in names]
    return max(distances, key=lambda d: d.distance / d.tolerance, default=None)


def _distance(name: str, own: dict[int, Run], reference: dict[int, Run]) -> Distance:
    curves = {seed: _second_half(run.losses[name]) for seed, run in reference.items() if name in run.losses}
    pairs = [_differences(_second_half(run.losses[name]), curves[seed]) for seed, run in own.items()]
    spreads = [fmean(map(abs, _differences(a, b))) for a, b in combinations(curves.values(), 2)]
    spread = fmean(spreads) if spreads else None
    sizes = [abs(value) for curve in curves.values() for value in curve if math.isfinite(value)]
    scale = (fmean(sizes) if sizes else 0.0) or 1.0
    least = (TOLERANCE_OF_ONE_SEED if spread is None else LEAST_TOLERANCE) * scale
    return Distance(
        name=name,
        distance=fmean(fmean(map(abs, pair)) for pair in pairs),
        difference=fmean(fmean(pair) for pair in pairs),
        spread=spread,
        tolerance=max(NOISE_FACTOR * (spread or 0.0), least),
    )


def _second_half(values: Sequence[float]) -> list[float]:
    return smooth(values)[len(values) // 2 :]


def _differences(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """Of two curves; a place where one is not finite is infinitely far off."""
    pairs = list(zip(a, b, strict=False))
    return [x - y if math.isfinite(x - y) else math.inf for x, y in pairs] or [math.inf]


# --- the recommendation ---------------------------------------------------------------------------------------------


def recommend(judgements: Sequence[Judgement]) -> Recommendation:
    """The fastest level that nothing stands against; of equally fast ones the smallest, of those the simplest.

    O3 keeps no fp32 weights, and is chosen only where it is much faster than every other: a short run does not show the
    small updates that are lost without masters.
    """
    reference = next((j for j in judgements if j.level == REFERENCE), None)
    if reference is None or not reference.finished:
        return Recommendation(None, "O0 was not trained to the end, so that there is nothing to compare with.")
    if reference.trouble:
        return Recommendation(
            None, f"O0 itself cannot be trusted: {reference.trouble}. Mend that before choosing a level."
        )
    if not reference.has_loss:
        return Recommendation(None, f"No loss could be read of O0, so that there is nothing to compare: {_GIVE_A_LOSS}")
    usable = [j for j in judgements if not j.trouble and math.isfinite(j.seconds)]
    fastest = min(j.seconds for j in usable)
    safe = [j for j in usable if j.level != _WITHOUT_FP32_WEIGHTS]
    quickest_safe = min(j.seconds for j in safe)  # O0 is among them
    if quickest_safe <= WITHOUT_MASTERS * fastest:
        usable, fastest = safe, quickest_safe
    fast = [j for j in usable if j.seconds <= SAME * fastest]
    smallest = min(_memory(j) for j in fast)
    small = [j for j in fast if _memory(j) <= SAME * smallest]
    best = min(small, key=lambda j: _SIMPLEST.index(j.level))
    return Recommendation(best.level, _reason(best, reference, judgements))


def _memory(judgement: Judgement) -> float:
    return math.inf if judgement.memory is None else judgement.memory


def _reason(best: Judgement, reference: Judgement, judgements: Sequence[Judgement]) -> str:
    others = [f"{j.level} is out: {j.trouble}." for j in judgements if j.trouble]
    if best is reference:
        first = "No other level that can be used is faster, or as fast with less memory."
    else:
        first = f"A step takes {_times(best.seconds, reference.seconds)} O0's time"
        if best.memory and reference.memory:
            first += f" and {_times(best.memory, reference.memory)} its memory"
        first += f"; {_equality(best)}; {_skips(best)}."
    return " ".join([first, *others])


def _times(value: float, of: float) -> str:
    return f"{value / of:.2f} times"


def _equality(best: Judgement) -> str:
    distance = best.distance
    assert distance is not None  # or it would be out
    if distance.distance > distance.tolerance:
        return f"its {distance.called} is lower than O0's by {-distance.difference:.2g}"
    if distance.spread is None:
        return f"its {distance.called} is {distance.distance:.2g} from O0's (one seed: O0's own spread is not known)"
    spread = f"whose own spread over seeds is {distance.spread:.2g}"
    return f"its {distance.called} is {distance.distance:.2g} from O0's, {spread}"


def _skips(best: Judgement) -> str:
    if not best.skipped:
        return "no step was skipped"
    return (
        f"{best.skipped} step{'s were' if best.skipped > 1 else ' was'} skipped, while the loss scale was being found"
    )
