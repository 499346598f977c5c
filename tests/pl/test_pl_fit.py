"""The plugins of lightning_apex.pl in a Trainer of pytorch_lightning: what they do in Lightning's other package."""

import pickle

import pytest
import pytorch_lightning
import torch
from pl_support import LEVELS, NETS, PACKAGES, OldNet, assert_same, batches, plugin, trainer, weights
from pytorch_lightning.callbacks import EMAWeightAveraging
from torch import nn

import lightning_apex
import lightning_apex.pl
from lightning_apex import FusedAdam, FusedSGD

OLD = "pytorch_lightning"


def fit(package, level, options=None, model=None, count=4, **kwargs):
    model = model or NETS[package]()
    made = trainer(package, level, options, **kwargs)
    made.fit(model, batches(count))
    return model, made


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, FusedSGD, FusedAdam])
@pytest.mark.parametrize("level", LEVELS)
def test_every_level_trains_as_under_lightning(level, optimizer):
    ends = []
    for package, net in NETS.items():
        model = net(optimizer=optimizer)
        before = weights(model)
        fit(package, level, model=model, accumulate_grad_batches=2)
        assert not torch.equal(before["net.0.weight"], model.net[0].weight)
        assert all(p.dtype is torch.float32 for p in model.parameters())
        ends.append(weights(model))
    assert_same(*ends)


