"""Which files are read, and how they are written."""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

_SKIPPED = {"__pycache__", "node_modules", "site-packages", "dist-packages"}


def sources(path: Path) -> Iterator[Path]:
    """A file itself; of a folder the ``.py`` and ``.pyi`` files, sorted, without environments and hidden folders."""
    if not path.is_dir():
        yield path
        return
    for folder, folders, files in os.walk(path):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in _SKIPPED
            and not Path(folder, name, "pyvenv.cfg").exists()
            and not Path(folder, name, "conda-meta").exists()
        )
        for name in sorted(files):
            if name.endswith((".py", ".pyi")):
                yield Path(folder, name)


def diff(path: Path, before: bytes, after: bytes, encoding: str) -> str:
    """The unified diff of two versions of a file."""
    old, new = (text.decode(encoding).splitlines(keepends=True) for text in (before, after))
    shown = difflib.unified_diff(old, new, str(path), str(path))
    return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in shown)


def replace(path: Path, before: bytes, after: bytes) -> None:
    """Puts new content in a file's place in one move; links keep pointing at it and its mode stays.

    Raises:
        OSError: If it cannot be written, or no longer holds ``before``; then it is as it was.
    """
    real = path.resolve()
    handle, temporary = tempfile.mkstemp(prefix=f".{real.name}.", suffix=".tmp", dir=real.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(after)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, real.stat().st_mode & 0o7777)
        if real.read_bytes() != before:
            raise OSError("it was changed meanwhile")
        os.replace(temporary, real)
    except BaseException:
        os.unlink(temporary)
        raise
