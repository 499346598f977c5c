"""Several backward passes for one step: accumulation, several losses, several optimizers."""

import pytest
import torch
from amp_support import (
    BF16,
    LEVELS,
    OPTIMIZERS,
    SCALED,
    batch,
    fp32,
    loss_of,
    net,
    same,
    scale_of,
    start,
    state_of,
    step,
    thinned,
)
from cases import assert_close
from torch import nn

from lightning_apex import amp

INF = float("inf")
K = 4


def plain_net():
    """Without BatchNorm, whose statistics depend on the split."""
    model = net()
    model[1] = nn.LayerNorm(8)
    return model


def micro_loss(model, index):
    x, y = batch(0, 8 * K)
    return nn.functional.cross_entropy(model(x[8 * index : 8 * index + 8]), y[8 * index : 8 * index + 8]) / K


def accumulate(model, made, delay, factors=(1.0,) * K):
    for index, factor in enumerate(factors):
        with amp.scale_loss(micro_loss(model, index) * factor, made, delay_unscale=delay and index < K - 1) as scaled:
            scaled.backward()
    made.step()
    made.zero_grad()


def gradients(model, made, delay):
    for index in range(K):
        with amp.scale_loss(micro_loss(model, index), made, delay_unscale=delay and index < K - 1) as scaled:
            scaled.backward()
    return [p.grad.clone() for p in amp.master_params(made)]


@pytest.mark.parametrize(("level", "optimizer", "delay"), thinned(3, LEVELS, OPTIMIZERS, [True, False]))
def test_accumulated_gradients_are_those_of_the_whole_batch(level, optimizer, delay):
    whole = plain_net()
    loss_of(whole, 0, 8 * K).backward()
    model, made = start(level, optimizer, plain_net())
    found = gradients(model, made, delay)
    for grad, p in zip(found, whole.parameters(), strict=True):
        tolerance = 1e-6 if level == "O0" else 3e-2
        assert (grad.double() - p.grad.double()).norm() <= tolerance * p.grad.double().norm() + 1e-7


