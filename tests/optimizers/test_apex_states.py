"""State dicts that Apex's optimizers left behind."""

import copy

import pytest
import torch
from cases import F16, F32, same_bits
from optimizer_support import assert_same_state, compare, copy_of, fill_grads, make_params, params_of

from lightning_apex import FusedAdam, FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad, FusedSGD


@pytest.mark.parametrize("kind", [FusedAdam, FusedLAMB, FusedMixedPrecisionLamb])
@pytest.mark.parametrize("count", [3, 3.0, torch.tensor(3.0), torch.tensor([3], dtype=torch.int32)])
def test_apexs_one_step_count_a_group(kind, count):
    a = kind(make_params(), lr=0.1)
    for step in range(3):
        fill_grads(step, params_of(a))
        a.step()
    state = copy.deepcopy(a.state_dict())
    for values in state["state"].values():
        del values["step"]
    group = state["param_groups"][0]
    state["param_groups"] = [
        {key: group[key] for key in ("lr", "bias_correction", "betas", "eps", "weight_decay", "params")}
        | {"step": count}
    ]
    b = kind(copy_of(params_of(a)))
    b.load_state_dict(state)
    assert b.param_groups[0]["lr"] == 0.1
    fill_grads(3, params_of(a), params_of(b))
    a.step()
    b.step()
    assert_same_state(a, b)


def test_apexs_sgd_without_step_counts():
    a = FusedSGD(make_params(), lr=0.1, momentum=0.9, dampening=0.5)
    for step in range(3):
        fill_grads(step, params_of(a))
        a.step()
    state = copy.deepcopy(a.state_dict())
    for values in state["state"].values():
        del values["step"]
    b = FusedSGD(copy_of(params_of(a)), lr=0.1, momentum=0.9, dampening=0.5)
    b.load_state_dict(state)
    fill_grads(3, params_of(a), params_of(b))
    a.step()
    b.step()
    compare(a, b, states=False)


class TestApexsNovoGrad:
    """Apex keeps the roots of a group's second moments in two vectors: one for its fp16 parameters, one for fp32."""

    def saved(self, a, split, norm_type=2):
        state = copy.deepcopy(a.state_dict())
        group = state["param_groups"][0]
        roots = [[], []]
        for index, values in state["state"].items():
            root = values.pop("exp_avg_sq")
            roots[split(index)].append(root.sqrt() if norm_type == 2 else root)
            del values["step"]
        names = ("lr", "bias_correction", "betas", "eps", "weight_decay", "grad_averaging", "norm_type", "init_zero")
        group = {name: group[name] for name in (*names, "params")} | {"step": 3}
        group["exp_avg_sq"] = [torch.stack(part) if part else torch.empty(0) for part in roots]
        return {"state": state["state"], "param_groups": [group]}

    def trained(self, dtypes, **hypers):
        params = [make_params(dtype, ((4,),), seed)[0] for seed, dtype in enumerate(dtypes)]
        a = FusedNovoGrad(params, lr=0.1, **hypers)
        for step in range(3):
            fill_grads(step, params, skip=lambda i: i == 1)
            a.step()
        return a

    @pytest.mark.parametrize("norm_type", [2, 0])
    @pytest.mark.parametrize("dtypes", [(F32,) * 4, (F16,) * 4, (F16, F16, F32, F16)])
    def test_is_taken_over(self, dtypes, norm_type):
        a = self.trained(dtypes, norm_type=norm_type)
        half = [p.dtype is F16 for p in params_of(a)]
        b = FusedNovoGrad(copy_of(params_of(a)), norm_type=norm_type)
        b.load_state_dict(self.saved(a, lambda i: 0 if half[i] else 1, norm_type))
        assert "exp_avg_sq" not in b.param_groups[0]
        for step in range(3, 5):
            fill_grads(step, params_of(a), params_of(b), skip=lambda i: i == 1)
            a.step()
            b.step()
        compare(a, b)

    def test_of_masters_in_fp32_for_what_is_fp16_now(self):
        a = self.trained((F16,) * 4)
        b = FusedNovoGrad(copy_of(params_of(a)))
        b.load_state_dict(self.saved(a, lambda i: 1))
        compare(a, b)

    def test_that_does_not_fit_changes_nothing(self):
        a = self.trained((F32, F32, F16, F32))
        before = copy.deepcopy(a.state_dict())
        with pytest.raises(ValueError, match=r"exp_avg_sq of 2 fp16 and 1 fp32 parameters.* 1 and 2 with a state"):
            a.load_state_dict(self.saved(a, lambda i: 0 if i < 3 else 1))
        after = a.state_dict()
        assert all(same_bits(v, after["state"][i][k]) for i, s in before["state"].items() for k, v in s.items())
