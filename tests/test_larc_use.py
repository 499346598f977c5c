"""LARC as the optimizer that it is: what stands around one, and loss scaling."""

import copy
import io
import pickle

import pytest
import torch
from cases import BF16, F32, same_bits
from larc_support import INNER, fill, inner, make_params
from torch import nn
from torch.optim import lr_scheduler

from lightning_apex import LARC, FusedAdam, FusedSGD, LossScaler
from lightning_apex.engine import PrecisionEngine
from lightning_apex.levels import resolve
from lightning_apex.parallel import LARC as BY_APEXS_PATH


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
