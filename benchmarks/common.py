"""What the benchmarks share: the report's lines with their goals, and the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_apex.cli.benching.race import Contender, MachineClock, Race, Spread, race, settle

__all__ = ["Contender", "MachineClock", "Options", "Race", "Result", "Spread", "parse_options", "race"]


@dataclass
class Result:
    """One line of a report: a figure beside its goals.

    Attributes:
        row: What was done.
        against: What it is compared with.
        value: The figure.
        must: The goal; ``None`` for a figure that only informs.
        stretch: The goal beyond.
        unit: ``"x"`` for ratios.
        higher: Whether more is better.
    """

    row: str
    against: str
    value: Spread
    must: float | None = None
    stretch: float | None = None
    unit: str = "x"
    higher: bool = True

    def verdict(self) -> str:
        if self.must is None:
            return ""
        sign = 1 if self.higher else -1
        if self.stretch is not None and sign * (self.value.median - self.stretch) >= 0:
            return "stretch"
        if sign * (self.value.median - self.must) >= 0:
            return "met"
        best = self.value.high if self.higher else self.value.low
        return "within noise" if sign * (best - self.must) >= 0 else "missed"


@dataclass
class Options:
    """What the command line of every benchmark says."""

    rounds: int = 15
    quick: bool = False
    threads: int = 2
    rows: tuple[str, ...] = ()
    out: Path = Path("benchmarks/results")

    def wants(self, row: str) -> bool:
        return not self.rows or any(word in row for word in self.rows)


def parse_options(doc: str | None, rows: Sequence[str], argv: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(description=doc, epilog=f"rows: {', '.join(rows)}")
    parser.add_argument(
        "--rows", "--only", nargs="+", default=[], metavar="ROW", help="only rows whose name contains one of these"
    )
    parser.add_argument("--rounds", type=int, default=15, help="timings of each contender (default: 15)")
    parser.add_argument("--quick", action="store_true", help="3 rounds on small tensors: shows that it runs, no more")
    parser.add_argument("--threads", type=int, help="CPU threads (default: 2; 1 with --quick)")
    parser.add_argument("--out", type=Path, default=Options.out, help="folder for JSON and pictures")
    given = parser.parse_args(argv)
    given.threads = (1 if given.quick else 2) if given.threads is None else given.threads
    for name in ("rounds", "threads"):
        if getattr(given, name) < 1:
            parser.error(f"--{name} {getattr(given, name)}: give at least 1")
    options = Options(3 if given.quick else given.rounds, given.quick, given.threads, tuple(given.rows), given.out)
    if not any(options.wants(row) for row in rows):
        parser.error(f"--rows {' '.join(given.rows)} matches none of: {', '.join(rows)}")
    settle(options.threads)
    return options