@pytest.mark.parametrize("delay", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_accumulation_at_O1_is_exact(optimizer, delay):
    witness = plain_net()
    by_hand = OPTIMIZERS[optimizer](witness.parameters())
    for index in range(K):
        x, y = batch(0, 8 * K)
        with torch.autocast("cpu", dtype=BF16):
            output = witness(x[8 * index : 8 * index + 8])
        (nn.functional.cross_entropy(output.float(), y[8 * index : 8 * index + 8]) / K).backward()
    by_hand.step()
    model, made = start("O1", optimizer, plain_net())
    accumulate(model, made, delay)
    assert same(fp32(model), fp32(witness))


@pytest.mark.parametrize(
    ("scaled", "optimizer", "bad", "delay"), thinned(3, SCALED, ["sgd", "fused_adam"], range(K), [True, False])
)
def test_an_inf_anywhere_in_the_window_skips_its_step(scaled, optimizer, bad, delay):
    level, dtype = scaled
    model, made = start(level, optimizer, plain_net(), half_dtype=dtype)
    before = fp32(model)
    accumulate(model, made, delay, [INF if i == bad else 1.0 for i in range(K)])
    assert same(fp32(model), before)
    assert scale_of(made) == 2.0**7  # one check a window
    accumulate(model, made, delay)
    assert not same(fp32(model), before)


def test_the_scale_is_constant_in_a_window_and_grows_once():
    model, made = start("O1", growth_interval=1)
    scales = []
    for index in range(K):
        with amp.scale_loss(micro_loss(model, index), made) as scaled:
            scaled.backward()
            scales.append(scale_of(made))
    made.step()
    assert scales == [2.0**8] * K and scale_of(made) == 2.0**9


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_delayed_gradients_are_unscaled_by_the_step_if_nobody_did(level, optimizer):
    results = []
    for delay in (True, False):
        model, made = start(level, optimizer, plain_net(), loss_scale=256.0, half_dtype="bfloat16")
        step(model, made, delay_unscale=delay)
        results.append(fp32(model))
    assert same(*results)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_zeroing_in_place_is_the_same_as_dropping(level, optimizer):
    results = []
    for set_to_none in (True, False):
        model, made = start(level, optimizer)
        for index in range(4):
            made.zero_grad(set_to_none=set_to_none)
            with amp.scale_loss(loss_of(model, index), made) as scaled:
                scaled.backward()
            made.step()
        results.append((fp32(model), state_of(made)))
    assert same(*results)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_second_step_on_the_same_gradients(level, optimizer):
    """torch takes them again."""
    model, made = start(level, optimizer)
    step(model, made)
    made.step()
    twice = fp32(model)
    model, made = start(level, optimizer)
    with amp.scale_loss(loss_of(model), made) as scaled:
        scaled.backward()
    grads = [p.grad.float().clone() for p in amp.master_params(made)]
    made.step()
    for p, grad in zip(model.parameters(), grads, strict=True):
        p.grad = grad.to(p.dtype)
    made.step()
    for name, value in fp32(model).items():
        if value.is_floating_point():
            assert (twice[name] - value).abs().max() <= 1e-2 * (value.abs().max() + 1), name


@pytest.mark.parametrize("optimizer", ["adamw", "fused_adam"])
@pytest.mark.parametrize("level", ["O1", "O2"])
class TestSeveralLosses:
    def model(self, level, optimizer, num_losses=2):
        return start(level, optimizer, plain_net(), num_losses=num_losses, half_dtype="bfloat16")

    def test_gradients_add_up_whatever_the_scales(self, level, optimizer):
        model, made = self.model(level, optimizer)
        states = amp.state_dict(made)
        states["loss_scaler1"] |= {"scale": 2.0**14}
        amp.load_state_dict(states, made)
        for loss_id in range(2):
            with amp.scale_loss(micro_loss(model, loss_id), made, loss_id=loss_id) as scaled:
                scaled.backward()
        found = [p.grad.clone() for p in amp.master_params(made)]
        witness, _ = start(level, optimizer, plain_net(), loss_scale=256.0, half_dtype="bfloat16")
        expected = [torch.zeros_like(p, dtype=torch.float32) for p in witness.parameters()]
        for index in range(2):
            witness.zero_grad()
            micro_loss(witness, index).backward()
            for total, p in zip(expected, witness.parameters(), strict=True):
                total += p.grad.float()
        for grad, total in zip(found, expected, strict=True):
            assert (grad - total).norm() <= 1e-2 * total.norm() + 1e-7

    def test_each_scale_follows_its_own_loss(self, level, optimizer):
        model, made = self.model(level, optimizer)
        before = fp32(model)
        for loss_id, factor in ((0, 1.0), (1, INF)):
            with amp.scale_loss(micro_loss(model, loss_id) * factor, made, loss_id=loss_id) as scaled:
                scaled.backward()
        made.step()
        assert same(fp32(model), before)
        assert (scale_of(made, 0), scale_of(made, 1)) == (2.0**8, 2.0**7)

    def test_the_order_does_not_matter(self, level, optimizer):
        model, made = self.model(level, optimizer)
        before = fp32(model)
        for loss_id, factor in ((0, INF), (1, 1.0)):
            with amp.scale_loss(micro_loss(model, loss_id) * factor, made, loss_id=loss_id) as scaled:
                scaled.backward()
        made.step()
        assert same(fp32(model), before)
        assert (scale_of(made, 0), scale_of(made, 1)) == (2.0**7, 2.0**8)


@pytest.mark.parametrize("optimizer", ["sgd", "fused_sgd"])
@pytest.mark.parametrize("level", ["O1", "O2"])
class TestSeveralOptimizers:
    def start(self, level, optimizer):
        model = plain_net()
        made = [OPTIMIZERS[optimizer](model[0].parameters()), OPTIMIZERS[optimizer](model[3].parameters())]
        return amp.initialize(
            model, made, opt_level=level, half_dtype="bfloat16", init_scale=256.0, growth_interval=1, verbosity=0
        )

    def test_an_overflow_skips_all_optimizers_of_the_loss(self, level, optimizer):
        model, made = self.start(level, optimizer)
        before = fp32(model)
        with amp.scale_loss(loss_of(model), made) as scaled:
            scaled.backward()
            model[0].weight.grad[0, 0] = INF
        for each in made:
            each.step()
            each.zero_grad()
        assert same(fp32(model), before)
        assert scale_of(made[0]) == 2.0**7  # once

    def test_the_scale_may_move_between_their_steps(self, level, optimizer):
        model, made = self.start(level, optimizer)
        joint = plain_net()
        whole = OPTIMIZERS[optimizer](joint.parameters())
        for index in range(3):
            with amp.scale_loss(loss_of(model, index), made) as scaled:
                scaled.backward()
            for each in made:
                each.step()
                each.zero_grad()
        assert scale_of(made[0]) == 2.0**11
        joint, whole = amp.initialize(joint, whole, opt_level=level, half_dtype="bfloat16", verbosity=0)
        for p in joint[1].parameters():
            p.requires_grad_(False)
        for index in range(3):
            with amp.scale_loss(loss_of(joint, index), whole) as scaled:
                scaled.backward()
            whole.step()
            whole.zero_grad()
        for name, value in fp32(joint).items():
            assert_close(fp32(model)[name], value.double(), name)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_backward_pass_that_fails_leaves_the_gradients_of_the_last_one(level, optimizer):
    runs = []
    for fails in (True, False):
        model, made = start(level, optimizer, plain_net())
        with amp.scale_loss(micro_loss(model, 0), made) as scaled:
            scaled.backward()
        if fails:
            with pytest.raises(ArithmeticError), amp.scale_loss(micro_loss(model, 1), made) as scaled:
                scaled.backward()
                raise ArithmeticError
        grads = [p.grad.clone() for p in amp.master_params(made)]
        made.step()
        runs.append((grads, fp32(model)))
    assert same(*runs)


def test_accumulation_with_masters_is_in_fp32():
    """Half gradients would lose the small ones: 256 + 0.5 is 256 in bfloat16."""
    model = nn.Linear(1, 1, bias=False)
    made = torch.optim.SGD(model.parameters(), lr=0.0)
    model, made = amp.initialize(model, made, opt_level="O2", half_dtype="bfloat16", verbosity=0)
    for value in (256.0, 0.5):
        with amp.scale_loss(model(torch.full((1, 1), value)).sum(), made) as scaled:
            scaled.backward()
    (master,) = amp.master_params(made)
    assert master.grad.item() == 256.5
