"""A benchmark's chart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_apex.cli.benching.benchmark import milliseconds

if TYPE_CHECKING:
    from lightning_apex.cli.benching.benchmark import Benchmark

_OURS, _OTHERS = "#0072b2", "#bbbbbb"


def draw(benchmark: Benchmark) -> Any:
    """Bars of each contender's time over ours, and the roofline's as a mark."""
    from matplotlib.figure import Figure  # not pyplot, which keeps figures and chooses a window

    lines = list(benchmark.lines)[::-1]
    figure = Figure(figsize=(9, 1.4 + 0.32 * max(3, len(lines))), layout="constrained")
    axes = figure.subplots()
    for y, line in enumerate(lines):
        over = line.over
        spread = [[over.median - over.low], [over.high - over.median]]
        colour = _OURS if line.name == benchmark.reference else _OTHERS
        axes.barh(y, over.median, xerr=spread, color=colour, height=0.65, ecolor="#444444")
        axes.annotate(f" {milliseconds(line)} ms", (over.high, y), va="center", fontsize=8)
        if line.of_roofline is not None:
            at = over.median * line.of_roofline.median
            axes.plot([at, at], [y - 0.42, y + 0.42], color="black", linewidth=2)
    axes.set_yticks(range(len(lines)), [f"{line.row}, {line.name}" for line in lines], fontsize=8)
    axes.axvline(1, color="#888888", linewidth=0.8, linestyle=":")
    axes.set_xlim(0, 1.15 * max(line.over.high for line in lines))
    marks = "; black mark: the memory roofline" if any(line.of_roofline for line in lines) else ""
    axes.set(title=f"{benchmark.what}, {benchmark.subject}", xlabel=f"time over that of {benchmark.reference}{marks}")
    return figure
