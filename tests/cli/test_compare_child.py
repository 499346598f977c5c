"""One run of a comparison, in this process: what the child writes of steps, memory, skips, ranges and its end."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

pytest.importorskip("jsonargparse")
pytest.importorskip("rich")

import compare_models
from lightning.pytorch import Trainer, seed_everything

from lightning_apex import ApexPrecision
from lightning_apex.cli.comparing.child import Task, main
from lightning_apex.cli.comparing.judging import judge, recommend
from lightning_apex.cli.comparing.records import Run, read_events, run_of_events

pytestmark = pytest.mark.filterwarnings("ignore:ApexPrecision.* uses bfloat16 instead of float16 on a CPU")


@pytest.fixture
def child(tmp_path: Path) -> Any:
    def run(level: str, model: str, steps: int = 6, data: str = "Data", **changes: Any) -> tuple[int, Run]:
        task = Task(
            config=changes.pop("config", None),
            model=f"compare_models:{model}" if model else None,
            data=f"compare_models:{data}" if data else None,
            accelerator="cpu",
            level=level,
            seed=0,
            steps=steps,
            half_dtype=None,
            probes_ranges=False,
        )
        for name, value in changes.items():
            setattr(task, name, value)
        order, events = tmp_path / "task.json", tmp_path / "events.jsonl"
        order.write_text(json.dumps(asdict(task)))
        status = main([str(order), str(events)])
        return status, run_of_events(level, 0, read_events(events))

    return run


def by_hand(level: str, model: Any, steps: int, **trainer: Any) -> list[float]:
    """The same training without any of the program's code."""
    losses: list[float] = []

    class Keeps(compare_models.Callback):
        def on_train_batch_start(self, *rest: Any) -> None:
            torch.manual_seed(len(losses) * 2)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
            losses.append(outputs["loss"].item() * trainer.accumulate_grad_batches)
            torch.manual_seed((len(losses)) * 2 + 1)

    seed_everything(0, workers=True, verbose=False)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    made = Trainer(
        accelerator="cpu", devices=1, max_steps=steps, max_epochs=-1, callbacks=[Keeps()],
        plugins=[ApexPrecision(level)], **quiet, **trainer,
    )  # fmt: skip
    made.fit(model(), compare_models.Data())
    return losses


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_losses_are_those_of_plain_training(level: str, child: Any) -> None:
    status, run = child(level, "Net", steps=6)
    assert (status, run.status, run.error) == (0, "finished", "")
    assert run.losses == {"loss": pytest.approx(by_hand(level, compare_models.Net, 6), rel=1e-6)}
    assert run.steps == 6 and len(run.scales) == 6
    assert run.scales[0] == (65536.0 if level == "O2" else 1.0)
    assert run.half_dtype == ("" if level == "O0" else "bfloat16") and run.device.startswith("CPU")
    assert run.timed == [False, False, True, True, True, True] and all(s > 0 for s in run.seconds)


def test_levels_see_the_same_data_even_where_one_draws_more(child: Any) -> None:
    first, second = child("O0", "Net", steps=9)[1], child("O4", "Net", steps=9)[1]
    assert first.losses["loss"] == pytest.approx(second.losses["loss"], rel=0.05)


