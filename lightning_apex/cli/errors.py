"""What a command says when it cannot do what it was asked."""

from __future__ import annotations

OK, FINDING, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130  # a program's exit statuses


class CommandError(Exception):
    """Input that a command cannot work with; the message is one sentence that says what to do instead."""


def one_sentence(text: object, limit: int = 400) -> str:
    """A foreign message on one line, without what follows its first paragraph."""
    first = str(text).strip().split("\n\n")[0]
    line = " ".join(first.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
