"""``lightning-apex convert``: what it sees in checkpoints of every kind, and that what it writes resumes."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn

pytest.importorskip("rich")
pytest.importorskip("jsonargparse")

from lightning_apex import ApexPrecision, FusedAdam, FusedNovoGrad, FusedSGD, amp
from lightning_apex.cli import convert_checkpoint, inspect_checkpoint
from lightning_apex.cli.program import main
from lightning_apex.fp16_utils import FP16_Optimizer, network_to_half

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
DYNAMIC = ("O1", "O2")


class Model(BoringModel):
    def configure_optimizers(self) -> Any:
        return FusedAdam(self.parameters(), lr=0.1)


def trainer(steps: int, level: str | None, folder: Path, **kwargs: Any) -> Trainer:
    if level is not None:
        kwargs["plugins"] = [ApexPrecision(level, half_dtype="bfloat16" if level != "O0" else None)]
    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    return Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        limit_train_batches=3,
        limit_val_batches=0,
        default_root_dir=folder,
        **off,
        **kwargs,
    )


@lru_cache
def blob(level: str | None) -> bytes:
    """A checkpoint after three steps."""
    torch.manual_seed(0)
    with TemporaryDirectory() as folder:
        fit = trainer(3, level, Path(folder))
        fit.fit(Model())
        fit.save_checkpoint(Path(folder, "a.ckpt"))
        return Path(folder, "a.ckpt").read_bytes()


def trained(folder: Path, level: str | None) -> Path:
    path = folder / f"{level}.ckpt"
    path.write_bytes(blob(level))
    return path


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype is b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("level", LEVELS)
def test_shows_a_checkpoint_of_each_level(level, tmp_path):
    seen = inspect_checkpoint(trained(tmp_path, level))
    assert seen.kind == ("lightning-apex" if level in DYNAMIC else "Lightning")
    assert seen.global_step == 3
    [weights] = seen.weights
    assert weights.place == "state_dict"
    assert {dtype: size.elements for dtype, size in weights.by_dtype.items()} == {"float32": 66}
    assert weights.by_dtype["float32"].bytes == 264
    [optimizer] = seen.optimizers
    assert (optimizer.looks_like, optimizer.layout, optimizer.parameters, optimizer.step) == ("AdamW", "torch", 2, 3.0)
    assert optimizer.by_dtype["float32"].elements == 132
    assert [scale.value for scale in seen.scales] == ([65536.0] if level in DYNAMIC else [])
    assert seen.exit_code == 0


@pytest.mark.parametrize("source", [None, "O1", "O2", "O3", "O5"])
@pytest.mark.parametrize("target", ["O0", "O1", "O2", "O5"])
def test_is_what_a_run_at_the_other_level_resumes_from(source, target, tmp_path):
    path = trained(tmp_path, source)
    made = convert_checkpoint(str(path), output=str(tmp_path / "made.ckpt"), to=target)
    assert made.written == tmp_path / "made.ckpt"
    before, after = load(path), load(made.written)
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step", "loops"):
        assert same(before[key], after[key])
    assert ("ApexPrecision" in after) == (target in DYNAMIC)
    if source in DYNAMIC and target in DYNAMIC:
        assert after["ApexPrecision"] == before["ApexPrecision"]
    resumed = trainer(4, target, tmp_path)
    model = Model()
    resumed.fit(model, ckpt_path=made.written)
    assert resumed.global_step == 4
    [state] = [s for s in resumed.optimizers[0].state.values() if s["exp_avg"].dim() == 2]
    assert state["step"] == 4


def test_takes_over_what_lightning_kept_of_a_scale(tmp_path):
    held = load(trained(tmp_path, "O0"))
    scaler = {"scale": 512.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 100, "_growth_tracker": 7}
    for key, value in (("MixedPrecision", scaler), ("native_amp_scaling_state", scaler)):
        torch.save(held | {key: value}, tmp_path / f"{key}.ckpt")
        made = convert_checkpoint(str(tmp_path / f"{key}.ckpt"), output=str(tmp_path / f"{key}.O2"), to="O2")
        assert [s.value for s in made.scales] == [512.0]
        after = load(made.written)
        assert key not in after
        state = after["ApexPrecision"]
        assert (state["scale"], state["_growth_tracker"], state["growth_interval"]) == (512.0, 7, 100)
    apexs = held | {"amp_scaling_state": {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 5}}}
    torch.save(apexs, tmp_path / "apex.ckpt")
    assert inspect_checkpoint(tmp_path / "apex.ckpt").kind == "Lightning with Apex"
    after = load(convert_checkpoint(str(tmp_path / "apex.ckpt"), output=str(tmp_path / "apex.O1"), to="O1").written)
    assert "amp_scaling_state" not in after
    assert (after["ApexPrecision"]["scale"], after["ApexPrecision"]["_growth_tracker"]) == (128.0, 5)
    after = load(convert_checkpoint(str(tmp_path / "apex.ckpt"), output=str(tmp_path / "apex.O4"), to="O4").written)
    assert not {"amp_scaling_state", "ApexPrecision"} & set(after)


def test_half_weights_become_fp32_and_stay_tied(tmp_path):
    tied = torch.tensor([1.5, 0.25], dtype=torch.float16)
    torch.save({"a": tied, "b": tied, "n": torch.tensor([3])}, tmp_path / "half.pt")
    seen = convert_checkpoint(str(tmp_path / "half.pt"), output=str(tmp_path / "full.pt"), to="O5")
    assert seen.weights[0].by_dtype["float16"].tensors == 1
    made = load(seen.written)
    assert same(made, {"a": tied.float(), "b": tied.float(), "n": torch.tensor([3])})
    assert made["a"].data_ptr() == made["b"].data_ptr()


class TestWeightsAlone:
    def test_load_into_a_plain_module(self, tmp_path):
        path = trained(tmp_path, "O2")
        made = convert_checkpoint(str(path), output=str(tmp_path / "w.pt"), state_dict_only=True, strip_prefix="layer.")
        plain = nn.Linear(32, 2)
        plain.load_state_dict(load(made.written))
        assert torch.equal(plain.weight, load(path)["state_dict"]["layer.weight"])

    @pytest.mark.parametrize(("to", "dtype"), [(None, torch.float16), ("O2", torch.float32), ("O5", torch.float32)])
    def test_are_fp32_for_every_level_and_as_they_are_without_one(self, tmp_path, to, dtype):
        half = torch.tensor([1.5, 0.25], dtype=torch.float16)
        torch.save({"model": {"w": half}, "epoch": 3}, tmp_path / "half.pt")
        made = convert_checkpoint(str(tmp_path / "half.pt"), output=str(tmp_path / "w.pt"), state_dict_only=True, to=to)
        assert same(load(made.written), {"w": half.to(dtype)})

    def test_leaves_out_what_has_another_prefix(self, tmp_path):
        torch.save({"net.w": torch.ones(2), "metric.sum": torch.ones(1)}, tmp_path / "a.pt")
        made = convert_checkpoint(
            str(tmp_path / "a.pt"), output=str(tmp_path / "b.pt"), state_dict_only=True, strip_prefix="net."
        )
        assert same(load(made.written), {"w": torch.ones(2)})
        assert made.notes == ("1 tensors whose names do not begin with 'net.' were left out.",)

    def test_of_one_module_among_several(self, tmp_path):
        torch.save({"g": {"w": torch.ones(2)}, "d": {"w": torch.zeros(2)}}, tmp_path / "gan.pt")
        made = convert_checkpoint(
            str(tmp_path / "gan.pt"), output=str(tmp_path / "d.pt"), state_dict_only=True, key="d"
        )
        assert same(load(made.written), {"w": torch.zeros(2)})


def apexs_layout(state: dict[str, Any]) -> dict[str, Any]:
    """Step counts once a group, as Apex's FusedAdam and FusedLAMB keep them."""
    state = copy.deepcopy(state)
    steps = [values.pop("step") for values in state["state"].values()]
    for group in state["param_groups"]:
        group["step"] = int(steps[0])
    return state


