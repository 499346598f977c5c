"""Checks of what `initialize` and `scale_loss` are given, before anything changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from lightning_apex.levels import HALF_DTYPES, LEVELS, OptLevel, OptLevelError, resolve

_DTYPES = {**HALF_DTYPES, "half": torch.float16, "float32": torch.float32, "float": torch.float32}
_TEXT_BOOLS = {"True": True, "False": False}
_WRAPPERS = ("FullyShardedDataParallel", "DeepSpeedEngine", "FSDPModule")


def check_enabled(enabled: Any) -> None:
    """Raises ValueError for what is no bool; the opt level stands in fourth place."""
    if not isinstance(enabled, int):  # a flag may be 0 or 1
        is_level = isinstance(enabled, str) and enabled in LEVELS
        hint = f": write opt_level={enabled!r}" if is_level else ": use True or False"
        raise ValueError(f"enabled={enabled!r} is no bool{hint}.")


def checked_models(models: Any) -> list[nn.Module]:
    """The models as a list.

    Raises:
        TypeError: If one is no module.
        ValueError: If one is wrapped for parallel training already, or given twice.
    """
    result = list(models) if isinstance(models, list | tuple) else [models]
    for model in result:
        if not isinstance(model, nn.Module):
            raise TypeError(f"models holds a {type(model).__name__}: give a torch.nn.Module or a list of them.")
        wrapped = isinstance(model, DistributedDataParallel | DataParallel)
        if wrapped or any(kind.__name__ in _WRAPPERS for kind in type(model).__mro__):
            raise ValueError(
                f"A model is wrapped in {type(model).__name__} already: give amp.initialize() the bare model, and wrap "
                "what it returns."
            )
    _refuse_twins("models", result)
    return result


def checked_optimizers(optimizers: Any) -> list[Optimizer]:
    """The optimizers as a list; empty for ``None``.

    Raises:
        TypeError: If one is no optimizer with hooks.
        ValueError: If one is given twice.
    """
    if optimizers is None:
        return []
    result = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
    for optimizer in result:
        if not isinstance(optimizer, Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            raise TypeError(
                f"optimizers holds a {type(optimizer).__name__}: give a torch.optim.Optimizer that has run "
                "Optimizer.__init__(), or a list of them."
            )
    _refuse_twins("optimizers", result)
    return result


def _refuse_twins(name: str, items: list[Any]) -> None:
    if len({id(item) for item in items}) < len(items):
        raise ValueError(f"{name} holds one object twice: give each once.")


def refuse_closure_driven(optimizers: Sequence[Optimizer], level: OptLevel) -> None:
    """Raises ValueError for LBFGS where a step is more than ``optimizer.step()``."""
    if level.loss_scale == 1.0 and not level.master_weights:
        return
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise ValueError(
                f"LBFGS evaluates the loss several times a step, which opt_level={level.name!r} cannot scale or "
                "skip as a whole: use 'O0' or 'O4' with LBFGS, or another optimizer."
            )


def level_of(
    opt_level: str,
    *,
    cast_model_type: torch.dtype | str | None,
    patch_torch_functions: bool | None,
    half_dtype: torch.dtype | str | None,
    keep_batchnorm_fp32: bool | str | None,
    master_weights: bool | None,
    loss_scale: float | str | None,
) -> OptLevel:
    """The level with Apex's overrides.

    Raises:
        OptLevelError: If one is invalid or contradicts the level.
    """
    level = LEVELS.get(opt_level) if isinstance(opt_level, str) else None
    cast_to = _dtype("cast_model_type", cast_model_type or None)  # False meant None, too
    if level is not None and cast_to is not None:
        if level.casts_weights and cast_to is torch.float32:
            raise OptLevelError(
                f"cast_model_type={cast_model_type!r} contradicts opt_level={opt_level!r}, which casts weights to a "
                "16-bit type: use 'O0' for fp32."
            )
        if not level.casts_weights and cast_to is not torch.float32:
            raise OptLevelError(
                f"cast_model_type={cast_model_type!r} contradicts opt_level={opt_level!r}, which keeps weights in "
                "fp32: use 'O2', 'O3' or 'O5', or leave cast_model_type=None."
            )
        if level.casts_weights and half_dtype is None:
            half_dtype = cast_to
    if level is not None and patch_torch_functions not in (None, level.autocasts and not level.casts_weights):
        raise OptLevelError(
            f"patch_torch_functions={patch_torch_functions!r} contradicts opt_level={opt_level!r}: O1 and O4 cast in "
            "torch's functions, the others do not; leave patch_torch_functions=None."
        )
    keep = keep_batchnorm_fp32
    return resolve(
        opt_level,
        half_dtype=half_dtype,
        keep_batchnorm_fp32=_TEXT_BOOLS.get(keep, keep) if isinstance(keep, str) else keep,  # type: ignore[arg-type]
        master_weights=master_weights,
        loss_scale=loss_scale,
    )


def output_dtype(value: torch.dtype | str | None, level: OptLevel) -> torch.dtype | None:
    """What outputs are cast to: by default fp32, so that losses outside the model are computed in it."""
    if value is None:
        return None if level.half_dtype is None else torch.float32
    return _dtype("cast_model_outputs", value)


def _dtype(name: str, value: Any) -> torch.dtype | None:
    if value is None:
        return None
    dtype = _DTYPES.get(value.removeprefix("torch.")) if isinstance(value, str) else value
    if dtype not in _DTYPES.values():
        raise OptLevelError(f"{name}={value!r} is invalid: use torch.float16, torch.bfloat16 or torch.float32.")
    return dtype


def positive_count(name: str, value: Any) -> int:
    """A whole number of at least 1.

    Raises:
        ValueError: If it is none.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r} is invalid: it must be a whole number of at least 1.")
    return value


def check_loss_id(loss_id: Any, num_losses: int) -> None:
    """Raises ValueError if there is no such loss."""
    if not isinstance(loss_id, int) or isinstance(loss_id, bool) or not 0 <= loss_id < num_losses:
        raise ValueError(
            f"loss_id={loss_id!r} is out of range: amp.initialize() was called with num_losses={num_losses}, so it is "
            f"{'0' if num_losses == 1 else f'0 to {num_losses - 1}'}; give initialize() a larger num_losses."
        )


def summary(level: OptLevel) -> str:
    """A level in words, for a log."""
    half = str(level.half_dtype).removeprefix("torch.")
    if level.half_dtype is None:
        work = "float32"
    elif level.casts_weights:
        kept = ", BatchNorm in float32" if level.keep_batchnorm_fp32 else ""
        work = f"{half} weights{kept}, {'float32 masters' if level.master_weights else 'no masters'}"
    else:
        work = f"float32 weights, autocast to {half}"
    scale = "dynamic" if level.loss_scale == "dynamic" else f"{level.loss_scale:g}"
    return f"{level.name}: {work}, loss scale {scale}"
