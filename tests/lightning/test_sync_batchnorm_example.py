"""examples/syncbn_digits.py runs as it stands, and judges what it shows."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("rich")
EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*words):
    command = [sys.executable, str(EXAMPLES / "syncbn_digits.py"), *words]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stderr == ""
    return done.stdout


@pytest.mark.distributed
def test_it_runs_quietly_and_prints_both_side_by_side():
    shown = run("--fast")
    assert "local BatchNorm" in shown and "SyncBatchNorm" in shown and "accuracy" in shown


@pytest.mark.slow
@pytest.mark.distributed
def test_local_statistics_fail_and_shared_ones_learn():
    assert "Local statistics failed" in run()


@pytest.mark.parametrize(
    ("local", "synced", "status", "said"),
    [(0.6, 0.95, 0, "failed (60.0%)"), (0.9, 0.95, 1, "got 90.0% and 95.0%"), (0.6, 0.85, 1, "got 60.0% and 85.0%")],
)
def test_it_judges_the_accuracies(local, synced, status, said, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("syncbn_digits")
    runs = [example.Run("", [[2.0, local]], 1.0), example.Run("", [[1.0, synced]], 1.0)]
    assert example.verdict(runs, example.parse([]), example.Console(width=200)) == status
    assert said in capsys.readouterr().out


def test_a_wrong_argument_is_named(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("syncbn_digits")
    with pytest.raises(SystemExit, match="2"):
        example.parse(["--epochs", "-1"])
    assert "--epochs -1" in capsys.readouterr().err
