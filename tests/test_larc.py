"""LARC against its formula, around fused and torch's optimizers, and as the optimizer that it is."""

import copy
import io
import pickle

import pytest
import torch
from cases import BF16, F16, F32, F64, same_bits
from torch import nn
from torch.optim import lr_scheduler

from lightning_apex import LARC, FusedAdam, FusedLion, FusedSGD, LossScaler
from lightning_apex.engine import PrecisionEngine
from lightning_apex.levels import resolve
from lightning_apex.parallel import LARC as BY_APEXS_PATH

SHAPES = ((7,), (), (0,), (3, 5), (2, 3, 2, 2))
INNER = {
    "torch sgd": lambda ps, **k: torch.optim.SGD(ps, **({"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1} | k)),
    "fused sgd": lambda ps, **k: FusedSGD(ps, **({"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1} | k)),
    "torch adam": lambda ps, **k: torch.optim.Adam(ps, **({"lr": 0.1, "weight_decay": 0.1} | k)),
    "fused adam": lambda ps, **k: FusedAdam(ps, **({"lr": 0.1, "weight_decay": 0.1} | k)),
    "fused lion": lambda ps, **k: FusedLion(ps, **({"lr": 0.01, "weight_decay": 0.1} | k)),
}
inner = pytest.mark.parametrize("inner", INNER)


def make_params(dtype=F32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=F64).to(dtype)) for s in SHAPES]


def fill(step, *lists, scale=1.0):
    generator = torch.Generator().manual_seed(100 + step)
    for same in zip(*lists, strict=True):
        grad = torch.randn(same[0].shape, generator=generator, dtype=F64) * scale
        for p in same:
            p.grad = grad.to(p.dtype)


def scaled(p, g, lr, decay, trust, clip, eps=1e-8):
    """The gradient that the wrapped optimizer should get, in float64."""
    p, g = p.double(), g.double()
    ratio = 1.0
    if p.norm() > 0 and g.norm() > 0:
        ratio = trust * p.norm() / (g.norm() + decay * p.norm() + eps)
        if clip:
            ratio = min(ratio / lr, 1.0)
    return ratio * (g + decay * p)


@inner
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("trust", [0.02, 5.0])
@pytest.mark.parametrize("maximize", [False, True])
def test_equals_the_wrapped_optimizer_on_scaled_gradients(inner, clip, trust, maximize):
    params, twins = make_params(), make_params(F64)
    a = LARC(INNER[inner](params, maximize=maximize), trust_coefficient=trust, clip=clip)
    b = INNER[inner](twins, weight_decay=0.0, maximize=maximize)
    lr = b.param_groups[0]["lr"]
    for step in range(4):
        fill(step, params)
        for p, q in zip(params, twins, strict=True):
            sign = -1 if maximize else 1  # the decay shrinks whichever way the optimizer goes
            q.grad = sign * scaled(q, sign * p.grad, lr, 0.1, trust, clip)
        a.step()
        b.step()
        for p, q in zip(params, twins, strict=True):
            torch.testing.assert_close(p.double(), q, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [F16, BF16, F64])
def test_other_dtypes(dtype):
    params, twins = make_params(dtype), make_params(F64)
    for p, q in zip(params, twins, strict=True):
        q.data.copy_(p)
    a, b = LARC(FusedSGD(params, lr=0.1, weight_decay=0.1)), torch.optim.SGD(twins, lr=0.1)
    fill(0, params)
    for p, q in zip(params, twins, strict=True):
        q.grad = scaled(p, p.grad, 0.1, 0.1, 0.02, True)
    a.step()
    b.step()
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(
            p.double(), q, rtol={F64: 1e-12}.get(dtype, 1e-2), atol=1e-4 if dtype is not F64 else 1e-12
        )


@inner
class TestWhatStaysAsItWas:
    def test_gradients_and_weight_decay(self, inner):
        params = make_params()
        optimizer = LARC(INNER[inner]([{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.3}]))
        fill(0, params)
        grads = [(p.grad, p.grad.clone()) for p in params]
        optimizer.step()
        assert all(p.grad is g and same_bits(g, v) for p, (g, v) in zip(params, grads, strict=True))
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.3]

    @pytest.mark.parametrize("where", ["before", "in", "closure", "sparse"])
    def test_also_when_something_raises(self, inner, where):
        params = make_params()
        optimizer = LARC(INNER[inner](params))
        fill(0, params)
        if where == "sparse":
            params[3].grad = torch.eye(3, 5).to_sparse()
        grads = [p.grad for p in params]

        def fail(*_):
            raise KeyError("broken")

        if where == "before":
            optimizer.optim.register_step_pre_hook(fail)
        elif where == "in":
            optimizer.optim.register_step_post_hook(fail)
        with pytest.raises(RuntimeError if where == "sparse" else KeyError, match=r"broken|sparse=False"):
            optimizer.step(fail if where == "closure" else None)
        assert all(p.grad is g for p, g in zip(params, grads, strict=True))
        assert optimizer.param_groups[0]["weight_decay"] == 0.1

    def test_missing_gradients(self, inner):
        params = make_params()
        before = [p.detach().clone() for p in params]
        optimizer = LARC(INNER[inner](params))
        assert optimizer.step() is None
        assert all(map(same_bits, params, before))
        fill(0, params)
        params[3].grad = None
        optimizer.step()
        assert params[3].grad is None and same_bits(params[3], before[3]) and not same_bits(params[0], before[0])


class TestZeroNorms:
    @pytest.mark.parametrize("clip", [True, False])
    def test_the_decay_is_kept_where_the_gradient_is_zero(self, clip):
        param = nn.Parameter(torch.full((4,), 2.0))
        optimizer = LARC(torch.optim.SGD([param], lr=0.1, weight_decay=0.5), clip=clip)
        param.grad = torch.zeros(4)
        optimizer.step()
        torch.testing.assert_close(param.detach(), torch.full((4,), 2.0 - 0.1 * 0.5 * 2.0))

    def test_a_parameter_of_zeros_learns(self):
        param = nn.Parameter(torch.zeros(4))
        optimizer = LARC(torch.optim.SGD([param], lr=0.1, weight_decay=0.5))
        param.grad = torch.ones(4)
        optimizer.step()
        torch.testing.assert_close(param.detach(), torch.full((4,), -0.1))

    @pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)])
    def test_a_learning_rate_of_zero(self, lr):
        params = make_params()
        before = [p.detach().clone() for p in params]
        optimizer = LARC(FusedSGD(params, lr=lr))
        fill(0, params)
        optimizer.step()
        assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))


