"""Which loss scale to begin with, and which modules to keep in fp32: pure functions of what a probe has counted."""

from __future__ import annotations

import fnmatch
import glob
import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from lightning_apex.cli.exponents import Exponents
from lightning_apex.cli.probe import ModuleExponents, ProbeReport

SCALES = tuple(2.0**e for e in range(-10, 25))  # as far as ApexPrecision lets a scale go
MUCH = 0.1  # of a module's weight gradients flushed at the best loss scale: worth fp32
SOME_WEIGHTS = 0.01  # of a module's weights flushed
_DEFAULT = 16  # the binary logarithm of ApexPrecision's own init_scale
_FP16 = torch.float16


@dataclass(frozen=True)
class ScaleRow:
    """What fp16 does to all gradients at one loss scale.

    Attributes:
        scale: The loss scale.
        flushed: How many gradients become 0.
        subnormal: How many lose bits.
        overflowed: How many become infinite; one is enough for a step to be skipped.
        nonzero: How many gradients there are that are finite and not 0.
    """

    scale: float
    flushed: int
    subnormal: int
    overflowed: int
    nonzero: int


@dataclass(frozen=True)
class Keep:
    """A pattern for ``keep_fp32``.

    Attributes:
        pattern: Names one or several modules, as `ApexPrecision` takes it.
        reason: A sentence.
    """

    pattern: str
    reason: str


@dataclass(frozen=True)
class Advice:
    """What a probe's counts suggest for fp16.

    Attributes:
        init_scale: The loss scale to begin with; None where gradients overflow at every scale.
        scale_reason: Why this one.
        keep_fp32: Modules to keep in fp32, and why.
        notes: What no setting mends, and what else should be known.
        scales: Gradients at every loss scale, those that are computed in fp32 left out.
        usable: Whether there is evidence for settings: gradients were counted, and are finite in fp32.
    """

    init_scale: float | None
    scale_reason: str
    keep_fp32: tuple[Keep, ...]
    notes: tuple[str, ...]
    scales: tuple[ScaleRow, ...]
    usable: bool = True


def advise(report: ProbeReport) -> Advice:
    """Derives everything from a probe's report."""
    if missing := _no_evidence(report):
        return Advice(None, missing, (), tuple(_notes_on_values(report)), tuple(scale_table(report)), usable=False)
    notes: list[str] = []
    keep = dict(_keep_for_activations(report, notes))
    keep |= {n: r for n, r in _keep_for_weights(report) if n not in keep}
    scales = scale_table(report, keep)
    init_scale, reason = suggest_scale(scales)
    if init_scale is not None:
        keep |= {n: r for n, r in _keep_for_gradients(report, init_scale, keep) if n not in keep}
    outermost = {name: reason for name, reason in keep.items() if not _inside(name, keep.keys() - {name})}
    notes += _notes_on_size(report, outermost)
    notes += _notes_on_values(report)
    return Advice(init_scale, reason, tuple(_patterns(outermost, list(report.modules))), tuple(notes), tuple(scales))


def _no_evidence(report: ProbeReport) -> str:
    """Why no setting can be suggested; empty where one can."""
    if not report.backward_order:
        what = "No gradient was measured" if report.forward_order else "Nothing was measured"
        return f"{what}, so no setting is suggested: return the loss from training_step, or call manual_backward on it."
    if _not_finite_gradients(report) is not None:
        return "No setting is suggested: gradients have to be finite in fp32 first."
    return ""


# --- the loss scale -------------------------------------------------------------------------------------------------


