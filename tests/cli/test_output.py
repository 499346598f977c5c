"""Files that are whole or not there, JSON that every reader takes, progress on stderr."""

from __future__ import annotations

import io
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")

from rich.console import Console

from lightning_apex.cli import output
from lightning_apex.cli.errors import CommandError


@dataclass
class Inner:
    path: Path
    numbers: tuple[float, ...]


def test_json_of_dataclasses_paths_and_what_is_not_finite() -> None:
    value = {"a": Inner(Path("x/y"), (1.5, float("nan"), float("inf"))), 3: {4}, "t": True, "n": None}
    assert json.loads(output.json_text(value)) == {
        "a": {"path": "x/y", "numbers": [1.5, None, None]}, "3": [4], "t": True, "n": None
    }  # fmt: skip


def test_a_file_is_replaced_as_a_whole_and_readable_by_others(tmp_path: Path) -> None:
    path = tmp_path / "f.txt"
    output.write_whole(path, "old")
    output.write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o666 & ~output._umask()
    assert os.listdir(tmp_path) == ["f.txt"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    path = tmp_path / "f.txt"
    output.write_whole(path, "old")

    def full(descriptor: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", full)
    expected = CommandError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        output.write_whole(path, "new")
    if isinstance(error, OSError):
        assert "f.txt" in str(caught.value) and "No space left" in str(caught.value)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["f.txt"]


def test_a_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    folder = output.writable_folder(tmp_path / "a" / "b")
    assert folder.is_dir() and not list(folder.iterdir())


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    with pytest.raises(CommandError, match=r"out='.*/f/x' cannot be written \(Not a directory\)"):
        output.writable_folder(tmp_path / "f" / "x")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CommandError, match="Permission denied"):
        output.writable_folder(tmp_path / "x")


@pytest.mark.parametrize("terminal", [False, True])
def test_an_error_clears_the_progress(terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=80)
    with pytest.raises(CommandError), output.progress(console) as bars:
        bars.add("reading")
        raise CommandError("no")
    written = console.file.getvalue()
    assert written.endswith("\x1b[1A\x1b[2K") if terminal else not written.strip()


def test_progress_is_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with output.progress() as bars:
        bar = bars.add("O2, seed 0", total=2)
        bar.advance()
        bar.update(2, note="loss [0.5]")
    printed = capsys.readouterr()
    assert printed.out == ""
    for expected in ("O2, seed 0", "2/2", "loss [0.5]"):
        assert expected in printed.err
