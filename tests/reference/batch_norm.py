"""Batch normalisation from its formula, in float64; its gradients are autograd's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def _dims(x: Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _wide(t: Tensor, x: Tensor) -> Tensor:
    """One number a channel, to be broadcast over `x`."""
    return t.detach().cpu().double().view(1, -1, *[1] * (x.dim() - 2))


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of every channel."""
    x = x.detach().cpu().double()
    mean = x.mean(_dims(x))
    return mean, (x - _wide(mean, x)).square().mean(_dims(x))


def running(before: Tensor, now: Tensor, momentum: float) -> Tensor:
    return (1 - momentum) * before.cpu().double() + momentum * now


@dataclass
class Result:
    """What a forward and a backward give."""

    out: Tensor
    grad_input: Tensor
    grad_weight: Tensor
    grad_bias: Tensor
    grad_z: Tensor


def batch_norm(
    x: Tensor,
    grad_out: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    z: Tensor | None = None,
    *,
    positive: Tensor | None = None,
    eps: float = 1e-5,
) -> Result:
    """Normalises and goes back.

    Args:
        x: ``(N, C, ...)``.
        grad_out: The gradient of the result.
        weight: None for 1.
        bias: None for 0.
        z: Added.
        positive: Where a ReLU lets through; None: there is no ReLU.
        eps: Added to the variance.
    """
    channels = x.shape[1]
    weight = torch.ones(channels) if weight is None else weight
    bias = torch.zeros(channels) if bias is None else bias
    z = torch.zeros_like(x) if z is None else z
    leaves = [t.detach().cpu().double().clone().requires_grad_() for t in (x, weight, bias, z)]
    a, w, b, c = leaves
    shape = (1, -1, *[1] * (x.dim() - 2))
    mean = a.mean(_dims(a), keepdim=True)
    variance = (a - mean).square().mean(_dims(a), keepdim=True)
    out = (a - mean) / (variance + eps).sqrt() * w.view(shape) + b.view(shape) + c
    if positive is not None:
        out = out * positive.cpu()
    grads = torch.autograd.grad(out, leaves, grad_out.detach().cpu().double())
    return Result(out.detach(), *grads)
