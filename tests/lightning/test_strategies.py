"""Strategies that cast models themselves are refused, with a sentence that says what to use."""

from types import SimpleNamespace

import pytest
import torch
from helpers import LEVELS, Net, all_fp32, batches, fit, plugin, trainer, weights
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.xla import XLAStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException


@pytest.mark.parametrize("how", ["name", "object"])
def test_fsdp_is_refused(how):
    strategy = "fsdp" if how == "name" else FSDPStrategy()
    # Lightning itself refuses it in the Trainer's constructor, here for the lack of a GPU
    with pytest.raises((MisconfigurationException, TypeError, ValueError, RuntimeError)):
        fit(Net(), "O2", batches(1), strategy=strategy)


def test_lightnings_refusal_beside_fsdp_says_what_to_use():
    with pytest.raises(TypeError, match=r"FSDPPrecision.*for FSDP2 use ModelParallelStrategy and plugin\.fully_shard"):
        FSDPStrategy(precision_plugin=plugin("O5"))


@pytest.mark.parametrize("kind", [FSDPStrategy, DeepSpeedStrategy, XLAStrategy])
def test_strategies_that_cast_models_themselves_are_refused(kind):
    model = Net()
    before = weights(model)
    model._trainer = SimpleNamespace(strategy=object.__new__(kind))  # which cannot be made without a device of its own
    refusal = rf"ApexPrecision does not work with {kind.__name__}, .* ModelParallelStrategy\(\) with plugin.fully_shard"
    with pytest.raises(MisconfigurationException, match=refusal):
        plugin("O2").convert_module(model)
    assert all(torch.equal(weights(model)[n], t) for n, t in before.items())


@pytest.mark.parametrize("level", LEVELS)
def test_single_device_strategy_object(level):
    model = Net()
    made = trainer(None, strategy=SingleDeviceStrategy(device="cpu", precision_plugin=plugin(level)))
    made.fit(model, batches(2))
    assert all_fp32(model)


def test_sync_batchnorm_beside_the_plugin_on_one_device():
    fit(Net(), "O2", batches(1), sync_batchnorm=True)
    fit(Net(), "O2", batches(1), plugins=[TorchSyncBatchNorm()])


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_model_used_without_a_trainer(level):
    """The plugin's methods outside a Trainer: as Lightning's own tests call them."""
    made, model = plugin(level), Net()
    before = weights(model)
    assert made.convert_module(model) is model
    with made.forward_context():
        out = model(torch.zeros(2, 8))
    assert out.dtype is (torch.float32 if level == "O0" else torch.bfloat16)
    made.teardown()
    assert all(torch.equal(weights(model)[n], t) for n, t in before.items() if "running" not in n and "num" not in n)
    assert all_fp32(model)
