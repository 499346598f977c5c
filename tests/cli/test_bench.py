"""``lightning-apex bench``: what takes part, what is written, and bad input. What it measures is no test."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("rich")
pytest.importorskip("jsonargparse")
pytest.importorskip("matplotlib")

from lightning_apex.cli import Benchmark, CommandError, run_benchmark
from lightning_apex.cli.benching import peers, roofline, rows, steps, subjects
from lightning_apex.cli.benching.benchmark import lines_of
from lightning_apex.cli.benching.families import FAMILIES, Family, sweeps_of
from lightning_apex.cli.benching.race import Race, Spread
from lightning_apex.cli.program import main

HERE = Path(__file__)
RANGES = HERE.with_name("ranges_models.py")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="the roofline is compiled with g++")


class Norms(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 5), nn.BatchNorm1d(5))


class Twice(nn.Module):
    """Calls one BatchNorm twice, channels last, and never another."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.idle = nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.norm(x).contiguous(memory_format=torch.channels_last))


class Frozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.requires_grad_(False)


class Plain(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)


class Needs(nn.Linear):
    def __init__(self, size: int) -> None:
        super().__init__(size, size)


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def alone(monkeypatch):
    """Other packages take long to import."""
    make = peers.Peer.make
    monkeypatch.setattr(peers.Peer, "make", lambda p, params: make(p, params) if p.module == "torch.optim" else None)


