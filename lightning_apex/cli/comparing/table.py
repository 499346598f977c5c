"""The table of a comparison, as text: one row a level."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lightning_apex.cli.comparing.judging import Judgement
from lightning_apex.cli.comparing.records import Run

if TYPE_CHECKING:
    from lightning_apex.cli.comparing.comparison import Comparison

HEADINGS = ("level", "half", "loss", "from O0", "spread", "ms", "× O0", "MiB", "× O0", "skips")
_SHORT = {"float16": "fp16", "bfloat16": "bf16", "": "–"}
_MISSING = "–"


def rows(comparison: Comparison) -> list[list[str]]:
    """One a level, as `HEADINGS` says."""
    judgements = comparison.judgements
    reference = next((j for j in judgements if j.level == "O0"), None)
    return [_row(j, reference, [run for run in comparison.runs if run.level == j.level]) for j in judgements]


def _row(judgement: Judgement, reference: Judgement | None, runs: list[Run]) -> list[str]:
    distance = judgement.distance
    halves = {_SHORT.get(run.half_dtype, run.half_dtype) for run in runs if run.device}
    return [
        judgement.level,
        " ".join(sorted(halves)) or _MISSING,
        _last_loss(runs) if judgement.finished else runs[0].status if len(runs) == 1 else _statuses(runs),
        f"{distance.distance:.2g}" if distance is not None else _MISSING,
        f"{distance.spread:.2g}" if distance is not None and distance.spread is not None else _MISSING,
        f"{judgement.seconds * 1e3:.3g}" if math.isfinite(judgement.seconds) else _MISSING,
        _ratio(judgement.seconds, reference.seconds if reference else None),
        _mib(judgement.memory),
        _ratio(judgement.memory, reference.memory if reference else None),
        str(judgement.skipped),
    ]


def _mib(size: int | None) -> str:
    if size is None:
        return _MISSING
    return f"{size / 2**20:.3g}" if size >= 2**20 / 100 else "<0.01"


def _statuses(runs: list[Run]) -> str:
    return ", ".join(dict.fromkeys(run.status for run in runs if not run.finished))


def _last_loss(runs: list[Run]) -> str:
    """Of the last tenth, over all seeds."""
    name = next(iter(runs[0].losses), None)
    if name is None:
        return _MISSING
    last = [run.losses[name][-max(1, run.steps // 10) :] for run in runs if name in run.losses]
    values = [value for part in last for value in part]
    return f"{sum(values) / len(values):.4g}"


def _ratio(value: float | None, of: float | None) -> str:
    if value is None or of is None or not math.isfinite(value) or not math.isfinite(of) or not of:
        return _MISSING
    return f"{value / of:.2f}"
