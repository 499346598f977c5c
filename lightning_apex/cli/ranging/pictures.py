"""Pictures of exponents, made without a display."""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import BytesIO

from matplotlib.figure import Figure

from lightning_apex.cli.exponents import Exponents
from lightning_apex.cli.probe import ModuleExponents
from lightning_apex.cli.ranging.advice import ScaleRow

# Okabe and Ito's colours, which people who see few colours can tell apart.
_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#999999"
_LEFT, _RIGHT = -50, 34


def of_module(module: ModuleExponents, init_scale: float | None) -> Figure:
    """Histograms of weights, activations and gradients over fp16's range."""
    rows: list[tuple[str, Exponents, str]] = [
        ("weights", module.counts["weights"], _GREEN),
        ("activations", module.counts["activations"], _BLUE),
        ("gradients", module.gradients(), _ORANGE),
    ]
    rows = [row for row in rows if row[1].elements] or rows[1:2]
    height = 0.8 + 1.1 * len(rows)
    figure = Figure(figsize=(7, height))
    # By hand: the layout engine would take most of the time.
    figure.subplots_adjust(left=0.12, right=0.99, bottom=0.52 / height, top=1 - 0.28 / height, hspace=0.08)
    axes = figure.subplots(len(rows), sharex=True, squeeze=False)[:, 0]
    left, right = _limits([counted for _, counted, _ in rows])
    for axis, (label, counted, color) in zip(axes, rows, strict=True):
        _zones(axis, left, right)
        _bars(axis, counted, 0, color=color)
        if label == "gradients" and init_scale is not None and init_scale != 1:
            shift = round(_log2(init_scale))
            _bars(axis, counted, shift, color="none", edgecolor=_RED, linewidth=0.8)
            label += f"\n(red: × 2^{shift})"
        axis.set_ylabel(label, fontsize=8)
        axis.set_yticks([])
        axis.set_xlim(left, right)
        axis.tick_params(labelsize=8)
        nothing = counted.zeros / counted.elements if counted.elements else 0.0
        if nothing or counted.infs or counted.nans:
            text = f"{100 * nothing:.3g} % zeros"
            if counted.infs or counted.nans:
                text += f", {counted.infs + counted.nans} not finite"
            axis.text(0.995, 0.93, text, transform=axis.transAxes, ha="right", va="top", fontsize=7)
    axes[0].set_title(f"{module.name or '(the model)'} ({module.type})", fontsize=9, loc="left")
    axes[-1].set_xlabel("exponent (base 2); grey: subnormal in fp16; red: 0 or infinite in fp16", fontsize=8)
    return figure


def of_scales(rows: Sequence[ScaleRow], init_scale: float | None) -> Figure:
    """The shares of flushed, subnormal and overflowing gradients over the loss scale."""
    figure = Figure(figsize=(7, 3), layout="constrained")
    axis = figure.subplots()
    scales = [_log2(row.scale) for row in rows]
    for key, color, style in (("flushed", _RED, "-"), ("subnormal", _GREY, "--"), ("overflowed", _BLUE, "-.")):
        shares = [100 * getattr(row, key) / max(row.nonzero, 1) for row in rows]
        axis.plot(scales, shares, style, color=color, label=key, linewidth=1.5)
    if init_scale is not None:
        axis.axvline(_log2(init_scale), color=_GREEN, linewidth=1, label=f"init_scale {init_scale:g}")
    axis.set_xlabel("loss scale (base 2 logarithm)")
    axis.set_ylabel("% of the gradients in fp16")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8)
    return figure


def png(figure: Figure, dpi: int = 80) -> bytes:
    """The picture's file."""
    file = BytesIO()
    figure.savefig(file, format="png", dpi=dpi, metadata={"Software": None})
    return file.getvalue()


def _limits(counted: Sequence[Exponents]) -> tuple[float, float]:
    exponents = [exponent for counts in counted for exponent in counts.histogram()]
    return min([_LEFT, *exponents]) - 1, max([_RIGHT, *exponents]) + 1


def _zones(axis: object, left: float, right: float) -> None:
    axis.axvspan(left, -25, color=_RED, alpha=0.12, linewidth=0)  # type: ignore[attr-defined]
    axis.axvspan(-25, -14, color=_GREY, alpha=0.2, linewidth=0)  # type: ignore[attr-defined]
    axis.axvspan(16, right, color=_RED, alpha=0.12, linewidth=0)  # type: ignore[attr-defined]


def _bars(axis: object, counted: Exponents, shift: int, **style: object) -> None:
    histogram = counted.histogram()
    places = [exponent + shift for exponent in histogram]
    axis.bar(places, list(histogram.values()), width=1.0, align="edge", **style)  # type: ignore[attr-defined]


def _log2(scale: float) -> float:
    return math.log2(scale)