def test_memory_by_kind(child: Any) -> None:
    weights = 4 * (6 * 12 + 12 + 12 * 2 + 2)
    measured = {level: child(level, "Net")[1].memory for level in ("O0", "O2")}
    assert vars(measured["O0"]) | {"activations": 0} == {
        "weights": weights,
        "masters": 0,
        "gradients": weights,
        "optimizer": 2 * weights + 4 * 4,
        "activations": 0,
        "cuda_peak": None,
    }
    o2 = measured["O2"]
    assert (o2.weights, o2.masters, o2.gradients) == (weights // 2, weights, weights // 2)
    assert o2.optimizer == 2 * weights + 4 * 4
    assert 0 < o2.activations < measured["O0"].activations
    assert o2.total == sum(vars(o2)[kind] for kind in ("weights", "masters", "gradients", "optimizer", "activations"))


def test_settings_of_the_config_are_honoured(child: Any, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    same = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01, "limit_train_batches": 2}
    trainer = same | {"accelerator": "cpu", "callbacks": [{"class_path": "compare_models.Remembers"}]}
    plugin = {"class_path": "lightning_apex.ApexPrecision", "init_args": {"init_scale": 8.0}}
    sections = {
        "model": {"class_path": "compare_models.Plain"},
        "data": {"class_path": "compare_models.Data"},
        "trainer": trainer | {"plugins": [plugin]},
    }
    config.write_text(yaml.safe_dump(sections))
    compare_models.Remembers.seen.clear()
    status, run = child("O2", "", steps=3, data="", config=str(config))
    assert (status, run.error) == (0, "")
    losses = by_hand("O2", compare_models.Plain, 3, **same)
    pairs = [(a + b) / 2 for a, b in zip(losses[::2], losses[1::2], strict=True)]
    assert run.losses["loss"] == pytest.approx(pairs, rel=1e-3)
    assert max(pairs) - min(pairs) > 1e-2
    assert run.scales == [8.0] * 3
    assert len(compare_models.Remembers.seen) == 6


def test_skipped_steps(child: Any) -> None:
    _, run = child("O1", "Overflows")
    assert run.finished and len(run.overflows) == 1
    overflow = run.overflows[0]
    assert (overflow.step, overflow.old_scale, overflow.new_scale) == (3, 65536.0, 32768.0)
    assert overflow.modules == ["net.0", "net.3"]
    assert run.scales == [65536.0, 65536.0, 32768.0, 32768.0, 32768.0, 32768.0]
    assert run.losses["loss"][2] != run.losses["loss"][2] and run.first_not_finite is None


def test_fp16_on_request(child: Any) -> None:
    status, run = child("O2", "Net", steps=3, half_dtype="float16")
    assert (status, run.error, run.half_dtype) == (0, "", "float16")
    _, run = child("O5", "Net", steps=1, half_dtype="float16")  # not O5's to choose
    assert run.half_dtype == "bfloat16"


def test_a_loss_that_becomes_nan(child: Any) -> None:
    _, run = child("O5", "Diverges")
    assert run.finished and run.first_not_finite == 4


def test_a_model_that_fails(child: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, run = child("O5", "Breaks")
    assert (status, run.status, run.error) == (1, "failed", "ValueError: half weights are not for me")
    assert run.steps == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_model_that_needs_more_memory_than_there_is(child: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, run = child("O0", "Hungry")
    assert (status, run.status) == (1, "out of memory")
    assert capsys.readouterr().err


def test_a_model_that_optimizes_by_hand(child: Any) -> None:
    status, run = child("O2", "TwoByHand", steps=6)
    assert (status, run.error, run.steps) == (0, "", 6)
    assert set(run.losses) == {"part0", "part1"} and all(len(values) == 6 for values in run.losses.values())
    assert len(set(run.losses["part0"])) == 6
    assert all(map(math.isfinite, run.losses["part0"]))


@pytest.mark.parametrize("steps", [1, 2])
def test_very_few_steps(steps: int, child: Any) -> None:
    _, run = child("O0", "Net", steps=steps, probes_ranges=True)
    assert run.finished and run.steps == steps and run.memory is not None and run.out_of_range is not None
    assert run.step_seconds > 0


def test_ranges_are_looked_at_and_such_steps_are_not_timed(child: Any) -> None:
    _, plain = child("O0", "Net", steps=12)
    _, run = child("O0", "Net", steps=12, probes_ranges=True)
    assert plain.out_of_range is None
    assert run.out_of_range.activations is None and run.out_of_range.gradients is None
    assert [number for number, timed in enumerate(run.timed) if not timed] == [0, 1, 3, 6, 9]
    assert run.losses == plain.losses


@pytest.mark.parametrize(
    ("model", "data", "said"),
    [
        ("NoOptimizer", "Data", "NoOptimizer.configure_optimizers returns no optimizer"),
        ("Bare", "Data", "Bare has no optimizer"),
        ("Net", "Empty", "training ended after 0 of 6 steps"),
    ],
)
def test_bad_input(model: str, data: str, said: str, child: Any) -> None:
    status, run = child("O0", model, data=data)
    assert (status, run.status) == (1, "bad input")
    assert said in run.error and "\n" not in run.error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("model", ["MadeOnTheGPU", "RunsOnTheGPU"])
def test_a_model_that_needs_cuda(model: str, child: Any) -> None:
    status, run = child("O0", model)
    assert (status, run.status) == (1, "bad input") and "needs CUDA and there is no GPU here" in run.error


def test_a_step_that_fails_leaves_no_hooks_of_autograd(child: Any) -> None:
    assert child("O2", "Breaks")[1].steps == 1  # fails in the step whose saved tensors are added up
    with torch.autograd.graph.disable_saved_tensors_hooks("refused where there are some"):
        pass


def test_outputs_that_are_nan_are_not_called_beyond_fp16(child: Any) -> None:
    _, run = child("O0", "NotANumber", probes_ranges=True)
    assert run.out_of_range is not None
    assert (run.out_of_range.activations, run.out_of_range.gradients) == (None, None)
    assert run.out_of_range.not_finite == "net.0"


@pytest.mark.parametrize("model", ["Silent", "ReturnsNone"])
def test_without_a_loss_nothing_is_recommended(model: str, child: Any) -> None:
    runs = [child(level, model, steps=3)[1] for level in ("O0", "O5")]
    assert all(run.finished and not run.losses for run in runs)
    assert recommend(judge(runs)).level is None


def test_a_logged_loss_is_enough_by_hand(child: Any) -> None:
    runs = [child(level, "TwoByHand", steps=6)[1] for level in ("O0", "O5")]
    judgements = judge(runs)
    assert all(judged.has_loss for judged in judgements) and judgements[1].distance is not None
    assert recommend(judgements).level is not None


def test_a_child_whose_parent_has_gone_ends(child: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parents = iter([100, 100, 100])
    monkeypatch.setattr("lightning_apex.cli.comparing.watch.os.getppid", lambda: next(parents, 1))
    with pytest.raises(SystemExit):
        child("O0", "Net")