@needs_compiler
def test_optimizers_on_a_models_shapes(alone, tmp_path, capsys):
    words = ["bench", "optimizers", "--model", f"{HERE}:Plain", "--optimizers", "AdamW", "LAMB"]
    assert main([*words, "--rounds", "1", "--threads", "1", "--out", str(tmp_path / "new"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "new" / "optimizers.json").read_text())
    assert (tmp_path / "new" / "optimizers.png").read_bytes().startswith(b"\x89PNG")
    names = [(line["row"], line["name"]) for line in printed["lines"]]
    assert names == [
        *(("AdamW fp32", name) for name in ("ours", "torch fused", "torch for-loop", "torch foreach")),
        ("LAMB fp32", "ours"),
    ]
    for line in printed["lines"]:
        assert line["milliseconds"] > 0 and line["over"]["median"] > 0 and line["of_roofline"]["median"] > 0
        assert line["name"] != "ours" or line["over"]["median"] == 1
    assert "LAMB: without timm (timm is not installed)." in printed["notes"]
    assert printed["machine"]["torch"] == torch.__version__


def test_shapes_of_models():
    shapes = subjects.parameter_shapes("gpt2-small", None)
    assert sum(map(math.prod, shapes)) == 124_439_808
    assert subjects.parameter_shapes(f"{HERE}:Plain", None) == [(2, 3), (2,)]
    assert subjects.parameter_shapes(f"{RANGES}:Plain", None)


def test_inputs_of_norms():
    found = subjects.norm_inputs(f"{HERE}:Norms", None, (2, 3, 8, 8))
    assert found == [((2, 4, 6, 6), torch.contiguous_format), ((2, 5), torch.contiguous_format)]
    found = subjects.norm_inputs(f"{HERE}:Twice", None, (2, 3, 8, 8))
    assert found == [((2, 3, 8, 8), torch.contiguous_format), ((2, 3, 8, 8), torch.channels_last)]


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batchnorm(dtype, capsys):
    words = ["bench", "batchnorm", "--model", f"{HERE}:Norms", "--input_shape", "2", "3", "8", "8", "--dtype", dtype]
    assert main([*words, "--rounds", "1", "--accelerator", "cpu"]) == 0
    out = capsys.readouterr().out
    assert f"2 BatchNorms, {dtype}" in out and "of roofline" in out and "torch" in out


def test_steps():
    found = run_benchmark(
        "step", model=f"{RANGES}:Plain", data=f"{RANGES}:Numbers", levels=["O0", "O5"], rounds=1, steps=2,
        accelerator="cpu",
    )  # fmt: skip
    assert isinstance(found, Benchmark)
    assert [line.name for line in found.lines] == ["O0", "O5", "32-true", "bf16-mixed", "bf16-true"]
    assert found.lines[0].over == Spread(1, 1, 1)
    assert found.reference == "O0"


def test_what_a_gpus_roofline_copies():
    """The bytes of fp32 steps, an element: AdamW 28, SGD with momentum 20, LAMB 40, NovoGrad 24."""
    for name, expected in (("AdamW", 28), ("SGD", 20), ("LAMB", 40), ("NovoGrad", 24)):
        params = [nn.Parameter(torch.ones(3))]
        params[0].grad = torch.ones(3)
        optimizer = rows.our_optimizer(FAMILIES[name], params)
        optimizer.step()
        assert roofline.bytes_of(sweeps_of(FAMILIES[name], optimizer, [params])) == expected


def test_one_that_fails_leaves_the_others(monkeypatch):
    native = steps.native_precisions
    monkeypatch.setattr(steps, "native_precisions", lambda kind: (*native(kind)[:1], "no-such"))
    found = run_benchmark("step", model=f"{RANGES}:Plain", data=f"{RANGES}:Numbers", levels=["O0"], rounds=1, steps=2)
    assert [line.name for line in found.lines] == ["O0", "32-true"]
    assert any(note.startswith("without no-such: ") for note in found.notes)


def test_none_that_trains_is_an_error():
    with pytest.raises(CommandError, match=r"no contender could train: without O0: .*the shapes are wrong"):
        run_benchmark("step", model=f"{RANGES}:Raising", data=f"{RANGES}:Numbers", levels=["O0"], rounds=1, steps=2)


def test_without_a_compiler_there_is_no_roofline(alone, monkeypatch):
    roofline._library.cache_clear()
    monkeypatch.setattr(roofline.shutil, "which", lambda name: None)
    lines, notes = rows.optimizer_row("SGD", [(3,)], 1, torch.device("cpu"))
    assert all(line.of_roofline is None for line in lines)
    assert any("no g++ here" in note for note in notes)
    roofline._library.cache_clear()


def test_ratios_are_taken_within_a_round():
    race = Race({"ours": [1.0, 10.0], "peer": [2.0, 20.0], "roofline": [0.5, 5.0]}, others=[0.0, 0.0])
    ours, peer = lines_of("row", race, "roofline", 1.5)
    assert peer.over == Spread(2, 2, 2)
    assert ours.of_roofline == Spread(0.75, 0.75, 0.75)
    assert ours.milliseconds == 5500.0


@pytest.mark.parametrize("name", FAMILIES)
def test_families_make_what_they_say(name):
    family: Family = FAMILIES[name]
    params = [nn.Parameter(torch.ones(3))]
    params[0].grad = torch.ones(3)
    optimizer = rows.our_optimizer(family, params)
    optimizer.step()
    assert set(family.states) <= set(optimizer.state[params[0]])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nothing"], "'nothing' is none of"),
        (["optimizers", "--rounds", "0"], "rounds=0 is too few"),
        (["step", "--steps", "0", "--model", "a:B"], "steps=0 is too few"),
        (["optimizers", "--optimizers", "Adam"], "optimizers: Adam is not known: use AdamW"),
        (["step", "--model", "a:B", "--levels", "O9"], "levels: O9 is not known"),
        (["optimizers", "--model", "resnet"], "model='resnet' is not known: use resnet50, gpt2-small"),
        (["optimizers", "--model", f"{HERE}:Frozen"], "Frozen has no trainable parameters"),
        (["optimizers", "--model", f"{HERE}:Needs"], "cannot be made without arguments"),
        (["optimizers", "--model", f"{HERE}:shutil"], "must make a torch.nn.Module|cannot be made"),
        (["optimizers", "--model", f"{HERE}:Plain", "--data", "a:B"], "data='a:B' is of use for step"),
        (["batchnorm"], "there is nothing to measure"),
        (["batchnorm", "--model", f"{HERE}:Plain"], "Plain has no BatchNorm"),
        (["batchnorm", "--model", f"{HERE}:Norms"], "give another --input_shape"),
        (["batchnorm", "--model", f"{HERE}:Norms", "--input_shape", "0", "3"], "has no elements"),
        (["step"], "there is nothing to train"),
        (["step", "--model", f"{HERE}:Plain"], "Plain"),
    ],
)
def test_bad_input(words, sentence, capsys):
    import re

    assert main(["bench", *words]) == 2
    captured = capsys.readouterr()
    [line] = [line for line in captured.err.splitlines() if line.startswith("lightning-apex: ")]
    assert re.search(sentence, line)
    assert captured.out == ""


def test_an_unwritable_folder(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["bench", "optimizers", "--out", str(tmp_path / "file" / "x")]) == 2
    assert "cannot be written" in capsys.readouterr().err
