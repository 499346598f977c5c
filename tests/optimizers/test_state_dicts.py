"""State dicts: between ours and torch's in both directions, from Apex, and there and back without losing a bit."""

import copy
import io
import pickle

import pytest
import torch
from cases import BF16, F16, F32, F64, same_bits
from optimizer_support import (
    KINDS,
    PAIRS,
    TORCHS,
    assert_same_state,
    copy_of,
    fill_grads,
    make_params,
    ours,
    params_of,
    run,
    takes,
    theirs,
)
from torch import nn

from lightning_apex import FusedAdagrad, FusedAdam, FusedLAMB, FusedLion, FusedNovoGrad

pairs = pytest.mark.parametrize("pair", PAIRS)


def through_a_file(state, weights_only=True):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


@pytest.mark.parametrize("pair", TORCHS)
@pytest.mark.parametrize("steps", [0, 1, 4])
class TestWithTorch:
    def test_theirs_into_ours(self, pair, steps):
        b = theirs(pair, make_params())
        for step in range(steps):
            fill_grads(step, params_of(b))
            b.step()
        a = ours(pair, copy_of(params_of(b)), lr=123.0)
        a.load_state_dict(through_a_file(b.state_dict()))
        assert a.param_groups[0]["lr"] == b.param_groups[0]["lr"]
        run(a, b, range(steps, steps + 3))

    def test_ours_into_theirs(self, pair, steps):
        a = ours(pair, make_params())
        for step in range(steps):
            fill_grads(step, params_of(a))
            a.step()
        b = theirs(pair, copy_of(params_of(a)), lr=123.0)
        b.load_state_dict(through_a_file(a.state_dict()))
        assert a.param_groups[0]["lr"] == b.param_groups[0]["lr"]
        run(a, b, range(steps, steps + 3))

    def test_parameters_without_state_have_none_afterwards(self, pair, steps):
        b = theirs(pair, make_params())
        for step in range(steps):
            fill_grads(step, params_of(b), skip=lambda i: i == 3)
            b.step()
        a = ours(pair, copy_of(params_of(b)))
        a.load_state_dict(b.state_dict())
        assert a.state.get(params_of(a)[3], {"step": 0})["step"] == 0  # torch's Adagrad has one from the start
        run(a, b, range(steps, steps + 3))

    def test_arguments_that_torch_does_not_know_keep_our_own_value(self, pair, steps):
        b = theirs(pair, make_params())
        for step in range(steps):
            fill_grads(step, params_of(b))
            b.step()
        a = ours(pair, copy_of(params_of(b)), state_dtype=BF16, set_grad_none=False)
        flags = {"bias_correction": False, "wd_after_momentum": True, "adagrad_w_mode": True}.items() & {
            (name, not value) for name, value in a.param_groups[0].items() if isinstance(value, bool)
        }
        assert flags
        a.param_groups[0].update(flags)
        a.load_state_dict(b.state_dict())
        assert a.param_groups[0].items() >= flags
        assert a.param_groups[0]["set_grad_none"] is False
        assert a.param_groups[0]["state_dtype"] is BF16


@pairs
@pytest.mark.parametrize("steps", [0, 1, 4])
class TestThereAndBack:
    @pytest.mark.parametrize("dtype", [F32, F64, F16, BF16])
    def test_the_next_steps_are_the_same_bits(self, pair, steps, dtype):
        a = ours(pair, make_params(dtype))
        for step in range(steps):
            fill_grads(step, params_of(a), skip=lambda i: i == 3)
            a.step()
        b = ours(pair, copy_of(params_of(a)))
        b.load_state_dict(through_a_file(a.state_dict()))
        for step in range(steps, steps + 3):
            fill_grads(step, params_of(a), params_of(b))
            a.step()
            b.step()
            assert_same_state(a, b)

    @pytest.mark.parametrize(
        "twin_of", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o)), lambda o: through_a_file(o, False)]
    )
    def test_copies_and_pickles_go_on_by_themselves(self, pair, steps, twin_of):
        a = ours(pair, make_params())
        for step in range(steps):
            fill_grads(step, params_of(a))
            a.step()
        b = twin_of(a)
        assert type(b) is type(a) and b.defaults.items() >= a.defaults.items()
        before = [p.detach().clone() for p in params_of(a)]
        fill_grads(steps, params_of(b))
        b.step()
        assert all(map(same_bits, params_of(a), before)), "the copy shares memory"
        fill_grads(steps, params_of(a))
        a.step()
        assert_same_state(a, b)

    def test_loaded_state_is_a_copy(self, pair, steps):
        a = ours(pair, make_params())
        for step in range(steps):
            fill_grads(step, params_of(a))
            a.step()
        state = copy.deepcopy(a.state_dict())
        b = ours(pair, copy_of(params_of(a)))
        b.load_state_dict(state)
        fill_grads(9, params_of(b))
        b.step()
        for index, values in state["state"].items():
            for name, value in values.items():
                assert same_bits(value, a.state[params_of(a)[index]][name])


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("kind", KINDS)
def test_small_moments_of_half_parameters_survive(kind, dtype):
    """``torch.optim.Optimizer`` would make 0 of 1e-9 in fp16."""
    hypers = takes(kind, momentum=0.9)
    param = nn.Parameter(torch.ones(3, dtype=dtype))
    a = kind([param], **hypers)
    param.grad = torch.ones_like(param)
    a.step()
    for name in set(a.state[param]) - {"step"}:
        a.state[param][name].fill_(1e-9)
    b = kind([nn.Parameter(param.detach().clone())], **hypers)
    b.load_state_dict(through_a_file(a.state_dict()))
    state = b.state[params_of(b)[0]]
    assert all(same_bits(state[name], torch.full_like(state[name], 1e-9)) for name in set(state) - {"step"})
    assert all(state[name].dtype is F32 for name in set(state) - {"step"})


