"""Lightning's callbacks and tools beside the plugin, and the LossScaleMonitor."""

import logging

import pytest
import torch
from helpers import (
    LEVELS,
    SCALED,
    Net,
    all_fp32,
    assert_close,
    assert_same,
    batches,
    every_step,
    fit,
    halving,
    plugin,
    trainer,
    weights,
)
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_apex import LossScaleMonitor


class Log(DummyLogger):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, {key: float(value) for key, value in metrics.items()}))

    def column(self, key):
        return [row[key] for _, row in self.rows if key in row]


@pytest.mark.parametrize("optimizer", ["fused_adam", "torch_adamw"])
@pytest.mark.parametrize("level", LEVELS)
def test_monitor_logs_the_norm_of_unscaled_gradients(level, optimizer):
    log, witness = Log(), []

    class Norms(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            witness.append(torch.stack([p.grad.norm() for p in pl_module.parameters()]).norm().item())

    kwargs = {"logger": log, "log_every_n_steps": 1, "gradient_clip_val": 0.2}
    fit(Net(optimizer), level, batches(4), callbacks=[LossScaleMonitor()], **kwargs)
    fit(Net(optimizer), "32-true", batches(4), callbacks=[Norms()], gradient_clip_val=0.2)
    assert log.column("grad_norm") == pytest.approx(witness, rel={"O0": 1e-5, "O3": 0.2}.get(level, 0.06))


@pytest.mark.parametrize("level", SCALED)
def test_monitor_logs_scale_and_skips(level):
    log = Log()
    model = Net(overflow_at=[1, 2])
    kwargs = {"logger": log, "log_every_n_steps": 1}
    fit(model, plugin(level, init_scale=64.0), batches(4), callbacks=[LossScaleMonitor()], **kwargs)
    assert log.column("loss_scale") == [64.0, 32.0, 16.0, 16.0]
    assert log.column("skipped_steps") == [0.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("level", SCALED)
def test_monitor_reports_each_overflow_in_one_line(level, caplog):
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)
    logging.getLogger("lightning.fabric").setLevel(logging.INFO)

    class Bad(Net):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            return loss + self.net[3].bias.sum() * float("inf") if batch_idx in (1, 3) else loss

    with caplog.at_level(logging.INFO):
        fit(Bad(), plugin(level, init_scale=64.0), batches(5), callbacks=[LossScaleMonitor()])
    lines = [r.getMessage() for r in caplog.records if "loss scale" in r.getMessage()]
    assert len(lines) == 2
    assert "64 -> 32" in lines[0]
    assert "32 -> 16" in lines[1]
    assert all("net.3" in line and "net.0" not in line and "\n" not in line for line in lines)
    assert "2" in lines[0].split(":")[0]  # the step
    assert "4" in lines[1].split(":")[0]


def test_monitor_reports_overflows_from_windows_of_accumulation(caplog):
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)
    with caplog.at_level(logging.INFO):
        fit(Net(overflow_at=[1]), "O2", batches(4), accumulate_grad_batches=2, callbacks=[LossScaleMonitor()])
    assert len([r for r in caplog.records if "loss scale" in r.getMessage()]) == 1


def test_monitor_needs_the_plugin():
    with pytest.raises(MisconfigurationException, match="ApexPrecision"):
        fit(Net(), "32-true", batches(1), callbacks=[LossScaleMonitor()])


def test_monitor_in_the_progress_bar():
    class Look(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.shown = dict(trainer.progress_bar_metrics)

    look = Look()
    fit(Net(), "O1", batches(2), callbacks=[LossScaleMonitor(), look])
    assert {"loss_scale", "skipped_steps", "grad_norm"} <= set(look.shown)
    look = Look()
    fit(Net(), "O1", batches(2), callbacks=[LossScaleMonitor(prog_bar=False), look])
    assert "loss_scale" not in look.shown


@pytest.mark.parametrize("level", LEVELS)
def test_monitor_changes_nothing(level):
    model, witness = Net(), Net()
    fit(model, level, batches(4), callbacks=[LossScaleMonitor()])
    fit(witness, level, batches(4))
    assert_same(weights(model), weights(witness))


@pytest.mark.parametrize("level", LEVELS)
def test_monitor_in_manual_optimization(level):
    class Manual(Net):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.optimizers().zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()

    log = Log()
    fit(Manual(), level, batches(3), callbacks=[LossScaleMonitor()], logger=log, log_every_n_steps=1)
    assert len(log.column("grad_norm")) == 3


class Backbone(Net):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x):
        return self.net(self.backbone(x))

    def configure_optimizers(self):
        return self.make_optimizer([p for p in self.parameters() if p.requires_grad])


