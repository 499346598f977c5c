"""LAMB's clip by the global norm of all groups: on the device, each group's own limit, with what others measured."""

import copy

import pytest
import torch
from cases import BF16, F32, same_bits
from optimizer_support import compare, copy_of, fill_grads, make_params, params_of, run
from reference_optimizer import Reference
from torch import nn

from lightning_apex import FusedLAMB, FusedMixedPrecisionLamb, LossScaler, ops
from lightning_apex.masters import MasterWeights
from lightning_apex.optimizers._base import StepInputs

# eps is large, so that the length of the gradient is not all lost in the division by its root mean square
HYPERS = {"lr": 0.05, "weight_decay": 0.1, "eps": 0.1}


@pytest.mark.parametrize("kind", [FusedLAMB, FusedMixedPrecisionLamb])
@pytest.mark.parametrize("limit", [0.1, 1.0, 3.0, 1e6, 0.0, None])
def test_equals_gradients_divided_beforehand(kind, limit):
    params = make_params()
    run(kind(params, **HYPERS, max_grad_norm=limit), Reference(copy_of(params), kind, **HYPERS, max_grad_norm=limit))


def test_it_matters():
    results = []
    for limit in (0.1, None):
        params = make_params()
        optimizer = FusedLAMB(params, **HYPERS, max_grad_norm=limit)
        fill_grads(0, params)
        optimizer.step()
        results.append(params[4].detach().clone())
    assert (results[0] - results[1]).abs().max() > 1e-3


@pytest.mark.parametrize("limits", [(0.5, None), (None, 0.5), (0.5, 2.0), (1e6, 0.25)])
def test_each_group_has_a_limit_of_its_own_for_the_norm_of_all(limits):
    params = make_params()
    copies = copy_of(params)

    def groups(ps):
        return [{"params": ps[:3], "max_grad_norm": limits[0]}, {"params": ps[3:], "max_grad_norm": limits[1]}]

    a, b = FusedLAMB(groups(params), **HYPERS), Reference(groups(copies), FusedLAMB, **HYPERS)
    run(a, b)
    a.add_param_group({"params": make_params(seed=5), "max_grad_norm": 0.3})
    b.add_param_group({"params": make_params(seed=5), "max_grad_norm": 0.3})
    run(a, b, range(5, 8))
    a.param_groups[0]["max_grad_norm"] = b.param_groups[0]["max_grad_norm"] = 0.05
    run(a, b, range(8, 10))


def test_the_limit_of_a_loaded_state_counts():
    a = FusedLAMB(make_params(), **HYPERS, max_grad_norm=0.1)
    fill_grads(0, params_of(a))
    a.step()
    b = FusedLAMB(copy_of(params_of(a)), **HYPERS, max_grad_norm=None)
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    for step in range(1, 3):
        fill_grads(step, params_of(a), params_of(b))
        a.step()
        b.step()
    assert all(map(same_bits, params_of(a), params_of(b)))


def test_gradients_are_untouched():
    params = make_params()
    optimizer = FusedLAMB(params, **HYPERS, max_grad_norm=0.01)
    fill_grads(0, params)
    grads = [(p.grad, p.grad.clone()) for p in params]
    optimizer.step()
    assert all(p.grad is g and same_bits(g, v) for p, (g, v) in zip(params, grads, strict=True))


