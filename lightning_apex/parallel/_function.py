from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from lightning_apex import ops
from lightning_apex.parallel._collectives import SumOverRanks, all_gather, local_statistics


class BatchNormFunction(Function):
    """BatchNorm by the statistics of the batch, of all ranks of a group or alone, with an optional addend and ReLU."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        z: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        batches_tracked: Tensor | None,
        eps: float,
        momentum: float,
        relu: bool,
        group: Any | None,
    ) -> Tensor:
        input = dense(input)
        total: Tensor | None = None
        if group is None:
            out, mean, invstd = ops.batch_norm_forward(
                input, weight, bias, running_mean, running_var, eps, momentum, z, relu
            )
        else:
            mean, invstd, total = _shared_statistics(input, running_mean, running_var, eps, momentum, group)
            out = ops.batch_norm_apply(input, mean, invstd, weight, bias, z, relu)
        if batches_tracked is not None:
            # With the statistics, and here: activation checkpointing may end a forward pass where tensors are saved.
            batches_tracked.add_(1)
        ctx.save_for_backward(input, weight, mean, invstd, out if relu else None, total)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        saved = ctx.saved_tensors  # once: activation checkpointing hands each tensor out a single time
        with torch.no_grad():
            grads = _gradients(ctx, grad_out, *saved)
        if torch.is_grad_enabled():
            grads = _FirstDerivativeOnly.apply(saved[0], saved[1], grad_out, *grads)
        return (*grads, *(None,) * 7)


def dense(input: Tensor) -> Tensor:
    """The input in one of the layouts that kernels read: contiguous, or channels_last."""
    if (
        input.is_contiguous()
        or (input.dim() == 4 and input.is_contiguous(memory_format=torch.channels_last))
        or (input.dim() == 5 and input.is_contiguous(memory_format=torch.channels_last_3d))
    ):
        return input
    return input.contiguous()


def values_per_channel(input: Tensor) -> int:
    """How many values of the input a channel's statistics are of."""
    return input.numel() // max(input.size(1), 1)


def refuse_single_value(count: int, shape: torch.Size, ranks: int) -> None:
    """BatchNorm's output would be its bias whatever the input.

    Raises:
        ValueError: If a channel has one value.
    """
    if count == 1:
        where = f"over all {ranks} ranks" if ranks > 1 else "in the batch"
        raise ValueError(
            f"Expected more than 1 value per channel when training, got one {where} (input of shape {list(shape)}): "
            "give larger batches, or call eval()."
        )


def _shared_statistics(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, eps: float, momentum: float, group: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, 1 / standard deviation, and the number of values, over all ranks; moves the running statistics."""
    count, channels = values_per_channel(input), input.size(1)
    gathered = all_gather(local_statistics(*ops.batch_norm_stats(input), count), group)
    counts = gathered[:, -1]
    if count < 2:  # only then can there be one value in all; elsewhere nobody waits for the device
        refuse_single_value(int(counts.sum()), input.shape, len(counts))
    means, m2s = gathered[:, :channels], gathered[:, channels:-1]
    return ops.batch_norm_combine(means, m2s, counts, eps, momentum, running_mean, running_var)


def _gradients(
    ctx: Any,
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    out: Tensor | None,
    total: Tensor | None,
) -> tuple[Tensor | None, ...]:
    needs_input, needs_weight, needs_bias, needs_z = ctx.needs_input_grad[:4]
    masks_z = needs_z and out is not None
    grad_input = masked = sums = None
    if needs_input and ctx.group is None:
        grad_input, masked, sum_dy, sum_dy_xhat = ops.batch_norm_backward(
            grad_out, input, out, mean, invstd, weight, masks_z
        )
    else:
        sum_dy, sum_dy_xhat = ops.batch_norm_backward_reduce(grad_out, input, out, mean, invstd)
    if needs_input and ctx.group is not None:
        sums = SumOverRanks(torch.stack((sum_dy, sum_dy_xhat)), ctx.group)
    # Of this rank alone, as DDP averages them; and made while the sums travel.
    grad_weight = sum_dy_xhat.to(weight.dtype) if needs_weight and weight is not None else None
    grad_bias = sum_dy.to(ctx.bias_dtype) if needs_bias else None
    if sums is not None:
        sum_dy, sum_dy_xhat = sums.wait()
        grad_input, masked = ops.batch_norm_backward_apply(
            grad_out, input, out, mean, invstd, weight, sum_dy, sum_dy_xhat, cast("Tensor", total), masks_z
        )
    if masks_z and masked is None:  # z needs a gradient, and the input does not
        masked = torch.where(cast("Tensor", out) > 0, grad_out, 0)
    grad_z = masked if masks_z else grad_out
    return grad_input, grad_weight, grad_bias, grad_z if needs_z else None


class _FirstDerivativeOnly(Function):
    """Passes gradients through, and says so when somebody differentiates them."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, grad_out: Tensor, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        return grads

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "SyncBatchNorm has no second derivative, which create_graph=True asks for: use torch.nn.BatchNorm in a "
            "model that differentiates its gradients (a gradient penalty), or eval() mode."
        )