class TestApexsOptimizers:
    def trained(self, make: Any) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        net = nn.Linear(4, 3)
        optimizer = make(net.parameters())
        for _ in range(3):
            self.step(net, optimizer)
        return net, optimizer

    def step(self, net: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        net(torch.linspace(-1, 1, 8).view(2, 4)).square().sum().backward()
        optimizer.step()

    def test_continue_in_torch(self, tmp_path):
        net, optimizer = self.trained(lambda params: FusedAdam(params, lr=0.1, weight_decay=0.01))
        held = {
            "model": net.state_dict(),
            "optimizer": apexs_layout(optimizer.state_dict()),
            "amp": {"loss_scaler0": {"loss_scale": 4096.0, "unskipped": 9}},
        }
        torch.save(held, tmp_path / "apex.pt")
        seen = inspect_checkpoint(tmp_path / "apex.pt")
        assert (seen.kind, seen.optimizers[0].layout, seen.optimizers[0].step) == ("Apex", "Apex", 3.0)
        assert (seen.scales[0].place, seen.scales[0].value, seen.scales[0].good_steps) == (
            "amp.loss_scaler0",
            4096.0,
            9,
        )
        made = convert_checkpoint(str(tmp_path / "apex.pt"), output=str(tmp_path / "t.pt"), torch_optimizer=True)
        after = load(made.written)
        assert after["amp"] == held["amp"]
        other = nn.Linear(4, 3)
        other.load_state_dict(after["model"])
        torchs = torch.optim.AdamW(other.parameters())
        torchs.load_state_dict(after["optimizer"])
        self.step(net, optimizer)
        self.step(other, torchs)
        assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(net.parameters(), other.parameters(), strict=True))
        assert not any(torch.equal(a, held["model"][name]) for name, a in other.named_parameters() if a.dim() == 3)

    def test_sgd_needs_no_step(self, tmp_path):
        net, optimizer = self.trained(lambda params: FusedSGD(params, lr=0.1, momentum=0.9))
        state = optimizer.state_dict()
        for values in state["state"].values():
            del values["step"]
        torch.save({"net": net.state_dict(), "opt": state}, tmp_path / "sgd.pt")
        made = convert_checkpoint(str(tmp_path / "sgd.pt"), output=str(tmp_path / "t.pt"), torch_optimizer=True)
        assert made.optimizers[0].looks_like == "SGD"
        torchs = torch.optim.SGD(net.parameters(), lr=1.0)
        torchs.load_state_dict(load(made.written)["opt"])
        assert torchs.param_groups[0]["momentum"] == 0.9

    def test_novograd_is_left_as_ours_takes_it(self, tmp_path):
        net, optimizer = self.trained(lambda params: FusedNovoGrad(params, lr=0.1))
        torch.save({"net": net.state_dict(), "opt": optimizer.state_dict()}, tmp_path / "n.pt")
        made = convert_checkpoint(str(tmp_path / "n.pt"), output=str(tmp_path / "t.pt"), torch_optimizer=True)
        assert "which torch has not" in made.notes[0]
        assert same(load(made.written)["opt"], optimizer.state_dict())

    def test_at_a_level_amp_takes_it(self, tmp_path):
        net, optimizer = self.trained(lambda params: FusedAdam(params, lr=0.1))
        held = {
            "model": net.state_dict(),
            "optimizer": apexs_layout(optimizer.state_dict()),
            "amp": {f"loss_scaler{i}": {"loss_scale": 2.0**i, "unskipped": i} for i in (0, 1)},
        }
        torch.save(held, tmp_path / "apex.pt")
        made = load(convert_checkpoint(str(tmp_path / "apex.pt"), output=str(tmp_path / "O2"), to="O2").written)
        model = nn.Linear(4, 3)
        fused = FusedAdam(model.parameters(), lr=0.5)
        model, fused = amp.initialize(model, fused, opt_level="O2", num_losses=2, verbosity=0)
        model.load_state_dict(made["model"])
        fused.load_state_dict(made["optimizer"])
        amp.load_state_dict(made["amp"])
        state = amp.state_dict()
        assert [state[f"loss_scaler{i}"]["loss_scale"] for i in (0, 1)] == [1.0, 2.0]
        assert fused.param_groups[0]["lr"] == 0.1


