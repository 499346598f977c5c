"""Checkpoints hold fp32 weights, and a resumed run is the uninterrupted one, bit for bit."""

import copy
import itertools

import pytest
import torch
from helpers import (
    LEVELS,
    MASTERED,
    SCALED,
    Net,
    all_fp32,
    assert_close,
    assert_same,
    batches,
    every_step,
    fit,
    plugin,
    trainer,
    weights,
)
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

OPTIMIZERS = ["fused_adam", "fused_sgd", "torch_adamw"]


def decay(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)


class Masters(Callback):
    """Copies the masters themselves, read from the engine, at the end of training."""

    def on_train_end(self, trainer, pl_module):
        masters = trainer.precision_plugin.masters
        self.values = {
            name: (p if masters is None or p not in masters else masters.get(p)).detach().clone()
            for name, p in pl_module.named_parameters()
        }


def scaling(level):
    return {"init_scale": 256.0, "growth_interval": 3} if level in SCALED else {}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_2n_steps_equal_n_save_load_n(level, optimizer, tmp_path):
    overflow = [1, 6] if level in SCALED else []

    def model(seen=0):
        made = Net(optimizer, every_step(decay), overflow_at=overflow)
        made.seen = seen
        return made

    # no_shuffle data: the second run continues with the batches of the second epoch, which are those of the first
    straight = model()
    whole = fit(straight, plugin(level, **scaling(level)), batches(5), epochs=2)
    first = model()
    half = fit(first, plugin(level, **scaling(level)), batches(5), epochs=1)
    half.save_checkpoint(tmp_path / "half.ckpt")
    second = model(seen=5)
    rest = trainer(plugin(level, **scaling(level)), 2)
    rest.fit(second, batches(5), ckpt_path=tmp_path / "half.ckpt")

    assert second.losses == straight.losses[5:]
    assert_same(weights(second), weights(straight))
    assert_same(rest.optimizers[0].state_dict(), whole.optimizers[0].state_dict())
    schedulers = [t.lr_scheduler_configs[0].scheduler.state_dict() for t in (rest, whole)]
    assert_same(*schedulers)
    assert_same(rest.precision_plugin.state_dict(), whole.precision_plugin.state_dict())
    assert rest.global_step == whole.global_step == 10


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")  # order is fixed
@pytest.mark.parametrize("optimizer", ["fused_adam", "torch_adamw"])
@pytest.mark.parametrize("level", LEVELS)
def test_resume_from_the_middle_of_an_epoch(level, optimizer, tmp_path):
    """A checkpoint written during training, by a ModelCheckpoint, into a fresh trainer."""

    same = batches(4, only=(0, 0, 0, 0))  # Lightning starts a plain loader anew

    def saver(folder):
        return ModelCheckpoint(tmp_path / folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)

    straight = Net(optimizer)
    whole = trainer(level, 2, enable_checkpointing=True, callbacks=[saver(".")])
    whole.fit(straight, same)
    second = Net(optimizer)
    rest = trainer(level, 2, enable_checkpointing=True, callbacks=[saver("rest")])
    rest.fit(second, same, ckpt_path=tmp_path / "step=3.ckpt")
    assert second.losses == straight.losses[3:]
    assert_same(weights(second), weights(straight))
    assert_same(rest.optimizers[0].state_dict(), whole.optimizers[0].state_dict())


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_checkpoint_during_training_holds_the_masters(level, weights_only, tmp_path):
    class Save(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 2:
                trainer.save_checkpoint(tmp_path / "x.ckpt", weights_only=weights_only)
                masters = trainer.precision_plugin.masters
                half = {n: p for n, p in pl_module.named_parameters() if p.dtype is not torch.float32}
                self.expected = {n: masters.get(p).clone() for n, p in half.items()} if masters else {}
                self.half = {n: p.detach().clone() for n, p in half.items()}

    save = Save()
    model = Net()
    fit(model, level, batches(4), callbacks=[save])
    saved = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert all(t.dtype is torch.float32 for t in saved["state_dict"].values() if t.is_floating_point())
    assert set(saved["state_dict"]) == set(model.state_dict())
    assert (len(save.expected) > 0) is (level in MASTERED)
    for name, master in save.expected.items():
        assert torch.equal(saved["state_dict"][name], master)
        assert not torch.equal(master, save.half[name].float())  # or the test would say nothing
    loaded = Net()
    loaded.load_state_dict(saved["state_dict"])
    assert ("optimizer_states" in saved) is not weights_only


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_moments_in_a_checkpoint_are_fp32(level, optimizer, tmp_path):
    if level == "O3" and optimizer.startswith("torch"):
        pytest.skip("without masters, torch's own optimizers keep their state in the parameters' type")
    model = Net(optimizer)
    made = fit(model, level, batches(3))
    made.save_checkpoint(tmp_path / "x.ckpt")
    saved = torch.load(tmp_path / "x.ckpt", weights_only=True)
    moments = [t for s in saved["optimizer_states"][0]["state"].values() for t in s.values() if torch.is_tensor(t)]
    assert moments
    assert all(t.dtype is torch.float32 for t in moments)


@pytest.mark.parametrize("level", LEVELS)
def test_weights_after_fit_are_the_masters(level):
    model, masters = Net(), Masters()
    fit(model, level, batches(4), callbacks=[masters])
    values = {n: p.detach() for n, p in model.named_parameters()}
    assert_same(values, {n: t.float() for n, t in masters.values.items()})


@pytest.mark.parametrize("level", LEVELS)
def test_load_from_checkpoint(level, tmp_path):
    model = Net()
    made = fit(model, level, batches(3))
    made.save_checkpoint(tmp_path / "x.ckpt")
    loaded = Net.load_from_checkpoint(tmp_path / "x.ckpt")
    assert all_fp32(loaded)
    assert_same(weights(loaded), weights(model))


PAIRS = list(itertools.product(LEVELS, LEVELS))
FEW = [("O0", "O2"), ("O2", "O0"), ("O1", "O5"), ("O5", "O1"), ("O2", "O5"), ("O3", "O2"), ("O2", "O3"), ("O4", "O1")]


def resumes(saved_by, resumed_at, optimizer, tmp_path):
    model = Net(optimizer)
    first = fit(model, saved_by, batches(5))
    first.save_checkpoint(tmp_path / "x.ckpt")
    expected = weights(model)
    second = Net(optimizer)
    start = {}

    class Look(Callback):
        def on_train_start(self, trainer, pl_module):
            start.update(weights(pl_module))
            start["moments"] = copy.deepcopy(trainer.optimizers[0].state_dict()["state"])

    rest = trainer(resumed_at, 3, callbacks=[Look()])
    rest.fit(second, batches(5), ckpt_path=tmp_path / "x.ckpt")
    moments = start.pop("moments")
    expected_moments = first.optimizers[0].state_dict()["state"]
    if resumed_at == "O3":
        assert_close(start, expected, atol=1e-2)
    else:
        assert_same(start, expected)
        if saved_by != "O3":
            assert_same(moments, expected_moments)
    assert rest.global_step == 15
    assert len(second.losses) == 10
    assert max(second.losses[:3]) < max(model.losses[:2]) + 0.1  # no spike
    assert all_fp32(second)


@pytest.mark.parametrize("optimizer", ["fused_adam", "torch_adamw"])
@pytest.mark.parametrize(("saved_by", "resumed_at"), FEW)
def test_a_level_resumes_another(saved_by, resumed_at, optimizer, tmp_path):
    resumes(saved_by, resumed_at, optimizer, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("saved_by", "resumed_at"), PAIRS)
def test_any_level_resumes_any_other(saved_by, resumed_at, optimizer, tmp_path):
    resumes(saved_by, resumed_at, optimizer, tmp_path)


@pytest.mark.parametrize("native", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("level", LEVELS)
def test_native_checkpoint_resumes_and_back(level, native, tmp_path):
    resumes(native, level, "torch_adamw", tmp_path)
    resumes(level, native, "torch_adamw", tmp_path)


@pytest.mark.parametrize("level", LEVELS)
def test_native_16_mixed_checkpoint_resumes_with_its_scale(level, tmp_path):
    """What Lightning's own 16-mixed writes: GradScaler's state under its plugin's name."""
    first = fit(Net("torch_adamw"), "32-true", batches(3))
    first.save_checkpoint(tmp_path / "x.ckpt")
    saved = torch.load(tmp_path / "x.ckpt", weights_only=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0, growth_interval=77)
    scaler.scale(torch.ones(()))  # its state is made lazily
    saved["MixedPrecision"] = scaler.state_dict() | {"_growth_tracker": 5}
    torch.save(saved, tmp_path / "x.ckpt")
    seen = {}

    class Look(Callback):
        def on_train_start(self, trainer, pl_module):
            seen.update(trainer.precision_plugin.state_dict())

    second = Net("torch_adamw")
    trainer(level, 2, callbacks=[Look()]).fit(second, batches(3), ckpt_path=tmp_path / "x.ckpt")
    if level in SCALED:
        assert (seen["scale"], seen["_growth_tracker"], seen["growth_interval"]) == (4096.0, 5, 77)
    else:
        assert seen == {}
    assert len(second.losses) == 3


@pytest.mark.parametrize("level", SCALED)
def test_native_amp_takes_our_scale(level, tmp_path):
    """Our scaler's state is one that torch's GradScaler loads."""
    made = fit(Net(overflow_at=[0]), plugin(level, init_scale=512.0), batches(3))
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(made.precision_plugin.state_dict())
    assert scaler.get_scale() == 256.0


@pytest.mark.parametrize("level", SCALED)
def test_scale_state_is_in_the_checkpoint(level, tmp_path):
    made = fit(Net(overflow_at=[1, 2]), plugin(level, init_scale=64.0, hysteresis=2, growth_interval=10), batches(7))
    made.save_checkpoint(tmp_path / "x.ckpt")
    saved = torch.load(tmp_path / "x.ckpt", weights_only=True)["ApexPrecision"]
    assert saved["scale"] == 32.0
    assert saved["_growth_tracker"] == 4
    assert saved["skipped_steps"] == 2


@pytest.mark.parametrize("fn", ["test", "validate", "predict"])
@pytest.mark.parametrize("level", SCALED)
def test_evaluating_a_checkpoint_leaves_the_live_scale(level, fn, tmp_path):
    other = fit(Net(), plugin(level, init_scale=1024.0), batches(2))
    other.save_checkpoint(tmp_path / "x.ckpt")
    model = Net()
    made = fit(model, plugin(level, init_scale=8.0), batches(2))
    assert made.scaler.get_scale() == 8.0
    kwargs = {} if fn == "predict" else {"verbose": False}
    getattr(made, fn)(model, batches(1), ckpt_path=tmp_path / "x.ckpt", weights_only=True, **kwargs)
    assert made.scaler.get_scale() == 8.0


@pytest.mark.parametrize("level", LEVELS)
def test_fit_goes_on_from_its_own_checkpoint_in_the_same_trainer(level, tmp_path):
    straight = Net()
    fit(straight, level, batches(3), epochs=2)
    model = Net()
    made = fit(model, level, batches(3))
    made.save_checkpoint(tmp_path / "x.ckpt")
    made.fit_loop.max_epochs = 2
    made.fit(model, batches(3), ckpt_path=tmp_path / "x.ckpt")
    assert_same(weights(model), weights(straight))
