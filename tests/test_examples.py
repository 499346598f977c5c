"""The examples run as they stand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[1]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / "digits.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_digits_runs_quietly_and_shows_what_it_did(tmp_path: Path) -> None:
    done = run("--fast", "--accelerator", "cpu", "--levels", "O0", "O5", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "12.0" not in done.stdout  # both levels hold 16 bytes a parameter
    for expected in ("O0", "O5", "bf16", "4.0+4.0+0.0+8.0", "2.0+2.0+4.0+8.0", "step time"):
        assert expected in done.stdout
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("wrong", [("--levels", "O6"), ("--epochs", "-1"), ("--half-dtype", "float32")])
def test_digits_names_a_wrong_argument(wrong: tuple[str, str]) -> None:
    done = run(*wrong)
    assert done.returncode == 2
    assert wrong[0] in done.stderr and wrong[1] in done.stderr
