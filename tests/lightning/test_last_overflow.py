"""What a hook reads in ``trainer.precision_plugin.last_overflow``."""

import dataclasses

import pytest
import torch
from helpers import MASTERED, SCALED, Net, batches, fit, plugin, trainer
from lightning.pytorch import Callback
from ranks import spawn
from torch import nn

from lightning_apex import LossScaleError, LossScaleMonitor
from lightning_apex.overflow import OverflowWatch, _Letter

OPTIMIZERS = ["fused_adam", "torch_adamw"]


class Reader(Callback):
    """Keeps what it reads in every hook of a batch, with the Trainer's step."""

    def __init__(self):
        self.after_batch, self.at_other_hooks = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        report = trainer.precision_plugin.last_overflow
        self.after_batch.append(report)
        if report is not None and (not self.steps or self.steps[-1] != report.step):
            assert report.step == trainer.global_step  # read in the very batch that overflowed
        self.steps.append(report.step if report is not None else 0)

    def _read(self, trainer, *_):
        self.at_other_hooks.append(trainer.precision_plugin.last_overflow)

    def on_train_start(self, trainer, pl_module):
        self.steps = []
        self._read(trainer)

    on_train_batch_start = on_before_zero_grad = on_before_backward = on_after_backward = _read
    on_train_epoch_end = on_train_end = _read


class Bad(Net):
    """The gradients of net.3's bias are inf at these batches."""

    def __init__(self, optimizer="fused_adam", at=(1, 3)):
        super().__init__(optimizer)
        self.at = at

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss + self.net[3].bias.sum() * float("inf") if batch_idx in self.at else loss


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", SCALED)
def test_what_it_tells_and_when(level, optimizer):
    reader = Reader()
    made = fit(Bad(optimizer, at=(1, 2, 4)), plugin(level, init_scale=64.0), batches(6), callbacks=[reader])
    assert reader.steps == [0, 2, 3, 3, 5, 5]
    first, second, third = (reader.after_batch[i] for i in (1, 2, 4))
    assert reader.after_batch[0] is None and reader.at_other_hooks[0] is None
    assert [(r.old_scale, r.new_scale) for r in (first, second, third)] == [(64, 32), (32, 16), (16, 8)]
    assert [r.consecutive_skips for r in (first, second, third)] == [1, 2, 1]
    assert [r.skipped_steps for r in (first, second, third)] == [1, 2, 3]
    assert (third.parameters, third.modules) == (("net.3.bias",), ("net.3",))
    assert made.precision_plugin.last_overflow is third  # after the run, too
    assert reader.at_other_hooks[-1] is third


