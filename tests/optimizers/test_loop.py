"""The optimizers among what a training loop has around them: closures, schedulers, new groups, hooks, averages."""

import copy
import io

import pytest
import torch
from cases import BF16, F32, F64, same_bits
from optimizer_support import KINDS, PAIRS, compare, copy_of, fill_grads, make_params, ours, run, takes, theirs
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_apex import FusedSGD, LossScaler

pairs = pytest.mark.parametrize("pair", PAIRS)


@pairs
def test_a_closure(pair):
    params = make_params()
    a, b = ours(pair, params), theirs(pair, copy_of(params))
    for step in range(3):
        results = []
        for optimizer in (a, b):

            def closure(optimizer=optimizer, step=step):
                assert torch.is_grad_enabled()
                optimizer.zero_grad()
                fill_grads(step, optimizer.param_groups[0]["params"])
                return torch.tensor(float(step))

            with torch.no_grad():
                results.append(optimizer.step(closure))
        assert results == [float(step)] * 2
        compare(a, b)


@pairs
class TestLearningRate:
    @pytest.mark.parametrize("dtype", [F32, F64, BF16])
    def test_as_a_tensor(self, pair, dtype):
        params = make_params()
        lr = torch.tensor(0.125, dtype=dtype)
        a, b = ours(pair, params, lr=lr), theirs(pair, copy_of(params), lr=0.125)
        run(a, b, range(2))
        lr.fill_(0.5)
        b.param_groups[0]["lr"] = 0.5
        run(a, b, range(2, 4))

    @pytest.mark.parametrize(
        "make",
        [
            lambda o: lr_scheduler.StepLR(o, 2, 0.1),
            lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10, cycle_momentum=False),
            lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
            lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.5)], [3]),
        ],
        ids=["step", "one cycle", "cosine", "sequential"],
    )
    @pytest.mark.parametrize("as_tensor", [False, True])
    def test_follows_a_scheduler(self, pair, make, as_tensor):
        params = make_params()
        a = ours(pair, params, lr=torch.tensor(0.1) if as_tensor else 0.1)
        b = theirs(pair, copy_of(params), lr=0.1)
        schedulers = [make(a), make(b)]
        for step in range(6):
            run(a, b, [step])
            for scheduler in schedulers:
                scheduler.step()

    def test_may_be_zero(self, pair):
        params = make_params()
        before = copy_of(params)
        run(ours(pair, params, lr=0.0), theirs(pair, copy_of(params), lr=0.0), range(2))
        assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))


def test_momentum_follows_a_cycle():
    params = make_params()
    a = FusedSGD(params, lr=0.1, momentum=0.9)
    b = torch.optim.SGD(copy_of(params), lr=0.1, momentum=0.9, foreach=False)
    schedulers = [lr_scheduler.OneCycleLR(o, 0.2, total_steps=8) for o in (a, b)]
    for step in range(6):
        run(a, b, [step])
        for scheduler in schedulers:
            scheduler.step()


def test_momentum_that_is_switched_on_later():
    params = make_params()
    a, b = (
        kind(ps, lr=0.1, dampening=0.5, momentum=0.0)
        for kind, ps in ((FusedSGD, params), (torch.optim.SGD, copy_of(params)))
    )
    run(a, b, range(2))
    for optimizer in (a, b):
        optimizer.param_groups[0]["momentum"] = 0.9
    run(a, b, range(2, 5))


def test_weight_decay_and_betas_may_change():
    params = make_params()
    a, b = ours("adamw", params), theirs("adamw", copy_of(params))
    run(a, b, range(2))
    for optimizer in (a, b):
        optimizer.param_groups[0].update(weight_decay=0.5, betas=(0.5, 0.9), eps=1e-3)
    run(a, b, range(2, 5))


@pairs
class TestNewGroups:
    def test_train_from_their_own_first_step(self, pair):
        params, more = make_params(), make_params(seed=2)
        a, b = ours(pair, params), theirs(pair, copy_of(params))
        run(a, b, range(3))
        copies = copy_of(more)
        a.add_param_group({"params": more, "lr": 0.3})
        b.add_param_group({"params": copies, "lr": 0.3})
        run(a, b, range(3, 6))
        assert a.state[more[0]]["step"] == 3

    def test_a_single_tensor(self, pair):
        optimizer = ours(pair, make_params())
        param = make_params(seed=2)[0]
        optimizer.add_param_group({"params": param})
        assert optimizer.param_groups[1]["params"] == [param]