class TestUnderLossScaling:
    def test_the_unscaled_norm_is_clipped_after_one_measurement(self, monkeypatch):
        measured, whole = [], ops.measure_gradients
        monkeypatch.setattr(ops, "measure_gradients", lambda grads: (measured.append(1), whole(grads))[1])
        params = make_params()
        a, b = FusedLAMB(params, **HYPERS), Reference(copy_of(params), FusedLAMB, **HYPERS)
        scaler = LossScaler(init_scale=1024.0)
        for step in range(4):
            fill_grads(step, params, params_of(b))
            for p in params:
                p.grad.mul_(1024.0)
            measured.clear()
            scaler.step(a)
            scaler.update()
            assert len(measured) == 1
            b.step()
            compare(a, b)

    def test_a_norm_given_with_a_factor(self):
        params = make_params()
        a, b = FusedLAMB(params, **HYPERS), Reference(copy_of(params), FusedLAMB, **HYPERS)
        fill_grads(0, params, params_of(b))
        squares, _ = ops.measure_gradients([p.grad for p in params])
        for q in params_of(b):
            q.grad.mul_(0.25)
        with a.handed(StepInputs(multiplier=torch.tensor(0.25), sum_of_squares=squares)):
            a.step()
        b.step()
        compare(a, b)

    @pytest.mark.parametrize("bad", [float("inf"), float("nan")])
    def test_a_skipped_step_writes_nothing(self, bad):
        params = make_params()
        optimizer = FusedLAMB(params, **HYPERS)
        fill_grads(0, params)
        optimizer.step()
        values = copy_of(params)
        states = copy.deepcopy(optimizer.state_dict()["state"])
        fill_grads(1, params)
        params[4].grad[0, 0] = bad
        scaler = LossScaler(init_scale=4.0)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.skipped_steps == 1
        assert all(map(same_bits, params, values))
        for i, state in optimizer.state_dict()["state"].items():
            assert all(same_bits(v, states[i][k]) for k, v in state.items())

    def test_nothing_is_read_back(self, monkeypatch):
        """On a GPU every one of these would wait for it."""
        params = make_params()
        optimizer = FusedLAMB(params, **HYPERS)
        fill_grads(0, params)

        def refuse(*_):
            raise AssertionError("a host read")

        for name in ("__float__", "__bool__", "__int__", "item", "tolist", "__index__"):
            monkeypatch.setattr(torch.Tensor, name, refuse)
        optimizer.step()


class TestMastersOfItsOwn:
    def make(self, **hypers):
        params = make_params(BF16)
        return params, FusedMixedPrecisionLamb(params, **HYPERS, reduced_precision_dtype=BF16, **hypers)

    def test_equal_fp32_training(self):
        params, a = self.make()
        wide = copy_of(params, F32)
        b = FusedLAMB(wide, **HYPERS)
        for step in range(5):
            fill_grads(step, params)
            for p, q in zip(params, wide, strict=True):
                q.grad = p.grad.float()
            a.step()
            b.step()
            for p, q in zip(params, wide, strict=True):
                assert same_bits(a.state[p]["master"], q.detach())
                assert same_bits(p.detach(), q.detach().to(BF16))

    @pytest.mark.parametrize("state_dtype", [None, BF16])
    def test_are_saved_and_loaded(self, state_dtype):
        params, a = self.make(state_dtype=state_dtype)
        for step in range(2):
            fill_grads(step, params)
            a.step()
        twins = [copy.deepcopy(a), FusedMixedPrecisionLamb(copy_of(params), lr=1.0, reduced_precision_dtype=BF16)]
        twins[1].load_state_dict(copy.deepcopy(a.state_dict()))
        for twin in twins:
            assert twin.state[params_of(twin)[4]]["master"].dtype is F32
            for step in range(2, 4):
                fill_grads(step, params_of(twin))
                twin.step()
        for step in range(2, 4):
            fill_grads(step, params)
            a.step()
        for twin in twins:
            for p, q in zip(params, params_of(twin), strict=True):
                assert same_bits(p, q) and same_bits(a.state[p]["master"], twin.state[q]["master"])

    def test_give_way_to_those_of_an_opt_level(self):
        params, a = self.make()
        masters = MasterWeights()
        fill_grads(0, params)
        with a.handed(StepInputs(masters)):
            a.step()
        assert all("master" not in a.state[p] for p in params)
        assert same_bits(params[4].detach(), masters.of(params[4]).to(BF16))

    def test_without_a_dtype_there_are_none(self):
        params = make_params(BF16)
        a = FusedMixedPrecisionLamb(params)
        fill_grads(0, params)
        a.step()
        assert all("master" not in a.state[p] for p in params)

    def test_steps_behind_it(self):
        param = nn.Parameter(torch.ones(3))
        a = FusedMixedPrecisionLamb([param], step=7)
        param.grad = torch.ones(3)
        a.step()
        assert a.state[param]["step"] == 8

    @pytest.mark.parametrize("changes", [{"step": -1}, {"reduced_precision_dtype": F32}])
    def test_bad_arguments(self, changes):
        with pytest.raises(ValueError, match=next(iter(changes))):
            FusedMixedPrecisionLamb(make_params(), **changes)
