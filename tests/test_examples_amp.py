"""The examples in the shape of Apex's own run as they stand, and learn."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import lightning_apex

pytest.importorskip("sklearn")
ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def example(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_dcgan_trains_two_models_with_three_losses(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert example("dcgan_amp").main(["--fast", "--width", "8", "--opt-level", level]) == 0
    out = capsys.readouterr().out
    assert re.search(r"D\(real\) \d\.\d+  D\(fake\) \d\.\d+  G \d\.\d+", out)
    assert all(f"loss_scaler{i}" in out for i in range(3))
    assert ("65536" in out) is (level == "O2")


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_word_language_model_learns_with_tied_weights(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--fast", "--width", "32", "--words", "300", "--layers", "1", "--opt-level", level]
    assert example("word_language_model_amp").main(words) == 0
    assert capsys.readouterr().out.count("validation perplexity") == 3


@pytest.mark.parametrize("level", ["O0", "O1", "O5"])
def test_bert_accumulates_and_learns_with_lamb(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert example("bert_lamb_amp").main(["--fast", "--words", "300", "--opt-level", level]) == 0
    assert "a step" in capsys.readouterr().out
    assert hasattr(lightning_apex.optimizers, "FusedLAMB")


def test_imagenet_in_one_process_resumes_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imagenet = example("imagenet_amp")
    words = ["--arch", "small", "--opt-level", "O2", "--epochs", "2", "--demand", "0", "--batch-size", "128"]
    save = imagenet.save
    monkeypatch.setattr(imagenet, "save", lambda path, model, opt, epoch: save(path / f"{epoch}.pt", model, opt, epoch))
    (tmp_path / "whole").mkdir()
    (tmp_path / "resumed").mkdir()
    assert imagenet.main([*words, "--checkpoint", str(tmp_path / "whole")]) == 0
    first = str(tmp_path / "whole" / "1.pt")
    assert imagenet.main([*words, "--resume", first, "--checkpoint", str(tmp_path / "resumed")]) == 0
    assert [path.name for path in (tmp_path / "resumed").iterdir()] == ["2.pt"]
    whole, resumed = (torch.load(tmp_path / run / "2.pt", weights_only=True) for run in ("whole", "resumed"))
    assert {t.dtype for t in whole["model"].values() if t.is_floating_point()} == {torch.float32}
    assert all(torch.equal(resumed["model"][name], tensor) for name, tensor in whole["model"].items())
    assert resumed["amp"] == whole["amp"] and set(whole["amp"]) == {"loss_scaler0"}


@pytest.mark.distributed
def test_imagenet_under_torchrun() -> None:
    words = ["--arch", "small", "--opt-level", "O5", "--epochs", "2", "--demand", "0.05", "--batch-size", "128"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [str(EXAMPLES / "imagenet_amp.py"), *words, "--sync-bn"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        out, err = running.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)  # the ranks too
        raise
    assert running.returncode == 0, err
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", out)]
    assert out.count("epoch") == 2 and losses[1] < losses[0]  # printed by one rank
    assert "Warning" not in err, err


@pytest.mark.parametrize("name", ["dcgan_amp", "imagenet_amp", "word_language_model_amp", "bert_lamb_amp"])
def test_a_wrong_level_is_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        example(name).parse(["--opt-level", "O6"])
    assert "O6" in capsys.readouterr().err
