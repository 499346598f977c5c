"""Strategies that cast models themselves are refused, with a sentence that says what to use."""

import pytest
import torch
from fabric_support import net, plugin, weights
from lightning.fabric.strategies import DeepSpeedStrategy, FSDPStrategy, XLAFSDPStrategy, XLAStrategy
from lightning.fabric.utilities.exceptions import MisconfigurationException


def test_lightnings_refusal_beside_fsdp_says_what_to_use():
    with pytest.raises(TypeError, match=r"FSDPPrecision.*for FSDP2 use ModelParallelStrategy and plugin\.fully_shard"):
        FSDPStrategy(precision=plugin("O5"))


@pytest.mark.parametrize("kind", [FSDPStrategy, DeepSpeedStrategy, XLAStrategy, XLAFSDPStrategy])
def test_strategies_that_cast_models_themselves_are_refused(kind):
    precision, model = plugin("O2"), net()
    before = weights(model)
    strategy = object.__new__(kind)  # which cannot be made without a device of its own
    strategy._precision = precision
    refusal = rf"ApexPrecision does not work with {kind.__name__}, .* plugin.fully_shard\(\) in it"
    with pytest.raises(MisconfigurationException, match=refusal):
        precision.convert_module(model)
    assert all(torch.equal(weights(model)[name], value) for name, value in before.items())
