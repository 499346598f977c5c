"""The benchmarks run and write what they promise; what they measure is no test."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[1]
PACKAGES = {f"× {name}" for name in ("DeepSpeed", "optimi", "timm", "pytorch_optimizer", "bitsandbytes 8 bit")}
sys.path.insert(0, str(ROOT))

from benchmarks import gpu, gpu_family, optimizers  # noqa: E402
from benchmarks.common import Race, Result, Spread  # noqa: E402
from lightning_apex.cli.benching import shapes  # noqa: E402
from lightning_apex.cli.benching.buffers import Buffers  # noqa: E402
from lightning_apex.cli.benching.race import OURS  # noqa: E402


@pytest.mark.skipif(shutil.which("g++") is None, reason="the roofline is compiled with g++")
@pytest.mark.parametrize(
    ("module", "rows"),
    [
        ("optimizers", {"SGD fp32 ResNet-50": 4, "LAMB bf16 + masters ResNet-50": 1, "O5 tail ResNet-50": 2}),
        ("step", {"memory": 4, "Trainer overhead": 1}),
        ("half_convolutions", {"ResNet-18": 5}),
        ("batchnorm", {"bf16 channels_last": 2, "BN + add + ReLU channels_last": 2, "two processes": 2}),
    ],
)
def test_writes_a_record(module: str, rows: dict[str, int], tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"benchmarks.{module}", "--quick", "--out", str(tmp_path), "--rows", *rows]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / f"{module}.json").read_text())
    for row, figures in rows.items():
        of_all = [r for r in record["results"] if row in r["row"] and r["against"] not in PACKAGES]
        assert len(of_all) == figures
    for result in record["results"]:
        assert 0 < result["value"]["low"] <= result["value"]["median"] <= result["value"]["high"]
        if result["against"] == "O5 held":
            assert result["value"]["median"] == pytest.approx(16, abs=0.05)
    assert record["machine"]["torch"] == torch.__version__ and record["machine"]["cpu"] and record["machine"]["date"]
    assert (tmp_path / f"{module}.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def threads() -> Iterator[None]:
    """Benchmarks choose their number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_unknown_row_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        optimizers.main(["--rows", "nosuchrow"])
    assert "nosuchrow" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_benchmark_says_that_it_needs_a_gpu(threads: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


@pytest.mark.parametrize("name", gpu_family.FAMILIES)
def test_what_the_gpu_benchmark_compares_runs(name: str) -> None:
    """On the CPU, as far as the peers are installed."""
    contenders = gpu_family.contenders(name, Buffers(shapes.small(3, 100)))
    assert contenders[0].name == OURS
    for contender in contenders:
        contender.run()


def test_shapes_are_those_of_the_models() -> None:
    assert (len(shapes.resnet50()), sum(map(math.prod, shapes.resnet50()))) == (161, 25_557_032)
    assert (len(shapes.gpt2_small()), sum(map(math.prod, shapes.gpt2_small()))) == (148, 124_439_808)


def test_ratio_is_taken_within_a_round_and_leaves_disturbed_rounds_out() -> None:
    disturbed = Race({"peer": [2.0] * 6 + [90.0] * 3, "ours": [1.0] * 9}, others=[0.0] * 6 + [0.5] * 3)
    assert disturbed.ratio("peer", "ours") == Spread(2.0, 2.0, 2.0)
    slowing = Race({"peer": [2.0, 20.0, 200.0], "ours": [1.0, 10.0, 100.0]}, others=[0.0] * 3)
    assert slowing.ratio("peer", "ours") == Spread(2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("value", "higher", "verdict"),
    [
        (2.0, True, "stretch"),
        (1.2, True, "met"),
        (0.97, True, "within noise"),
        (0.5, True, "missed"),
        (0.5, False, "stretch"),
    ],
)
def test_verdict(value: float, higher: bool, verdict: str) -> None:
    spread = Spread(value - 0.05, value, value + 0.05)
    stretch = 1.5 if higher else 0.8
    assert Result("row", "peer", spread, 1.0, stretch, higher=higher).verdict() == verdict
