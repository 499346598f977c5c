"""The examples run as they stand."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")
EXAMPLES = Path(__file__).parents[1] / "examples"


def test_digits_runs_quietly_and_shows_what_it_did(tmp_path: Path) -> None:
    words = ["--fast", "--accelerator", "cpu", "--levels", "O0", "O5", "--out", str(tmp_path)]
    command = [sys.executable, str(EXAMPLES / "digits.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for expected in ("O0", "O5", "bf16", "4.0+4.0+0.0+8.0", "2.0+2.0+4.0+8.0", "step time"):
        assert expected in done.stdout
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("digits")


@pytest.mark.parametrize("wrong", [("--levels", "O6"), ("--epochs", "-1"), ("--half-dtype", "float32")])
def test_digits_names_a_wrong_argument(
    wrong: tuple[str, str], digits: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        digits.parse(wrong)
    message = capsys.readouterr().err
    assert wrong[0] in message and wrong[1] in message


@pytest.mark.parametrize(
    ("accuracies", "status", "said"),
    [
        ({"O0": 0.985, "O2": 0.976, "O3": 0.5}, 0, "did"),
        ({"O0": 0.99, "O2": 0.975}, 1, "O2 (97.5%)"),
        ({"O5": 0.96}, 1, "O5 (96.0%)"),
    ],
)
def test_digits_judges_the_accuracy(
    accuracies: dict[str, float], status: int, said: str, digits: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [digits.Run(level, accuracy, 0, digits.Watch(), None) for level, accuracy in accuracies.items()]
    assert digits.verdict(runs, digits.parse([]), digits.Console()) == status
    assert said in capsys.readouterr().out