def test_a_tensor_learning_rate():
    a, b = make_params(), make_params()
    first, second = LARC(FusedSGD(a, lr=torch.tensor(0.01))), LARC(FusedSGD(b, lr=0.01))
    fill(0, a, b)
    first.step()
    second.step()
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q)


@inner
class TestIsAnOptimizer:
    def test_by_type(self, inner):
        optimizer = LARC(INNER[inner](make_params()))
        assert isinstance(optimizer, torch.optim.Optimizer) and BY_APEXS_PATH is LARC
        assert optimizer.defaults is optimizer.optim.defaults and "LARC(" in repr(optimizer)

    def test_closures(self, inner):
        params = make_params()
        optimizer = LARC(INNER[inner](params))

        def closure():
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss = sum(p.square().sum() for p in params)
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(5)]
        assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]

    @pytest.mark.parametrize(
        "make",
        [
            lambda o: lr_scheduler.StepLR(o, 1, 0.5),
            lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=5, cycle_momentum=False),
            lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
        ],
        ids=["step", "one cycle", "plateau"],
    )
    def test_schedulers(self, inner, make):
        params = make_params()
        optimizer = LARC(INNER[inner](params))
        scheduler = make(optimizer)
        plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
        for step in range(3):
            fill(step, params)
            optimizer.step()
            scheduler.step(*([1.0] if plateau else []))
        assert optimizer.param_groups[0]["lr"] == optimizer.optim.param_groups[0]["lr"] != 0.1

    def test_hooks(self, inner):
        params = make_params()
        optimizer = LARC(INNER[inner](params))
        calls = []
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        optimizer.register_state_dict_pre_hook(lambda *_: calls.append("saving"))
        optimizer.register_state_dict_post_hook(lambda _, state: state | {"mine": 1})
        optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append(state.pop("mine")))
        optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
        fill(0, params)
        optimizer.step()
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        assert calls == ["before", "after", "saving", 1, "loaded"] and state["mine"] == 1

    def test_new_groups_and_zero_grad(self, inner):
        params, more = make_params(), make_params(seed=2)
        optimizer = LARC(INNER[inner](params))
        optimizer.add_param_group({"params": more, "lr": 0.01})
        assert len(optimizer.param_groups) == len(optimizer.optim.param_groups) == 2
        before = more[0].detach().clone()
        fill(0, params, params)
        fill(0, more)
        optimizer.step()
        assert not same_bits(more[0], before)
        optimizer.zero_grad(set_to_none=False)
        assert all(p.grad.eq(0).all() for p in params)
        optimizer.zero_grad()
        assert all(p.grad is None for p in params)

    def test_state_dicts_are_the_wrapped_optimizers(self, inner):
        params = make_params()
        a = LARC(INNER[inner](params))
        for step in range(2):
            fill(step, params)
            a.step()
        file = io.BytesIO()
        torch.save(a.state_dict(), file)
        file.seek(0)
        twins = make_params()
        for p, q in zip(params, twins, strict=True):
            q.data.copy_(p)
        b = LARC(INNER[inner](twins, lr=5.0))
        b.load_state_dict(torch.load(file, weights_only=True))
        bare = INNER[inner](make_params())
        bare.load_state_dict(a.state_dict())
        for step in range(2, 4):
            fill(step, params, twins)
            a.step()
            b.step()
        assert all(map(same_bits, params, twins))

    @pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
    def test_copies_and_pickles(self, inner, twin_of):
        params = make_params()
        a = LARC(INNER[inner](params), 0.5, False, 1e-3)
        scheduler = lr_scheduler.StepLR(a, 1)  # wraps step
        fill(0, params)
        a.step()
        scheduler.step()
        b = twin_of(a)
        twins = [p for group in b.param_groups for p in group["params"]]
        assert (b.trust_coefficient, b.clip, b.eps) == (0.5, False, 1e-3) and twins[0] is not params[0]
        fill(1, params, twins)
        a.step()
        b.step()
        assert all(map(same_bits, params, twins))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"trust_coefficient": 0}, ValueError, "trust_coefficient=0"),
        ({"trust_coefficient": -1.0}, ValueError, r"trust_coefficient=-1\.0"),
        ({"eps": -1e-8}, ValueError, "eps=-1e-08"),
        ({"optimizer": [nn.Parameter(torch.ones(1))]}, TypeError, "wraps an optimizer.*list"),
    ],
)
def test_bad_arguments(arguments, error, match):
    with pytest.raises(error, match=match):
        LARC(**{"optimizer": torch.optim.SGD(make_params(), lr=0.1), **arguments})


