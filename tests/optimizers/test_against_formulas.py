"""What torch does not have: every combination of hyperparameters against the float64 formulas."""

import math

import pytest
import torch
from cases import BF16, F16, F32, F64
from optimizer_support import KINDS, close, compare, copy_of, fill_grads, make_params, params_of, run
from reference_optimizer import Reference
from test_against_torch import combinations, named, rows
from torch import nn

from lightning_apex import (
    FusedAdagrad,
    FusedAdam,
    FusedAdamW,
    FusedLAMB,
    FusedLARS,
    FusedLion,
    FusedNovoGrad,
    optimizers,
)

COMBINATIONS = {
    FusedLAMB: combinations(
        named("weight_decay", (0.0, 0.1)),
        named("adam_w_mode", (True, False)),
        named("use_nvlamb", (False, True)),
        named("grad_averaging", (True, False)),
        named("bias_correction", (True, False)),
        named("betas", ((0.9, 0.999), (0.0, 0.5))),
        named("maximize", (False, True)),
        named("max_grad_norm", (None,)),
    ),
    FusedNovoGrad: combinations(
        named("weight_decay", (0.0, 0.1)),
        named("reg_inside_moment", (False, True)),
        named("norm_type", (2, 0, math.inf)),
        named("init_zero", (False, True)),
        named("grad_averaging", (True, False)),
        named("bias_correction", (True, False)),
        named("maximize", (False, True)),
    ),
    FusedLARS: [
        row
        for row in combinations(
            named("momentum", (0.0, 0.9)),
            named("dampening", (0.0, 0.3)),
            named("weight_decay", (0.0, 0.1)),
            named("nesterov", (False, True)),
            named("wd_after_momentum", (False, True)),
            named("eps", (0.0, 0.1)),
            named("maximize", (False, True)),
            named("trust_coefficient", (0.5,)),
        )
        if not row["nesterov"] or (row["momentum"] > 0 and row["dampening"] == 0)
    ],
    FusedLion: combinations(
        named("betas", ((0.9, 0.99), (0.0, 0.0), (0.5, 0.9))),
        named("weight_decay", (0.0, 0.1)),
        named("maximize", (False, True)),
    ),
    FusedAdagrad: combinations(
        named("weight_decay", (0.0, 0.1)), named("adagrad_w_mode", (True,)), named("maximize", (False, True))
    ),
}
ALL = [(kind, row) for kind, its_rows in COMBINATIONS.items() for row in its_rows]


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize(
    ("kind", "hypers"),
    [
        pytest.param(kind, *row.values, marks=row.marks, id=f"{kind.__name__}-{row.id}")
        for kind, its_rows in COMBINATIONS.items()
        for row in rows(its_rows, every=3)
    ],
)
def test_every_combination(kind, hypers, dtype):
    params = make_params(dtype)
    run(kind(params, lr=0.05, **hypers), Reference(copy_of(params), kind, lr=0.05, **hypers))


@pytest.mark.parametrize("kind", KINDS)
def test_defaults(kind):
    """With nothing but parameters, gradients small enough that LAMB clips none."""
    params = make_params()
    a, b = kind(params), Reference(copy_of(params), kind)
    for step in range(3):
        fill_grads(step, params, params_of(b))
        for p in (*params, *params_of(b)):
            p.grad.mul_(1e-3)
        a.step()
        b.step()
        compare(a, b)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("kind", KINDS)
def test_half_parameters_are_rounded_once(kind, dtype):
    params = make_params(dtype)
    optimizer = kind(params, lr=0.05, weight_decay=0.1)
    for step in range(3):
        # The witness starts from the same values and moments each time: half values would drift apart.
        wide = copy_of(params, F64)
        witness = Reference(wide, kind, lr=0.05, weight_decay=0.1)
        fill_grads(step, params)
        for p, q in zip(params, wide, strict=True):
            q.grad = p.grad.double()
            if optimizer.state[p]:
                witness.state[q] = {name: value.double() for name, value in optimizer.state[p].items()}
        optimizer.step()
        witness.step()
        for i, (p, q) in enumerate(zip(params, wide, strict=True)):
            close(p, q, f"parameter {i} at step {step}", steps=1)
            for name, value in witness.state[q].items():
                assert optimizer.state[p][name].dtype is F32
                close(optimizer.state[p][name], value, name, steps=3)


def test_fp64_moments_of_fp64_parameters_only():
    for kind in KINDS:
        params = [*make_params(F32), *make_params(F64)]
        optimizer = kind(params)
        fill_grads(0, params)
        optimizer.step()
        for p in params:
            assert all(v.dtype is p.dtype for k, v in optimizer.state[p].items() if k != "step"), kind


class TestZeros:
    """Where a norm is 0 there is no ratio of norms, and nothing divides by it."""

    @pytest.mark.parametrize("which", ["parameters", "gradients", "both"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_norms(self, kind, which):
        params = make_params(shapes=((3,), (2, 2)))
        if which != "gradients":
            params[0].data.zero_()
        a, b = kind(params, weight_decay=0.1), Reference(copy_of(params), kind, weight_decay=0.1)
        for step in range(3):
            fill_grads(step, params, params_of(b))
            for p in (params[0], params_of(b)[0]):
                p.grad.mul_(1e-3 if which == "parameters" else 0)
            a.step()
            b.step()
            compare(a, b)
        assert all(p.isfinite().all() for p in params)

    @pytest.mark.parametrize("scale", [1e-25, 1e25])
    @pytest.mark.parametrize("kind", [FusedLAMB, FusedLARS, FusedNovoGrad])
    def test_norms_whose_squares_no_float_holds(self, kind, scale):
        """1e-50 and 1e50 are 0 and infinity in float32, but not in the sums."""
        hypers = {FusedLARS: {"trust_coefficient": 0.01}, FusedLAMB: {"max_grad_norm": None}}.get(kind, {})
        params = make_params(shapes=((40,),))
        params[0].data.mul_(scale)
        a, b = (
            make(params_, **hypers, weight_decay=0.1, eps=0.0)
            for make, params_ in ((kind, params), (lambda p, **k: Reference(p, kind, **k), copy_of(params, F64)))
        )
        fill_grads(0, params, [p.float() for p in params_of(b)])
        params_of(b)[0].grad = params[0].grad.double()
        before = params[0].detach().clone()
        a.step()
        b.step()
        torch.testing.assert_close(params[0].double(), params_of(b)[0], rtol=1e-5, atol=0)
        assert not torch.equal(params[0], before)


def test_adamw_by_name_has_torchs_arguments():
    params = make_params()
    a = FusedAdamW(params, 0.1, (0.5, 0.9), 1e-3, 0.2, True, maximize=True)
    b = torch.optim.AdamW(copy_of(params), 0.1, (0.5, 0.9), 1e-3, 0.2, True, maximize=True, foreach=False)
    run(a, b)
    assert isinstance(a, FusedAdam) and FusedAdamW(params).defaults["weight_decay"] == 0.01


def test_lion_steps_are_of_one_length():
    param = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    optimizer = FusedLion([param], lr=0.5)
    param.grad = torch.tensor([1e-30, -1e30, 0.0, -0.0])
    optimizer.step()
    assert param.tolist() == [0.5, 2.5, 3.0, 4.0]


def test_all_classes_are_exported_and_documented():
    import lightning_apex

    for name in optimizers.__all__:
        kind = getattr(lightning_apex, name)
        assert kind is getattr(optimizers, name)
        assert "Args:" in kind.__doc__ and "Raises:" in kind.__doc__
        assert name in lightning_apex.__all__
