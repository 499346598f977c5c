"""What two processes do in test_sharded.py. Each function compares with one process that holds the whole model."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from cases import BF16, F32, same_bits
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_apex import LARC, LossScaler, clip_grad_norm_, optimizers


def make_model() -> nn.Module:
    """Shards of unequal size, and one parameter of which one process has nothing."""
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def both_models(dtype: torch.dtype = F32) -> tuple[nn.Module, nn.Module]:
    plain = make_model().to(dtype)
    sharded = copy.deepcopy(plain)
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return plain, fully_shard(sharded)


def backward(step: int, *models: nn.Module, scale: float = 1.0) -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    for model in models:
        model.zero_grad()
        loss = model(x.to(next(model.parameters()).dtype)).float().square().mean() * 10
        (loss * scale).backward()


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().double()


def assert_equal(sharded: Any, plain: Any, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    for p, q in zip(params_of(sharded), params_of(plain), strict=True):
        torch.testing.assert_close(whole(p), whole(q), rtol=rtol, atol=atol)


def assert_equal_states(sharded: Any, plain: Any) -> None:
    for p, q in zip(params_of(sharded), params_of(plain), strict=True):
        for name, expected in plain.state[q].items():
            actual = sharded.state[p][name]
            if expected.dim() > 0:
                assert isinstance(actual, DTensor) and actual.placements == p.placements, name
            torch.testing.assert_close(
                whole(actual), whole(expected), rtol=1e-4, atol=1e-6, msg=lambda m, n=name: n + m
            )


def params_of(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def fsdp(rank: int, kind: str, hypers: dict[str, Any]) -> None:
    plain, sharded = both_models()
    a, b = (getattr(optimizers, kind)(m.parameters(), **hypers) for m in (sharded, plain))
    assert any(p.to_local().numel() == 0 for p in params_of(a)) or rank == 0
    for step in range(4):
        backward(step, plain, sharded)
        before = [p.grad for p in params_of(a)]
        a.step()
        b.step()
        assert all(p.grad is g for p, g in zip(params_of(a), before, strict=True))
        assert_equal(a, b)
    assert_equal_states(a, b)


def larc(rank: int, inner: str, hypers: dict[str, Any]) -> None:
    plain, sharded = both_models()
    kind = getattr(optimizers, inner, None) or getattr(torch.optim, inner)
    a, b = (LARC(kind(m.parameters(), **hypers)) for m in (sharded, plain))
    for step in range(4):
        backward(step, plain, sharded)
        grads = [p.grad for p in params_of(a)]
        a.step()
        b.step()
        assert all(p.grad is g for p, g in zip(params_of(a), grads, strict=True))
        assert_equal(a, b)


def clip(rank: int, norm_type: float, max_norm: float, bad: float | None) -> None:
    plain, sharded = both_models()
    backward(0, plain, sharded)
    if bad is not None:  # in a shard of one process only
        plain[0].weight.grad[0, 0] = bad
        if rank == 0:
            sharded[0].weight.grad.to_local()[0, 0] = bad
    norm = clip_grad_norm_(sharded.parameters(), max_norm, norm_type)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
    if norm_type in (2.0, float("inf")):
        assert not isinstance(norm, DTensor)
    torch.testing.assert_close(whole(norm), whole(expected), rtol=1e-5, atol=0, equal_nan=True)
    for p, q in zip(sharded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), whole(q.grad), rtol=1e-4, atol=1e-7, equal_nan=True)


def loss_scaling(rank: int, kind: str, unscales: bool) -> None:
    plain, sharded = both_models()
    a, b = (getattr(optimizers, kind)(m.parameters(), lr=0.05) for m in (sharded, plain))
    scaler = LossScaler(init_scale=256.0)
    for step in range(5):
        backward(step, plain)
        backward(step, sharded, scale=scaler.get_scale())
        if step == 2 and rank == 1:  # an overflow in what one process holds skips the step of both
            sharded[2].weight.grad.to_local()[0, 0] = float("inf")
        if unscales:
            scaler.unscale_(a)
        scaler.step(a)
        scaler.update()
        if step != 2:
            b.step()
        assert_equal(a, b)
    assert scaler.get_scale() == 128.0 and scaler.skipped_steps == 1
    assert scaler.last_overflow.parameters == ("parameter 2 of group 0",)  # on the process that saw nothing, too


def masters_of_its_own(rank: int) -> None:
    plain, sharded = both_models(BF16)
    hypers = {"lr": 0.05, "reduced_precision_dtype": BF16}
    a, b = (optimizers.FusedMixedPrecisionLamb(m.parameters(), **hypers) for m in (sharded, plain))
    for step in range(3):
        backward(step, plain, sharded)
        for p, q in zip(params_of(a), params_of(b), strict=True):
            q.grad.copy_(p.grad.full_tensor())  # a mean over processes is rounded
        a.step()
        b.step()
    for p, q in zip(params_of(a), params_of(b), strict=True):
        torch.testing.assert_close(whole(a.state[p]["master"]), whole(b.state[q]["master"]), rtol=1e-3, atol=1e-3)
    assert_equal(a, b, rtol=2e-2, atol=2e-2)


def checkpoints(rank: int, kind: str, hypers: dict[str, Any], full: bool) -> None:
    """torch.distributed.checkpoint's helpers take the state out and put it in again."""
    _, model = both_models()
    make = getattr(optimizers, kind)
    a = make(model.parameters(), **hypers)
    for step in range(2):
        backward(step, model)
        a.step()
    options = StateDictOptions(full_state_dict=full)
    state = copy.deepcopy(get_optimizer_state_dict(model, a, options=options))
    for value in state["state"]["0.weight"].values():
        assert isinstance(value, DTensor) is (not full and value.dim() > 0)
    _, other = both_models()
    for p, q in zip(other.parameters(), model.parameters(), strict=True):
        p.data.copy_(q.data)
    b = make(other.parameters(), **(hypers | {"lr": 7.0}))
    set_optimizer_state_dict(other, b, state, options=options)
    assert b.param_groups[0]["lr"] == a.param_groups[0]["lr"]
    for step in range(2, 4):
        backward(step, model, other)
        a.step()
        b.step()
    for p, q in zip(params_of(a), params_of(b), strict=True):
        assert same_bits(p.to_local(), q.to_local())


