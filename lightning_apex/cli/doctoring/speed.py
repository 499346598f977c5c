"""How fast this machine multiplies matrices and convolves in fp32, bf16 and fp16."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch.nn import functional as F

from lightning_apex.half_convolutions import HalfConvolutions

OPS = ("matrix products", "convolutions")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# (n of an n x n product, (batch, channels, side) of a 3 x 3 convolution): some milliseconds each
_SIZES = {"cpu": (768, (8, 64, 28)), "cuda": (4096, (64, 256, 28))}
_MOST_ROUNDS = 100


def name_of(dtype: torch.dtype) -> str:
    """``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def measure(op: str, device: torch.device, seconds: float) -> dict[tuple[str, str], float | None]:
    """Measures one operation in every type; rounds of all types alternate, so that other load hits all of them.

    Args:
        op: One of `OPS`.
        device: Where.
        seconds: For all types together, about: one that takes longer is run once.

    Returns:
        Floating-point operations a second by ``(op, type)``; None where torch cannot do it.
    """
    n, shape = _SIZES.get(device.type, _SIZES["cpu"])
    times: dict[torch.dtype, list[float]] = {}
    calls: dict[torch.dtype, Callable[[], None]] = {}
    end = time.perf_counter() + seconds
    work = 0.0
    for dtype in DTYPES:
        times[dtype] = []
        work, call = _product(n, dtype, device) if op == OPS[0] else _convolution(shape, dtype, device)
        try:
            first = _timed(call, device)
        except RuntimeError:  # not implemented for this type
            continue
        if first > seconds / len(DTYPES):
            times[dtype].append(first)
        else:  # the first call is slower than the rest
            times[dtype].append(_timed(call, device))
            calls[dtype] = call
    for _ in range(_MOST_ROUNDS):
        if time.perf_counter() > end:
            break
        for dtype, call in calls.items():
            times[dtype].append(_timed(call, device))
    return {(op, name_of(dtype)): work / statistics.median(t) if t else None for dtype, t in times.items()}


def _timed(call: Callable[[], None], device: torch.device) -> float:
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _product(n: int, dtype: torch.dtype, device: torch.device) -> tuple[float, Callable[[], None]]:
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))

    def call() -> None:
        a @ b

    return 2.0 * n**3, call


def _convolution(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[float, Callable[[], None]]:
    """Forward and backward, as training runs it: fp16 on a CPU goes backward in fp32 under every opt level."""
    batch, channels, side = shape
    x = torch.randn(batch, channels, side, side, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(channels, channels, 3, 3, device=device) / channels).to(dtype).requires_grad_()
    on_cpu = device.type == "cpu" and dtype is torch.float16

    def call() -> None:
        with HalfConvolutions() if on_cpu else nullcontext():
            out = F.conv2d(x, weight, padding=1)
        torch.autograd.grad(out, (x, weight), torch.ones_like(out))

    return 3 * 2.0 * batch * side**2 * channels**2 * 9, call