class TestFP16Optimizer:
    def held(self) -> tuple[dict[str, Any], list[Tensor]]:
        torch.manual_seed(0)
        net = network_to_half(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
        optimizer = FP16_Optimizer(FusedAdam(net.parameters(), lr=0.1), static_loss_scale=128.0)
        for _ in range(3):
            optimizer.zero_grad()
            optimizer.backward(net(torch.randn(6, 4)).float().square().mean())
            optimizer.step()
        masters = [optimizer.masters.of(p).clone() if p in optimizer.masters else p.detach() for p in net.parameters()]
        return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}, masters

    @pytest.mark.parametrize("how", [{"to": "O5"}, {"torch_optimizer": True}, {"state_dict_only": True}])
    def test_its_masters_become_the_weights(self, how, tmp_path):
        held, masters = self.held()
        torch.save(held, tmp_path / "a.pt")
        seen = convert_checkpoint(str(tmp_path / "a.pt"), output=str(tmp_path / "b.pt"), **how)
        assert (seen.kind, seen.optimizers[0].masters) == ("Apex FP16_Optimizer", 4)
        assert "4 of 4 fp32 masters" in " ".join(seen.notes)
        made = load(seen.written)
        weights = made.get("model", made)
        named = [name for name in held["model"] if name.endswith(("weight", "bias"))]
        assert all(same(weights[name], master) for name, master in zip(named, masters, strict=True))
        assert any(not torch.equal(master, master.half().float()) for master in masters)
        if "state_dict_only" not in how:
            torch.optim.AdamW([m.requires_grad_() for m in masters]).load_state_dict(made["optimizer"])
        if "to" in how:
            assert made["amp"]["loss_scaler0"]["dynamic"] is False

    def test_apexs_own_pickled_scaler_is_read_without_apex(self, tmp_path, monkeypatch):
        import sys
        import types

        scaler = type("DynamicLossScaler", (), {"__module__": "apex.fp16_utils.loss_scaler"})
        modules = {name: types.ModuleType(name) for name in ("apex", "apex.fp16_utils", "apex.fp16_utils.loss_scaler")}
        modules["apex.fp16_utils.loss_scaler"].DynamicLossScaler = scaler
        held, _ = self.held()
        held["optimizer"]["loss_scaler"] = scaler()
        held["optimizer"]["loss_scaler"].cur_scale = 256.0
        with monkeypatch.context() as patch:
            for name, module in modules.items():
                patch.setitem(sys.modules, name, module)
            torch.save(held, tmp_path / "apex.pt")
        assert [scale.value for scale in inspect_checkpoint(tmp_path / "apex.pt").scales] == [256.0]
        made = load(convert_checkpoint(str(tmp_path / "apex.pt"), output=str(tmp_path / "b"), to="O2").written)
        assert made["amp"]["loss_scaler0"]["loss_scale"] == 256.0


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_sharded_checkpoint(tmp_path):
    import torch.distributed.checkpoint as dcp

    weights = {"layer.weight": torch.arange(6.0).view(2, 3), "layer.bias": torch.zeros(2)}
    dcp.save({"state_dict": weights}, checkpoint_id=tmp_path / "sharded", no_dist=True)
    seen = convert_checkpoint(
        str(tmp_path / "sharded"), output=str(tmp_path / "w.pt"), state_dict_only=True, unsafe=True
    )
    assert seen.kind == "sharded"
    assert same(load(seen.written), weights)


