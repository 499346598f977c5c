"""Typed faces of the compiled kernels, and what the compiler (`torch.compile`) needs to know of them.

This module is the one door to the kernels. Every function takes lists of dense tensors that are on one device (CPU or
CUDA) and may differ in shape, memory format and dtype (float32, float16, bfloat16, float64), makes one pass over their
memory, and checks its arguments before it writes anything. A name ending in ``_`` writes arguments, as each says. On
CUDA no function waits for the device. None of them is differentiable.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_apex import _batch_norm_ops
from lightning_apex._batch_norm_ops import *  # noqa: F403
from lightning_apex._extension import _C, build_info, cpu_backend, has_cuda, optimizer_table, set_cpu_backend

__all__ = [
    "build_info",
    "copy_scaled_",
    "cpu_backend",
    "fused_norms_",
    "fused_step_",
    "has_cuda",
    "measure_gradients",
    "optimizer_table",
    "reconcile_masters_",
    "set_cpu_backend",
    "step_factors",
    "tensor_norms",
    "unscale_",
    "update_scale_",
]

__all__ += _batch_norm_ops.__all__

_ops = torch.ops.lightning_apex


def _lists() -> Any:
    """Where the functions on lists are: the compiler can follow operators only, anybody else takes a shorter way."""
    return _ops if torch.compiler.is_compiling() else _C


def measure_gradients(grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Reads every gradient once: the square of their global norm, and which are not finite.

    Args:
        grads: Any number of tensors; empty ones, and none at all, are fine.

    Returns:
        The sum of squares (float64, 0-dim), infinite or NaN where a gradient is, and uint8 flags of shape
        ``[len(grads)]``: 1 where the tensor holds an infinity or a NaN. The sum does not depend on the number of
        threads, and float32 values whose squares exceed float32 count as the finite numbers they are.
    """
    result: tuple[Tensor, Tensor] = _lists().measure_gradients(grads)
    return result


