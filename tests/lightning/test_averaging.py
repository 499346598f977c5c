"""Weight averaging callbacks average fp32 weights and leave fp32 results."""

import pytest
import torch
from helpers import LEVELS, MASTERED, Net, all_fp32, assert_close, assert_same, batches, plugin, trainer, weights
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.optim.swa_utils import get_ema_avg_fn


class History(Callback):
    """The fp32 weights after each step."""

    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps.append({n: t for n, t in weights(pl_module).items() if "num_batches" not in n})


def run(precision, callback, epochs=2, val=False, optimizer="fused_sgd", history=True):
    model, past = Net(optimizer), History()
    made = trainer(precision, epochs, callbacks=[past, callback] if history else [callback])
    made.fit(model, batches(4), batches(1) if val else None)
    return model, past.steps


def parameters(model):
    return {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("val", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_default_average_is_the_mean_of_fp32_weights(level, val):
    model, steps = run(level, WeightAveraging(), val=val)
    assert all_fp32(model)
    for name, value in parameters(model).items():
        mean = torch.stack([step[name] for step in steps]).mean(0)
        torch.testing.assert_close(value, mean, atol=2e-2 if level == "O3" else 1e-6, rtol=0)


def ema(weights_in_order, decay):
    average = dict(weights_in_order[0])
    for step in weights_in_order[1:]:
        average = {n: decay * average[n] + (1 - decay) * value for n, value in step.items()}
    return average


@pytest.mark.parametrize("val", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_ema_is_that_of_fp32_weights(level, val):
    """Validation swaps model and average at each epoch; a slow average must not be rounded on the way."""
    model, steps = run(level, WeightAveraging(avg_fn=get_ema_avg_fn(0.99)), epochs=3, val=val)
    expected = ema(steps, 0.99)
    for name, value in parameters(model).items():
        torch.testing.assert_close(value, expected[name], atol=2e-2 if level == "O3" else 1e-6, rtol=0)


@pytest.mark.parametrize("level", MASTERED)
def test_ema_does_not_touch_the_training_run(level):
    _, averaged = run(level, WeightAveraging(avg_fn=get_ema_avg_fn(0.99)), epochs=3, val=True)
    _, plain = run(level, Callback(), epochs=3, val=True)
    assert_same(averaged, plain)


@pytest.mark.parametrize("level", LEVELS)
def test_lightnings_ema_callback(level):
    model, _ = run(level, EMAWeightAveraging(decay=0.9, update_every_n_steps=1), val=True)
    witness, _ = run("32-true", EMAWeightAveraging(decay=0.9, update_every_n_steps=1), val=True)
    assert all_fp32(model)
    assert_close(parameters(model), parameters(witness), atol=1e-6 if level == "O0" else 5e-2)


@pytest.mark.parametrize("level", MASTERED)
def test_averages_of_a_cast_model_are_validated(level):
    """In validation the model holds the average, and afterwards the current weights again."""

    class Look(Callback):
        def on_validation_epoch_start(self, trainer, pl_module):
            self.validated = weights(pl_module)

    look, average = Look(), WeightAveraging(avg_fn=get_ema_avg_fn(0.9))
    model, past = Net("fused_sgd"), History()
    made = trainer(level, 2, callbacks=[past, average, look], num_sanity_val_steps=0)
    made.fit(model, batches(4), batches(1))
    expected = ema(past.steps, 0.9)
    for name, _ in model.named_parameters():
        torch.testing.assert_close(look.validated[name], expected[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize("level", LEVELS)
def test_checkpoint_with_an_average_resumes(level, tmp_path):
    def averaging():
        return WeightAveraging(avg_fn=get_ema_avg_fn(0.9))

    straight, _ = run(level, averaging(), epochs=2, history=False)
    model = Net("fused_sgd")
    first = trainer(level, 1, callbacks=[averaging(), Saver(tmp_path / "x.ckpt")])
    first.fit(model, batches(4))
    second = Net("fused_sgd")
    rest = trainer(level, 2, callbacks=[averaging()])
    rest.fit(second, batches(4), ckpt_path=tmp_path / "x.ckpt")
    assert_close(parameters(second), parameters(straight), atol=5e-2 if level == "O3" else 0.0)


class Saver(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("level", LEVELS)
def test_callbacks_are_left_as_they_were(level):
    for callback in (WeightAveraging(), StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)):
        attributes = set(vars(callback)) | {"_average_model", "log", "log_dict"}  # Lightning's own
        run(level, callback)
        assert not {a for a in set(vars(callback)) - attributes if callable(vars(callback)[a])}


class WithoutBatchNorm(Net):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.net[1] = nn.LayerNorm(16)


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_stochastic_weight_averaging(level, batch_norm):
    def swa(precision):
        model = (Net if batch_norm else WithoutBatchNorm)("fused_sgd")
        callback = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=1)
        trainer(precision, 4, callbacks=[callback]).fit(model, batches(4))
        return model

    model, witness = swa(level), swa("32-true")
    assert all_fp32(model)
    assert_close(parameters(model), parameters(witness), atol=1e-5 if level == "O0" else 6e-2)
    if batch_norm:
        assert_close({"mean": model.net[1].running_mean}, {"mean": witness.net[1].running_mean}, atol=0.05)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_swa_with_an_overflow(level):
    model = Net("fused_sgd", overflow_at=[9])
    made = trainer(plugin(level), 4, callbacks=[StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)])
    made.fit(model, batches(4))
    assert made.scaler.skipped_steps == 1
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("level", LEVELS)
def test_averaging_twice_in_one_process(level):
    model = Net("fused_sgd")
    for _ in range(2):
        callback = WeightAveraging()
        trainer(level, 1, callbacks=[callback]).fit(model, batches(3))
        assert all_fp32(model)
