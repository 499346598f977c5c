"""What a benchmark found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_apex.cli.benching.race import OURS, Race, Spread

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Line:
    """One contender of a row.

    Attributes:
        row: What was done.
        name: Who did it.
        milliseconds: The median of its times.
        over: Its time over ours (that of the reference), round by round: above 1, ours is faster.
        of_roofline: The time that memory takes for what ours moves, over this contender's; ``None`` where no roofline
            was measured.
    """

    row: str
    name: str
    milliseconds: float
    over: Spread
    of_roofline: Spread | None = None


@dataclass(frozen=True)
class Benchmark:
    """Times side by side.

    Attributes:
        what: optimizers, batchnorm or step.
        subject: What was measured.
        rounds: How often each contender had its turn.
        lines: The figures.
        machine: Where and with which versions.
        notes: Who is missing, and why.
        reference: The contender whose time is 1.
    """

    what: str
    subject: str
    rounds: int
    lines: Sequence[Line]
    machine: Mapping[str, Any]
    notes: Sequence[str] = field(default=())
    reference: str = OURS
    exit_code = 0

    def as_json(self) -> Any:
        """All of it."""
        return self

    def show(self, console: Console) -> None:
        """Prints a table."""
        from lightning_apex.cli.benching.table import show

        show(self, console)

    def plot(self) -> Any:
        """A matplotlib figure: bars of the times, over ours.

        Returns:
            matplotlib.figure.Figure: Not shown yet.
        """
        from lightning_apex.cli.benching.picture import draw

        return draw(self)

    def save(self, folder: str | Path) -> list[Path]:
        """Writes WHAT.json and WHAT.png.

        Args:
            folder: Made if it is not there.

        Returns:
            The files.

        Raises:
            CommandError: If they cannot be written.
        """
        import io

        from lightning_apex.cli.output import json_text, writable_folder, write_whole

        path = writable_folder(folder)
        picture = io.BytesIO()
        self.plot().savefig(picture, format="png", dpi=120)
        return [
            write_whole(path / f"{self.what}.json", json_text(self) + "\n"),
            write_whole(path / f"{self.what}.png", picture.getvalue()),
        ]


def lines_of(row: str, race: Race, roof: str | None = None, roof_factor: float = 1.0) -> list[Line]:
    """The lines of one race.

    Args:
        row: What was done.
        race: How it went.
        roof: The contender that only moves memory.
        roof_factor: By how much more ours moves.
    """
    medians = race.milliseconds()
    lines = []
    for name in race.seconds:
        if name == roof:
            continue
        share = race.ratio(roof, name, roof_factor) if roof is not None else None
        lines.append(Line(row, name, medians[name], race.ratio(name, OURS), share))
    return lines


def milliseconds(line: Line) -> str:
    """Three digits of a line's time."""
    return f"{line.milliseconds:.3g}" if line.milliseconds < 100 else f"{line.milliseconds:.0f}"
