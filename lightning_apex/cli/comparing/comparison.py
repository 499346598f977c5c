"""The result of ``lightning-apex compare``."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lightning_apex.cli.comparing.judging import Judgement, Recommendation, judge, recommend
from lightning_apex.cli.comparing.records import Run
from lightning_apex.cli.errors import FINDING, OK, CommandError, one_sentence
from lightning_apex.cli.output import json_text, to_json, write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT, PAGE, PICTURE = "report.json", "report.html", "report.png"
_FORMAT = 1  # of report.json


@dataclass
class Comparison:
    """A model trained at several opt levels.

    Attributes:
        settings: What all runs had in common; see `Settings`.
        runs: One a level and a seed.
        folder: Where the report lies; ``None`` where it was not written.
    """

    settings: dict[str, Any]
    runs: list[Run]
    folder: Path | None = field(default=None, compare=False)

    @property
    def judgements(self) -> list[Judgement]:
        """What each level came to."""
        return judge(self.runs)

    @property
    def recommendation(self) -> Recommendation:
        """Which level to use, and why."""
        return recommend(self.judgements)

    @property
    def findings(self) -> list[str]:
        """What else a reader should know, in sentences."""
        from lightning_apex.cli.comparing.findings import findings

        return findings(self.runs)

    @property
    def exit_code(self) -> int:
        """1 where a level did not finish or its loss became NaN, or no level can be recommended."""
        broken = any(not run.finished or run.first_not_finite is not None for run in self.runs)
        return FINDING if broken or self.recommendation.level is None else OK

    # --- for eyes ---------------------------------------------------------------------------------------------------

    def plot(self) -> Figure:
        """A picture of the losses, of their distance to O0, and of each level's time and memory."""
        from lightning_apex.cli.comparing.pictures import overview

        return overview(self)

    def to_html(self, path: str | Path | None = None) -> str:
        """The report as one page that needs no other file; also written to ``path``, if given."""
        from lightning_apex.cli.comparing.page import page

        text = page(self)
        if path is not None:
            write_whole(path, text)
        return text

    def show(self, console: Console) -> None:
        """Prints the table, the recommendation and the findings."""
        from lightning_apex.cli.comparing.table import HEADINGS, rows

        title = f"{self.settings['steps']} steps at each opt level"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for heading in HEADINGS:
            table.add_column(heading, justify="left" if heading == "level" else "right")
        for row in rows(self):
            table.add_row(*row)
        console.print(table)
        level, reason = self.recommendation.level, self.recommendation.reason
        console.print(f"[bold]{'Use ' + level if level else 'No recommendation'}.[/bold]", end=" ")
        console.print(reason, markup=False)
        for finding in self.findings:
            console.print(f"- {finding}", markup=False)
        if self.folder is not None:
            console.print(f"The report: {self.folder / PAGE}", markup=False, soft_wrap=True)

    # --- for programs -----------------------------------------------------------------------------------------------

    def as_json(self) -> dict[str, Any]:
        """Everything: the runs, and what is concluded from them."""
        return {
            "format": _FORMAT,
            "settings": self.settings,
            "recommendation": to_json(self.recommendation),
            "judgements": to_json(self.judgements),
            "findings": self.findings,
            "runs": to_json(self.runs),
        }

    def save(self, folder: str | Path) -> None:
        """Writes report.json, report.html and report.png."""
        from lightning_apex.cli.comparing.pictures import png

        folder = Path(folder)
        write_whole(folder / REPORT, json_text(self.as_json()))
        write_whole(folder / PICTURE, png(self.plot()))
        self.to_html(folder / PAGE)
        self.folder = folder

    @classmethod
    def load(cls, path: str | Path) -> Comparison:
        """Reads a report.

        Args:
            path: A report.json, or the folder that holds one.

        Raises:
            CommandError: If it is none.
        """
        path = Path(path)
        file = path / REPORT if path.is_dir() else path
        try:
            content = json.loads(file.read_text())
            if content["format"] != _FORMAT:
                raise ValueError(f"its format is {content['format']}, and this version reads {_FORMAT}")
            return cls(content["settings"], [Run.from_json(run) for run in content["runs"]], file.parent)
        except OSError as error:
            raise CommandError(f"{file} cannot be read: {error.strerror or error}.") from error
        except (ValueError, KeyError, TypeError) as error:
            raise CommandError(f"{file} is no report of lightning-apex compare ({one_sentence(error)}).") from error
