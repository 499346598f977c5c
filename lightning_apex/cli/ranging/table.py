"""Ranges on a terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch

from lightning_apex.cli.exponents import Exponents
from lightning_apex.cli.probe import ModuleExponents

if TYPE_CHECKING:
    from rich.console import Console

    from lightning_apex.cli.ranging.ranges import Ranges

HEADINGS = ("module", "class", "activ.", "grad.", "fp16 inf", "fp16 0", "0 scaled", "bf16 lost")
LEGEND = (
    "activ., grad.: binary exponents, smallest to largest. fp16 inf: of the activations; fp16 0: of the "
    "gradients; 0 scaled: the same at init_scale."
)
_ROWS = 40  # on a terminal


def cells(module: ModuleExponents, init_scale: float | None) -> tuple[str, ...]:
    """One row of the table: the spans of exponents, and shares."""
    activations, gradients = module.counts["activations"], module.gradients()
    half, brain = torch.float16, torch.bfloat16
    everything = activations + gradients + module.counts["weights"]
    lost = everything.fate(brain)
    scaled = gradients.fate(half, init_scale).flushed_share if init_scale is not None else None
    return (
        module.name or "(the model)",
        module.type,
        span(activations),
        span(gradients),
        percent(activations.fate(half).overflowed_share, activations),
        percent(gradients.fate(half).flushed_share, gradients),
        percent(scaled, gradients),
        percent(lost.flushed_share + lost.overflowed_share, everything),
    )


def span(counted: Exponents) -> str:
    """``-12..3``, the exponents that occurred."""
    exponents = list(counted.histogram())
    return f"{exponents[0]}..{exponents[-1]}" if exponents else "-"


def percent(share: float | None, counted: Exponents) -> str:
    """A share for people; nothing where nothing was counted."""
    if share is None or not counted.elements:
        return "-"
    if 0 < share < 1e-4:
        return "< 0.01 %"
    return f"{100 * share:.2g} %" if 0 < share < 0.1 else f"{100 * share:.0f} %" if share else "0"


def settings(ranges: Ranges) -> str:
    """What to write, as code; empty where nothing can be suggested."""
    if not ranges.advice.usable:
        return ""
    given = ['"O2"']
    if ranges.init_scale is not None:
        given.append(f"init_scale=2.0**{round(math.log2(ranges.init_scale))}")
    if ranges.keep_fp32:
        given.append(f"keep_fp32={ranges.keep_fp32!r}")
    return f"ApexPrecision({', '.join(given)})"


def extent(ranges: Ranges) -> str:
    """How much was trained and counted."""
    steps, batches = ranges.steps, ranges.measured_batches
    return f"{steps} step{'s' if steps != 1 else ''} at O0, counted on {batches} batch{'es' if batches != 1 else ''}"


def sentences(ranges: Ranges) -> list[str]:
    """Reasons and notes."""
    kept = [f"keep_fp32 {keep.pattern!r}: {keep.reason}" for keep in ranges.advice.keep_fp32]
    return [ranges.advice.scale_reason, *kept, *ranges.advice.notes, *ranges.notes]


def show(ranges: Ranges, console: Console) -> None:
    """Prints everything."""
    from rich import box
    from rich.table import Table

    report = ranges.report
    modules = [m for name in report.forward_order if not (m := report.modules[name]).passes_on]
    worst = {m.name for m in sorted(modules, key=_losses, reverse=True)[:_ROWS]}
    table = Table(
        title=f"{ranges.model}: {extent(ranges)}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for index, heading in enumerate(HEADINGS):
        if index != 1 or console.width >= 110:
            justify: Literal["left", "right"] = "left" if index < 2 else "right"
            table.add_column(heading, justify=justify, overflow="fold", no_wrap=index > 1)
    for module in modules:
        if module.name in worst:
            row = cells(module, ranges.init_scale)
            table.add_row(*(row if console.width >= 110 else (row[0], *row[2:])))
    console.print(table)
    if len(modules) > len(worst):
        console.print(f"... and {len(modules) - len(worst)} modules that lose less.")
    console.print(LEGEND, style="dim")
    for sentence in sentences(ranges):
        console.print(f"- {sentence}", markup=False, highlight=False)
    if ranges.advice.usable:
        console.print(f"\n{settings(ranges)}", markup=False, style="bold")


def _losses(module: ModuleExponents) -> tuple[float, float]:
    half = torch.float16
    return (
        module.counts["activations"].fate(half).overflowed_share,
        module.gradients().fate(half).flushed_share,
    )