def test_is_frozen():
    made = fit(Bad(at=(0,)), "O2", batches(1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.precision_plugin.last_overflow.step = 5


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", SCALED)
def test_modules_come_in_the_models_order(level, optimizer):
    """Whatever the order of the optimizer's groups."""

    class Backwards(Net):
        def configure_optimizers(self):
            *rest, last = reversed(list(self.parameters()))
            return self.make_optimizer([{"params": rest}, {"params": [last]}])

    model = Backwards(optimizer, overflow_at=[0])
    report = fit(model, level, batches(1)).precision_plugin.last_overflow
    assert report.parameters == tuple(name for name, _ in model.named_parameters())
    assert report.modules == ("net.0", "net.1", "net.3")


def test_with_gradient_accumulation():
    reader = Reader()
    fit(Net(overflow_at=[2]), "O2", batches(6), accumulate_grad_batches=2, callbacks=[reader])
    assert reader.steps == [0, 0, 0, 2, 2, 2]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", SCALED)
def test_manual_optimization_with_two_optimizers(level, optimizer):
    class Two(Net):
        def __init__(self):
            super().__init__(optimizer)
            self.automatic_optimization = False
            self.other = nn.Linear(8, 4)
            self.read = []

        def training_step(self, batch, batch_idx):
            for index, (part, optimizer) in enumerate(zip((self.net, self.other), self.optimizers(), strict=True)):
                loss = nn.functional.cross_entropy(part(batch[0]), batch[1])
                optimizer.zero_grad()
                self.manual_backward(loss * float("inf") if (batch_idx, index) in ((0, 1), (2, 0)) else loss)
                optimizer.step()
                report = self.trainer.precision_plugin.last_overflow
                self.read.append(report and (report.step, report.modules))

        def configure_optimizers(self):
            return [self.make_optimizer(self.net.parameters()), self.make_optimizer(self.other.parameters())]

    model = Two()
    fit(model, level, batches(3))
    second, fifth = (2, ("other",)), (5, ("net.0", "net.1", "net.3"))
    assert model.read == [None, second, second, second, fifth, fifth]


@pytest.mark.parametrize("level", ["O0", "O3", "O4", "O5"])
def test_without_loss_scaling_there_is_none(level):
    assert fit(Net(), level, batches(2)).precision_plugin.last_overflow is None


@pytest.mark.parametrize("level", MASTERED)
def test_with_a_fixed_scale(level):
    report = fit(Bad(at=(1,)), plugin(level, loss_scale=8.0), batches(2)).precision_plugin.last_overflow
    assert (report.step, report.old_scale, report.new_scale) == (2, 8.0, 8.0)


def test_a_new_run_begins_without_one():
    shared, reader = plugin("O2"), Reader()
    fit(Bad(at=(0,)), shared, batches(1))
    assert shared.last_overflow.step == 1
    fit(Net(), shared, batches(1), callbacks=[reader])
    assert reader.at_other_hooks == [None] * len(reader.at_other_hooks)
    assert shared.last_overflow is None


def test_a_resumed_run_goes_on_counting(tmp_path):
    model = Bad(at=(1,))
    made = fit(model, "O2", batches(2))
    made.save_checkpoint(tmp_path / "c.ckpt")
    again = trainer("O2", epochs=2)
    again.fit(Bad(at=(1,)), batches(2), ckpt_path=tmp_path / "c.ckpt")
    assert again.precision_plugin.last_overflow.step == 4
    assert again.precision_plugin.last_overflow.skipped_steps == 2


def test_reading_never_raises_and_hides_no_error():
    """A hook that reads the report of the last straw leaves the error to the step."""
    read = []

    class Straw(Bad):
        def on_before_zero_grad(self, optimizer):
            read.append(self.trainer.precision_plugin.last_overflow)

    slow = _Slow()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Letter, "arrived", slow)
        with pytest.raises(LossScaleError, match="3 steps in a row"):
            fit(Straw(at=range(10)), plugin("O2", max_consecutive_skips=3), batches(10))
    assert [r and r.consecutive_skips for r in read] == [None, 1, 2, 3]


class _Slow:
    """Stands in for `_Letter.arrived` on a device that is always behind."""

    def __init__(self):
        self.asked = 0

    def __call__(self, *_):
        self.asked += 1
        return False


def test_nothing_waits_where_nobody_reads(monkeypatch):
    """On a device that is behind, steps go on; the one who reads waits, and the monitor loses no report at the end."""
    waits = []
    original = OverflowWatch.collect

    def collect(self, *, wait):
        waits.append(wait)
        original(self, wait=wait)

    monkeypatch.setattr(OverflowWatch, "collect", collect)
    monkeypatch.setattr(_Letter, "arrived", _Slow())
    made = fit(Bad(), "O2", batches(5))
    assert waits == [False] * 5
    assert made.precision_plugin.last_overflow.step == 4
    assert waits[-1] is True


def test_the_monitor_reports_late_news_with_their_own_steps(monkeypatch):
    lines = []
    monkeypatch.setattr(_Letter, "arrived", _Slow())
    monkeypatch.setattr("lightning_apex.plugins.callbacks.rank_zero_info", lines.append)
    fit(Bad(), plugin("O2", init_scale=64.0), batches(5), callbacks=[LossScaleMonitor()])
    assert [line.split(":")[0] for line in lines] == ["Step 2", "Step 4"]
    assert "64 -> 32" in lines[0] and "32 -> 16" in lines[1]


def ddp_job(rank, level, optimizer):
    class OnOneRank(Bad):
        def __init__(self):
            super().__init__(optimizer)
            self.net[1] = nn.LayerNorm(16)

        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            return loss + self.net[3].bias.sum() * float("inf") if (batch_idx, rank) == (1, 1) else loss

    torch.set_num_threads(1)
    reader = Reader()
    kwargs = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False, "callbacks": [reader]}
    made = fit(OnOneRank(), plugin(level, init_scale=64.0), batches(3), **kwargs)
    return reader.steps, dataclasses.asdict(made.precision_plugin.last_overflow)


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore::DeprecationWarning:multiprocessing")
def test_all_ranks_read_the_same(tmp_path):
    rows = [(level, optimizer) for level in SCALED for optimizer in OPTIMIZERS]
    jobs = [(f"{level}-{optimizer}", ddp_job, {"level": level, "optimizer": optimizer}) for level, optimizer in rows]
    expected = {"step": 2, "parameters": ("net.3.bias",), "old_scale": 64.0, "new_scale": 32.0}
    for results in spawn(tmp_path, jobs).values():
        for steps, report in results:
            assert steps == [0, 2, 2]
            assert report == {**expected, "consecutive_skips": 1, "skipped_steps": 1}
