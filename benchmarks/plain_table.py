"""The few calls of rich that reports make, in plain text, for machines without it."""

from __future__ import annotations

import re
from typing import Any


class Table:
    """Collects rows; a cell's markup is dropped."""

    def __init__(self, title: str = "") -> None:
        self.title = title
        self.rows: list[list[str]] = [[]]

    def add_column(self, title: str, **_: Any) -> None:
        self.rows[0].append(title)

    def add_row(self, *cells: str) -> None:
        self.rows.append([re.sub(r"\[/?[a-z ]*\]", "", cell) for cell in cells])

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in self.rows]
        return "\n".join([self.title, *lines])


class Console:
    """Prints."""

    def __init__(self, **_: Any) -> None:
        pass

    def print(self, what: object, **_: Any) -> None:
        print(what)
