"""Validation of hyperparameters: every message names the argument, the value and what to use instead."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_apex.levels import is_number


def check_number(name: str, value: Any, low: float, high: float = math.inf, *, open_above: bool = False) -> None:
    """Requires ``low <= value <= high`` (``< high`` if ``open_above``), and a finite value."""
    if isinstance(value, Tensor) and name == "lr":
        if value.numel() != 1:
            raise ValueError(f"lr={value} has {value.numel()} elements: give a float or a tensor of one element.")
        if value.device.type != "cpu":
            return  # reading it would wait for the device
        value = value.item()
    fine = is_number(value) and low <= value <= high and not (open_above and value == high)
    if not fine:
        lower = "" if low == -math.inf else f" of at least {low:g}"
        upper = "" if high == math.inf else f" and {'below' if open_above else 'at most'} {high:g}"
        raise ValueError(f"{name}={value!r} is invalid: it must be a finite number{lower}{upper}.")


def check_betas(betas: Any) -> None:
    """Requires two numbers in [0, 1)."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"betas={betas!r} is invalid: give two numbers, such as (0.9, 0.999).")
    for i, beta in enumerate(betas):
        check_number(f"betas[{i}]", beta, 0, 1, open_above=True)


def check_state_dtype(dtype: torch.dtype | None) -> None:
    """Requires None, fp32 or bf16."""
    if dtype not in (None, torch.float32, torch.bfloat16):
        raise ValueError(f"state_dtype={dtype!r} is invalid: use None or torch.float32 (fp32), or torch.bfloat16.")


def check_state_shapes(state: Any, index: Any, param: Tensor, like_param: list[str], numbers: list[str]) -> None:
    """Requires of a saved state that moments have their parameter's shape, and ``numbers`` one element."""
    for name, value in (state or {}).items():
        if isinstance(value, Tensor) and (
            (name in like_param and value.shape != param.shape) or (name in numbers and value.numel() != 1)
        ):
            raise ValueError(
                f"The state dict's {name} of parameter {index} has shape {tuple(value.shape)}, and the parameter "
                f"{tuple(param.shape)}: load what was saved by an optimizer of this kind, for these parameters."
            )
