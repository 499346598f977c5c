"""The benchmarks run and write what they promise; what they measure is no test."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[1]


def run(module: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.{module}", *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, env={**os.environ, "COLUMNS": "120"}
    )


@pytest.mark.skipif(shutil.which("g++") is None, reason="the roofline is compiled with g++")
@pytest.mark.parametrize(
    ("module", "row", "figures"),
    [
        ("optimizers", "fp32 ResNet-50", 4),
        ("optimizers", "O5 tail ResNet-50", 2),
        ("step", "memory", 4),
        ("step", "overhead", 1),
    ],
)
def test_writes_a_record(module: str, row: str, figures: int, tmp_path: Path) -> None:
    done = run(module, "--quick", "--rows", row, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / f"{module}.json").read_text())
    assert len(record["results"]) == figures
    for result in record["results"]:
        assert row in result["row"] and result["value"]["low"] <= result["value"]["median"] <= result["value"]["high"]
        assert result["value"]["low"] > 0
    assert record["machine"]["torch"] == torch.__version__ and record["machine"]["cpu"] and record["machine"]["date"]
    assert (tmp_path / f"{module}.png").read_bytes().startswith(b"\x89PNG")


def test_memory_row_counts_masters_and_moments(tmp_path: Path) -> None:
    run("step", "--quick", "--rows", "memory", "--out", tmp_path)
    values = {r["against"]: r["value"]["median"] for r in json.loads((tmp_path / "step.json").read_text())["results"]}
    assert values["O5 held"] == pytest.approx(16, abs=0.05)


def test_unknown_row_is_named() -> None:
    done = run("optimizers", "--rows", "nosuchrow")
    assert done.returncode == 2 and "nosuchrow" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_benchmark_says_that_it_needs_a_gpu() -> None:
    done = run("gpu")
    assert done.returncode == 2 and "needs a CUDA GPU" in done.stderr
