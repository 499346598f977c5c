"""fp16 convolutions on a CPU with a backward pass in fp32: torch's own takes 24 to 488 times as long as fp32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_FP16 = torch.float16
_BACKWARD = torch.ops.aten.convolution_backward.default


class HalfConvolutions(TorchFunctionMode):
    """Inside, fp16 convolutions on a CPU that need gradients compute these in fp32 and round them to fp16.

    Modules and functional calls alike, also where autocast makes them fp16. Everything else, and convolutions whose
    gradients nobody needs, go to torch as they are. A graph made inside may be used outside.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each function."""
        convolve = _CONVOLUTIONS.get(func)
        if convolve is None:
            return func(*args, **(kwargs or {}))
        result = convolve(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is None else result


class HalfBackward(TorchDispatchMode):
    """Around a backward pass: fp16 convolutions that were computed with a graph outside of `HalfConvolutions`.

    Re-entrant checkpointing repeats parts of the forward pass inside the backward pass, where torch has put all
    function modes aside.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each operator."""
        if func is not _BACKWARD or args[0].dtype is not _FP16 or args[0].device.type != "cpu":
            return func(*args, **(kwargs or {}))
        grads = func(*(a.float() for a in args[:3]), *args[3:])
        return tuple(None if grad is None else grad.to(_FP16) for grad in grads)


def _halves(input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """What an fp16 convolution is computed of, as autocast would cast it; ``None`` where it is none of ours."""
    tensors = [input, weight] if bias is None else [input, weight, bias]
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
        return None
    if any(t.device.type != "cpu" or not t.is_floating_point() or t.dtype is torch.float64 for t in tensors):
        return None
    if torch.is_autocast_enabled("cpu"):
        if torch.get_autocast_dtype("cpu") is not _FP16:
            return None
        return input.to(_FP16), weight.to(_FP16), None if bias is None else bias.to(_FP16)
    return (input, weight, bias) if all(t.dtype is _FP16 for t in tensors) else None


def _forward_convolution(n: int) -> Callable[..., Tensor | None]:
    def convolve(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor | None:
        halves = _halves(input, weight, bias)
        if halves is None:
            return None
        dilation = _each(dilation, n)
        if padding == "same":
            # torch pads a side more where the total is odd: at the end.
            totals = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
            padding = [total // 2 for total in totals]
            if any(total % 2 for total in totals):
                ends = [side for total in reversed(totals) for side in (0, total % 2)]
                halves = (F.pad(halves[0], ends), *halves[1:])
        elif padding == "valid":
            padding = 0
        return _apply(halves, n, _each(stride, n), _each(padding, n), dilation, False, [0] * n, groups)

    return convolve


def _transposed_convolution(n: int) -> Callable[..., Tensor | None]:
    def convolve(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Tensor | None:
        halves = _halves(input, weight, bias)
        if halves is None:
            return None
        sizes = [_each(value, n) for value in (stride, padding, dilation)]
        return _apply(halves, n, *sizes, True, _each(output_padding, n), groups)

    return convolve


def _each(value: int | Sequence[int], n: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * n if len(values) == 1 else values


def _apply(halves: tuple[Tensor, Tensor, Tensor | None], n: int, *geometry: Any) -> Tensor:
    input, weight, bias = halves
    if input.dim() == n + 1:  # without a batch
        return _apply((input.unsqueeze(0), weight, bias), n, *geometry).squeeze(0)
    result: Tensor = _HalfConvolution.apply(input, weight, bias, *geometry)
    return result


class _HalfConvolution(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
        return torch.convolution(input, weight, bias, *geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, weight, bias, *ctx.geometry = inputs
        ctx.save_for_backward(input, weight)
        ctx.bias_sizes = None if bias is None else list(bias.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        needed = list(ctx.needs_input_grad[:3])
        # In manual optimization the backward pass runs under autocast, which would meet the backward of this one.
        with torch.autocast("cpu", enabled=False):
            grads = _BACKWARD(grad.float(), input.float(), weight.float(), ctx.bias_sizes, *ctx.geometry, needed)
            halves = [g.to(_FP16) if need else None for g, need in zip(grads, needed, strict=True)]
        return (*halves, *(None for _ in ctx.geometry))


_CONVOLUTIONS: dict[Any, Callable[..., Tensor | None]] = {
    torch.conv1d: _forward_convolution(1),
    torch.conv2d: _forward_convolution(2),
    torch.conv3d: _forward_convolution(3),
    torch.conv_transpose1d: _transposed_convolution(1),
    torch.conv_transpose2d: _transposed_convolution(2),
    torch.conv_transpose3d: _transposed_convolution(3),
}
