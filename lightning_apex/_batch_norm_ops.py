"""Typed faces of the batch norm kernels, and what the compiler needs to know of them; part of `lightning_apex.ops`.

Activations are ``(N, C, ...)``, of float32, float16, bfloat16 or float64, contiguous or with the channels last; other
layouts are copied at the door. Outputs are laid out as the input is. Elements are computed in float32 (float64 for
float64). Statistics are float64 whatever the input is: so a channel with a large mean and a small variance loses
nothing, and a count is exact. Empty inputs are fine. On CUDA no function waits for the device. None is differentiable.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "batch_norm_apply",
    "batch_norm_backward",
    "batch_norm_backward_apply",
    "batch_norm_backward_reduce",
    "batch_norm_combine",
    "batch_norm_forward",
    "batch_norm_stats",
]

_ops = torch.ops.lightning_apex


def batch_norm_stats(input: Tensor) -> tuple[Tensor, Tensor]:
    """Finds the mean and the sum of squared deviations of every channel.

    Args:
        input: ``(N, C, ...)``. How many elements were counted is ``input.numel() / C``.

    Returns:
        The means and the sums of squared deviations from them (float64 ``[C]``); zeros where the input is empty.
    """
    result: tuple[Tensor, Tensor] = _ops.batch_norm_stats(input)
    return result


def batch_norm_combine(
    means: Tensor,
    m2s: Tensor,
    counts: Tensor,
    eps: float,
    momentum: float,
    running_mean: Tensor | None,
    running_var: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Combines the statistics of several ranks, as if their batches were one.

    Args:
        means: float64 ``[ranks, C]``, from `batch_norm_stats`.
        m2s: Likewise.
        counts: The elements that each rank counted a channel (float64 ``[ranks]``); 0 is fine.
        eps: Added to the variance.
        momentum: The share of this batch in the new running statistics.
        running_mean: Written, as by `torch.nn.functional.batch_norm`; left alone where all counts are 0.
        running_var: Likewise; the unbiased variance goes in. Both are None or neither.

    Returns:
        The mean and ``1 / sqrt(variance + eps)`` of every channel (float64 ``[C]``), and the sum of the counts
        (float64 ``[1]``).
    """
    result: tuple[Tensor, Tensor, Tensor] = _ops.batch_norm_combine(
        means, m2s, counts, eps, momentum, running_mean, running_var
    )
    return result


def batch_norm_apply(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    z: Tensor | None,
    relu: bool,
) -> Tensor:
    """Normalises: ``(input - mean) * invstd * weight + bias``, plus ``z``, through a ReLU, rounded once.

    Args:
        input: ``(N, C, ...)``.
        mean: float64 ``[C]``.
        invstd: Likewise.
        weight: ``[C]``, any floating dtype; None for 1.
        bias: Likewise; None for 0.
        z: A tensor of the input's shape and dtype to add.
        relu: Whether negative results become 0.

    Returns:
        A tensor like the input.
    """
    result: Tensor = _ops.batch_norm_apply(input, mean, invstd, weight, bias, z, relu)
    return result


