"""Every operator but the optimizers' run once on small tensors: how far it is from float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

SHAPES = ((7, 5), (33,), (2, 3, 4))


def difference(actual: Any, expected: Any) -> float:
    """The largest difference, relative to the largest expected value where that is above 1."""
    a, e = (torch.as_tensor(t, dtype=torch.float64).detach().cpu().reshape(-1) for t in (actual, expected))
    if not e.numel():
        return 0.0
    error = float((a - e).abs().max() / max(1.0, float(e.abs().max())))
    return math.inf if math.isnan(error) else error


def worst(pairs: list[tuple[Any, Any]]) -> float:
    """The largest difference of several tensors."""
    return max(difference(actual, expected) for actual, expected in pairs)


def _randoms(device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape).to(device, dtype) for shape in SHAPES]


def _one(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, device=device)


# --- gradients and scales -------------------------------------------------------------------------------------------


def _measure_gradients(device: torch.device) -> float:
    from lightning_apex import ops

    grads = [*_randoms(device), torch.tensor([1.0, math.nan], device=device)]
    total, _ = ops.measure_gradients(grads[:3])
    _, flags = ops.measure_gradients(grads)
    expected = sum(float(g.double().square().sum()) for g in grads[:3])
    return worst([(total, expected), (flags, [0, 0, 0, 1])])


def _step_factors(device: torch.device) -> float:
    from lightning_apex import ops

    found, flags = _one(0.0, device), torch.zeros(2, dtype=torch.uint8, device=device)
    squares = torch.tensor(64.0 * 9, dtype=torch.float64, device=device)
    norm, factor = ops.step_factors(squares, flags, _one(8.0, device), 1.5, found)
    return worst([(norm, 3.0), (factor, 1 / 8 * 1.5 / (3 + 1e-6)), (found, 0.0)])


def _unscale(device: torch.device) -> float:
    from lightning_apex import ops

    grads, found = _randoms(device), _one(0.0, device)
    expected = [g.double() * 0.125 for g in grads]
    flags = ops.unscale_(grads, _one(0.125, device), found)
    return worst([*zip(grads, expected, strict=True), (flags, [0, 0, 0]), (found, 0.0)])


def _copy_scaled(device: torch.device) -> float:
    from lightning_apex import ops

    source = _randoms(device, torch.bfloat16)
    copies = [torch.empty_like(t, dtype=torch.float32) for t in source]
    ops.copy_scaled_(copies, source, _one(0.375, device))
    return worst([(copy, t.double() * 0.375) for copy, t in zip(copies, source, strict=True)])


def _reconcile_masters(device: torch.device) -> float:
    from lightning_apex import ops

    masters = _randoms(device)
    params = [m.to(torch.bfloat16) for m in masters]
    expected = [m.clone() for m in masters]
    params[1][3], expected[1][3] = 5.0, 5.0  # somebody wrote it
    ops.reconcile_masters_(masters, params)
    return worst(list(zip(masters, expected, strict=True)))


def _tensor_norms(device: torch.device) -> float:
    from lightning_apex import ops

    tensors = _randoms(device)
    squares, largest = [t.double().square().sum() for t in tensors], [t.double().abs().max() for t in tensors]
    return worst(
        [
            (ops.tensor_norms(tensors, 2.0), torch.stack(squares)),
            (ops.tensor_norms(tensors, math.inf), torch.stack(largest)),
        ]
    )


def _update_scale(device: torch.device) -> float:
    from lightning_apex import ops

    scale, trackers = _one(1024.0, device), torch.tensor([1, 1, 0, 0], dtype=torch.int32, device=device)
    seen = []
    for found in (0.0, 1.0, 1.0):  # grows, backs off, and again, to its floor
        ops.update_scale_(scale, trackers, _one(found, device), 2.0, 0.25, 2, 1, 200.0, 4096.0)
        seen.append(float(scale))
    return worst([(seen, [2048.0, 512.0, 200.0]), (trackers[2:], [2, 2])])


# --- batch norm -----------------------------------------------------------------------------------------------------


class _BatchNorm:
    """One batch, with what float64 makes of it and of a gradient."""

    def __init__(self, device: torch.device) -> None:
        self.x, self.z, self.grad = (torch.randn(4, 3, 5, 2).to(device) for _ in range(3))
        self.weight, self.bias = (torch.randn(3).to(device) for _ in range(2))
        wide = [t.cpu().double().requires_grad_() for t in (self.x, self.weight, self.bias, self.z)]
        x, weight, bias, z = wide
        self.mean, variance = x.detach().mean((0, 2, 3)), x.detach().var((0, 2, 3), correction=0)
        self.m2, self.invstd = variance * 40, (variance + 1e-5).rsqrt()
        self.out = (F.batch_norm(x, None, None, weight, bias, training=True, eps=1e-5) + z).relu()
        self.gradients = torch.autograd.grad(self.out, wide, self.grad.cpu().double())
        self.statistics = (self.mean.to(device), self.invstd.to(device))
        self.count = torch.tensor([40.0], dtype=torch.float64, device=device)


def _stats(device: torch.device) -> float:
    from lightning_apex import ops

    case = _BatchNorm(device)
    means, m2s = ops.batch_norm_stats(case.x)
    return worst([(means, case.mean), (m2s, case.m2)])


def _combine(device: torch.device) -> float:
    from lightning_apex import ops

    case = _BatchNorm(device)
    halves = [ops.batch_norm_stats(part) for part in (case.x[:1], case.x[1:])]
    counts = torch.tensor([10.0, 30.0], dtype=torch.float64, device=device)
    means, m2s = (torch.stack(parts) for parts in zip(*halves, strict=True))
    running = [torch.zeros(3, device=device), torch.ones(3, device=device)]
    mean, invstd, total = ops.batch_norm_combine(means, m2s, counts, 1e-5, 0.1, *running)
    variance = 0.9 + 0.1 * case.m2 / 39
    return worst([(mean, case.mean), (invstd, case.invstd), (total, 40.0), (running[0], 0.1 * case.mean),
                   (running[1], variance)])  # fmt: skip


def _apply(device: torch.device) -> float:
    from lightning_apex import ops

    case = _BatchNorm(device)
    return difference(ops.batch_norm_apply(case.x, *case.statistics, case.weight, case.bias, case.z, True), case.out)


def _forward(device: torch.device) -> float:
    from lightning_apex import ops

    case = _BatchNorm(device)
    out, mean, invstd = ops.batch_norm_forward(case.x, case.weight, case.bias, None, None, 1e-5, 0.1, case.z, True)
    return worst([(out, case.out), (mean, case.mean), (invstd, case.invstd)])


def _backward_reduce(device: torch.device) -> float:
    from lightning_apex import ops

    case = _BatchNorm(device)
    sum_dy, sum_dy_xhat = ops.batch_norm_backward_reduce(
        case.grad, case.x, case.out.float().to(device), *case.statistics
    )
    return worst([(sum_dy, case.gradients[2]), (sum_dy_xhat, case.gradients[1])])


def _backward_apply(device: torch.device) -> float:
    from lightning_apex import ops

    case = _BatchNorm(device)
    out, sums = case.out.float().to(device), (case.gradients[2].to(device), case.gradients[1].to(device))
    grad, grad_z = ops.batch_norm_backward_apply(
        case.grad, case.x, out, *case.statistics, case.weight, *sums, case.count, True
    )
    return worst([(grad, case.gradients[0]), (grad_z, case.gradients[3])])


def _backward(device: torch.device) -> float:
    from lightning_apex import ops

    case = _BatchNorm(device)
    out = case.out.float().to(device)
    grad, grad_z, sum_dy, sum_dy_xhat = ops.batch_norm_backward(
        case.grad, case.x, out, *case.statistics, case.weight, True
    )
    expected = (case.gradients[i] for i in (0, 3, 2, 1))
    return worst(list(zip((grad, grad_z, sum_dy, sum_dy_xhat), expected, strict=True)))


OPERATORS: dict[str, Callable[[torch.device], float]] = {
    "measure_gradients": _measure_gradients,
    "step_factors": _step_factors,
    "unscale_": _unscale,
    "copy_scaled_": _copy_scaled,
    "reconcile_masters_": _reconcile_masters,
    "tensor_norms": _tensor_norms,
    "update_scale_": _update_scale,
    "batch_norm_stats": _stats,
    "batch_norm_combine": _combine,
    "batch_norm_apply": _apply,
    "batch_norm_forward": _forward,
    "batch_norm_backward_reduce": _backward_reduce,
    "batch_norm_backward_apply": _backward_apply,
    "batch_norm_backward": _backward,
}