def test_notices_weights_that_fp16_cannot_hold(tmp_path, capsys):
    bad = {"big": torch.tensor([65520.0]), "fine": torch.tensor([65519.0]), "nan": torch.tensor([1.0, torch.nan])}
    torch.save(bad | {"inf": torch.tensor([torch.inf]), "empty": torch.empty(0)}, tmp_path / "bad.pt")
    seen = inspect_checkpoint(tmp_path / "bad.pt")
    assert list(seen.weights[0].beyond_fp16) == ["big"]
    assert list(seen.weights[0].not_finite) == ["nan", "inf"]
    assert main(["convert", str(tmp_path / "bad.pt")]) == 1
    out = capsys.readouterr().out
    assert "not finite: nan, inf" in out
    assert main(["convert", str(tmp_path / "bad.pt"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["weights"][0]["not_finite"] == ["nan", "inf"]


def test_a_sharded_checkpoint_of_lightning_becomes_one_that_resumes(tmp_path):
    """What ModelParallelStrategy writes, by hand: optimizer states by names, the rest in meta.pt."""
    import torch.distributed.checkpoint as dcp

    held = load(trained(tmp_path, "O2"))
    [state] = held.pop("optimizer_states")
    names = list(held["state_dict"])
    named = {
        "state": {names[index]: moments for index, moments in state["state"].items()},
        "param_groups": [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]],
    }
    folder = tmp_path / "sharded"
    with pytest.warns(UserWarning, match=r"torch\.distributed is disabled"):
        dcp.save({"state_dict": held.pop("state_dict"), "optimizer_0": named}, checkpoint_id=folder, no_dist=True)
    torch.save(held, folder / "meta.pt")
    made = convert_checkpoint(str(folder), output=str(tmp_path / "one.ckpt"), to="O5", unsafe=True)
    assert (made.kind, made.optimizers[0].parameters) == ("Lightning, sharded", 2)
    whole = load(made.written)
    assert same(whole["optimizer_states"][0]["state"], state["state"])
    assert whole["optimizer_states"][0]["param_groups"][0]["params"] == [0, 1]
    resumed = trainer(4, "O5", tmp_path)
    resumed.fit(Model(), ckpt_path=made.written)
    assert resumed.global_step == 4


def test_the_console_script_converts(tmp_path):
    """It puts off importing the package, parts of which need all of it."""
    path = trained(tmp_path, "O2")
    words = ["convert", str(path), "--to", "O1", "--output", str(tmp_path / "made.ckpt")]
    command = [sys.executable, "-m", "lightning_apex_program", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert load(tmp_path / "made.ckpt")["ApexPrecision"]["scale"] == 65536
