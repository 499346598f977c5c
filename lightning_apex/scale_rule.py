"""The numbers that govern a dynamic loss scale: their ranges, and their names in other packages' checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_apex.levels import is_number, is_scale

BOUNDS = ("min_loss_scale", "max_loss_scale")


def from_apex(state: dict[str, Any]) -> dict[str, Any]:
    """Apex keeps {'loss_scale', 'unskipped'}, alone or under 'loss_scaler0'."""
    if len(state) == 1 and isinstance(inner := next(iter(state.values())), dict):
        state = inner
    if "loss_scale" in state and "scale" not in state:
        return {"scale": state["loss_scale"], "_growth_tracker": state.get("unskipped", 0)}
    return state


def checked_rule(rule: dict[str, Any]) -> dict[str, Any]:
    """The numbers by which a dynamic scale moves, as floats and ints.

    Raises:
        ValueError: If one is out of range; the message names it.
    """
    low = rule["min_loss_scale"]
    requirements: dict[str, tuple[Callable[[Any], bool], str]] = {
        "growth_factor": (lambda v: is_number(v) and v > 1, "a finite number above 1"),
        "backoff_factor": (lambda v: is_number(v) and 0 < v < 1, "between 0 and 1"),
        "growth_interval": (_is_count, "a whole number of at least 1"),
        "hysteresis": (_is_count, "a whole number of at least 1"),
        "min_loss_scale": (is_scale, "a finite number above 0"),
        "max_loss_scale": (lambda v: is_scale(v) and v >= low, f"finite and at least min_loss_scale={low}"),
    }
    for name, (fits, wanted) in requirements.items():
        if not fits(rule[name]):
            raise ValueError(f"{name}={rule[name]!r} is invalid: it must be {wanted}.")
    return {name: int(value) if requirements[name][0] is _is_count else float(value) for name, value in rule.items()}


def check_start(init_scale: Any, max_consecutive_skips: int | None) -> None:
    """Raises ValueError if the first scale or the number of skips to bear is invalid."""
    if not is_scale(init_scale):
        raise ValueError(f"init_scale={init_scale!r} is invalid: it must be a finite number above 0.")
    if max_consecutive_skips is not None and not _is_count(max_consecutive_skips):
        raise ValueError(f"max_consecutive_skips={max_consecutive_skips!r} is invalid: use at least 1, or None.")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31
