"""What people have met while they saved, resumed and tuned, where no other file shows it; see tests/field."""

import pytest
import torch
from helpers import LEVELS, SCALED, Net, assert_close, assert_same, batches, fit, plugin, trainer, weights
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader

from lightning_apex import ApexPrecision, FusedAdam, FusedSGD


class Sized(Net):
    def __init__(self, lr: float = 0.05):
        super().__init__()
        self.batch_size, self.lr = 2, lr
        self.sizes = []

    def train_dataloader(self):
        return DataLoader(batches(64).dataset, self.batch_size)

    def val_dataloader(self):
        return batches(1)

    def training_step(self, batch, batch_idx):
        self.sizes.append(len(batch[0]))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return FusedSGD(self.parameters(), lr=self.lr)


@pytest.mark.parametrize(("level", "mode"), [*((level, "power") for level in LEVELS), ("O2", "binsearch")])
def test_scale_batch_size(level, mode):
    model = Sized()
    before = weights(model)
    made = trainer(level, max_steps=2)
    found = Tuner(made).scale_batch_size(model, mode=mode, max_trials=2, init_val=2, steps_per_trial=2)
    assert found == model.batch_size > 2
    assert_close(weights(model), before, atol=5e-3 if level == "O3" else 0.0)
    if level in SCALED:
        assert made.scaler.state_dict()["_growth_tracker"] == 0
    model.sizes.clear()
    made.fit(model)
    assert model.sizes == [found, found]


class Data(LightningDataModule):
    def train_dataloader(self):
        return batches(12)


class Bare(Net):
    def __init__(self, lr: float = 0.05):
        super().__init__()
        self.lr = lr

    configure_optimizers = None


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_lr_find_with_an_optimizer_of_the_cli(level):
    """It is made before the Trainer, of the parameters as they are then, and serves every run."""
    pytest.importorskip("jsonargparse")
    words = ["--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--trainer.logger=false", "--optimizer=FusedAdam"]
    words += ["--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false", "--optimizer.lr=0.05"]
    words += ["--trainer.enable_model_summary=false", "--trainer.plugins=ApexPrecision"]
    words += [f"--trainer.plugins.opt_level={level}"]
    words += [] if level == "O5" else ["--trainer.plugins.half_dtype=bfloat16"]
    made = LightningCLI(Bare, Data, args=words, save_config_callback=None, run=False)
    before = weights(made.model)
    Tuner(made.trainer).lr_find(made.model, made.datamodule, num_training=8, update_attr=False)
    assert_close(weights(made.model), before, atol=0.0)
    made.trainer.fit(made.model, made.datamodule)
    assert type(made.trainer.optimizers[0]) is FusedAdam
    assert not torch.equal(made.model.net[0].weight, before["net.0.weight"])
    assert made.model.losses[-1] < made.model.losses[0]


class Late(Net):
    """Its layers are made in setup(), as those of models that ask their data for sizes."""

    def __init__(self):
        super().__init__("torch_adamw")
        del self.net

    def setup(self, stage):
        if not hasattr(self, "net"):
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


@pytest.mark.parametrize("level", LEVELS)
def test_layers_made_in_setup_resume(level, tmp_path):
    whole, first, rest = Late(), Late(), Late()
    fit(whole, level, batches(3), epochs=2)
    fit(first, level, batches(3)).save_checkpoint(tmp_path / "x.ckpt")
    trainer(level, 2).fit(rest, batches(3), ckpt_path=tmp_path / "x.ckpt")
    assert_close(weights(rest), weights(whole), atol=2e-2 if level == "O3" else 0.0)


@pytest.mark.parametrize("level", LEVELS)
def test_a_checkpoint_loads_without_running_code(level, tmp_path):
    """torch loads weights and plain values only, unless told otherwise; an enumeration in our state would fail."""
    fit(Net(overflow_at=[1]), level, batches(3)).save_checkpoint(tmp_path / "x.ckpt")
    assert torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"]
    model = Net()
    trainer(level, 2).fit(model, batches(3), ckpt_path=tmp_path / "x.ckpt", weights_only=True)
    assert len(model.losses) == 3


class MyPrecision(ApexPrecision):
    """A user's own; Lightning keeps a plugin's state under the name of its class."""


@pytest.mark.parametrize("level", SCALED)
def test_a_subclass_takes_over_the_state_of_the_plugin(level, tmp_path):
    fit(Net(overflow_at=[0, 1]), plugin(level, init_scale=1024.0), batches(3)).save_checkpoint(tmp_path / "x.ckpt")
    mine = MyPrecision(level, half_dtype="bfloat16")
    trainer(mine, 2).fit(Net(), batches(3), ckpt_path=tmp_path / "x.ckpt")
    assert mine.scaler.get_scale() == 256.0 and mine.scaler.skipped_steps == 2


@pytest.mark.parametrize("when", ["before the fit", "after the fit"])
def test_the_plugins_state_may_be_loaded_at_any_time(when):
    state = fit(Net(overflow_at=[0]), plugin("O2", init_scale=512.0), batches(4)).precision_plugin.state_dict()
    made = plugin("O2")
    if when == "after the fit":
        fit(Net(), made, batches(2))
    made.load_state_dict(state)
    assert made.scaler.get_scale() == 256.0
    assert_same(made.state_dict(), state)
    fit(Net(), made, batches(2))
    assert made.state_dict()["_growth_tracker"] == state["_growth_tracker"] + 2


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_throughput_monitor_runs(level):
    class Measured(Net):
        flops_per_batch = 1000

    monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2)
    fit(Measured(), level, batches(4), callbacks=[monitor], logger=CSVLogger("."), log_every_n_steps=1)


def test_an_optimizer_shows_its_state():
    model = Net()
    made = fit(model, "O2", batches(2))
    state = made.optimizers[0].state
    assert set(state) == set(model.parameters())
    assert all(entry["exp_avg"].dtype is torch.float32 for entry in state.values())