def scale_table(report: ProbeReport, keep: Collection[str] = ()) -> list[ScaleRow]:
    """What becomes of the gradients that fp16 training computes in fp16, at every loss scale.

    Args:
        report: What was counted at loss scale 1.
        keep: Names of modules that compute in fp32: their weights' gradients, and all gradients inside them, do not
            count.
    """
    counted = Exponents()
    for name, module in report.modules.items():
        if _inside(name, keep) or module.passes_on:
            continue
        counted += module.counts["activation_gradients"]
        if name not in keep and not module.stays_fp32:
            counted += module.counts["weight_gradients"]
    rows = []
    for scale in SCALES:
        fate = counted.fate(_FP16, scale)
        rows.append(ScaleRow(scale, fate.flushed, fate.subnormal, fate.overflowed, fate.nonzero))
    return rows


def fewest_lost(rows: Sequence[ScaleRow]) -> ScaleRow:
    """Where fewest gradients are flushed or overflow; of equals, that with the fewest subnormal ones."""
    return min(rows, key=lambda row: (row.flushed + row.overflowed, row.subnormal))


def suggest_scale(rows: Sequence[ScaleRow]) -> tuple[float | None, str]:
    """The scale with the fewest flushed gradients of those where none overflows, not even at twice the scale.

    Of equals, that with the fewest subnormal ones; then `ApexPrecision`'s own or what is nearest to it, or, where bits
    are lost, the largest.
    """
    if not rows or not rows[0].nonzero:
        return None, "No gradient that fp16 would hold differs from 0: there is no loss scale to choose."
    safe = [row for row in rows if not row.overflowed]
    if not safe:
        share = _percent(rows[0].overflowed, rows[0].nonzero)
        return None, (
            f"{share} of the gradients overflow fp16 even at a loss scale of {rows[0].scale:g}: use bf16 (O4, O5)."
        )
    best = min(safe[:-1] or safe, key=_rank)
    one = next(row for row in rows if row.scale == 1.0)
    limit = next((row for row in rows if row.overflowed), None)
    above = f"the first overflow comes at {limit.scale:g}" if limit else f"none overflows up to {rows[-1].scale:g}"
    return best.scale, (
        f"At a loss scale of {best.scale:g}, {_percent(best.flushed, best.nonzero)} of the gradients become 0 "
        f"and {_percent(best.subnormal, best.nonzero)} are subnormal (at 1: {_percent(one.flushed, one.nonzero)} and "
        f"{_percent(one.subnormal, one.nonzero)}); {above}."
    )


def _rank(row: ScaleRow) -> tuple[float, ...]:
    power = math.log2(row.scale)
    return row.flushed, row.subnormal, -power if row.flushed or row.subnormal else abs(power - _DEFAULT)


# --- modules --------------------------------------------------------------------------------------------------------


def _keep_for_activations(report: ProbeReport, notes: list[str]) -> Iterator[tuple[str, str]]:
    """A kept module gives half outputs for half inputs, so an overflow ends only where values are in range again."""
    stuck: list[str] = []
    for name in report.forward_order:
        module = report.modules[name]
        if not _overflows(module) or module.passes_on:
            continue
        around = next((n for n in _ancestors(name) if _comes_back(report, n)), None)
        reach = f"{name or 'the model'}'s outputs reach {_largest(module.counts['activations'])}"
        if around is None:
            stuck.append(reach)
        else:
            yield around, f"{reach}, and fp16 ends at 65504; {around}'s own outputs are in range again."
    # What an overflow runs through on its way out is the same story.
    if stuck:
        others = f" (and {len(stuck) - 1} more modules)" if len(stuck) > 1 else ""
        notes.append(
            f"{stuck[0]}{others}, and no module around has outputs that fp16 holds: keep_fp32 cannot help, since what "
            "a kept module returns is half again. Scale the values down, or use bf16 (O4, O5)."
        )


def _comes_back(report: ProbeReport, name: str) -> bool:
    module = report.modules.get(name)
    return module is not None and module.counts["activations"].elements > 0 and not _overflows(module)