def placements(rank: int, kind: str, hypers: dict[str, Any]) -> None:
    """Replicated and cut in several ways, together with plain parameters, in one group."""
    mesh = init_device_mesh("cpu", (2,))
    values = [torch.randn(4, 6) for _ in range(4)]
    ways = ([Replicate()], [Shard(0)], [Shard(1)], None)
    plain = [nn.Parameter(v.clone()) for v in values]
    spread = [
        nn.Parameter(v.clone() if way is None else distribute_tensor(v.clone(), mesh, way))
        for v, way in zip(values, ways, strict=True)
    ]
    a, b = getattr(optimizers, kind)(spread, **hypers), getattr(optimizers, kind)(plain, **hypers)
    for step in range(3):
        for i, (p, q) in enumerate(zip(spread, plain, strict=True)):
            grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + i))
            q.grad = grad
            # gradients may be cut otherwise than their parameter
            p.grad = distribute_tensor(grad, mesh, [Shard(1)]) if isinstance(p, DTensor) else grad.clone()
        a.step()
        b.step()
        assert_equal(a, b)


def zero(rank: int, kind: str, hypers: dict[str, Any], bucket_view: bool) -> None:
    plain, model = make_model(), make_model()
    a = ZeroRedundancyOptimizer(
        model.parameters(), getattr(optimizers, kind), parameters_as_bucket_view=bucket_view, **hypers
    )
    b = getattr(optimizers, kind)(plain.parameters(), **hypers)
    for step in range(4):
        backward(step, plain, model)
        a.step()
        b.step()
        if step == 1:
            a.param_groups[0]["lr"] = b.param_groups[0]["lr"] = 0.02
        assert_equal(a, b)
    a.consolidate_state_dict(to=0)
    if rank == 0:
        states = a.state_dict()["state"]
        for index, q in enumerate(params_of(b)):
            for name, expected in b.state[q].items():
                torch.testing.assert_close(states[index][name], expected, rtol=1e-4, atol=1e-6)
    dist.barrier()
