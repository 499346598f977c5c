"""A row of the tables of this folder."""

from __future__ import annotations

from dataclasses import dataclass

LIGHTNING = "https://github.com/Lightning-AI/pytorch-lightning"


@dataclass(frozen=True)
class Row:
    """What people have met, as the behaviour that is right.

    Attributes:
        right: The behaviour.
        tests: The tests that show it, ``file::test`` or ``file::Class::test`` below tests/.
        links: Where people reported that something else did otherwise, if it is public.
    """

    right: str
    tests: tuple[str, ...]
    links: tuple[str, ...] = ()


Numbers = int | tuple[int, ...]


def row(right: str, *tests: str, issue: Numbers = (), pull: Numbers = (), url: str = "") -> Row:
    """A row; ``issue`` and ``pull`` are numbers in Lightning's repository, ``url`` has links to others."""
    numbers = [("issues", issue), ("pull", pull)]
    links = [f"{LIGHTNING}/{kind}/{n}" for kind, ns in numbers for n in ((ns,) if isinstance(ns, int) else ns)]
    return Row(right, tests, (*links, *url.split()))
