"""Writes what a benchmark found: a table, a JSON file and a picture."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Options, Race, Result
from lightning_apex.cli.benching.machine import cpu_model, machine

try:
    from rich.console import Console
    from rich.table import Table
except ModuleNotFoundError:  # a GPU machine without a network, say
    from benchmarks.plain_table import Console, Table

_COLOURS = {"stretch": "bold green", "met": "green", "within noise": "yellow", "missed": "red", "": "dim"}


@dataclass
class Report:
    """Collects results, and shows each row as soon as it is there."""

    name: str
    options: Options
    results: list[Result] = field(default_factory=list)
    milliseconds: dict[str, dict[str, float]] = field(default_factory=dict)
    rounds_kept: dict[str, str] = field(default_factory=dict)
    notes: dict[str, dict[str, Any]] = field(default_factory=dict)
    console: Console = field(default_factory=lambda: Console() if sys.stdout.isatty() else Console(width=120))

    def add(self, row: str, race: Race | None, *results: Result) -> None:
        self.results += results
        if race is not None:
            self.milliseconds[row] = race.milliseconds()
            self.rounds_kept[row] = f"{len(race.kept())} of {len(race.others)}"
        for result in results:
            value = f"{result.value.median:.2f}{result.unit}"
            self.console.print(f"  {row}: {value} {result.against} {result.verdict()}", highlight=False, soft_wrap=True)

    def save(self) -> Path:
        """Writes NAME.json, with what there is so far."""
        self.options.out.mkdir(parents=True, exist_ok=True)
        path = self.options.out / f"{self.name}.json"
        path.write_text(json.dumps(self._record(), indent=1) + "\n")
        return path

    def close(self) -> Path:
        """Prints the table and writes NAME.json and NAME.png."""
        self.console.print(self._table())
        if self.options.quick:
            self.console.print("--quick only shows that everything runs: these figures mean nothing.")
        path = self.save()
        if find_spec("matplotlib") is None:
            self.console.print(f"{path}; no picture, since matplotlib is not installed")
            return path
        draw(self.results, path.with_suffix(".png"), title=f"{self.name} on {cpu_model()}")
        self.console.print(f"{path} and {path.with_suffix('.png')}")
        return path

    def _table(self) -> Table:
        table = Table(title=f"{self.name}: {cpu_model()}, {self.options.threads} threads, torch {torch.__version__}")
        for title in ("row", "against"):
            table.add_column(title, overflow="fold")
        for title in ("median", "quartiles", "must", "stretch"):
            table.add_column(title, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        previous = ""
        for result in self.results:
            colour = _COLOURS[result.verdict()]
            table.add_row(
                result.row if result.row != previous else "",
                result.against,
                f"[{colour}]{result.value.median:.2f}{result.unit}[/]",
                f"{result.value.low:.2f}–{result.value.high:.2f}",
                "" if result.must is None else f"{'≥' if result.higher else '≤'} {result.must:g}",
                "" if result.stretch is None else f"{result.stretch:g}",
                f"[{colour}]{result.verdict()}[/]",
            )
            previous = result.row
        return table

    def _record(self) -> dict[str, Any]:
        return {
            "benchmark": self.name,
            "machine": machine(),
            "rounds": self.options.rounds,
            "quick": self.options.quick,
            "rounds_kept": self.rounds_kept,
            "results": [{**asdict(result), "verdict": result.verdict()} for result in self.results],
            "milliseconds": self.milliseconds,
            **({"notes": self.notes} if self.notes else {}),
        }


def draw(results: list[Result], path: Path, title: str) -> None:
    """Bars for what was measured, a mark for each goal."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [result for result in results if result.unit == "x"][::-1]
    figure, axes = pyplot.subplots(figsize=(10, 1.2 + 0.34 * max(3, len(shown))), layout="constrained")
    colours = {"stretch": "#1a7f37", "met": "#5aa469", "within noise": "#d9a400", "missed": "#c0392b", "": "#8899aa"}
    for y, result in enumerate(shown):
        spread = [[result.value.median - result.value.low], [result.value.high - result.value.median]]
        axes.barh(y, result.value.median, xerr=spread, color=colours[result.verdict()], height=0.6, ecolor="#444444")
        for goal, width in ((result.must, 2.5), (result.stretch, 1.2)):
            if goal is not None:
                axes.plot([goal, goal], [y - 0.42, y + 0.42], color="black", linewidth=width)
    axes.set_yticks(range(len(shown)), [f"{result.row} {result.against}" for result in shown], fontsize=8)
    axes.axvline(1, color="#888888", linewidth=0.8, linestyle=":")
    axes.set(title=title, xlabel="ratio; thick mark: must, thin mark: stretch")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