def batch_norm_backward_reduce(
    grad_out: Tensor, input: Tensor, out: Tensor | None, mean: Tensor, invstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Sums what the gradients of weight, bias and input need.

    Args:
        grad_out: Like the input, in any layout.
        input: As it was normalised.
        out: The result, where a ReLU was fused: the gradient is 0 where it is not positive.
        mean: float64 ``[C]``, as it was normalised by.
        invstd: Likewise.

    Returns:
        For every channel the sums of the gradient and of the gradient times the normalised input (float64 ``[C]``):
        the gradients of bias and weight.
    """
    result: tuple[Tensor, Tensor] = _ops.batch_norm_backward_reduce(grad_out, input, out, mean, invstd)
    return result


def batch_norm_backward_apply(
    grad_out: Tensor,
    input: Tensor,
    out: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xhat: Tensor,
    total_count: Tensor,
    need_grad_z: bool,
) -> tuple[Tensor, Tensor | None]:
    """Computes the gradients of the input, and of ``z``.

    Args:
        grad_out: As in `batch_norm_backward_reduce`, like the next four.
        input: See there.
        out: See there.
        mean: See there.
        invstd: See there.
        weight: ``[C]``, any floating dtype; None for 1.
        sum_dy: The sum over all ranks of what `batch_norm_backward_reduce` returned. With zeros the mean and the
            variance are constants, as in evaluation.
        sum_dy_xhat: Likewise.
        total_count: Over how many elements a channel mean and variance were taken (float64, one element).
        need_grad_z: Whether to return the gradient of ``z``.

    Returns:
        The gradient of the input, and that of ``z`` or None. Without a ReLU the latter is ``grad_out`` itself.
    """
    grad_input, grad_z = _ops.batch_norm_backward_apply(
        grad_out, input, out, mean, invstd, weight, sum_dy, sum_dy_xhat, total_count, need_grad_z
    )
    return grad_input, _grad_z(grad_out, out, grad_z, need_grad_z)


def batch_norm_forward(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    eps: float,
    momentum: float,
    z: Tensor | None,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Does the work of `batch_norm_stats`, `batch_norm_combine` and `batch_norm_apply` where there is one rank.

    Args:
        input: See `batch_norm_apply`, like all others that are there.
        weight: See there.
        bias: See there.
        running_mean: See `batch_norm_combine`, like the next three.
        running_var: See there.
        eps: See there.
        momentum: See there.
        z: See `batch_norm_apply`.
        relu: See there.

    Returns:
        A tensor like the input, and mean and ``invstd`` of every channel (float64 ``[C]``).
    """
    result: tuple[Tensor, Tensor, Tensor] = _ops.batch_norm_forward(
        input, weight, bias, running_mean, running_var, eps, momentum, z, relu
    )
    return result


def batch_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    out: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    need_grad_z: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Does the work of `batch_norm_backward_reduce` and `batch_norm_backward_apply` where there is one rank.

    Args:
        grad_out: See `batch_norm_backward_apply`, like all others.
        input: See there.
        out: See there.
        mean: See there.
        invstd: See there.
        weight: See there.
        need_grad_z: See there.

    Returns:
        The gradient of the input, that of ``z`` or None, and the sums of `batch_norm_backward_reduce`.
    """
    grad_input, grad_z, sum_dy, sum_dy_xhat = _ops.batch_norm_backward(
        grad_out, input, out, mean, invstd, weight, need_grad_z
    )
    return grad_input, _grad_z(grad_out, out, grad_z, need_grad_z), sum_dy, sum_dy_xhat


def _grad_z(grad_out: Tensor, out: Tensor | None, computed: Tensor, needed: bool) -> Tensor | None:
    if not needed:
        return None
    return grad_out if out is None else computed


# ---- fakes ----


def _like(input: Tensor) -> Tensor:
    """Laid out as the kernels' outputs are."""
    if input.is_contiguous() or _channels_innermost(input):
        return torch.empty_strided(input.shape, input.stride(), dtype=input.dtype, device=input.device)
    suggested = torch.contiguous_format
    for dim, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if input.dim() == dim and torch._prims_common.suggest_memory_format(input) == memory_format:
            suggested = memory_format
    return torch.empty(input.shape, dtype=input.dtype, device=input.device, memory_format=suggested)


def _channels_innermost(input: Tensor) -> bool:
    expected = input.shape[1]
    for dim in (*range(input.dim() - 1, 1, -1), 0):
        if input.shape[dim] != 1 and input.stride(dim) != expected:
            return False
        expected *= input.shape[dim]
    return input.shape[1] == 1 or input.stride(1) == 1


def _statistic(input: Tensor, numel: int | torch.SymInt | None = None) -> Tensor:
    return input.new_empty(input.shape[1] if numel is None else numel, dtype=torch.float64)


def _fake_grad_z(input: Tensor, out: Tensor | None, needed: bool) -> Tensor:
    return _like(input) if needed and out is not None else input.new_empty(0)


def _fake_stats(input: Tensor) -> tuple[Tensor, Tensor]:
    return _statistic(input), _statistic(input)


def _fake_combine(means: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return _statistic(means), _statistic(means), _statistic(means, 1)


def _fake_apply(input: Tensor, *_: object) -> Tensor:
    return _like(input)


def _fake_forward(input: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return _like(input), _statistic(input), _statistic(input)


def _fake_reduce(grad_out: Tensor, input: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _statistic(input), _statistic(input)


def _fake_backward_apply(grad_out: Tensor, input: Tensor, out: Tensor | None, *rest: object) -> tuple[Tensor, Tensor]:
    return _like(input), _fake_grad_z(input, out, bool(rest[-1]))


def _fake_backward(
    grad_out: Tensor, input: Tensor, out: Tensor | None, *rest: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _like(input), _fake_grad_z(input, out, bool(rest[-1])), _statistic(input), _statistic(input)


FAKES: dict[str, Callable[..., Any]] = {
    "batch_norm_stats": _fake_stats,
    "batch_norm_combine": _fake_combine,
    "batch_norm_apply": _fake_apply,
    "batch_norm_forward": _fake_forward,
    "batch_norm_backward_reduce": _fake_reduce,
    "batch_norm_backward_apply": _fake_backward_apply,
    "batch_norm_backward": _fake_backward,
}
