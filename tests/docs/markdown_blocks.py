"""The code blocks of a Markdown page, and what comments before them say to the tests.

``<!-- test: page needs MODULE -->`` skips the page where a module cannot be imported. ``<!-- test: setup`` begins a
comment whose lines run as Python before what follows. ``<!-- test: slow -->`` leaves the next block to the slow tests.
``<!-- test: syntax only (why) -->`` has it compiled or parsed, but not run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^( *)(```+|~~~+)\s*([\w-]*)\s*(.*)$")
_NEEDS = re.compile(r"^<!-- test: page needs ([\w.]+) -->$", re.MULTILINE)
_TITLE = re.compile(r'^title="([^"]+)"$')


@dataclass(frozen=True)
class Block:
    """One block of a page.

    Attributes:
        page: The page it is on.
        line: The line of the page that its first line is.
        language: What the fence says; ``python`` for a setup comment.
        text: The code.
        title: The name of the file it shows, if it shows one.
        note: ``""``, ``"slow"`` or ``"syntax only (why)"``.
    """

    page: Path
    line: int
    language: str
    text: str
    title: str = ""
    note: str = ""

    @property
    def where(self) -> str:
        """``docs/cli.md:12``."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def needs(page: Path) -> list[str]:
    """The modules without which a page's code cannot run."""
    return _NEEDS.findall(page.read_text())


def blocks(page: Path) -> Iterator[Block]:
    """All blocks of a page, in order.

    Raises:
        ValueError: If a fence does not end, or says something that no test understands.
    """
    lines = enumerate(page.read_text().splitlines(), 1)
    note = ""
    for number, line in lines:
        if line.startswith("<!-- test:"):
            said = line.removeprefix("<!-- test:").strip()
            if said == "setup":
                yield Block(page, number + 1, "python", _until(lines, page, number, re.compile("-->$")))
            elif _NEEDS.match(line):
                continue
            elif re.fullmatch(r"(slow|syntax only \(.+\)) -->", said):
                note = said.removesuffix(" -->")
            else:
                raise ValueError(f"{page}:{number}: {line!r} is none of page needs, setup, slow, syntax only (why)")
        elif found := _FENCE.match(line):
            indent, fence, language, rest = found.groups()
            title = _TITLE.match(rest)
            if rest and title is None:
                raise ValueError(f"{page}:{number}: {rest!r} is no title")
            text = _until(lines, page, number, re.compile(rf"{indent}{fence}\s*$"), len(indent))
            yield replace(Block(page, number + 1, language, text, title[1] if title else ""), note=note)
            note = ""
        elif line.strip() and note:
            raise ValueError(f"{page}:{number}: no block follows the comment `test: {note}`")


def _until(lines: Iterator[tuple[int, str]], page: Path, start: int, end: re.Pattern[str], indent: int = 0) -> str:
    found = []
    for _, line in lines:
        if end.match(line):
            return "\n".join(found) + "\n"
        found.append(line[indent:])
    raise ValueError(f"{page}:{start}: what begins here does not end")