def step_factors(
    sum_of_squares: Tensor, nonfinite: Tensor, scale: Tensor | None, max_norm: float, found_inf: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes the norm of the unscaled gradients, and the one factor by which an update multiplies every gradient.

    Args:
        sum_of_squares: Of the scaled gradients, from `measure_gradients`.
        nonfinite: The flags from `measure_gradients`.
        scale: The loss scale (float32, one element), None for 1.
        max_norm: Clip to this norm; 0 or less does not clip.
        found_inf: Set to 1 if any flag is set, otherwise left as it is (float32, one element).

    Returns:
        The norm, and ``1 / scale * min(1, max_norm / (norm + 1e-6))`` (float32, 0-dim both).
    """
    result: tuple[Tensor, Tensor] = _ops.step_factors(sum_of_squares, nonfinite, scale, max_norm, found_inf)
    return result


def unscale_(grads: Sequence[Tensor], multiplier: Tensor, found_inf: Tensor | None = None) -> Tensor:
    """Multiplies gradients in place, in float32 (float64 for float64), rounded to their own dtype.

    Args:
        grads: The tensors to write; their memory is left alone where the multiplier is 1.
        multiplier: A factor (float32, one element).
        found_inf: Set to 1 if a value written is not finite (float32, one element).

    Returns:
        uint8 flags of shape ``[len(grads)]``: 1 where a value written is not finite.
    """
    result: Tensor = _lists().unscale_(grads, multiplier, found_inf)
    return result


def copy_scaled_(
    dst: Sequence[Tensor], src: Sequence[Tensor], multiplier: Tensor | None = None, found_inf: Tensor | None = None
) -> Tensor:
    """Copies ``src * multiplier`` into ``dst``, converting the dtype either way.

    Args:
        dst: The tensors to write.
        src: One tensor of the same shape for each.
        multiplier: A factor (float32, one element), None for 1.
        found_inf: Set to 1 if a value written is not finite (float32, one element).

    Returns:
        uint8 flags of shape ``[len(dst)]``: 1 where a value written is not finite.
    """
    result: Tensor = _lists().copy_scaled_(dst, src, multiplier, found_inf)
    return result


def reconcile_masters_(masters: Sequence[Tensor], params: Sequence[Tensor]) -> None:
    """Lets masters follow parameters that somebody else wrote.

    Element by element: a master stays where it rounds to its parameter's value, and becomes that value elsewhere.

    Args:
        masters: float32 tensors.
        params: One float16 or bfloat16 tensor of the same shape for each.
    """
    _lists().reconcile_masters_(masters, params)


def fused_step_(
    name: str,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    masters: Sequence[Tensor],
    states: Sequence[Tensor],
    steps: Sequence[Tensor],
    hypers: Sequence[float],
    lr: Tensor | None = None,
    multiplier: Tensor | None = None,
    found_inf: Tensor | None = None,
    norms: Tensor | None = None,
) -> None:
    """Makes one optimizer step on all parameters, in one pass over memory, or in two for norms of whole tensors.

    Args:
        name: An optimizer of `optimizer_table`.
        params: The tensors to update, in float32 arithmetic (float64 for float64).
        grads: One for each parameter, of its dtype, or float32 for a half parameter. They are not written.
        masters: Empty, or one float32 tensor for each half parameter: the update goes to the master and, rounded, to
            the parameter. A master that does not round to its parameter takes the parameter's value first.
        states: All parameters' first states, then all second, and so on; float32 or bfloat16, float64 for float64.
            Then, likewise, the states of one number a tensor (``tensor_states``); float32, float64 for float64.
        steps: float32 0-dim tensors: the updates made so far, each counted up by one.
        hypers: Hyperparameters in the order of `optimizer_table`.
        lr: A learning rate in place of the first hyperparameter (one element, any floating dtype).
        multiplier: A factor for every gradient (float32, one element), as from `step_factors`.
        found_inf: Where not 0, nothing at all is written (float32, one element).
        norms: What `fused_norms_` returned for the same arguments, or the sum of that over all shards of each tensor:
            then only the second pass is made.
    """
    _lists().fused_step_(name, params, grads, masters, states, steps, hypers, lr, multiplier, found_inf, norms)


def fused_norms_(
    name: str,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    masters: Sequence[Tensor],
    states: Sequence[Tensor],
    steps: Sequence[Tensor],
    hypers: Sequence[float],
    lr: Tensor | None = None,
    multiplier: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> Tensor:
    """Makes the first pass of a step that needs norms of whole tensors, for tensors that are shards of larger ones.

    It may write the states (LAMB's does), and nothing else. `fused_step_` with the result makes the second pass.

    Args:
        name: An optimizer of `optimizer_table` whose ``n_norms`` is not 0.
        params: As for `fused_step_`, like all that follow.
        grads: One for each parameter.
        masters: Empty, or one for each parameter.
        states: All parameters' first states, and so on.
        steps: The updates made so far.
        hypers: Hyperparameters in the order of `optimizer_table`.
        lr: A learning rate in place of the first hyperparameter.
        multiplier: A factor for every gradient.
        found_inf: Where not 0, nothing is written, and all norms are 0.

    Returns:
        float64 of shape ``[len(params), n_norms]``: sums of squares, or the largest magnitudes where the optimizer
        takes those (NovoGrad with another ``norm_type`` than 2). Those of shards add up, or their maximum is taken.
    """
    result: Tensor = _lists().fused_norms_(
        name, params, grads, masters, states, steps, hypers, lr, multiplier, found_inf
    )
    return result


def tensor_norms(tensors: Sequence[Tensor], ord: float = 2.0) -> Tensor:
    """Reads every tensor once and returns a norm of each, in a form that adds up over shards.

    Args:
        tensors: Any number of tensors; empty ones, and none at all, are fine.
        ord: 2 for the sum of squares (its root is the norm), infinity for the largest magnitude.

    Returns:
        float64 of shape ``[len(tensors)]``, NaN where a tensor holds a NaN.
    """
    result: Tensor = _lists().tensor_norms(tensors, ord)
    return result


def update_scale_(
    scale: Tensor,
    trackers: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
    min_scale: float,
    max_scale: float,
) -> None:
    """Moves a dynamic loss scale after a step was made or skipped.

    Args:
        scale: The loss scale (float32, one element).
        trackers: int32 ``[4]``: good steps since the scale moved, overflows left before it backs off, skips in a row,
            skips in all.
        found_inf: Whether the step was skipped (float32, one element, 0 if not).
        growth_factor: Multiplies the scale after ``growth_interval`` good steps.
        backoff_factor: Multiplies the scale after ``hysteresis`` overflows.
        growth_interval: See ``growth_factor``.
        hysteresis: See ``backoff_factor``.
        min_scale: The scale never goes below.
        max_scale: The scale never goes above.
    """
    _ops.update_scale_(
        scale, trackers, found_inf, growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale
    )


def _flags(tensors: Sequence[Tensor]) -> Tensor:
    device = tensors[0].device if tensors else "cpu"
    return torch.empty(len(tensors), dtype=torch.uint8, device=device)


def _fake_measure_gradients(grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    flags = _flags(grads)
    return torch.empty((), dtype=torch.float64, device=flags.device), flags


def _fake_step_factors(sum_of_squares: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    norm = sum_of_squares.new_empty((), dtype=torch.float32)
    return norm, torch.empty_like(norm)


def _fake_flags(tensors: Sequence[Tensor], *_: Any) -> Tensor:
    return _flags(tensors)


def _fake_fused_norms_(name: str, params: Sequence[Tensor], *_: Any) -> Tensor:
    device = params[0].device if params else "cpu"
    columns = {row["name"]: row["n_norms"] for row in optimizer_table()}[name]
    return torch.empty(len(params), columns, dtype=torch.float64, device=device)


def _fake_tensor_norms(tensors: Sequence[Tensor], ord: float) -> Tensor:
    return torch.empty(len(tensors), dtype=torch.float64, device=tensors[0].device if tensors else "cpu")


def _fake_nothing(*_: Any) -> None:
    return None


def _register_fakes(namespace: str) -> None:
    fakes: dict[str, Callable[..., Any]] = {
        "measure_gradients": _fake_measure_gradients,
        "step_factors": _fake_step_factors,
        "unscale_": _fake_flags,
        "copy_scaled_": _fake_flags,
        "reconcile_masters_": _fake_nothing,
        "fused_step_": _fake_nothing,
        "fused_norms_": _fake_fused_norms_,
        "tensor_norms": _fake_tensor_norms,
        "update_scale_": _fake_nothing,
    }
    for name, fake in (fakes | _batch_norm_ops.FAKES).items():
        torch.library.register_fake(f"{namespace}::{name}", fake)


_register_fakes("lightning_apex")
