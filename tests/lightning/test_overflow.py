"""Skipped steps: what they leave alone, how the scale moves, when a run gives up."""

import copy

import pytest
import torch
from helpers import Net, assert_same, batches, every_step, fit, halving, plugin, weights

from lightning_apex import LossScaleError

OPTIMIZERS = ["fused_adam", "fused_sgd", "torch_adamw"]


class Diary(Net):
    """Notes everything a step may change, after each batch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.pages = []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.pages.append(self.page())

    def on_train_start(self):
        self.pages.append(self.page())

    def page(self):
        optimizer = self.trainer.optimizers[0]
        schedulers = [config.scheduler.state_dict() for config in self.trainer.lr_scheduler_configs]
        return {
            "weights": {k: v for k, v in weights(self).items() if "running" not in k and "num_batches" not in k},
            "optimizer": copy.deepcopy(optimizer.state_dict()["state"]),
            "lr": optimizer.param_groups[0]["lr"],
            "schedulers": copy.deepcopy(schedulers),
            "scale": self.trainer.scaler.get_scale(),
        }


def same_but_for_scale(before, after):
    for key in ("weights", "lr", "schedulers"):
        assert_same(after[key], before[key], key)
    # An optimizer may make its state of zeros beforehand; a missing state is one of zeros.
    for index, state in after["optimizer"].items():
        old = before["optimizer"].get(index, {})
        for name, value in state.items():
            assert_same(value, old.get(name, torch.zeros_like(value)), f"{index}.{name}")


@pytest.mark.parametrize("skipped", [[0], [2], [0, 1, 4]])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_skipped_step_changes_nothing(level, optimizer, skipped):
    model = Diary(optimizer, every_step(halving), overflow_at=skipped)
    made = fit(model, plugin(level, init_scale=1024.0), batches(6))
    for step in range(6):
        before, after = model.pages[step], model.pages[step + 1]
        if step in skipped:
            same_but_for_scale(before, after)
            assert after["scale"] == before["scale"] / 2
        else:
            assert after["scale"] == before["scale"]
            assert after["lr"] == before["lr"] / 2
            assert not torch.equal(after["weights"]["net.0.weight"], before["weights"]["net.0.weight"])
    assert made.scaler.skipped_steps == len(skipped)


@pytest.mark.parametrize("kind", [float("inf"), float("nan"), float("-inf")])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_each_kind_of_overflow_skips(level, kind):
    model = Net(overflow_at=[1], overflow=kind)
    made = fit(model, plugin(level), batches(3))
    assert made.scaler.skipped_steps == 1
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_run_with_skips_equals_one_without_these_batches(level, optimizer):
    model = Net(optimizer, overflow_at=[0, 3])
    fit(model, plugin(level, init_scale=256.0), batches(6))
    witness = Net(optimizer)
    fit(witness, plugin(level, loss_scale=256.0), batches(6, only=(1, 2, 4, 5)))
    parameters = [{n: p.detach() for n, p in m.named_parameters()} for m in (model, witness)]
    assert_same(*parameters)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_real_fp16_overflow_is_found_and_recovered_from(level):
    # a scale of 2^24 overflows fp16 gradients until it has come down
    model = Net()
    made = fit(model, plugin(level, half_dtype="float16", init_scale=2.0**24), batches(10), epochs=4)
    assert 1 <= made.scaler.skipped_steps < 20
    assert made.scaler.get_scale() == 2.0 ** (24 - made.scaler.skipped_steps)
    assert sum(model.losses[-10:]) < 0.8 * sum(model.losses[:10])


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_fixed_scale_skips_and_stays(level):
    model = Net(overflow_at=[0, 2])
    made = fit(model, plugin(level, loss_scale=64.0), batches(4))
    assert made.scaler.get_scale() == 64.0
    assert made.scaler.skipped_steps == 2
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_overflow_in_any_micro_batch_skips_the_window():
    model = Diary(overflow_at=[1])
    fit(model, plugin("O2"), batches(4), accumulate_grad_batches=2)
    same_but_for_scale(model.pages[0], model.pages[2])
    assert not torch.equal(model.pages[4]["weights"]["net.0.weight"], model.pages[2]["weights"]["net.0.weight"])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_growth(level):
    model = Diary()
    fit(model, plugin(level, init_scale=4.0, growth_interval=2, growth_factor=4.0, max_loss_scale=100.0), batches(7))
    assert [page["scale"] for page in model.pages] == [4.0, 4.0, 16.0, 16.0, 64.0, 64.0, 100.0, 100.0]


def test_hysteresis():
    model = Diary(overflow_at=[0, 1, 2, 5])
    fit(model, plugin("O1", init_scale=16.0, hysteresis=2, growth_interval=2), batches(6))
    # the first overflow is forgiven, later ones not until the scale has grown again; then one is forgiven again
    assert [page["scale"] for page in model.pages[1:]] == [16.0, 8.0, 4.0, 4.0, 8.0, 8.0]


@pytest.mark.parametrize("floor", [4.0, 2.0**-6])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_floor_is_reached_and_held(level, floor):
    model = Net(overflow_at=range(100))
    made = fit(model, plugin(level, init_scale=16.0, min_loss_scale=floor), batches(15))
    assert made.scaler.get_scale() == floor


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gives_up_and_names_the_parameters(level, optimizer):
    class Bad(Net):
        def training_step(self, batch, batch_idx):
            return self.loss(batch).detach() + self.net[3].bias.sum() * self.overflow

    model = Bad(optimizer)
    made = plugin(level, max_consecutive_skips=3)
    with pytest.raises(LossScaleError, match=r"net\.3\.bias") as caught:
        fit(model, made, batches(9))
    assert "net.0" not in str(caught.value)
    assert "3 steps in a row" in str(caught.value)
    assert all(p.dtype is torch.float32 for p in model.parameters())


def test_skips_in_a_row_are_counted_anew_after_a_good_step():
    model = Net(overflow_at=[0, 1, 3, 4, 6, 7])
    made = fit(model, plugin("O2", max_consecutive_skips=3), batches(9))
    assert made.scaler.skipped_steps == 6


def test_max_consecutive_skips_none_never_gives_up():
    made = fit(Net(overflow_at=range(60)), plugin("O1", max_consecutive_skips=None), batches(60))
    assert made.scaler.skipped_steps == 60


@pytest.mark.parametrize("level", ["O0", "O4", "O5", "O3"])
def test_levels_without_a_scale_look_for_nothing(level):
    made = fit(Net(), plugin(level), batches(2))
    assert not made.scaler.is_enabled()
    assert made.scaler.get_scale() == 1.0
