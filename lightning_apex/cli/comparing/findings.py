"""What a reader of a comparison should know beside the figures, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_apex.cli.comparing.records import Run


def findings(runs: Sequence[Run]) -> list[str]:
    """All of them, the gravest first."""
    return [*_unfinished(runs), *_not_finite(runs), *_skips(runs), *_ranges(runs), *_circumstances(runs)]


def _unfinished(runs: Sequence[Run]) -> list[str]:
    return [
        f"{run.level} (seed {run.seed}) {'ran out of memory' if run.status == 'out of memory' else 'did not finish'} "
        f"after {run.steps} steps: {(run.error or run.status).rstrip('.')}."
        for run in runs
        if not run.finished
    ]


def _not_finite(runs: Sequence[Run]) -> list[str]:
    return [
        f"{run.level} (seed {run.seed}): the loss is not finite at step {run.first_not_finite}."
        for run in runs
        if run.first_not_finite is not None
    ]


def _skips(runs: Sequence[Run]) -> list[str]:
    result = []
    for run in runs:
        if not run.overflows:
            continue
        first, count = run.overflows[0], len(run.overflows)
        where = ", ".join(module or "the model itself" for module in first.modules[:3])
        result.append(
            f"{run.level} (seed {run.seed}) skipped {count} of {run.steps} steps; the loss scale ended at "
            f"{run.scales[-1] if run.scales else first.new_scale:g}, and gradients were first not finite in {where} "
            f"(step {first.step})."
        )
    return result


def _ranges(runs: Sequence[Run]) -> list[str]:
    result = []
    for run in runs:
        ranges = run.out_of_range
        if ranges is None:
            continue
        if ranges.not_finite is not None:
            result.append(
                f"At O0 values at {ranges.not_finite or 'the model itself'} are not finite (inf or NaN) in fp32 "
                "already: no opt level mends that."
            )
        if ranges.activations is not None:
            result.append(
                f"At O0 the output of {ranges.activations or 'the model itself'} is beyond fp16's range (65504): "
                "bf16 holds it, and keep_fp32 keeps that module out."
            )
        if ranges.gradients is not None:
            result.append(f"At O0 gradients at {ranges.gradients or 'the model itself'} are beyond fp16's range.")
        if ranges.activations is None and ranges.gradients is None and ranges.not_finite is None:
            result.append("At O0 no activation and no gradient leaves fp16's range.")
        if ranges.flushed_share >= 0.001:
            result.append(f"Without a loss scale fp16 would make {ranges.flushed_share:.1%} of O0's gradient values 0.")
    return result


def _circumstances(runs: Sequence[Run]) -> list[str]:
    result = list(dict.fromkeys(note for run in runs for note in run.notes))
    devices = sorted({run.device for run in runs if run.device})
    if len(devices) > 1:
        result.append(f"Times cannot be compared: runs were made on {' and on '.join(devices)}.")
    if any(run.level in ("O1", "O2") and run.half_dtype == "bfloat16" for run in runs):
        result.append(
            "O1 and O2 computed in bfloat16, as on any CPU: they differ from O4 and O5 in the loss scale alone, and no "
            "step overflows. --half_dtype float16 insists on fp16."
        )
    return result
