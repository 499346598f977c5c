"""What commands print and write: results on stdout, progress on stderr, files that are whole or not there."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

from lightning_apex.cli.errors import CommandError


class Result(Protocol):
    """What a command's function returns; the program prints it."""

    @property
    def exit_code(self) -> int:
        """0, or 1 where scripts should take notice."""

    def as_json(self) -> Any:
        """All of it, of what `to_json` takes."""

    def show(self, console: Console) -> None:
        """Prints it for people."""


# --- the screen -----------------------------------------------------------------------------------------------------


def errors_console() -> Console:
    """Where progress and notes go, so that stdout holds results alone."""
    return Console(stderr=True)


class Bar:
    """One line of a progress display."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def update(self, completed: float | None = None, *, total: float | None = None, note: str | None = None) -> None:
        """Sets how much is done, of how much, and what stands at the end of the line; ``None`` leaves it."""
        fields: dict[str, Any] = {} if note is None else {"note": note}
        self._progress.update(self._task, completed=completed, total=total, **fields)

    def advance(self, by: float = 1) -> None:
        """Some more is done."""
        self._progress.advance(self._task, by)


class Bars:
    """A progress display of one line a task."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def add(self, title: str, total: float | None = None) -> Bar:
        """Another line; ``total=None`` until it is known."""
        return Bar(self._progress, self._progress.add_task(title, total=total, note=""))


@contextmanager
def progress(console: Console | None = None) -> Iterator[Bars]:
    """Progress lines on stderr, for everything that takes longer than two seconds; an error clears them."""
    columns = (
        TextColumn("[bold]{task.description}", table_column=Column(no_wrap=True)),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn(
            "{task.fields[note]}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
        ),
    )
    with Progress(*columns, console=console or errors_console(), expand=True) as display:
        try:
            yield Bars(display)
        except Exception:
            display.live.transient = True  # the error says all; a bar that never moved would stand above it
            raise


# --- JSON -----------------------------------------------------------------------------------------------------------


def to_json(value: Any) -> Any:
    """Plain JSON of dataclasses, paths, mappings and sequences; a number that is not finite becomes ``null``."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, str | bytes):
        return [to_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    return str(value)


def json_text(value: Any) -> str:
    """The text that ``--json`` prints and reports are written as."""
    return json.dumps(to_json(value), indent=2, allow_nan=False)


# --- files ----------------------------------------------------------------------------------------------------------


def writable_folder(folder: str | Path, name: str = "out") -> Path:
    """Makes a folder and writes to it for a try, so that nobody learns after an hour that it cannot be written.

    Args:
        folder: Where results will lie.
        name: Of the argument, for the message.

    Raises:
        CommandError: If it cannot be made or written.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise CommandError(
            f"{name}={str(folder)!r} cannot be written ({error.strerror or error}): give a folder that is yours."
        ) from error
    return path


def write_whole(path: str | Path, data: str | bytes) -> Path:
    """Writes a file beside its place and renames it, so that a reader never sees half of it.

    Raises:
        CommandError: If it cannot be written; the file that was there is as it was.
    """
    path = Path(path)
    blob = data.encode() if isinstance(data, str) else data
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                file.write(blob)
                file.flush()
                os.fsync(file.fileno())
                os.chmod(file.name, 0o666 & ~_umask())
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror or error}.") from error
    return path


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