@pytest.mark.parametrize("kind", KINDS)
class TestZeroGrad:
    def test_sets_none_by_default(self, kind):
        params = make_params()
        optimizer = kind(params)
        fill_grads(0, params)
        optimizer.zero_grad()
        assert all(p.grad is None for p in params)

    @pytest.mark.parametrize("default", [False, True])
    @pytest.mark.parametrize("given", [False, True, None])
    def test_as_asked(self, kind, default, given):
        params = make_params()
        optimizer = kind(params, set_grad_none=default)
        fill_grads(0, params)
        optimizer.zero_grad(*([] if given is None else [given]))
        to_none = default if given is None else given
        assert all((p.grad is None) == to_none for p in params)
        assert to_none or all(p.grad.eq(0).all() for p in params)

    def test_zeroed_gradients_still_make_a_step(self, kind):
        params = make_params()
        optimizer = kind(params, lr=0.1, weight_decay=0.5)
        before = copy_of(params)
        fill_grads(0, params)
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        assert not torch.equal(params[4], before[4])


@pytest.mark.parametrize("kind", KINDS)
def test_step_hooks(kind):
    params = make_params()
    optimizer = kind(params, weight_decay=0.0)
    calls = []

    def before(optimizer, args, kwargs):
        calls.append("before")
        params[0].grad.zero_()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    fill_grads(0, params)
    start = params[0].detach().clone()
    optimizer.step()
    assert calls == ["before", "after"] and same_bits(params[0], start)
    fill_grads(1, params)
    LossScaler(init_scale=4.0).step(optimizer)
    assert calls == ["before", "after"] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_never_written(kind):
    params = make_params()
    optimizer = kind(params, weight_decay=0.1, maximize=True)
    for step in range(3):
        fill_grads(step, params)
        grads = [p.grad for p in params]
        values = [g.clone() for g in grads]
        optimizer.step()
        assert all(p.grad is g and same_bits(g, v) for p, g, v in zip(params, grads, values, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_an_average_owns_its_weights(kind):
    model = nn.Linear(3, 3)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = kind(model.parameters(), lr=0.5)
    average.update_parameters(model)
    for step in range(3):
        expected = average.module.weight.detach().clone()
        fill_grads(step, list(model.parameters()))
        optimizer.step()
        assert same_bits(average.module.weight, expected)
        average.update_parameters(model)
        torch.testing.assert_close(average.module.weight, (expected + model.weight) / 2)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_weights_with_masters_accumulate_tiny_steps(kind):
    """1e-6 is far below what bf16 adds to 1: without a master nothing would ever happen."""
    from lightning_apex.masters import MasterWeights
    from lightning_apex.optimizers._base import StepInputs

    masters, param, wide = MasterWeights(), nn.Parameter(torch.ones(4, dtype=BF16)), nn.Parameter(torch.ones(4))
    optimizer, twin = (kind([p], lr=1e-6, **takes(kind, trust_coefficient=1.0)) for p in (param, wide))
    for _ in range(1000):
        param.grad, wide.grad = torch.ones_like(param), torch.ones_like(wide)
        optimizer.hand(StepInputs(masters))
        optimizer.step()
        twin.step()
    assert same_bits(masters.of(param), wide.detach()) and wide.lt(1 - 5e-5).all()
    assert same_bits(param.detach(), masters.of(param).to(BF16))
    param.grad = torch.ones_like(param)
    optimizer.hand(StepInputs(masters))
    param.data.fill_(2)  # someone writes to the model
    optimizer.step()
    torch.testing.assert_close(masters.of(param), torch.full((4,), 2.0), rtol=0, atol=3e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_handed_over_is_used_once(kind):
    from lightning_apex.optimizers._base import StepInputs

    params = make_params()
    optimizer = kind(params, lr=0.1)
    fill_grads(0, params)
    before = copy_of(params)
    optimizer.hand(StepInputs(found_inf=torch.ones(())))
    optimizer.step()
    assert all(map(same_bits, params, before))
    optimizer.step()
    assert not torch.equal(params[4], before[4])
    with optimizer.handed(StepInputs(found_inf=torch.ones(()))):
        pass
    values = copy_of(params)
    optimizer.step()
    assert not torch.equal(params[4], values[4])
    twin = copy.deepcopy(optimizer)
    twin.hand(StepInputs(found_inf=torch.ones(())))
    assert optimizer._inputs.found_inf is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_checkpoint_resumes_bit_for_bit(kind):
    def make():
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = kind(model.parameters(), lr=0.05, weight_decay=0.01)
        return model, optimizer, LossScaler(init_scale=8.0, growth_interval=2), lr_scheduler.StepLR(optimizer, 2, 0.5)

    def train(parts, steps):
        model, optimizer, scaler, scheduler = parts
        for step in steps:
            x = torch.linspace(-1, 1, 12).reshape(3, 4) + step
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()

    whole = make()
    train(whole, range(6))
    first, second = make(), make()
    train(first, range(3))
    file = io.BytesIO()
    torch.save([part.state_dict() for part in first], file)
    file.seek(0)
    for part, state in zip(second, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    train(second, range(3, 6))
    assert all(map(same_bits, whole[0].parameters(), second[0].parameters()))
    assert whole[2].state_dict() == second[2].state_dict()
