"""Plain training loops for the tests of LossScaler."""

from __future__ import annotations

import random

import torch
from torch import nn

from lightning_apex import FusedAdam, FusedSGD

OPTIMIZERS = {
    "fused_adam": lambda params: FusedAdam(params, lr=0.1),
    "fused_sgd": lambda params: FusedSGD(params, lr=0.1, momentum=0.9),
    "torch_adamw": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.0),
    "torch_sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


def random_flags(seed: int, count: int, probability: float) -> list[bool]:
    numbers = random.Random(seed)
    return [numbers.random() < probability for _ in range(count)]


def loss_of(params, overflow: bool = False) -> torch.Tensor:
    loss = sum((p.float() ** 2).sum() for p in params)
    return loss * torch.inf if overflow else loss


def train(scaler, optimizer, params, pattern) -> list[float]:
    """One step for each flag; returns the scale after each."""
    scales = []
    for overflow in pattern:
        optimizer.zero_grad()
        scaler.scale(loss_of(params, overflow)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.linspace(-1, 1, n)) for n in (5, 1)]


def state_of(optimizer, params) -> list[torch.Tensor]:
    """Copies of everything a step could change."""
    states = [v for p in params for v in optimizer.state[p].values() if isinstance(v, torch.Tensor)]
    return [t.detach().clone() for t in (*params, *states)]
