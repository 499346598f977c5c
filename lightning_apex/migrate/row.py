"""One row of the table of names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["same", "better", "torch", "gone"]

#: The verdicts in words.
WORDS: dict[Verdict, str] = {"same": "same", "better": "better", "torch": "torch's own", "gone": "gone"}


@dataclass(frozen=True)
class Row:
    """What became of one name.

    Attributes:
        name: As it was imported.
        verdict: ``"same"`` and ``"better"`` are here under a name of ours; ``"torch"`` is in torch by now; ``"gone"``.
        to: The name that takes its place as it stands, so that an import of it can be rewritten.
        instead: What to write where nothing takes its place as it stands.
        note: What differs, or why it is gone.
        module: Whether it is a module, whose other names this row says nothing of.
        covers: Whether the row speaks for all names below it that have no row.
    """

    name: str
    verdict: Verdict
    to: str | None = None
    instead: str = ""
    note: str = ""
    module: bool = False
    covers: bool = False

    @property
    def now(self) -> str:
        """What to write now, in Markdown."""
        return f"`{self.to}`" if self.to is not None else self.instead


def _ours(name: str) -> str:
    return "lightning_" + name


def same(name: str, note: str = "", *, to: str | None = None, module: bool = False) -> Row:
    """A name that is here, and does the same."""
    return Row(name, "same", to or _ours(name), note=note, module=module)


def better(name: str, note: str = "", *, to: str | None = None) -> Row:
    """A name that is here, and does what it should have done."""
    return Row(name, "better", to or _ours(name), note=note)


def torchs(
    name: str, instead: str = "", *, to: str | None = None, note: str = "", module: bool = False, covers: bool = False
) -> Row:
    """A name that torch, or a library of its makers, has by now."""
    return Row(name, "torch", to, instead, note, module, covers)


def gone(name: str, instead: str, note: str, *, covers: bool = False) -> Row:
    """A name that is nowhere."""
    return Row(name, "gone", None, instead, note, covers, covers)
