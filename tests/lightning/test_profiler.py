"""A profiler sees an optimizer step in two parts, measure and update."""

from collections import Counter

import pytest
import torch
from helpers import LEVELS, SCALED, Net, assert_same, batches, fit, plugin, weights
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from torch.autograd.profiler import record_function

from lightning_apex import FusedAdam, LossScaler, sections

MEASURE, UPDATE = "[ApexPrecision]measure", "[ApexPrecision]update"


class Diary(SimpleProfiler):
    """Notes what starts and ends, in order."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def start(self, action_name):
        self.lines.append(f"+{action_name}")
        super().start(action_name)

    def stop(self, action_name):
        self.lines.append(f"-{action_name}")
        super().stop(action_name)


def seen(model, level, profiler, count=4, **kwargs):
    fit(model, level, batches(count), profiler=profiler, **kwargs)
    return {name: len(times) for name, times in profiler.recorded_durations.items()}


@pytest.mark.parametrize("optimizer", ["fused_adam", "torch_adamw"])
@pytest.mark.parametrize("level", LEVELS)
def test_both_parts_at_every_level(level, optimizer):
    counts = seen(Net(optimizer), level, SimpleProfiler(), gradient_clip_val=1.0)
    assert counts[UPDATE] == 4
    # A torch optimizer's gradients are unscaled by one pass and clipped by another.
    assert counts[MEASURE] == (4 if optimizer == "fused_adam" else 8)


@pytest.mark.parametrize("level", LEVELS)
def test_measures_only_where_something_depends_on_it(level):
    counts = seen(Net(), level, SimpleProfiler())
    assert counts[UPDATE] == 4
    assert counts.get(MEASURE, 0) == (4 if level in SCALED else 0)


@pytest.mark.parametrize("optimizer", ["fused_adam", "torch_adamw"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_the_parts_are_inside_the_step_and_after_the_backward_pass(level, optimizer):
    diary = Diary()
    seen(Net(optimizer), level, diary, count=1, gradient_clip_val=1.0)
    lines = [line for line in diary.lines if "Apex" in line or line.endswith((".optimizer_step", ".backward"))]
    backward, step = "[Strategy]SingleDeviceStrategy.backward", "[LightningModule]Net.optimizer_step"
    measure = [f"+{MEASURE}", f"-{MEASURE}"] * (1 if optimizer == "fused_adam" else 2)
    assert lines == [f"+{step}", f"+{backward}", f"-{backward}", *measure, f"+{UPDATE}", f"-{UPDATE}", f"-{step}"]


@pytest.mark.parametrize("level", ["O2", "O4"])
def test_manual_optimization(level):
    class Manual(Net):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.optimizers().zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.clip_gradients(self.optimizers(), 1.0)
            self.optimizers().step()

    counts = seen(Manual(), level, SimpleProfiler())
    assert counts[UPDATE] == 4
    assert counts[MEASURE] >= 4


def test_skipped_steps_are_seen():
    counts = seen(Net(overflow_at=[1]), "O1", SimpleProfiler())
    assert (counts[MEASURE], counts[UPDATE]) == (4, 4)


def test_an_optimizer_that_evaluates_several_times():
    def lbfgs(params):
        return torch.optim.LBFGS(params, lr=0.1, max_iter=3)

    counts = seen(Net(lbfgs), "O4", SimpleProfiler(), count=1)
    assert counts[UPDATE] == counts["[Strategy]SingleDeviceStrategy.backward"] > 1


def test_a_step_that_raises_ends_its_sections():
    class Bad(FusedAdam):
        def step(self, closure=None):
            super().step(closure)
            raise RuntimeError("no step")

    for level in ("O1", "O4"):
        diary = Diary()
        with pytest.raises(RuntimeError, match="no step"):
            fit(Net(lambda params: Bad(params)), level, batches(1), profiler=diary)
        assert Counter(diary.lines)[f"+{UPDATE}"] == Counter(diary.lines)[f"-{UPDATE}"] == 1


@pytest.mark.parametrize("profiler", [AdvancedProfiler, SimpleProfiler])
def test_profiling_changes_nothing(profiler):
    model, witness = Net(), Net()
    fit(model, "O2", batches(3), profiler=profiler())
    fit(witness, "O2", batches(3))
    assert_same(weights(model), weights(witness))


def test_a_plugin_forgets_the_profiler_of_a_run(tmp_path):
    shared, first, second = plugin("O2"), SimpleProfiler(), SimpleProfiler()
    fit(Net(), shared, batches(2), profiler=first)
    fit(Net(), shared, batches(2))
    fit(Net(), shared, batches(2), profiler=second)
    assert len(first.recorded_durations[UPDATE]) == len(second.recorded_durations[UPDATE]) == 2


@pytest.mark.filterwarnings("ignore:.*profiler.*:UserWarning")
def test_ranges_of_torchs_profiler_under_the_trainer(tmp_path):
    profiler = PyTorchProfiler(dirpath=tmp_path, filename="profile", export_to_chrome=False)
    fit(Net(), "O2", batches(3), profiler=profiler)
    assert {"lightning_apex.measure", "lightning_apex.update"} <= {event.key for event in profiler.function_events}


def train_once(scaler, optimizer, param):
    scaler.scale((param * param).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("kind", [FusedAdam, torch.optim.Adam])
def test_ranges_of_torchs_profiler_in_a_plain_loop(kind):
    param = torch.nn.Parameter(torch.ones(4))
    optimizer, scaler = kind([param]), LossScaler()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train_once(scaler, optimizer, param)
    counts = Counter(event.name for event in profile.events())
    assert (counts["lightning_apex.measure"], counts["lightning_apex.update"]) == (1, 1)


def test_without_a_profiler_no_range_is_made(monkeypatch):
    made = []

    class Noted(record_function):
        def __init__(self, name):
            made.append(name)
            super().__init__(name)

    monkeypatch.setattr(sections, "record_function", Noted)
    fit(Net(), "O2", batches(1))
    assert made == []
    fit(Net(), "O2", batches(1), profiler=SimpleProfiler())
    assert made == ["lightning_apex.measure", "lightning_apex.update"]
