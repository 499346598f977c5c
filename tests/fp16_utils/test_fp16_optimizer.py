"""FP16_Optimizer against a loop of masters written out with torch's optimizers."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_apex import FusedAdam, FusedSGD, LossScaleError
from lightning_apex.fp16_utils import DynamicLossScaler, FP16_Optimizer, LossScaler, network_to_half

HALVES = [torch.float16, torch.bfloat16]


def model(dtype: torch.dtype = torch.float16) -> nn.Sequential:
    torch.manual_seed(0)
    return network_to_half(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)), dtype)


def loss_of(net: nn.Module, i: int, factor: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(i)
    x, y = torch.randn(6, 4, generator=generator), torch.randn(6, 2, generator=generator)
    return (net(x).float() - y).square().mean() * factor


def by_hand(dtype: torch.dtype, make: Any, scale: float, steps: int, max_norm: float | None = None) -> list[Tensor]:
    """Masters of the half parameters beside the fp32 ones, with a torch optimizer."""
    net = model(dtype)
    params = list(net.parameters())
    masters = [p.detach().float().requires_grad_() if p.dtype is dtype else p for p in params]
    optimizer = make(masters)
    for i in range(steps):
        net.zero_grad()
        (loss_of(net, i) * scale).backward()
        for param, master in zip(params, masters, strict=True):
            master.grad = param.grad.float() / scale
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(masters, max_norm)
        optimizer.step()
        for param, master in zip(params, masters, strict=True):
            if param is not master:
                param.data.copy_(master.detach())
    return [m.detach() for m in masters]


def values(net: nn.Module, optimizer: FP16_Optimizer) -> list[Tensor]:
    """fp32 values of all parameters."""
    masters = optimizer.masters
    return [masters.of(p).clone() if p in masters else p.detach().clone() for p in net.parameters()]


def train(net: nn.Module, optimizer: FP16_Optimizer, steps: range, max_norm: float | None = None) -> None:
    for i in steps:
        optimizer.zero_grad()
        optimizer.backward(loss_of(net, i))
        if max_norm is not None:
            optimizer.clip_master_grads(max_norm)
        optimizer.step()


RECIPES = {
    "torch AdamW": (lambda ps: torch.optim.AdamW(ps, 1e-2), lambda ps: torch.optim.AdamW(ps, 1e-2)),
    "torch SGD": (lambda ps: torch.optim.SGD(ps, 1e-2, 0.9), lambda ps: torch.optim.SGD(ps, 1e-2, 0.9)),
    "fused AdamW": (
        lambda ps: FusedAdam(ps, 1e-2, weight_decay=0.01),
        lambda ps: torch.optim.AdamW(ps, 1e-2),
    ),
    "fused SGD": (lambda ps: FusedSGD(ps, 1e-2, 0.9), lambda ps: torch.optim.SGD(ps, 1e-2, 0.9)),
}


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_equals_the_loop_by_hand(recipe: str, dtype: torch.dtype, max_norm: float | None) -> None:
    ours, reference = RECIPES[recipe]
    net = model(dtype)
    parameters = list(net.parameters())
    optimizer = FP16_Optimizer(ours(net.parameters()), static_loss_scale=128.0)
    train(net, optimizer, range(6), max_norm)
    for found, want in zip(values(net, optimizer), by_hand(dtype, reference, 128.0, 6, max_norm), strict=True):
        torch.testing.assert_close(found, want)
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [id(p) for p in parameters]
    assert {p.grad.dtype for p in parameters if p.dtype is dtype} == {dtype}


def test_an_overflow_is_skipped_shrinks_the_scale_and_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    net = model()
    args = {"init_scale": 2.0**10, "scale_window": 2}
    optimizer = FP16_Optimizer(FusedAdam(net.parameters()), dynamic_loss_scale=True, dynamic_loss_args=args)
    train(net, optimizer, range(1))
    before = values(net, optimizer)
    assert not optimizer.overflow and optimizer.loss_scale == 2.0**10
    optimizer.zero_grad()
    optimizer.backward(loss_of(net, 1, float("inf")))
    assert optimizer.overflow
    assert optimizer.clip_master_grads(1.0) == -1 and optimizer.inspect_master_grad_data() is None
    assert optimizer.step() is None
    assert optimizer.overflow and optimizer.loss_scale == 2.0**9
    assert all(map(torch.equal, values(net, optimizer), before))
    assert "skipped, loss scale 1024 -> 512" in capsys.readouterr().out
    train(net, optimizer, range(2, 4))
    assert optimizer.loss_scale == 2.0**10 and not optimizer.overflow
    optimizer.verbose = False
    optimizer.backward(loss_of(net, 1, float("nan")))
    optimizer.step()
    assert capsys.readouterr().out == ""


def test_a_fixed_scale_skips_overflows_too() -> None:
    net = model()
    optimizer = FP16_Optimizer(torch.optim.SGD(net.parameters(), 0.1), static_loss_scale=8.0, verbose=False)
    before = values(net, optimizer)
    optimizer.backward(loss_of(net, 0, float("inf")))
    optimizer.step()
    assert optimizer.overflow and optimizer.loss_scale == 8.0
    assert all(map(torch.equal, values(net, optimizer), before))


def test_gradients_that_are_never_finite_end_the_run() -> None:
    net = model()
    optimizer = FP16_Optimizer(FusedSGD(net.parameters(), 0.1), dynamic_loss_scale=True, verbose=False)
    with pytest.raises(LossScaleError, match="50 steps"):
        for i in range(60):
            optimizer.zero_grad()
            optimizer.backward(loss_of(net, i, float("nan")))
            optimizer.step()


@pytest.mark.parametrize("make", [FusedSGD, torch.optim.SGD])
def test_several_losses_count_as_one(make: Any) -> None:
    net, other = model(), model()
    one, two = (FP16_Optimizer(make(n.parameters(), 0.1), static_loss_scale=64.0) for n in (net, other))
    one.backward(loss_of(net, 0), update_master_grads=False)
    one.backward(loss_of(net, 1), update_master_grads=False)
    one.update_master_grads()
    grads = one.inspect_master_grad_data()
    assert grads is not None and {g.dtype for g in grads[0]} == {torch.float32}
    one.step()
    two.backward(loss_of(other, 0))
    assert two.inspect_master_grad_data() is not None  # unscaled in memory, and scaled again for the next loss
    two.backward(loss_of(other, 1))
    two.step()
    for a, b in zip(values(net, one), values(other, two), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("make", [FusedSGD, torch.optim.SGD])
def test_a_parameter_that_only_the_second_loss_reaches_is_stepped_and_measured(make: Any) -> None:
    net = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)]).half()
    optimizer = FP16_Optimizer(make(net.parameters(), 0.1), static_loss_scale=4.0, verbose=False)
    ones = torch.ones(1, 2).half()
    for factor, change in ((1.0, 0.1), (float("inf"), 0.0)):
        before = net[1].weight.detach().clone()
        optimizer.zero_grad(set_grads_to_None=True)
        optimizer.backward(net[0](ones).sum())
        optimizer.backward(net[1](ones).sum() * factor)
        optimizer.step()
        assert optimizer.overflow is (change == 0.0)
        assert torch.allclose(before - net[1].weight, torch.tensor(change).half(), atol=1e-3)


def test_what_clipping_returns_and_what_inspection_shows() -> None:
    net = model()
    optimizer = FP16_Optimizer(FusedSGD(net.parameters(), 0.1), static_loss_scale=256.0)
    optimizer.backward(loss_of(net, 0))
    shown = optimizer.inspect_master_grad_data()
    want = torch.autograd.grad(loss_of(net, 0), list(net.parameters()))
    for found, grad in zip(shown[0], want, strict=True):
        torch.testing.assert_close(found, grad.float(), rtol=1e-2, atol=1e-3)
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in shown[0]]))
    torch.testing.assert_close(optimizer.clip_master_grads(1e-3), norm)
    inf = optimizer.clip_master_grads(1e9, float("inf"))
    assert 0 < inf < 1e-3  # what the first clipping left


@pytest.mark.parametrize("dynamic", [False, True])
def test_lbfgs_with_a_closure_equals_lbfgs_on_masters(dynamic: bool) -> None:
    net, reference = model(), model()
    optimizer = FP16_Optimizer(
        torch.optim.LBFGS(net.parameters(), max_iter=4, line_search_fn="strong_wolfe"),
        static_loss_scale=32.0,
        dynamic_loss_scale=dynamic,
        dynamic_loss_args={"init_scale": 2.0**30} if dynamic else None,
        verbose=False,
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, 0)
        optimizer.backward(loss)
        return loss

    start = loss_of(net, 0).item()
    first = [optimizer.step(closure).item() for _ in range(3)]
    params = list(reference.parameters())
    masters = [p.detach().float().requires_grad_() for p in params]
    plain = torch.optim.LBFGS(masters, max_iter=4, line_search_fn="strong_wolfe")

    def by_hand() -> Tensor:
        for param, master in zip(params, masters, strict=True):
            param.data.copy_(master.detach())
        reference.zero_grad()
        scaled = loss_of(reference, 0) * 32.0
        scaled.backward()
        for param, master in zip(params, masters, strict=True):
            master.grad = param.grad.float() / 32.0
        return scaled / 32.0

    second = [plain.step(by_hand).item() for _ in range(3)]
    assert first[0] == pytest.approx(start) and first[-1] < 0.5 * start
    assert first == pytest.approx(second, rel=0.05 if dynamic else 1e-5)
    assert {p.dtype for g in optimizer.param_groups for p in g["params"]} == {torch.float16, torch.float32}
    if dynamic:
        assert optimizer.loss_scale < 2.0**30


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("recipe", ["torch AdamW", "fused AdamW"])
def test_resume_is_exact(recipe: str, dynamic: bool) -> None:
    def new() -> tuple[nn.Module, FP16_Optimizer]:
        net = model()
        kind = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2.0**12, "scale_window": 3}}
        return net, FP16_Optimizer(RECIPES[recipe][0](net.parameters()), **(kind if dynamic else {}))

    net, optimizer = new()
    optimizer.loss_scale = 2.0**11
    train(net, optimizer, range(4))
    file = io.BytesIO()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(net, optimizer, range(4, 8))
    again, resumed = new()
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(again, resumed, range(4, 8))
    assert all(map(torch.equal, values(net, optimizer), values(again, resumed)))
    assert resumed.loss_scale == optimizer.loss_scale == (2.0**13 if dynamic else 2.0**11)
    moments = [t for s in resumed.state.values() for n, t in s.items() if n != "step"]
    assert {t.dtype for t in moments} == {torch.float32}


def test_the_optimizers_state_alone_brings_the_weights_back() -> None:
    net = model()
    optimizer = FP16_Optimizer(torch.optim.SGD(net.parameters(), 0.1))
    train(net, optimizer, range(2))
    again = model()
    resumed = FP16_Optimizer(torch.optim.SGD(again.parameters(), 0.1))
    resumed.load_state_dict(optimizer.state_dict())
    halves = [(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True) if a.dtype is torch.float16]
    assert all(torch.equal(a, b) for a, b in halves)


def test_apexs_own_state_loads() -> None:
    class ApexScaler:
        cur_scale, cur_iter = 2.0**9, 7

    net = model()
    halves = [p for p in net.parameters() if p.dtype is torch.float16]
    inner = torch.optim.SGD(net.parameters(), 0.1, 0.9)
    optimizer = FP16_Optimizer(inner, dynamic_loss_scale=True)
    masters = [p.detach().float() + 1e-5 for p in halves]
    optimizer.load_state_dict(
        {
            "loss_scaler": ApexScaler(),
            "dynamic_loss_scale": True,
            "overflow": False,
            "first_closure_call_this_step": True,
            "optimizer_state_dict": inner.state_dict(),
            "fp32_from_fp16": [masters],
        }
    )
    assert optimizer.loss_scale == 2.0**9
    assert all(torch.equal(optimizer.masters.of(p), m) for p, m in zip(halves, masters, strict=True))


def test_masters_that_do_not_fit_are_refused_before_anything_changes() -> None:
    net, other = model(), nn.Linear(3, 1).half()
    optimizer = FP16_Optimizer(torch.optim.SGD(net.parameters(), 0.1))
    wrong = FP16_Optimizer(torch.optim.SGD(other.parameters(), 0.1)).state_dict()
    before = values(net, optimizer)
    with pytest.raises(ValueError, match=r"fp32_from_fp16.*\[2\].*\[4\]"):
        optimizer.load_state_dict(wrong)
    assert all(map(torch.equal, values(net, optimizer), before))
    with pytest.raises(TypeError, match="init_optimizer is a Linear"):
        FP16_Optimizer(other)


def test_weights_written_by_hand_count() -> None:
    net = model()
    optimizer = FP16_Optimizer(torch.optim.SGD(net.parameters(), 0.0))
    with torch.no_grad():
        net[1][0].weight.fill_(0.5)
    train(net, optimizer, range(1))
    assert (optimizer.masters.of(net[1][0].weight) == 0.5).all()


def test_the_scale_may_be_set_and_a_scheduler_takes_the_inner_optimizer() -> None:
    net = model()
    optimizer = FP16_Optimizer(torch.optim.SGD(net.parameters(), 0.1))
    assert optimizer.loss_scale == 1.0
    optimizer.loss_scale = 4.0
    assert optimizer.loss_scale == 4.0
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1)
    train(net, optimizer, range(1))
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_the_two_scaler_classes() -> None:
    fixed, dynamic = LossScaler(8.0), DynamicLossScaler(init_scale=16.0, scale_factor=4.0, scale_window=2)
    param = nn.Parameter(torch.ones(2))
    fixed.backward(param.sum())
    assert param.grad.tolist() == [8.0, 8.0]
    assert not fixed.has_overflow([param]) and not dynamic.has_overflow([param, nn.Parameter(torch.ones(1))])
    param.grad[1] = float("nan")
    assert dynamic.has_overflow([param]) and not LossScaler(1.0).has_overflow([param])
    dynamic.update_scale(True)
    assert dynamic.loss_scale == 4.0
    for expected in (4.0, 16.0):
        dynamic.update_scale(False)
        assert dynamic.loss_scale == expected
    fixed.update_scale(True)
    assert fixed.loss_scale == 8.0
    assert dynamic.scale_gradient(nn.Linear(1, 1), (torch.ones(1), None), ())[0].item() == 16.0
    assert DynamicLossScaler().loss_scale == 2.0**32
    with pytest.raises(ValueError, match="scale_factor=1"):
        DynamicLossScaler(scale_factor=1)
