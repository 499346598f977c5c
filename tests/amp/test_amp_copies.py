"""Copies, pickles and averages of initialised models, and what is left when they are gone."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from amp_support import LEVELS, batch, fp32, same, start, state_of, step

from lightning_apex import amp


@pytest.mark.parametrize("optimizer", ["adamw", "fused_adam"])
@pytest.mark.parametrize("level", LEVELS)
class TestCopies:
    def copies(self, model):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        yield copy.deepcopy(model)
        yield pickle.loads(pickle.dumps(model))
        yield torch.load(file, weights_only=False)

    def test_compute_the_same_and_live_on_their_own(self, level, optimizer):
        model, made = start(level, optimizer)
        step(model, made)
        model.eval()
        expected, weights = model(batch()[0]), fp32(model)
        copies = list(self.copies(model))
        model.train()
        step(model, made, 1)
        for each in copies:
            assert torch.equal(each(batch()[0]), expected)
            assert same(fp32(each), weights)

    def test_can_be_initialised(self, level, optimizer):
        model, made = start(level, optimizer)
        step(model, made)
        expected = None
        for each in self.copies(model):
            each, remade = start("O2", optimizer, each)
            assert len(each._forward_pre_hooks) == 1
            if level != "O3":
                assert same(fp32(each), fp32(model))
            step(each, remade, 1)
            expected = expected or fp32(each)
            assert same(fp32(each), expected)

    def test_optimizers(self, level, optimizer):
        model, made = start(level, optimizer)
        step(model, made)
        for duplicate in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
            model2, made2 = duplicate((model, made))
            assert not made2._optimizer_step_pre_hooks
            assert same(state_of(made2), state_of(made))
            model2, made2 = amp.initialize(model2, made2, opt_level=level, init_scale=256.0, verbosity=0)
            step(model2, made2, 1)
        step(model, made, 1)
        if level != "O3":
            assert same(fp32(model2), fp32(model))
            assert same(state_of(made2)["state"], state_of(made)["state"])


@pytest.mark.parametrize("level", LEVELS)
def test_an_ema_copy(level):
    model, made = start(level, "adamw", half_dtype=None)
    ema = copy.deepcopy(model).eval()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for index in range(3):
        step(model, made, index)
        with torch.no_grad():
            for slow, fast in zip(ema.parameters(), model.parameters(), strict=True):
                slow.mul_(0.5).add_(fast, alpha=0.5)
        averaged.update_parameters(model)
    trained = fp32(model)
    assert ema(batch()[0]).dtype is torch.float32 and averaged(batch()[0]).isfinite().all()
    assert same(fp32(model), trained)
    assert not same(fp32(ema)["0.weight"], trained["0.weight"])
    with torch.no_grad():  # and back: the model's value becomes the master
        for slow, fast in zip(ema.parameters(), model.parameters(), strict=True):
            fast.copy_(slow)
    assert (fp32(model)["0.weight"] - fp32(ema)["0.weight"]).abs().max() < 1e-2
    step(model, made, 4)


def test_nothing_is_kept_alive():
    gc.collect()
    gc.disable()
    try:
        for optimizer in ("adamw", "fused_adam"):
            for level in LEVELS:
                model, made = start(level, optimizer, half_dtype=None)
                step(model, made)
                gone = [weakref.ref(made), weakref.ref(model), weakref.ref(model[0].weight)]
                del model, made
                assert [r() for r in gone] == [None] * 3, (level, optimizer)  # at once, without the collector
    finally:
        gc.enable()


def test_a_hundred_models_in_one_process():
    def one():
        model, made = start("O2", "fused_adam", half_dtype=None)
        step(model, made)

    def tensors():
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    one()
    before = tensors()
    for _ in range(30):
        one()
    assert tensors() == before
