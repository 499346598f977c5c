"""What the tests of the batch norm operators share: their rows, their tolerances, and inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from cases import BF16, F16, F32, F64, LAYOUTS
from kernels import Kernels
from torch import Tensor

EPS = 1e-5
CHANNELS = [1, 3, 64, 65, 130, 2048]
# What is left of (N, C, ...) when C is taken out: 2-D to 5-D, odd sizes, spatial sizes of 1, less than a vector.
SHAPES: list[tuple[int, ...]] = [(6,), (4, 7), (2, 3, 5), (3, 1, 1), (2, 2, 3, 3)]
# Several pieces of a channel, several tasks of rows, and tails; not for the emulation.
LARGE: list[tuple[int, ...]] = [(2500,), (90, 49), (3, 65, 67)]

# (rtol, atol) against float64, of values about 1: one rounding of the result, and float32 sums on the way.
TOLERANCES = {F32: (4e-6, 4e-6), F64: (1e-12, 1e-12), F16: (1.1e-3, 1e-5), BF16: (8e-3, 1e-5)}


def channels_innermost(t: Tensor) -> Tensor:
    """Like channels_last, for any number of dimensions."""
    return t.movedim(1, -1).contiguous().movedim(-1, 1)


BATCH_NORM_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = LAYOUTS | {"channels_innermost": channels_innermost}


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None, times: float = 1) -> None:
    """Compares with float64; the tolerance is that of `dtype`, by default of `actual`."""
    rtol, atol = TOLERANCES[dtype or actual.dtype]
    torch.testing.assert_close(
        actual.detach().cpu().double(), expected.double(), rtol=times * rtol, atol=times * atol, equal_nan=True
    )


def full_shape(channels: int, rest: tuple[int, ...]) -> tuple[int, ...]:
    return (rest[0], channels, *rest[1:])


@dataclass
class Inputs:
    """One layer's tensors."""

    x: Tensor
    grad_out: Tensor
    z: Tensor
    weight: Tensor
    bias: Tensor


def make_inputs(
    backend: Kernels, shape: tuple[int, ...], dtype: torch.dtype, layout: str = "contiguous", grad_layout: str = ""
) -> Inputs:
    def lay(t: Tensor, name: str) -> Tensor:
        return BATCH_NORM_LAYOUTS[name](t.to(backend.device, dtype))

    channels = shape[1]
    spread = torch.rand(1, channels, *[1] * (len(shape) - 2)) + 0.5
    return Inputs(
        x=lay(torch.randn(shape) * spread + 3 * spread, layout),
        grad_out=lay(torch.randn(shape), grad_layout or layout),
        z=lay(torch.randn(shape), layout),
        weight=(torch.rand(channels) + 0.5).to(backend.device),
        bias=torch.randn(channels).to(backend.device),
    )


def forward(
    backend: Kernels, i: Inputs, *, z: bool = False, relu: bool = False, affine: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """batch_norm_forward without running statistics."""
    weight, bias = (i.weight, i.bias) if affine else (None, None)
    return backend.batch_norm_forward(i.x, weight, bias, None, None, EPS, 0.1, i.z if z else None, relu)
