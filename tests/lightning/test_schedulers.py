"""Learning-rate schedulers stand still with skipped steps."""

import pytest
import torch
from helpers import LEVELS, Net, batches, every_step, fit, halving, plugin, trainer
from torch.optim import lr_scheduler

OPTIMIZERS = ["fused_adam", "torch_adamw"]


class LRs(Net):
    """Notes the learning rate each batch is trained with, and the one after it."""

    def on_train_start(self):
        self.lrs, self.used = [], []

    def on_train_batch_start(self, batch, batch_idx):
        self.used.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.lrs.append(self.trainer.optimizers[0].param_groups[0]["lr"])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_by_step_and_by_epoch_without_skips(level, optimizer):
    model = LRs(optimizer, every_step(halving))
    fit(model, level, batches(3))
    assert model.lrs == [0.005, 0.0025, 0.00125]
    model = LRs(optimizer, lambda o: halving(o))
    fit(model, level, batches(2), epochs=3)
    assert model.used == [0.01, 0.01, 0.005, 0.005, 0.0025, 0.0025]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_three_overflows_then_four_good_batches(level, optimizer):
    model = LRs(optimizer, every_step(halving), overflow_at=[0, 1, 2])
    fit(model, level, batches(7))
    # a "scheduler before optimizer" warning would be an error here
    assert model.lrs == [0.01, 0.01, 0.01, 0.005, 0.0025, 0.00125, 0.000625]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("skipped", [[0], [1], [0, 2]])
def test_two_schedulers_of_one_optimizer_both_stand_still(skipped, optimizer):
    class Two(LRs):
        def configure_optimizers(self):
            made = self.make_optimizer(self.parameters())
            first = lr_scheduler.LambdaLR(made, lambda k: 1.0)
            second = lr_scheduler.LambdaLR(made, lambda k: 1.0)
            return [made], [{"scheduler": s, "interval": "step", "name": n} for s, n in ((first, "a"), (second, "b"))]

    model = Two(optimizer, overflow_at=skipped)
    made = fit(model, "O2", batches(4))
    epochs = [config.scheduler.last_epoch for config in made.lr_scheduler_configs]
    assert epochs == [4 - len(skipped)] * 2


def test_frequency_counts_batches_but_a_skip_holds():
    model = LRs("fused_adam", every_step(halving, frequency=2), overflow_at=[1])
    fit(model, "O1", batches(6))
    # asked after batches 1, 3 and 5; between the first two questions a step was made
    assert model.lrs[-1] in (0.00125, 0.0025)


def test_epoch_scheduler_advances_if_any_step_was_made():
    model = LRs("fused_adam", lambda o: halving(o), overflow_at=[1])
    fit(model, "O1", batches(2), epochs=2)
    assert model.used == [0.01, 0.01, 0.005, 0.005]


def test_epoch_scheduler_stands_still_in_an_epoch_of_skips():
    model = LRs("fused_adam", lambda o: halving(o), overflow_at=[0, 1])
    fit(model, "O1", batches(2), epochs=3)
    assert model.used == [0.01, 0.01, 0.01, 0.01, 0.005, 0.005]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_hold_schedulers_false(optimizer):
    model = LRs(optimizer, every_step(halving), overflow_at=[0, 1])
    fit(model, plugin("O1", hold_schedulers=False), batches(4))
    assert model.lrs == [0.005, 0.0025, 0.00125, 0.000625]


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], milestones=[2]
        ),
        lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.StepLR(o, 2)]),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    ],
    ids=["one_cycle", "cosine", "sequential", "chained", "restarts"],
)
def test_kinds_of_schedulers_equal_a_run_without_the_bad_batches(make):
    model = LRs("fused_adam", every_step(make), overflow_at=[0, 3])
    fit(model, "O2", batches(7))
    witness = LRs("fused_adam", every_step(make))
    fit(witness, "O0", batches(5))
    assert model.lrs[-1] == pytest.approx(witness.lrs[-1])
    good = [lr for i, lr in enumerate(model.lrs) if i not in (0, 3)]
    assert good == pytest.approx(witness.lrs)


def test_reduce_on_plateau_follows_its_metric():
    class Plateau(LRs):
        def configure_optimizers(self):
            made = self.make_optimizer(self.parameters())
            scheduler = lr_scheduler.ReduceLROnPlateau(made, patience=0, factor=0.5)
            return {"optimizer": made, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", 1.0)

    model = Plateau()
    made = trainer("O2", 3)
    made.fit(model, batches(1), batches(1))
    assert made.optimizers[0].param_groups[0]["lr"] == 0.0025


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_schedulers_keep_their_class_afterwards(level):
    model = LRs("fused_adam", every_step(halving), overflow_at=[0])
    made = fit(model, level, batches(3))
    scheduler = made.lr_scheduler_configs[0].scheduler
    assert type(scheduler) is lr_scheduler.StepLR
    assert "step" not in vars(scheduler)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_scheduler_state_has_torchs_keys_during_training(level):
    states = []

    class Spy(LRs):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            states.append(self.trainer.lr_scheduler_configs[0].scheduler.state_dict())

    fit(Spy("fused_adam", every_step(halving)), level, batches(1))
    parameter = torch.nn.Parameter(torch.zeros(1))
    assert set(states[0]) == set(halving(torch.optim.SGD([parameter], lr=0.1)).state_dict())


@pytest.mark.parametrize("level", LEVELS)
def test_schedulers_stepped_by_hand_in_manual_optimization(level):
    class Manual(LRs):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer, scheduler = self.optimizers(), self.lr_schedulers()
            optimizer.zero_grad()
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            optimizer.step()
            scheduler.step()

    overflow = [0, 2] if level in ("O1", "O2") else []
    model = Manual("fused_adam", halving, overflow_at=overflow)
    fit(model, level, batches(4))
    assert model.lrs[-1] == 0.01 * 0.5 ** (4 - len(overflow))
