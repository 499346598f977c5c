"""Loops of other shapes: two models, closures, overflows, and what is refused."""

import warnings
from functools import partial

import pytest
import torch
from fabric_support import assert_equal, batches, fabric_with, net, plugin, train, weights
from lightning.fabric import Fabric
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F

import lightning_apex
from lightning_apex import FusedAdamW, FusedSGD

DATA = batches(8)
OPTIMIZERS = [torch.optim.SGD, FusedSGD]


def gan(precision, optimizer=torch.optim.SGD, joint=False):
    """The usual order, in which the generator's loss leaves gradients in the discriminator; or one joint backward."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    critic = nn.Sequential(nn.Linear(3, 16), nn.LeakyReLU(), nn.Linear(16, 1))
    options = {"lr": 0.05}
    opt_g, opt_d = optimizer(generator.parameters(), **options), optimizer(critic.parameters(), **options)
    if precision is None:
        g, d, backward = generator, critic, torch.Tensor.backward
    else:
        fabric = fabric_with(precision)
        g, opt_g = fabric.setup(generator, opt_g)
        d, opt_d = fabric.setup(critic, opt_d)
        backward = fabric.backward
    one, zero = torch.ones(8, 1), torch.zeros(8, 1)
    loss = F.binary_cross_entropy_with_logits
    for noise, real in DATA:
        fake = g(noise)
        if joint:
            opt_d.zero_grad()
            opt_g.zero_grad()
            backward(loss(d(real), one) + loss(d(fake), zero))
            opt_d.step()
            opt_g.step()
            continue
        opt_d.zero_grad()
        backward(loss(d(real), one) + loss(d(fake.detach()), zero))
        opt_d.step()
        opt_g.zero_grad()
        backward(loss(d(fake), one))
        opt_g.step()
    return {**{f"g.{k}": v for k, v in weights(generator).items()}, **{f"d.{k}": v for k, v in weights(critic).items()}}


@pytest.mark.parametrize("joint", [False, True])
def test_a_gan_at_o0_is_the_plain_loop(joint):
    assert_equal(gan(plugin("O0"), joint=joint), gan(None, joint=joint))


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("level", "unscaled"), [("O1", "O4"), ("O2", "O5")])
def test_a_gan_does_not_notice_that_the_scale_moves_between_its_steps(level, unscaled, optimizer, joint):
    moving = plugin(level, growth_interval=1, init_scale=2.0)
    assert_equal(gan(moving, optimizer, joint), gan(plugin(unscaled), optimizer, joint))
    assert moving.scaler.get_scale() == 2.0 ** (1 + 2 * len(DATA))


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, FusedAdamW])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_is_skipped_and_leaves_nothing_behind(level, optimizer, clip):
    bad = (DATA[3][0], DATA[3][1] * float("inf"))
    results = []
    for data in ([*DATA[:3], bad, *DATA[4:]], [*DATA[:3], *DATA[4:]]):
        precision, model = plugin(level), net()
        fabric = fabric_with(precision)
        # error_if_nonfinite is True by default: clipping must not end the run
        train(fabric, *fabric.setup(model, optimizer(model.parameters(), lr=0.05)), data, clip)
        results.append((weights(model), precision))
    (with_inf, overflowed), (without, calm) = results
    assert_equal(with_inf, without)
    assert overflowed.scaler.get_scale() == calm.scaler.get_scale() / 2
    assert overflowed.scaler.skipped_steps == 1 and calm.scaler.skipped_steps == 0
    assert "0.weight" in overflowed.last_overflow.parameters
    assert calm.last_overflow is None


def test_an_inf_in_one_micro_batch_skips_the_whole_step():
    precision, model = plugin("O2"), net()
    fabric = fabric_with(precision)
    before = weights(model)
    fabric_model, optimizer = fabric.setup(model, FusedSGD(model.parameters(), lr=0.05))
    bad = (DATA[0][0], DATA[0][1] * float("inf"))
    train(fabric, fabric_model, optimizer, [bad, DATA[1]], every=2)
    assert_equal(weights(model), before)


def zero_forward_backward(fabric, model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    fabric.backward(loss)
    return loss


@pytest.mark.parametrize("level", ["O0", "O2", "O4"])
def test_a_closure_is_called_once_before_the_step(level):
    results = []
    for closure in (True, False):
        model = net()
        fabric = fabric_with(plugin(level))
        fabric_model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
        for batch in DATA:
            compute = partial(zero_forward_backward, fabric, fabric_model, optimizer, *batch)
            if closure:
                assert optimizer.step(compute).item() > 0
            else:
                compute()
                optimizer.step()
        results.append(weights(model))
    assert_equal(*results)


def test_no_gradient_no_step():
    model = net()
    fabric = fabric_with(plugin("O2"))
    _, optimizer = fabric.setup(model, FusedAdamW(model.parameters(), lr=0.05))
    before = weights(model)
    optimizer.step()
    assert_equal(weights(model), before)
    assert not optimizer.optimizer.state


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_frozen_and_unfrozen_again(level):
    model = net()
    fabric = fabric_with(plugin(level))
    fabric_model, optimizer = fabric.setup(model, FusedAdamW(model.parameters(), lr=0.05))
    model[0].requires_grad_(False)
    before = weights(model)
    train(fabric, fabric_model, optimizer, DATA[:2])
    after = weights(model)
    assert torch.equal(after["0.weight"], before["0.weight"]) and not torch.equal(after["3.weight"], before["3.weight"])
    model[0].requires_grad_(True)
    train(fabric, fabric_model, optimizer, DATA[:2])
    assert not torch.equal(weights(model)["0.weight"], before["0.weight"])


def test_models_that_share_weights_have_one_master():
    encoder = nn.Linear(8, 8)
    first, second = nn.Sequential(encoder, nn.Linear(8, 3)), nn.Sequential(encoder, nn.Linear(8, 3))
    value = encoder.weight.detach().clone()
    precision = plugin("O2")
    fabric = fabric_with(precision)
    a, b = fabric.setup(first), fabric.setup(second)
    optimizer = fabric.setup_optimizers(FusedSGD([*first.parameters(), *second[1].parameters()], lr=0.05))
    assert torch.equal(first.state_dict()["0.weight"], value) and torch.equal(second.state_dict()["0.weight"], value)
    fabric.backward(F.mse_loss(a(DATA[0][0]) + b(DATA[0][0]), DATA[0][1]))
    optimizer.step()
    assert not torch.equal(second.state_dict()["0.weight"], value)
    assert torch.equal(first.state_dict()["0.weight"], second.state_dict()["0.weight"])
    precision.teardown()
    assert first[0].weight is second[0].weight and first[0].weight.dtype is torch.float32


def test_a_model_is_set_up_again():
    model = net()
    precision = plugin("O2")
    fabric = fabric_with(precision)
    fabric.setup(model)
    fabric_model, optimizer = fabric.setup(model, FusedSGD(model.parameters(), lr=0.05))
    train(fabric, fabric_model, optimizer, DATA[:2])
    precision.teardown()
    assert model[0].weight.dtype is torch.float32


def test_loss_backward_is_refused():
    model = net()
    fabric = fabric_with(plugin("O2"))
    fabric_model, optimizer = fabric.setup(model, FusedSGD(model.parameters(), lr=0.05))
    with pytest.raises(RuntimeError, match=r"fabric\.backward"):  # Fabric's own words
        F.mse_loss(fabric_model(DATA[0][0]), DATA[0][1]).backward()
    optimizer.zero_grad()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with pytest.raises(MisconfigurationException, match=r"call fabric\.backward\(loss\) instead"):
        optimizer.step()


def test_lbfgs_is_refused_where_its_losses_are_scaled():
    model = net()
    fabric = fabric_with(plugin("O1"))
    _, optimizer = fabric.setup(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(MisconfigurationException, match="LBFGS evaluates the loss several times"):
        optimizer.step(lambda: 0.0)


def test_the_trainers_plugin_is_refused_with_the_name_of_the_right_one():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fabric = Fabric(accelerator="cpu", devices=1, plugins=[lightning_apex.ApexPrecision("O5")])
    model = net()
    fabric_model = fabric.setup(model)
    loss = F.mse_loss(fabric_model(DATA[0][0]), DATA[0][1])
    with pytest.raises(MisconfigurationException, match=r"lightning_apex\.fabric"):
        fabric.backward(loss)


def test_a_half_model_is_refused():
    fabric = fabric_with(plugin("O2"))
    with pytest.raises(ValueError, match=r"is torch\.bfloat16 already"):
        fabric.setup(net().bfloat16())


def test_autocast_outside_the_model_is_the_levels():
    fabric = fabric_with(plugin("O1"))
    fabric.setup(net())
    with fabric.autocast():
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16
