"""The pictures of a comparison."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_apex.cli.comparing.judging import REFERENCE, Judgement, smooth
from lightning_apex.cli.comparing.records import MEMORY_KINDS, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lightning_apex.cli.comparing.comparison import Comparison

# Told apart by the colour-blind too; a level has its colour in every picture.
_COLOURS = {"O0": "#000000", "O1": "#e69f00", "O2": "#d55e00", "O3": "#cc79a7", "O4": "#56b4e9", "O5": "#0072b2"}
_DASHES = {"O0": "-", "O1": "--", "O2": "-", "O3": ":", "O4": "--", "O5": "-"}
# Levels may draw the same curve: the later ones are thinner.
_WIDTHS = {"O0": 1.6, "O1": 3.4, "O2": 2.6, "O3": 1.2, "O4": 1.8, "O5": 1.0}
_KIND_COLOURS = dict(zip(MEMORY_KINDS, ("#0072b2", "#56b4e9", "#e69f00", "#009e73", "#bbbbbb"), strict=True))
_MOST_POINTS = 400


def overview(comparison: Comparison) -> Figure:
    """Losses, distances, times and memory in one picture."""
    figure = _figure(11, 7.5)
    axes = figure.subplots(2, 2)
    names = loss_names(comparison.runs)
    draw_losses(axes[0, 0], comparison.runs, names[0] if names else "loss")
    draw_distances(axes[0, 1], comparison.runs, names[0] if names else "loss")
    draw_times(axes[1, 0], comparison.judgements)
    draw_memory(axes[1, 1], comparison.runs)
    level = comparison.recommendation.level
    figure.suptitle(f"Use {level}" if level else "No recommendation", x=0.01, ha="left", weight="bold")
    return figure


def single(draw: Any, *arguments: Any, width: float = 7.2, height: float = 3.6) -> Figure:
    """A picture of one of the drawings below."""
    figure = _figure(width, height)
    draw(figure.subplots(), *arguments)
    return figure


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure  # not pyplot, which keeps figures and chooses a window

    return Figure(figsize=(width, height), layout="constrained")


def png(figure: Figure, dpi: int = 110) -> bytes:
    """A figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def svg(figure: Figure) -> str:
    """A figure as an ``<svg>`` element, whose text is text."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "lightning_apex"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def loss_names(runs: Sequence[Run]) -> list[str]:
    """The names of all losses, in the order in which they were seen."""
    return list(dict.fromkeys(name for run in runs for name in run.losses))


# --- drawings -------------------------------------------------------------------------------------------------------


def draw_losses(axes: Axes, runs: Sequence[Run], name: str) -> None:
    """One smoothed curve a run over the raw losses; runs of one level share a colour."""
    for run, label in _labelled(run for run in runs if name in run.losses):
        values = run.losses[name]
        axes.plot(*_points(values), alpha=0.12, linewidth=0.7, color=_COLOURS[run.level])
        axes.plot(
            *_points(smooth(values)),
            label=label,
            **_style(run),
        )
    axes.set(xlabel="step", ylabel=name, title="Training loss" if name == "loss" else name)
    shown = [value for run in runs for value in run.losses.get(name, ()) if math.isfinite(value)]
    if shown and min(shown) > 0 and max(shown) > 20 * min(shown):
        axes.set_yscale("log")
    _finish(axes)


def draw_distances(axes: Axes, runs: Sequence[Run], name: str) -> None:
    """The smoothed distance of each run to O0's of the same seed, over O0's own spread."""
    reference = {run.seed: smooth(run.losses[name]) for run in runs if run.level == REFERENCE and name in run.losses}
    curves = list(reference.values())
    if len(curves) > 1:
        spread = [max(values) - min(values) for values in zip(*curves, strict=False)]
        steps, values = _points(spread)
        axes.fill_between(steps, values, color="#000000", alpha=0.12, label="O0 over seeds", linewidth=0)
    others = (r for r in runs if r.level != REFERENCE and r.seed in reference and name in r.losses)
    for run, label in _labelled(others):
        pairs = zip(smooth(run.losses[name]), reference[run.seed], strict=False)
        steps, values = _points([abs(own - other) for own, other in pairs])
        axes.plot(
            steps,
            values,
            label=label,
            **_style(run),
        )
    axes.set(xlabel="step", ylabel=f"distance of the {name}", title="Distance to O0, seed by seed")
    _finish(axes)


def draw_times(axes: Axes, judgements: Sequence[Judgement]) -> None:
    """The median time of a step."""
    shown = [j for j in judgements if math.isfinite(j.seconds)]
    bars = axes.barh(
        [j.level for j in shown], [j.seconds * 1e3 for j in shown], color=[_COLOURS[j.level] for j in shown]
    )
    axes.bar_label(bars, fmt="%.3g", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set(xlabel="ms", title="Time of a step (median)")
    axes.grid(alpha=0.3, axis="x")


def draw_memory(axes: Axes, runs: Sequence[Run]) -> None:
    """Bytes by kind, stacked."""
    measured = {run.level: run.memory for run in runs if run.memory is not None}
    left = [0.0] * len(measured)
    for kind in MEMORY_KINDS:
        sizes = [getattr(memory, kind) / 2**20 for memory in measured.values()]
        axes.barh(list(measured), sizes, left=left, color=_KIND_COLOURS[kind], label=kind)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="MiB", title="Memory by kind")
    axes.grid(alpha=0.3, axis="x")
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
        ncols=5,
        fontsize="small",
        frameon=False,
        columnspacing=1,
        handlelength=1,
    )


def draw_scales(axes: Axes, runs: Sequence[Run]) -> None:
    """The loss scale, and a mark at each skipped step."""
    for run, label in _labelled(runs):
        steps, values = _points(run.scales)
        axes.plot(
            steps,
            values,
            label=label,
            **_style(run),
        )
        skipped = [overflow.step for overflow in run.overflows]
        axes.plot(skipped, [o.new_scale for o in run.overflows], "x", color=_COLOURS[run.level], markersize=5)
    axes.set_yscale("log", base=2)
    axes.set(xlabel="step", ylabel="loss scale", title="Loss scale (x: a skipped step)")
    _finish(axes)


def _labelled(runs: Any) -> list[tuple[Run, str | None]]:
    """Each level's first run with the level's name, so that a legend has it once."""
    seen: set[str] = set()
    result = []
    for run in runs:
        result.append((run, None if run.level in seen else run.level))
        seen.add(run.level)
    return result


def _style(run: Run) -> dict[str, Any]:
    return {"color": _COLOURS[run.level], "linestyle": _DASHES[run.level], "linewidth": _WIDTHS[run.level]}


def _points(values: Sequence[float]) -> tuple[list[int], list[float]]:
    """Steps and values; of long curves every so many."""
    stride = max(1, len(values) // _MOST_POINTS)
    return list(range(1, len(values) + 1, stride)), list(values[::stride])


def _finish(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize="small", ncols=2)