def _keep_for_weights(report: ProbeReport) -> Iterator[tuple[str, str]]:
    for name, module in report.modules.items():
        fate = module.counts["weights"].fate(_FP16)
        if not name or module.stays_fp32:
            continue
        if fate.overflowed:
            yield name, f"{name}'s weights reach {_largest(module.counts['weights'])}, and fp16 ends at 65504."
        elif fate.flushed_share > SOME_WEIGHTS:
            yield name, f"{_percent(fate.flushed, fate.nonzero)} of {name}'s weights are 0 in fp16."


def _keep_for_gradients(report: ProbeReport, scale: float, keep: Collection[str]) -> Iterator[tuple[str, str]]:
    """Weight gradients that are flushed although the gradients that they are computed of are not."""
    for name in report.backward_order:
        module = report.modules[name]
        if not name or module.stays_fp32 or _inside(name, keep):
            continue
        own = module.counts["weight_gradients"].fate(_FP16, scale)
        incoming = module.counts["activation_gradients"].fate(_FP16, scale)
        if own.flushed_share > MUCH and incoming.flushed_share < own.flushed_share / 2:
            share = _percent(own.flushed, own.nonzero)
            yield name, f"{share} of the gradients of {name}'s weights are 0 in fp16 at a loss scale of {scale:g}."


def _overflows(module: ModuleExponents) -> bool:
    return module.counts["activations"].fate(_FP16).overflowed > 0


def _ancestors(name: str) -> Iterator[str]:
    """Names of the modules around one, from the inside, without the model itself."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _inside(name: str, keep: Collection[str]) -> bool:
    return any(ancestor in keep for ancestor in _ancestors(name))


def _patterns(keep: dict[str, str], names: Sequence[str]) -> Iterator[Keep]:
    """``layers.0.norm`` and ``layers.1.norm`` as ``layers.*.norm``, where that names these and no others."""
    left = dict(keep)
    while left:
        name = next(iter(left))
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", glob.escape(name))
        matched = [n for n in names if fnmatch.fnmatchcase(n, pattern)]
        reason = left[name]
        if len(matched) > 1 and all(n in left for n in matched):
            others = len(matched) - 1
            yield Keep(pattern, f"{reason} The same holds for {others} other{'s' if others > 1 else ''}.")
        else:
            pattern, matched = glob.escape(name), [name]
            yield Keep(pattern, reason)
        for n in matched:
            del left[n]


# --- notes ----------------------------------------------------------------------------------------------------------


def _notes_on_size(report: ProbeReport, keep: Collection[str]) -> Iterator[str]:
    kept, total = sum(report.modules[name].weights for name in keep), report.modules[""].weights
    if total and kept > total / 2:
        yield f"keep_fp32 holds {_percent(kept, total)} of the weights: bf16 (O4, O5) would leave all of them half."


def _notes_on_values(report: ProbeReport) -> Iterator[str]:
    for name in report.forward_order:
        counted = report.modules[name].counts["activations"]
        if counted.infs or counted.nans:
            yield f"{name or 'the model'} returned values that are not finite, in fp32: mend that first."
            break
    bad = _not_finite_gradients(report)
    if bad is not None:
        yield f"Gradients at {bad or 'the model'} are not finite in fp32 already: no loss scale mends that."
    if report.never_called:
        shown = ", ".join(report.never_called[:5])
        more = f" and {len(report.never_called) - 5} more" if len(report.never_called) > 5 else ""
        yield f"Never called, so not judged: {shown}{more}."


def _not_finite_gradients(report: ProbeReport) -> str | None:
    """The first module, in backward order, with such gradients."""
    counted = ((name, report.modules[name].gradients()) for name in report.backward_order)
    return next((name for name, gradients in counted if gradients.infs or gradients.nans), None)


def _largest(counted: Exponents) -> str:
    return f"{2.0 ** (max(counted.histogram()) + 1):.2g}"


def _percent(part: int, whole: int) -> str:
    if part in (0, whole):
        return "all" if part else "none"
    share = 100 * part / whole
    return "under 0.001 %" if share < 0.001 else f"{share:.2g} %" if share < 10 else f"{min(share, 99):.0f} %"
