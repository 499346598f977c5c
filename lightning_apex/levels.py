"""The opt levels: one table row each, and what a user may override in a row."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import Literal

import torch

LossScale = float | Literal["dynamic"]
HALF_DTYPES: dict[str, torch.dtype] = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class OptLevelError(ValueError):
    """An unknown opt level, or an argument that contradicts the level it is given with."""


@dataclass(frozen=True)
class OptLevel:
    """What one opt level does. See `LEVELS` for the table.

    Attributes:
        name: ``"O0"`` to ``"O5"``.
        half_dtype: The 16-bit type of the level; ``None`` where everything stays in fp32.
        casts_weights: Whether parameters and buffers are cast to ``half_dtype``.
        autocasts: Whether forward runs under ``torch.autocast``.
        casts_inputs: Whether floating-point tensors of a batch are cast to ``half_dtype``.
        keep_batchnorm_fp32: Whether modules with running statistics keep their parameters and buffers in fp32.
        master_weights: Whether the optimizer updates an fp32 copy of each cast parameter.
        loss_scale: A fixed factor, or ``"dynamic"``.
        half_dtype_is_default: Whether ``half_dtype`` is the level's own rather than a user's choice.
    """

    name: str
    half_dtype: torch.dtype | None
    casts_weights: bool
    autocasts: bool
    casts_inputs: bool
    keep_batchnorm_fp32: bool
    master_weights: bool
    loss_scale: LossScale
    half_dtype_is_default: bool = True

    def on(self, device_type: str) -> OptLevel:
        """The level as it runs on a type of device: the default fp16 becomes bf16 on a CPU.

        fp16 convolutions are computed one element at a time in a CPU's backward pass, while bf16 has fast kernels.
        """
        if device_type == "cpu" and self.half_dtype is torch.float16 and self.half_dtype_is_default:
            return replace(self, half_dtype=torch.bfloat16)
        return self

    @property
    def lightning_precision(self) -> str:
        """The nearest of Lightning's own precision strings, such as ``"bf16-mixed"``."""
        if self.half_dtype is None:
            return "32-true"
        bits = "bf16" if self.half_dtype is torch.bfloat16 else "16"
        return f"{bits}-mixed" if self.autocasts else f"{bits}-true"


_FP16, _BF16 = torch.float16, torch.bfloat16
# fmt: off
LEVELS: dict[str, OptLevel] = {
    level.name: level
    for level in (
        #        name  half   weights autocast inputs bn fp32 masters loss scale
        OptLevel("O0", None,  False,  False,   False, True,   False,  1.0),
        OptLevel("O1", _FP16, False,  True,    False, True,   False,  "dynamic"),
        OptLevel("O2", _FP16, True,   True,    False, True,   True,   "dynamic"),
        OptLevel("O3", _FP16, True,   False,   True,  False,  False,  1.0),
        OptLevel("O4", _BF16, False,  True,    False, True,   False,  1.0),
        OptLevel("O5", _BF16, True,   True,    False, True,   True,   1.0),
    )
}
# fmt: on


def resolve(
    opt_level: str,
    *,
    half_dtype: str | torch.dtype | None = None,
    keep_batchnorm_fp32: bool | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
) -> OptLevel:
    """Looks a level up and applies overrides to it.

    Args:
        opt_level: ``"O0"`` to ``"O5"``.
        half_dtype: ``"float16"``, ``"bfloat16"`` or the torch dtype; ``None`` for the level's own.
        keep_batchnorm_fp32: See `OptLevel`; ``None`` for the level's own.
        master_weights: See `OptLevel`; ``None`` for the level's own.
        loss_scale: A finite factor above 0, or ``"dynamic"``; ``None`` for the level's own.

    Raises:
        OptLevelError: If the level is unknown, or a value is invalid or contradicts the level.
    """
    level = LEVELS.get(opt_level) if isinstance(opt_level, str) else None
    if level is None:
        hint = " (the letter O, not a zero)" if isinstance(opt_level, str) and opt_level[:1] == "0" else ""
        raise OptLevelError(f"opt_level={opt_level!r} is unknown: use one of {', '.join(LEVELS)}{hint}.")
    if half_dtype is not None:
        level = _with_half_dtype(level, half_dtype)
    if keep_batchnorm_fp32 is not None:
        level = _with_batchnorm(level, keep_batchnorm_fp32)
    if master_weights is not None:
        level = _with_masters(level, master_weights)
    if loss_scale is not None:
        level = replace(level, loss_scale=_loss_scale(loss_scale))
    return level


def _with_half_dtype(level: OptLevel, half_dtype: str | torch.dtype) -> OptLevel:
    dtype = HALF_DTYPES.get(half_dtype.removeprefix("torch.")) if isinstance(half_dtype, str) else half_dtype
    if dtype not in HALF_DTYPES.values():
        raise OptLevelError(f"half_dtype={half_dtype!r} is unknown: use 'float16', 'bfloat16' or None.")
    if level.half_dtype is None:
        raise OptLevelError(
            f"half_dtype={half_dtype!r} contradicts opt_level={level.name!r}, which computes in fp32: "
            "use 'O1' or 'O2' for a 16-bit type."
        )
    if level.half_dtype is _BF16 and dtype is _FP16:
        fp16_level = "O2" if level.casts_weights else "O1"
        raise OptLevelError(
            f"half_dtype={half_dtype!r} contradicts opt_level={level.name!r}, which is the bfloat16 level: "
            f"use opt_level={fp16_level!r} with half_dtype='float16'."
        )
    return replace(level, half_dtype=dtype, half_dtype_is_default=False)


def _with_batchnorm(level: OptLevel, keep: bool) -> OptLevel:
    _check_bool("keep_batchnorm_fp32", keep)
    if not keep and not level.casts_weights:
        raise OptLevelError(
            f"keep_batchnorm_fp32=False contradicts opt_level={level.name!r}, which keeps all weights in fp32: "
            "use 'O2', 'O3' or 'O5', or leave keep_batchnorm_fp32=None."
        )
    return replace(level, keep_batchnorm_fp32=keep)


def _with_masters(level: OptLevel, masters: bool) -> OptLevel:
    _check_bool("master_weights", masters)
    if masters and not level.casts_weights:
        raise OptLevelError(
            f"master_weights=True contradicts opt_level={level.name!r}, whose weights are fp32 already: "
            "use 'O2' or 'O5', or leave master_weights=None."
        )
    return replace(level, master_weights=masters)


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise OptLevelError(f"{name}={value!r} is no bool: use True, False, or None for the level's own.")


def _loss_scale(value: float | str) -> LossScale:
    if value == "dynamic":
        return "dynamic"
    try:
        number = float(value) if isinstance(value, str) else value
    except ValueError:
        number = math.nan
    if not is_scale(number):
        raise OptLevelError(f"loss_scale={value!r} is invalid: use a finite number above 0, or 'dynamic'.")
    return float(number)


def is_scale(value: object) -> bool:
    """Whether a value can be a loss scale: it lives in fp32, where it must be neither 0 nor infinite."""
    return is_number(value) and 2.0**-126 <= float(value) <= torch.finfo(torch.float32).max  # type: ignore[arg-type]


def is_number(value: object) -> bool:
    """Whether a value is a finite real number, and no bool."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