class TestLossScaling:
    """What the wrapped optimizer sees does not depend on the loss scale."""

    @inner
    @pytest.mark.parametrize("scaler", [LossScaler, torch.amp.GradScaler])
    def test_scalers(self, inner, scaler):
        results = []
        for scale in (1.0, 2.0**12):
            params = make_params()
            optimizer = LARC(INNER[inner](params))
            made = scaler(init_scale=scale) if scaler is LossScaler else scaler("cpu", init_scale=scale)
            made.scale(torch.ones(()))
            for step in range(3):
                fill(step, params, scale=scale)
                made.step(optimizer)
                made.update()
            results.append(params)
        for p, q in zip(*results, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)

    @inner
    @pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
    def test_levels(self, inner, level):
        """Equal to LARC on the fp32 weights, up to the rounding of half gradients."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        plain = copy.deepcopy(model)
        settings = resolve(level, half_dtype="bfloat16" if level in ("O1", "O2", "O3") else None)
        engine = PrecisionEngine(settings, LossScaler(settings.loss_scale, init_scale=2.0**12))
        engine.convert(model, "cpu")
        optimizers = [LARC(INNER[inner](m.parameters())) for m in (model, plain)]
        engine.adopt(optimizers[:1])
        params = list(model.parameters())
        for step in range(3):
            fill_like(step, params, list(plain.parameters()), engine.scaler.get_scale())
            engine._backwards += 1
            engine.finish(optimizers[0])
            optimizers[1].step()
        assert not any(isinstance(p.grad, torch.Tensor) and p.grad.dtype is not p.dtype for p in params)
        half_state = [v.dtype for s in optimizers[0].state.values() for k, v in s.items() if k != "step"]
        if "fused" in inner:
            assert all(dtype is F32 for dtype in half_state)
        engine.restore()
        tolerance = 1e-6 if level in ("O0", "O1", "O2", "O4", "O5") else 2e-2
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.float(), q, rtol=tolerance, atol=tolerance)

    def test_a_skipped_step_changes_nothing(self):
        params = make_params()
        before = [p.detach().clone() for p in params]
        optimizer, scaler = LARC(FusedSGD(params, lr=0.1, momentum=0.9)), LossScaler()
        fill(0, params)
        params[0].grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        assert scaler.skipped_steps == 1 and all(map(same_bits, params, before)) and not optimizer.state


def fill_like(step, params, plain, scale):
    generator = torch.Generator().manual_seed(step)
    for p, q in zip(params, plain, strict=True):
        grad = torch.randn(q.shape, generator=generator).to(p.dtype)
        p.grad, q.grad = grad * scale, grad.float()


def test_a_bfloat16_state_of_a_fused_optimizer_stays_that_under_masters():
    model = nn.Linear(4, 4)
    engine = PrecisionEngine(resolve("O5"), LossScaler(1.0))
    engine.convert(model, "cpu")
    optimizer = LARC(FusedAdam(model.parameters(), state_dtype=BF16))
    engine.adopt([optimizer])
    for step in range(2):
        fill_like(step, list(model.parameters()), [p.float() for p in model.parameters()], 1.0)
        engine._backwards += 1
        engine.finish(optimizer)
    assert all(state["exp_avg"].dtype is BF16 for state in optimizer.state.values())
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    engine.restore()
    assert all(state["exp_avg"].dtype is BF16 for state in optimizer.state.values())
