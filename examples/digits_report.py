"""What examples/digits.py shows: a progress line a level, a table, and a picture of the losses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from digits import Run

_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "–"}


class LevelProgress:
    """The line of one level while it trains."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def expect(self, steps: int) -> None:
        self._progress.update(self._task, total=steps)

    def step(self, step: int, loss: float) -> None:
        self._progress.update(self._task, completed=step, note=f"loss {loss:.3f}")

    def done(self, accuracy: float) -> None:
        self._progress.update(self._task, note=f"validation accuracy {accuracy:.1%}")


@contextmanager
def level_progress(level: str, console: Console) -> Iterator[LevelProgress]:
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as progress:
        yield LevelProgress(progress, progress.add_task(level, total=None, note=""))


def print_table(runs: Sequence[Run], console: Console, seconds: float) -> None:
    table = Table(title="A small ResNet on handwritten digits", title_justify="left", caption_justify="left")
    table.add_column("level")
    table.add_column("half")
    for title in (
        "accuracy",
        f"step time\n/ {runs[0].level}",
        "bytes per\nparameter",
        "= weights+grads\n+masters+moments",
    ):
        table.add_column(title, justify="right")
    table.add_column("skipped\nsteps", justify="right")
    for run in runs:
        memory = run.watch.memory
        assert memory is not None
        parts = (memory.weights, memory.gradients, memory.masters, memory.moments)
        table.add_row(
            run.level + ("*" if run.level == "O3" else ""),
            _SHORT.get(run.watch.compute_dtype, str(run.watch.compute_dtype)),
            f"{run.accuracy:.1%}",
            f"{run.time_ratio:.2f}",
            f"{memory.total:.1f}",
            "+".join(f"{part:.1f}" for part in parts),
            str(run.skipped),
        )
    notes = [f"{seconds:.0f} s in all. BatchNorm's parameters are fp32 at every level but O3."]
    if any(run.level == "O3" for run in runs):
        notes.append("* O3 has no fp32 masters: an update too small for its 16-bit weight is lost.")
    notes.append("Bytes leave out activations, which are half as large from O1 on.")
    if all(run.watch.compute_dtype is not torch.float16 for run in runs):
        notes.append("No fp16 here (a CPU uses bf16): O1 and O2 compute as O4 and O5 do, and no step overflows.")
    table.caption = "\n".join(notes)
    console.print(table)


def draw_losses(losses: dict[str, list[float]], folder: Path) -> Path:
    """Writes losses.png: one smoothed curve a level, the raw losses faintly behind it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for number, (level, values) in enumerate(losses.items()):
        # On a CPU several levels compute in bf16 and draw the same curve: each has its own width and dashes.
        style = {"linewidth": 4.5 - 0.6 * number, "linestyle": ("-", "-", "-", "--", "-.", ":")[number % 6]}
        (line,) = axes.plot(range(1, len(values) + 1), smooth(values), label=level, **style)
        axes.plot(range(1, len(values) + 1), values, color=line.get_color(), alpha=0.15, linewidth=0.8)
    axes.set(
        xlabel="step",
        ylabel="training loss",
        yscale="log",
        title="Digits: training loss at each opt level (thin: each step)",
    )
    axes.grid(alpha=0.3, which="both")
    axes.legend(title="opt level", ncols=2)
    path = folder / "losses.png"
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def smooth(values: Sequence[float], keep: float = 0.8) -> list[float]:
    """A running geometric mean, which fits a logarithmic axis, that does not start at 1."""
    result, average, weight = [], 0.0, 0.0
    for value in values:
        average, weight = keep * average + (1 - keep) * math.log(max(value, 1e-9)), keep * weight + (1 - keep)
        result.append(math.exp(average / weight))
    return result