def by_hand(clip, value):
    model = OldNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=model.lr)
    for x, y in batches():
        optimizer.zero_grad()
        nn.functional.mse_loss(model.net(x), y).backward()
        (nn.utils.clip_grad_value_ if value else nn.utils.clip_grad_norm_)(model.parameters(), clip)
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize("value", [False, True])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, FusedSGD])
def test_clipping_equals_torchs(optimizer, value):
    algorithm = "value" if value else "norm"
    model, _ = fit(
        OLD, "O0", model=OldNet(optimizer=optimizer), gradient_clip_val=0.01, gradient_clip_algorithm=algorithm
    )
    for name, expected in by_hand(0.01, value).items():
        torch.testing.assert_close(model.state_dict()[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("level", LEVELS)
def test_clipping_really_clips(level, algorithm):
    """With SGD and a learning rate of 1, one step moves the weights by the clipped gradient."""
    model = OldNet(lr=1.0)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    fit(OLD, level, model=model, count=1, gradient_clip_val=0.02, gradient_clip_algorithm=algorithm)
    moved = torch.cat([(p.detach() - before[n]).flatten() for n, p in model.named_parameters()])
    size = moved.norm() if algorithm == "norm" else moved.abs().max()
    torch.testing.assert_close(size, torch.tensor(0.02), rtol=0.5 if level == "O3" else 1e-2, atol=0)


class Manual(OldNet):
    def __init__(self):
        super().__init__(lr=1.0)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(optimizer, gradient_clip_val=0.02, gradient_clip_algorithm="norm")
        optimizer.step()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_manual_clipping_really_clips(level):
    model = Manual()
    before = [p.detach().clone() for p in model.parameters()]
    fit(OLD, level, model=model, count=1)
    moved = torch.cat([(p.detach() - b).flatten() for p, b in zip(model.parameters(), before, strict=True)])
    torch.testing.assert_close(moved.norm(), torch.tensor(0.02), rtol=1e-2, atol=0)


class Watching(OldNet):
    def on_before_optimizer_step(self, optimizer):
        self.norm = torch.cat([p.grad.flatten() for p in self.parameters()]).norm().item()


def test_hooks_of_the_module_see_unscaled_gradients():
    scaled, plain = Watching(optimizer=FusedSGD), Watching(optimizer=FusedSGD)
    fit(OLD, "O1", {"loss_scale": 1024.0}, scaled, count=1)
    fit(OLD, "O1", {"loss_scale": 1.0}, plain, count=1)
    assert scaled.norm == pytest.approx(plain.norm, rel=1e-2)


def test_overflow_is_skipped_and_reported():
    model = OldNet(overflow_at=(1,), optimizer=FusedAdam)
    monitor = lightning_apex.pl.LossScaleMonitor()
    made = trainer(OLD, "O2", {"init_scale": 1024.0}, callbacks=[monitor])
    made.fit(model, batches())
    assert made.precision_plugin.scaler.get_scale() == 512.0
    assert made.callback_metrics["skipped_steps"] == 1
    assert made.callback_metrics["loss_scale"] == 512.0
    assert made.precision_plugin.last_overflow is not None


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("first", PACKAGES)
def test_what_one_package_saved_the_other_resumes(first, level, tmp_path):
    """6 epochs in one go equal 3, save, and 3 in the other package, bit for bit; the loss scale comes along."""
    options = {"init_scale": 256.0, "growth_interval": 5, "loss_scale": "dynamic"}
    second = next(name for name in PACKAGES if name != first)
    whole, whole_trainer = fit(first, level, options, NETS[first](optimizer=FusedAdam), max_epochs=6)
    _, half = fit(first, level, options, NETS[first](optimizer=FusedAdam), max_epochs=3)
    half.save_checkpoint(tmp_path / "half.ckpt")
    model = NETS[second](optimizer=FusedAdam)
    resumed = trainer(second, level, options, max_epochs=6)
    resumed.fit(model, batches(), ckpt_path=tmp_path / "half.ckpt")
    assert_same(weights(model), weights(whole))
    assert resumed.precision_plugin.scaler.state_dict() == whole_trainer.precision_plugin.scaler.state_dict()


class History(pytorch_lightning.Callback):
    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.steps.append(weights(pl_module)["net.0.weight"])


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_averages_are_of_fp32_weights(level):
    """A decay this slow changes the average by less than a half weight can show."""
    history, decay = History(), 0.999
    averaging = EMAWeightAveraging(decay=decay, update_every_n_steps=1)
    model, _ = fit(OLD, level, callbacks=[history, averaging], max_epochs=2)
    average = history.steps[0]
    for step in history.steps[1:]:
        average = decay * average + (1 - decay) * step
    torch.testing.assert_close(model.net[0].weight.detach(), average, rtol=0, atol=1e-6)


def test_sync_batch_norm_by_plugin_and_by_name():
    registry = pytorch_lightning.strategies.StrategyRegistry
    assert type(registry.get("apex_ddp")) is lightning_apex.pl.ApexDDPStrategy
    assert type(registry.get("apex_ddp")._layer_sync) is lightning_apex.pl.ApexSyncBatchNorm
    _, made = fit(OLD, "O0", plugins=[lightning_apex.pl.ApexSyncBatchNorm()])
    assert type(made._accelerator_connector._layer_sync) is lightning_apex.pl.ApexSyncBatchNorm
    model = lightning_apex.pl.ApexSyncBatchNorm().apply(OldNet())
    assert type(model.net[1]) is lightning_apex.SyncBatchNorm


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", [name for name in lightning_apex.pl.__all__ if name != "ApexCLI"])
def test_a_class_belongs_to_one_package(name, package):
    """A class that inherits from both is accepted by both, and clips nothing."""
    kind = getattr(PACKAGES[package][1], name)
    roots = {base.__module__.partition(".")[0] for base in kind.__mro__} - {
        "lightning_apex",
        "builtins",
        "abc",
        "typing",
    }
    assert roots & {"lightning", "pytorch_lightning", "lightning_fabric"}
    assert not (roots & {"lightning"} and roots & {"pytorch_lightning", "lightning_fabric"})
    assert kind.__qualname__ == name and kind.__doc__


@pytest.mark.parametrize("package", PACKAGES)
def test_pickles(package):
    ours = PACKAGES[package][1]
    made = plugin(ours, "O2", keep_fp32=["net.0"])
    copied = pickle.loads(pickle.dumps(made))
    assert type(copied) is ours.ApexPrecision
    assert copied.level == made.level and copied.keep_fp32 == ("net.0",)
    assert type(pickle.loads(pickle.dumps(ours.ApexSyncBatchNorm()))) is ours.ApexSyncBatchNorm


def test_the_same_names_are_offered():
    assert set(lightning_apex.pl.__all__) == {*lightning_apex.plugins.__all__, "ApexCLI"}
    assert all(getattr(lightning_apex, name) for name in lightning_apex.pl.__all__)
