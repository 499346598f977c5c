"""What checks and measures on a GPU, as far as it runs without one."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import gpu, gpu_batchnorm, gpu_training, report  # noqa: E402
from benchmarks.common import Options, Result, Spread  # noqa: E402
from benchmarks.models import resnet50, small_network  # noqa: E402
from benchmarks.plain_table import Console, Table  # noqa: E402

SCRIPTS = sorted((ROOT / "tools").glob("*.sh"))
PARTS = ("build", "tests", "sanitizer", "report", "optimizers", "batchnorm", "training")


@pytest.fixture
def threads() -> Iterator[None]:
    """Benchmarks choose their number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def gpu_summary() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_summary", ROOT / "tools" / "gpu_summary.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_sound(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK)
    if shutil.which("shellcheck") is not None:
        done = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def check(out: Path, *flags: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "tools" / "gpu_check.sh"), *flags],
        env=os.environ | {"PYTHON": sys.executable, "OUT": str(out)} | settings,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_every_part_can_be_left_out(tmp_path: Path) -> None:
    done = check(tmp_path, *(f"--no-{part}" for part in PARTS))
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "gpu_check.json").read_text())
    assert {step["status"] for step in record["steps"]} <= {"left out", "not installed"} and len(record["steps"]) >= 8
    assert record["machine"]["torch"] == torch.__version__ and record["results"] == []
    assert check(tmp_path, "--no-such").returncode == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_step_that_fails_is_told_and_what_comes_too_late_is_left_out(tmp_path: Path) -> None:
    # Each start of Python takes two seconds at least, however quick the machine is.
    slow = tmp_path / "python"
    slow.write_text(f'#!/bin/sh\nsleep 2\nexec "{sys.executable}" "$@"\n')
    slow.chmod(0o755)
    flags = ("--no-tests", "--no-sanitizer", "--no-report", "--no-optimizers", "--no-batchnorm")
    done = check(tmp_path, *flags, LIMIT="11", PYTHON=str(slow))
    steps = {step["name"]: step["status"] for step in json.loads((tmp_path / "gpu_check.json").read_text())["steps"]}
    assert done.returncode == 1 and steps["build"].startswith(("failed", "out of time"))
    assert steps["training"] == "no time left"
    assert (tmp_path / "build.log").exists()


@pytest.mark.parametrize(
    ("module", "rows"),
    [
        (gpu, ["device: AdamW ResNet-50", "host: AdamW", "wall: AdamW 161", "O1 tail 161", "O5 tail", "LAMB"]),
        (gpu_batchnorm, ["SyncBatchNorm"]),
        pytest.param(gpu_training, ["ResNet-50", "GPT-2"], marks=pytest.mark.slow),
    ],
    ids=lambda value: value.__name__.rpartition(".")[2] if isinstance(value, ModuleType) else "",
)
def test_benchmarks_run_without_a_gpu(
    module: ModuleType, rows: list[str], threads: None, tmp_path: Path, gpu_summary: ModuleType
) -> None:
    pytest.importorskip("rich")
    name = module.__name__.rpartition(".")[2]
    assert module.main(["--device", "cpu", "--out", str(tmp_path), "--rows", *rows]) == 0
    record = json.loads((tmp_path / f"{name}.json").read_text())
    assert all(any(row in measured for measured in record["milliseconds"]) for row in rows)
    assert all(value > 0 for times in record["milliseconds"].values() for value in times.values())
    joined = gpu_summary.collect(["bench\tpassed\t7\n"], tmp_path, 0.0)
    assert joined["results"] == record["results"]
    gpu_summary.show(joined)
    assert gpu_summary.collect([], tmp_path, (tmp_path / f"{name}.json").stat().st_mtime + 1)["results"] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("module", [gpu, gpu_batchnorm, gpu_training], ids=lambda module: module.__name__)
def test_without_a_gpu_they_say_so(module: ModuleType, threads: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert module.main([]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["O1", "O2", "16-mixed", "bf16-mixed", "32-true", "bf16-true"])
def test_without_lightning_a_step_is_written_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_training, "FABRIC", False)
    dtypes = []

    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Linear(4, 4)

    def loss(model: torch.nn.Module) -> torch.Tensor:
        out = model(torch.ones(2, 4, dtype=model.weight.dtype))
        dtypes.append(out.dtype)
        return out.float().square().sum()

    step = gpu_training.make_step(name, (make, loss), "cpu")
    step()
    step()
    half = torch.float16 if name == "16-mixed" else torch.bfloat16
    assert dtypes == [torch.float32 if name == "32-true" else half] * 2


def test_the_networks_are_those_that_they_are_called_after() -> None:
    assert sum(p.numel() for p in resnet50().parameters()) == 25_557_032
    assert small_network()(torch.ones(1, 3, 32, 32)).shape == (1, 10)


def test_a_report_needs_neither_rich_nor_matplotlib(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "Table", Table)
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    plain = report.Report("plain", Options(out=tmp_path), console=Console())  # type: ignore[arg-type]
    plain.add("row", None, Result("row", "× peer", Spread(1.0, 1.5, 2.0), 1.2, 2.0))
    plain.close()
    assert json.loads((tmp_path / "plain.json").read_text())["results"][0]["verdict"] == "met"
    printed = capsys.readouterr().out
    assert "1.00–2.00  ≥ 1.2  2        met" in printed and "matplotlib is not installed" in printed
