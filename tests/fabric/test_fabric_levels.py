"""What a Fabric loop computes at each level, against loops written by hand with torch alone."""

import inspect
import pickle

import pytest
import torch
from fabric_support import BF16, LEVELS, assert_close, assert_equal, batches, fabric_with, net, plugin, train, weights
from torch import nn
from torch.nn import functional as F

import lightning_apex
from lightning_apex import FusedAdamW, FusedSGD
from lightning_apex.fabric import ApexPrecision

DATA = batches(12)


def by_fabric(level, optimizer=torch.optim.SGD, clip=0.0, every=1, **options):
    model = net()
    fabric = fabric_with(plugin(level, **options))
    fabric_model, fabric_optimizer = fabric.setup(model, optimizer(model.parameters(), lr=0.05))
    train(fabric, fabric_model, fabric_optimizer, DATA, clip, every)
    return weights(model)


def by_hand(clip=0.0, every=1, autocast=False):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for index, (x, y) in enumerate(DATA):
        with torch.autocast("cpu", BF16, enabled=autocast, cache_enabled=False):
            output = model(x)
        (F.mse_loss(output.float(), y) / every).backward()
        if (index + 1) % every == 0:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def half_by_hand(masters):
    """Weights that are bf16, updated themselves or through fp32 masters."""
    model = net()
    fp32 = [p.detach().clone() for p in model.parameters()]
    model.to(BF16)
    for x, y in DATA:
        # O5's fp32 input meets half weights under autocast; O3's is cast
        with torch.autocast("cpu", BF16, enabled=masters, cache_enabled=False):
            hidden = model[0](x.to(BF16))
            if masters:
                hidden = F.layer_norm(hidden, (16,), model[1].weight, model[1].bias)
            output = model[3](F.relu(hidden if masters else model[1](hidden)))
        F.mse_loss(output.float(), y).backward()
        with torch.no_grad():
            for param, master in zip(model.parameters(), fp32, strict=True):
                if masters:
                    master -= 0.05 * param.grad.float()
                    param.copy_(master)
                else:
                    param -= 0.05 * param.grad
                param.grad = None
    values = fp32 if masters else [p.detach().float() for p in model.parameters()]
    return dict(zip(model.state_dict(), values, strict=True))


@pytest.mark.parametrize(("clip", "every"), [(0.0, 1), (0.3, 1), (0.3, 3)])
def test_o0_is_the_plain_loop_bit_for_bit(clip, every):
    assert_equal(by_fabric("O0", clip=clip, every=every), by_hand(clip, every))


@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize(("clip", "every"), [(0.0, 1), (0.3, 3)])
def test_o1_and_o4_are_torch_autocast(level, clip, every):
    # a scale that is a power of two changes no bit of a bf16 gradient
    assert_close(by_fabric(level, clip=clip, every=every), by_hand(clip, every, autocast=True), 1e-6)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, FusedSGD])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_o2_and_o5_update_fp32_masters(level, optimizer):
    assert_close(by_fabric(level, optimizer), half_by_hand(masters=True), 1e-6)


def test_o3_is_a_half_model():
    assert_close(by_fabric("O3"), half_by_hand(masters=False), 1e-2)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, FusedSGD])
def test_clipping_does_not_depend_on_the_loss_scale(level, optimizer):
    assert_equal(
        by_fabric(level, optimizer, clip=0.1, loss_scale=1024.0), by_fabric(level, optimizer, clip=0.1, loss_scale=1.0)
    )


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, FusedAdamW])
def test_clip_by_value_sees_unscaled_gradients(optimizer):
    model = net()
    fabric = fabric_with(plugin("O2", loss_scale=1024.0))
    fabric_model, fabric_optimizer = fabric.setup(model, optimizer(model.parameters(), lr=0.05))
    fabric.backward(100 * F.mse_loss(fabric_model(DATA[0][0]), DATA[0][1]))
    fabric.clip_gradients(fabric_model, fabric_optimizer, clip_val=0.01)
    grads = [p.grad for p in model.parameters()]
    assert all(grad.dtype is torch.float32 for grad in grads)
    assert max(float(grad.abs().max()) for grad in grads) == pytest.approx(0.01)


@pytest.mark.parametrize("level", LEVELS)
def test_the_model_returns_fp32_and_teardown_gives_fp32_weights_back(level):
    model = net(norm=nn.BatchNorm1d)
    precision = plugin(level)
    fabric = fabric_with(precision)
    fabric_model, optimizer = fabric.setup(model, FusedSGD(model.parameters(), lr=0.05))
    output = fabric_model(DATA[0][0])
    assert output.dtype is torch.float32
    train(fabric, fabric_model, optimizer, DATA[:3])
    half = precision.level.casts_weights
    assert model[0].weight.dtype is (BF16 if half else torch.float32)
    assert model[1].weight.dtype is (BF16 if level == "O3" else torch.float32)
    before = weights(model)
    assert all(value.dtype in (torch.float32, torch.int64) for value in before.values())
    precision.teardown()
    assert all(p.dtype is torch.float32 for p in model.parameters())
    assert_equal(weights(model), before)
    assert not model._state_dict_hooks and not model._load_state_dict_pre_hooks


def test_teardown_lets_another_fabric_take_over():
    model = net()
    precision = plugin("O2")
    fabric = fabric_with(precision)
    train(fabric, *fabric.setup(model, FusedSGD(model.parameters(), lr=0.05)), DATA[:2])
    fabric.strategy.teardown()
    other = fabric_with(plugin("O4"))
    losses = train(other, *other.setup(model, FusedSGD(model.parameters(), lr=0.05)), DATA)
    assert losses[-1] < 10 and model[0].weight.dtype is torch.float32


def test_the_constructor_is_that_of_the_trainers_plugin():
    ours = dict(inspect.signature(ApexPrecision).parameters)
    trainers = dict(inspect.signature(lightning_apex.ApexPrecision).parameters)
    del trainers["hold_schedulers"]  # a Fabric loop steps its schedulers itself
    assert list(ours) == list(trainers)
    for name, parameter in trainers.items():
        assert (ours[name].default, ours[name].kind) == (parameter.default, parameter.kind), name
    with pytest.raises(lightning_apex.OptLevelError, match="letter O"):
        ApexPrecision("01")
    with pytest.raises(ValueError, match="keep_fp32=3"):
        ApexPrecision(keep_fp32=3)


def test_a_plugin_is_pickled_with_its_scale():
    precision = plugin("O2", init_scale=256.0)
    fabric = fabric_with(precision)
    model = net()
    fabric.setup(model)
    copy = pickle.loads(pickle.dumps(precision))
    assert copy.scaler.get_scale() == 256.0 and copy.masters is None
    assert copy.precision == "bf16-mixed"


def test_the_cpu_gets_bf16_with_one_warning():
    fabric = fabric_with(ApexPrecision("O2"))
    with pytest.warns(UserWarning, match="bfloat16 instead of float16"):
        fabric.setup(net())
    second = net(1)
    fabric.setup(second)
    assert second[0].weight.dtype is BF16
