"""What an optimizer remembers from step to step must not outlive a change of its parameters, groups or state."""

import pytest
import torch
from cases import F64, same_bits
from optimizer_support import KINDS, PAIRS, compare, copy_of, fill_grads, make_params, ours, params_of, run, theirs
from torch import nn

from lightning_apex import FusedAdam, FusedSGD
from lightning_apex.masters import MasterWeights
from lightning_apex.optimizers._base import StepInputs

pairs = pytest.mark.parametrize("pair", PAIRS)


def both(pair, steps=2):
    params = make_params()
    a, b = ours(pair, params), theirs(pair, copy_of(params))
    run(a, b, range(steps))
    return a, b


@pairs
class TestChangesBetweenSteps:
    def test_state_that_is_cleared(self, pair):
        a, b = both(pair)
        a.state.clear()
        b.state.clear()
        run(a, b, range(2, 4))

    def test_the_state_of_one_parameter_is_dropped(self, pair):
        a, b = both(pair)
        for optimizer in (a, b):
            optimizer.state.pop(params_of(optimizer)[3], None)
        run(a, b, range(2, 4))

    def test_a_moment_is_replaced(self, pair):
        a, b = both(pair)
        for optimizer in (a, b):
            state = optimizer.state[params_of(optimizer)[4]]
            for name in set(state) - {"step"}:
                state[name] = torch.full_like(state[name], 0.5)
        run(a, b, range(2, 4))

    def test_groups_change_places_or_go(self, pair):
        params = make_params()
        copies = copy_of(params)
        a = ours(pair, [{"params": params[:3], "lr": 0.5}, {"params": params[3:]}])
        b = theirs(pair, [{"params": copies[:3], "lr": 0.5}, {"params": copies[3:]}])
        run(a, b, range(2))
        for optimizer in (a, b):
            optimizer.param_groups.reverse()
        run(a, b, range(2, 4))
        for optimizer in (a, b):
            del optimizer.param_groups[0]
        run(a, b, range(4, 6))

    def test_a_parameter_joins_a_group_that_has_stepped(self, pair):
        a, b = both(pair)
        for optimizer in (a, b):
            optimizer.param_groups[0]["params"].append(make_params(seed=2)[4])
        run(a, b, range(2, 4))

    def test_a_parameter_takes_anothers_place(self, pair):
        a, b = both(pair)
        for optimizer in (a, b):
            optimizer.param_groups[0]["params"][4] = make_params(seed=2)[4]
        run(a, b, range(2, 4))

    def test_a_loaded_state(self, pair):
        a, b = both(pair, 3)
        c = ours(pair, copy_of(params_of(a)))
        fill_grads(0, params_of(c))
        c.step()
        c.load_state_dict(a.state_dict())
        for p, q in zip(params_of(c), params_of(a), strict=True):
            p.data.copy_(q)
        run(c, b, range(3, 5))

    def test_parameters_get_other_memory(self, pair):
        a, b = both(pair)
        for param in params_of(a):
            param.data = param.data.clone()
        run(a, b, range(2, 4))


@pytest.mark.parametrize("kind", KINDS)
class TestOtherKinds:
    def test_parameters_become_fp64(self, kind):
        params = make_params(shapes=((5,),))
        optimizer = kind(params, lr=0.1)
        fill_grads(0, params)
        optimizer.step()
        params[0].grad = None
        params[0].data = params[0].data.double()
        params[0].grad_dtype = F64
        params[0].grad = torch.ones(5, dtype=F64)
        before = params[0].detach().clone()
        optimizer.state.clear()
        optimizer.step()
        assert params[0].dtype is F64 and not same_bits(params[0], before)

    def test_a_gradient_that_turns_sparse(self, kind):
        params = make_params(shapes=((4, 2),))
        optimizer = kind(params)
        fill_grads(0, params)
        optimizer.step()
        params[0].grad = torch.eye(4, 2).to_sparse()
        with pytest.raises(RuntimeError, match=r"sparse=False"):
            optimizer.step()


@pytest.mark.parametrize("kind", [FusedAdam, FusedSGD])
class TestOtherMasters:
    def test_are_found(self, kind):
        param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        optimizer = kind([param], lr=1e-6)
        first, second = MasterWeights(), MasterWeights()
        for masters in (first, first, second, None, second, first):
            param.grad = torch.ones_like(param)
            optimizer.hand(StepInputs(masters))
            optimizer.step()
        torch.testing.assert_close(first.of(param), torch.full((4,), 1 - 3e-6), rtol=0, atol=5e-7)
        torch.testing.assert_close(second.of(param), torch.full((4,), 1 - 2e-6), rtol=0, atol=5e-7)
        master = torch.full((4,), 1 + 1e-3)
        first.put(param, master)
        param.grad = torch.ones_like(param)
        optimizer.hand(StepInputs(first))
        optimizer.step()
        assert first.of(param) is master
        torch.testing.assert_close(master, torch.full((4,), 1 + 1e-3 - 1e-6), rtol=0, atol=5e-7)


def test_compare_can_fail():
    a, b = both("adamw")
    params_of(a)[4].data[0, 0] += 1e-3
    with pytest.raises(AssertionError):
        compare(a, b)
