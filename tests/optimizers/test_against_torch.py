"""FusedAdam and FusedSGD equal torch's unfused optimizers for every combination of hyperparameters."""

from itertools import product

import pytest
import torch
from cases import BF16, F16, F32, F64
from optimizer_support import UNFUSED, close, compare, copy_of, fill_grads, make_params, run
from reference import OPTIMIZERS as REFERENCES

from lightning_apex import FusedAdam, FusedSGD


def named(name: str, values) -> list[dict]:
    return [{name: value} for value in values]


def combinations(*axes: list[dict]) -> list[dict]:
    return [{k: v for part in parts for k, v in part.items()} for parts in product(*axes)]


def rows(all_of_them: list[dict], every: int) -> list:
    """All combinations; each ``every``-th in the quick tests, the others marked slow."""
    marks = [() if i % every == 0 else (pytest.mark.slow,) for i in range(len(all_of_them))]
    ids = ["-".join(f"{k}={v}" for k, v in row.items()) for row in all_of_them]
    return [pytest.param(row, marks=m, id=i) for row, m, i in zip(all_of_them, marks, ids, strict=True)]


ADAM = combinations(
    named("lr", (1e-3, 0.1)),
    named("betas", ((0.9, 0.999), (0.0, 0.9), (0.9, 0.0))),
    named("eps", (1e-8, 1e-2)),
    named("weight_decay", (0.0, 0.1)),
    named("amsgrad", (False, True)),
    named("maximize", (False, True)),
)
SGD = [
    row
    for row in combinations(
        named("momentum", (0.0, 0.5, 0.9, 1.0)),
        named("dampening", (0.0, 0.3, -0.2)),
        named("weight_decay", (0.0, 0.1)),
        named("nesterov", (False, True)),
        named("maximize", (False, True)),
    )
    if not row["nesterov"] or (row["momentum"] > 0 and row["dampening"] == 0)
]


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("hypers", rows(ADAM, every=5))
def test_adam(hypers, decoupled, dtype):
    params = make_params(dtype)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    run(FusedAdam(params, adam_w_mode=decoupled, **hypers), kind(copy_of(params), **UNFUSED, **hypers))


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("hypers", rows(SGD, every=3))
def test_sgd(hypers, dtype):
    params = make_params(dtype)
    run(FusedSGD(params, lr=0.1, **hypers), torch.optim.SGD(copy_of(params), lr=0.1, **UNFUSED, **hypers))


# What torch does not have, and half parameters, are held against float64 formulas.
BEYOND_TORCH = [
    (FusedAdam, "adam", {"bias_correction": False, "eps": 1e-3}),
    (FusedAdam, "adam", {"bias_correction": False, "weight_decay": 0.1, "adam_w_mode": False}),
    (FusedAdam, "adam_amsgrad", {"bias_correction": False, "eps": 1e-3, "amsgrad": True, "maximize": True}),
    (FusedAdam, "adam", {"weight_decay": 0.1}),
    (FusedSGD, "sgd", {"weight_decay": 0.1, "wd_after_momentum": True}),
    (FusedSGD, "sgd_momentum", {"momentum": 0.9, "weight_decay": 0.1, "wd_after_momentum": True}),
    (FusedSGD, "sgd_momentum", {"momentum": 0.9, "weight_decay": 0.1, "wd_after_momentum": True, "nesterov": True}),
    (FusedSGD, "sgd_momentum", {"momentum": 0.9, "weight_decay": 0.1, "wd_after_momentum": True, "maximize": True}),
    (FusedSGD, "sgd_momentum", {"momentum": 0.9, "dampening": 0.3}),
]


def hypers_of(optimizer) -> dict[str, float]:
    group = optimizer.param_groups[0]
    betas = dict(zip(("beta1", "beta2"), group.get("betas", ()), strict=False))
    return {k: float(v) for k, v in {**group, **betas}.items() if isinstance(v, bool | int | float)}


def states_of(optimizer, param, names) -> list[torch.Tensor]:
    state = optimizer.state[param]
    return [state[n].double().clone() if n in state else torch.zeros(param.shape, dtype=F64) for n in names]


@pytest.mark.parametrize("dtype", [F32, F64, F16, BF16])
@pytest.mark.parametrize(("kind", "row", "hypers"), BEYOND_TORCH)
def test_against_float64(kind, row, hypers, dtype):
    params = make_params(dtype)
    optimizer = kind(params, lr=0.05, **hypers)
    h = hypers_of(optimizer)
    n_states = {"adam": 2, "adam_amsgrad": 3, "sgd": 0, "sgd_momentum": 1}[row]
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if "adam" in row else ("momentum_buffer",)
    for step in range(1, 6):
        fill_grads(step, params)
        before = [(p.detach().double().clone(), states_of(optimizer, p, names[:n_states])) for p in params]
        optimizer.step()
        for p, (value, states) in zip(params, before, strict=True):
            expected, new_states = REFERENCES[row](value, p.grad.double(), states, step, h)
            close(p, expected, f"step {step}", steps=1)
            for name, new in zip(names, new_states, strict=False):
                assert optimizer.state[p][name].dtype is (F64 if dtype is F64 else F32), "moments are never half"
                close(optimizer.state[p][name], new, name, steps=1)


@pytest.mark.parametrize("kind", [FusedAdam, FusedSGD])
def test_defaults_are_torchs(kind):
    params = make_params()
    if kind is FusedAdam:
        run(FusedAdam(params), torch.optim.AdamW(copy_of(params), weight_decay=0.0, **UNFUSED))
    else:
        run(FusedSGD(params), torch.optim.SGD(copy_of(params), **UNFUSED))


def test_a_long_run():
    params = make_params()
    a, b = FusedAdam(params, lr=0.01), torch.optim.AdamW(copy_of(params), lr=0.01, weight_decay=0.0, **UNFUSED)
    for step in range(200):
        fill_grads(step, params, b.param_groups[0]["params"])
        a.step()
        b.step()
    for p, q in zip(params, b.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    assert a.state[params[0]]["step"] == 200
    compare(a, a)