def test_moments_in_bfloat16_are_saved_and_loaded_as_such():
    a = FusedAdam(make_params(), state_dtype=BF16)
    fill_grads(0, params_of(a))
    a.step()
    b = FusedAdam(copy_of(params_of(a)), state_dtype=BF16)
    b.load_state_dict(through_a_file(a.state_dict()))
    assert_same_state(a, b)
    assert b.state[params_of(b)[0]]["exp_avg"].dtype is BF16


class TestHooks:
    def test_what_a_load_hook_returns_is_loaded(self):
        a = FusedAdam(make_params())
        fill_grads(0, params_of(a))
        a.step()
        b = FusedAdam(copy_of(params_of(a)))

        def sevens(optimizer, state):
            state = copy.deepcopy(state)
            state["state"][3]["exp_avg"].fill_(7)
            return state

        b.register_load_state_dict_pre_hook(sevens)
        seen = []
        b.register_load_state_dict_post_hook(
            lambda optimizer: seen.append(optimizer.state[params_of(b)[3]]["exp_avg"].clone())
        )
        b.load_state_dict(a.state_dict())
        assert b.state[params_of(b)[3]]["exp_avg"].eq(7).all() and seen[0].eq(7).all()

    def test_a_state_that_does_not_fit_changes_nothing(self):
        a = FusedAdam(make_params())
        fill_grads(0, params_of(a))
        a.step()
        before = copy.deepcopy(a.state_dict())
        other = FusedAdam(make_params(shapes=((3,),)))
        with pytest.raises(ValueError, match="parameter group"):
            a.load_state_dict(other.state_dict())
        after = a.state_dict()
        assert after["param_groups"] == before["param_groups"]
        assert all(same_bits(v, after["state"][i][k]) for i, s in before["state"].items() for k, v in s.items())


def test_names_of_parameters_are_kept():
    model = nn.Linear(2, 2)
    a = FusedAdam(model.named_parameters())
    fill_grads(0, list(model.parameters()))
    a.step()
    assert a.param_groups[0]["param_names"] == ["weight", "bias"]
    b = FusedAdam(nn.Linear(2, 2).named_parameters())
    b.load_state_dict(a.state_dict())
    assert b.state[params_of(b)[0]]["step"] == 1


def test_adagrad_saves_what_torchs_saves_before_a_step():
    params = make_params(BF16)
    fused, plain = FusedAdagrad(params, initial_accumulator_value=0.5), theirs("adagrad", make_params())
    state = fused.state_dict()["state"]
    assert state.keys() == plain.state_dict()["state"].keys()
    for param, values in zip(params, state.values(), strict=True):
        assert values["step"] == 0 and same_bits(values["sum"], torch.full(param.shape, 0.5))


def test_a_loaded_group_is_validated_before_anything_changes():
    b = torch.optim.Adagrad(make_params(), lr_decay=0.1)
    a = FusedAdagrad(make_params(), lr=0.5)
    with pytest.raises(ValueError, match=r"lr_decay=0\.1.*LambdaLR"):
        a.load_state_dict(b.state_dict())
    assert a.param_groups[0]["lr"] == 0.5 and not a.state


@pytest.mark.parametrize(
    ("saved", "loaded", "what"),
    [
        (lambda p: FusedAdam(p), lambda p: FusedNovoGrad(p), r"exp_avg_sq of parameter 2 has shape \(0,\)"),
        (lambda p: FusedNovoGrad(p), lambda p: FusedLAMB(p), r"exp_avg_sq of parameter 1 has shape \(\)"),
        (lambda p: FusedAdam(p), lambda p: FusedLion(reversed(p)), r"exp_avg of parameter 0 has shape \(\)"),
    ],
    ids=["moments for numbers", "numbers for moments", "another order"],
)
def test_a_state_of_other_shapes_is_refused_before_anything_changes(saved, loaded, what):
    params = make_params()
    fill_grads(0, params)
    a, b = saved(params), loaded(make_params())
    a.step()
    before = copy.deepcopy(b.state_dict())
    with pytest.raises(ValueError, match=what):
        b.load_state_dict(a.state_dict())
    assert b.state_dict() == before