@pytest.mark.parametrize("optimizer", ["fused_adam", "torch_adamw"])
@pytest.mark.parametrize("level", LEVELS)
def test_backbone_finetuning(level, optimizer):
    model, witness = Backbone(optimizer), Backbone(optimizer)
    before = model.backbone[0].weight.detach().clone()
    frozen = {}

    class Look(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                frozen["weight"] = pl_module.state_dict()["backbone.0.weight"].clone()

    def finetuning():
        return BackboneFinetuning(unfreeze_backbone_at_epoch=2, verbose=False)

    fit(model, level, batches(3), epochs=4, callbacks=[finetuning(), Look()])
    fit(witness, "32-true", batches(3), epochs=4, callbacks=[finetuning()])
    assert_close({"w": frozen["weight"]}, {"w": before}, atol=5e-3 if level == "O3" else 0.0)
    moved = (model.backbone[0].weight - before).abs().max()
    assert moved > 1e-3
    assert max(abs(a - b) for a, b in zip(model.losses, witness.losses, strict=True)) < 0.2
    assert all_fp32(model)


@pytest.mark.parametrize("level", LEVELS)
def test_learning_rate_monitor(level):
    log = Log()
    model = Net("fused_adam", every_step(halving))
    fit(model, level, batches(3), callbacks=[LearningRateMonitor("step")], logger=log, log_every_n_steps=1)
    assert log.column("lr-FusedAdam") == [0.01, 0.005, 0.0025]


@pytest.mark.parametrize("level", LEVELS)
def test_model_summary(level, capsys):
    made = trainer(level, enable_model_summary=True, callbacks=[ModelSummary(max_depth=2)])
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)
    made.fit(Net(), batches(1))


@pytest.mark.parametrize("level", LEVELS)
def test_csv_logger_and_model_checkpoint(level, tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "best", monitor="val_loss", save_weights_only=True)
    model = Net()
    made = trainer(level, 2, logger=CSVLogger(tmp_path), enable_checkpointing=True, callbacks=[checkpoint])
    made.fit(model, batches(3), batches(1))
    best = torch.load(checkpoint.best_model_path, weights_only=True)
    assert_same(best["state_dict"], weights(model))


@pytest.mark.parametrize("level", LEVELS)
def test_gradient_accumulation_scheduler(level):
    model = Net()
    made = fit(model, level, batches(4), epochs=2, callbacks=[GradientAccumulationScheduler({0: 2, 1: 4})])
    assert made.global_step == 3


@pytest.mark.parametrize("level", LEVELS)
def test_overfit_batches(level):
    model = Net()
    fit(model, level, batches(4), epochs=4, overfit_batches=1)
    assert model.losses[-1] < model.losses[0]


class Tunable(Net):
    lr = 1e-2

    def configure_optimizers(self):
        from lightning_apex import FusedSGD

        return FusedSGD(self.parameters(), lr=self.lr)


@pytest.mark.parametrize("level", LEVELS)
def test_lr_find_restores_weights_and_scale(level):
    model = Tunable()
    before = weights(model)
    made = trainer(level, max_steps=5)
    tuner = Tuner(made)
    found = tuner.lr_find(model, batches(12), num_training=10, update_attr=False)
    assert found is not None
    assert all_fp32(model)
    assert_close(weights(model), before, atol=5e-3 if level == "O3" else 0.0)
    if level in SCALED:
        assert made.scaler.get_scale() == 2.0**16
        assert made.scaler.state_dict()["_growth_tracker"] == 0
    made.fit(model, batches(5))
    witness = Tunable()
    fit(witness, level, batches(5), max_steps=5)
    assert_close(weights(model), weights(witness), atol=1e-2 if level == "O3" else 0.0)


COMPILED = [
    pytest.param(
        level, what, marks=[] if (level, what) in (("O0", "submodule"), ("O2", "module")) else pytest.mark.slow
    )
    for level in LEVELS
    for what in ("module", "submodule", "method")
]


@pytest.mark.parametrize(("level", "what"), COMPILED)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch._dynamo's own
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at everything
def test_torch_compile(level, what):
    torch._dynamo.reset()
    model, witness = Net(), Net()
    if what == "module":
        compiled = torch.compile(model, backend="eager")
    elif what == "submodule":
        model.net = torch.compile(model.net, backend="eager")
        compiled = model
    else:
        model.compile(backend="eager")
        compiled = model
    fit(compiled, level, batches(3))
    fit(witness, level, batches(3))
    ours = {n.replace("_orig_mod.", ""): p for n, p in weights(model).items()}
    assert_close(ours, weights(witness), atol=5e-2 if level == "O3" else 2e-3)
    assert all_fp32(model)
