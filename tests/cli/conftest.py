"""Fixtures of the program's tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from compare_support import Children


@pytest.fixture(autouse=True)
def same_import_path() -> Iterator[None]:
    """Commands look for modules where the user stands and beside the config."""
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.fixture
def children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Children:
    from compare_support import HERE, Children

    from lightning_apex.cli.comparing import runs

    made = Children(tmp_path)
    monkeypatch.setattr(runs, "COMMAND", (sys.executable, str(HERE / "fake_child.py"), str(made.plan)))
    monkeypatch.setattr(runs, "_SECONDS_BETWEEN_LOOKS", 0.02)
    return made


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that make many comparisons and look at no picture."""
    from lightning_apex.cli import Comparison

    monkeypatch.setattr(Comparison, "save", lambda self, folder: None)
