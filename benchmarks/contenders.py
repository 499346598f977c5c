"""The ways to make an optimizer step that the benchmarks compare; all of a row work on the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer

from benchmarks.common import Contender
from lightning_apex import FusedAdam, LossScaler
from lightning_apex.cli.benching.buffers import Buffers
from lightning_apex.cli.benching.families import DEFAULT, FOREACH, FUSED
from lightning_apex.cli.benching.race import OURS
from lightning_apex.cli.benching.shapes import Shapes
from lightning_apex.masters import MasterWeights

MAX_NORM = 1.0
_SCALE = 2.0**16
_ADAM: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def adamw(buffers: Buffers, names: Sequence[str]) -> list[Contender]:
    """A bare AdamW step by each of the named optimizers."""
    params = buffers.params
    made: dict[str, Callable[[], Optimizer]] = {
        OURS: lambda: buffers.lend_moments(FusedAdam(params, **_ADAM), params),
        FUSED: lambda: buffers.lend_moments(AdamW(params, fused=True, **_ADAM), params),
        DEFAULT: lambda: buffers.lend_moments(AdamW(params, foreach=False, **_ADAM), params, host_steps=True),
        FOREACH: lambda: buffers.lend_moments(AdamW(params, foreach=True, **_ADAM), params, host_steps=True),
    }
    return [Contender(name, made[name]().step) for name in names]


def scaled_tails(shapes: Shapes, device: str = "cpu") -> tuple[Buffers, list[Contender]]:
    """All that follows the backward pass at O1: unscale, look for overflow, clip, AdamW, new scale, zero_grad."""
    buffers = Buffers(shapes, device, grad_scale=_SCALE)
    pristine = [grad.clone() for grad in buffers.grads]

    def prepare() -> None:
        # torch unscales and clips in place; everybody begins with the same gradients.
        torch._foreach_copy_(buffers.grads, pristine)
        buffers.hand_out(buffers.grads)

    params = buffers.params
    ours = buffers.lend_moments(FusedAdam(params, **_ADAM), params)
    theirs = {
        FUSED: buffers.lend_moments(AdamW(params, fused=True, **_ADAM), params),
        DEFAULT: buffers.lend_moments(AdamW(params, foreach=False, **_ADAM), params, host_steps=True),
    }
    contenders = [Contender(OURS, _our_scaled_tail(ours), prepare)]
    contenders += [Contender(name, _torch_scaled_tail(params, o, device), prepare) for name, o in theirs.items()]
    return buffers, contenders


def _our_scaled_tail(optimizer: Optimizer) -> Callable[[], None]:
    scaler = LossScaler(init_scale=_SCALE)

    def tail() -> None:
        scaler.open(optimizer).clip_norm(MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return tail


def _torch_scaled_tail(params: Sequence[Tensor], optimizer: Optimizer, device: str) -> Callable[[], None]:
    scaler = torch.amp.GradScaler(device, init_scale=_SCALE)
    scaler.scale(torch.ones((), device=device))  # makes its state

    def tail() -> None:
        scaler.unscale_(optimizer)
        clip_grad_norm_(params, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return tail


def master_tails(shapes: Shapes, device: str = "cpu") -> tuple[Buffers, list[Contender]]:
    """All that follows the backward pass at O5: bf16 weights and gradients, fp32 masters, clip, AdamW."""
    buffers = Buffers(shapes, device)
    masters = [p.detach() for p in buffers.params]
    halves = [nn.Parameter(master.bfloat16()) for master in masters]
    for half, grad in zip(halves, buffers.grads, strict=True):
        half.grad = grad.bfloat16()
    ours = Contender(OURS, _our_master_tail(buffers, halves, masters))
    return buffers, [ours, Contender("torch composition", _torch_master_tail(buffers, halves))]


def _our_master_tail(buffers: Buffers, halves: list[nn.Parameter], masters: list[Tensor]) -> Callable[[], None]:
    optimizer = buffers.lend_moments(FusedAdam(halves, **_ADAM), halves)
    weights = MasterWeights()
    for half, master in zip(halves, masters, strict=True):
        weights.put(half, master)
    scaler = LossScaler(1.0)

    def tail() -> None:
        scaler.open(optimizer, weights).clip_norm(MAX_NORM)
        scaler.step(optimizer)
        scaler.update()

    return tail


def _torch_master_tail(buffers: Buffers, halves: list[nn.Parameter]) -> Callable[[], None]:
    """The quickest we know to compose of torch's own: fp32 gradients that are allocated once, foreach copies."""
    params = buffers.params
    optimizer = buffers.lend_moments(AdamW(params, fused=True, **_ADAM), params)
    weights, masters = [h.detach() for h in halves], [p.detach() for p in params]

    def tail() -> None:
        torch._foreach_copy_(buffers.grads, [h.grad for h in halves])
        clip_grad_norm_(params, MAX_NORM)
        optimizer.step()
        torch._foreach_copy_(weights, masters)

    return tail
