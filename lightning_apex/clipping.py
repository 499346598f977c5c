"""Clipping gradients by their global norm, in one read and one write."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from functools import reduce
from types import GeneratorType

import torch
from torch import Tensor

from lightning_apex import ops
from lightning_apex.sharding import Place, by_place, sum_of_squares

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    r"""Clips the gradients of parameters to a global norm, as ``torch.nn.utils.clip_grad_norm_`` does.

    .. math::
        g \leftarrow g \cdot \min\left(1, \frac{\text{max\_norm}}{\lVert G \rVert + 10^{-6}}\right)

    Gradients are read once, and written once or, where the factor is 1, not at all. Different from torch: sums are
    formed in float64, so that the norm of fp16 gradients does not overflow; of DTensors the norm returned is that of
    the whole, a plain tensor and the same on every process. fp32, fp16, bf16 and fp64 may be mixed, and so may devices.
    Under a plugin or a `LossScaler`, gradients must have been unscaled.

    Args:
        parameters: Parameters, or one; those without a gradient are passed over.
        max_norm: The largest norm left as it is.
        norm_type: 2, ``inf`` for the largest absolute value, or another order, which torch's function computes.
        error_if_nonfinite: Whether to raise where the norm is infinite or NaN, before anything is written. Waits for
            the device.
        foreach: Accepted for old code; makes no difference for the norms 2 and ``inf``.

    Returns:
        The norm before clipping, in the dtype of the gradients (the widest, if they are mixed).

    Raises:
        RuntimeError: See ``error_if_nonfinite``.
    """
    parameters = _as_list(parameters)
    norm_type, max_norm = float(norm_type), float(max_norm)
    grads = [p.grad for p in parameters if p.grad is not None]
    if norm_type not in (2.0, math.inf) or any(not _has_kernel(grad) for grad in grads):
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    if not grads:
        return torch.tensor(0.0)
    places = by_place(grads)
    norm = sum_of_squares(places.items()).sqrt() if norm_type == 2 else _largest(places)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"The gradients' norm of order {norm_type:g} is {float(norm)}, so they cannot be clipped: look for the "
            "cause, or give error_if_nonfinite=False to go on."
        )
    factor = (max_norm / (norm + 1e-6)).clamp_(max=1.0)
    # On a CPU the factor is known here; reading it anywhere else would wait for the device.
    if factor.device.type != "cpu" or float(factor) != 1.0:
        for (device, _), parts in places.items():
            _multiply_(parts, factor.to(device))
    return norm.to(reduce(torch.promote_types, {grad.dtype for grad in grads}))


def _as_list(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    if isinstance(parameters, Tensor):
        return [parameters]
    result = list(parameters)
    if isinstance(parameters, GeneratorType) and not result:
        warnings.warn("`parameters` is a generator with nothing (left) in it: no gradient is clipped.", stacklevel=4)
    return result


def _multiply_(grads: list[Tensor], factor: Tensor) -> None:
    wide = [grad for grad in grads if grad.dtype is torch.float64]  # a factor in fp32 is too coarse for these
    if wide:
        torch._foreach_mul_(wide, factor)
    if len(wide) < len(grads):
        ops.unscale_([grad for grad in grads if grad.dtype is not torch.float64], factor.float())


def _has_kernel(grad: Tensor) -> bool:
    return grad.layout is torch.strided and grad.dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _largest(places: dict[Place, list[Tensor]]) -> Tensor:
    largest: Tensor | None = None
    for (_, sharding), parts in places.items():
        part = ops.tensor_norms(parts, math.inf).amax()
        if sharding is not None:
            sharding.all_reduce_(part, "max")
        largest = part if largest is None else torch.maximum(largest, part.to(largest.device))
    assert largest is not None
    return largest
