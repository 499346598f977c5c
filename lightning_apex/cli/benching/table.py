"""A benchmark on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_apex.cli.benching.benchmark import milliseconds

if TYPE_CHECKING:
    from rich.console import Console

    from lightning_apex.cli.benching.benchmark import Benchmark


def show(benchmark: Benchmark, console: Console) -> None:
    """Prints the table, what it means, and the notes."""
    from rich import box
    from rich.table import Table

    roofed = any(line.of_roofline is not None for line in benchmark.lines)
    table = Table(
        title=f"{benchmark.what}, {benchmark.subject}: medians of {benchmark.rounds} rounds",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for heading in ("row", "who"):
        table.add_column(heading, overflow="fold")
    for heading in ("ms", f"x {benchmark.reference}", "quartiles", *(["of roofline"] if roofed else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    previous = ""
    for line in benchmark.lines:
        over, share = line.over, line.of_roofline
        cells = [milliseconds(line), f"{over.median:.2f}", f"{over.low:.2f}–{over.high:.2f}"]
        cells += [f"{share.median:.2f}" if share is not None else ""] if roofed else []
        table.add_row(line.row if line.row != previous else "", line.name, *cells)
        previous = line.row
    console.print(table)
    words = f"x {benchmark.reference}: its time over that of {benchmark.reference}; above 1 it is slower."
    if roofed:
        words += " of roofline: the time that memory takes for what ours moves, over its own; 1 is the limit."
    console.print(words, style="dim")
    for note in benchmark.notes:
        console.print(f"- {note}", markup=False, highlight=False)
