"""Apex's two scaler classes, as faces of `lightning_apex.LossScaler`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_apex import ops
from lightning_apex import scaler as _core


class LossScaler:
    """A fixed loss scale.

    Args:
        scale: The factor, above 0.

    Attributes:
        scaler: The `lightning_apex.LossScaler` behind it.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.scaler = _core.LossScaler(scale)

    @property
    def loss_scale(self) -> float:
        """The scale; reads it from the device. May be set."""
        return self.scaler.get_scale()

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        if not self.scaler.dynamic:
            self.scaler = _core.LossScaler(value)
        else:
            self.scaler.update(value)

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Whether any gradient is not finite; reads it from the device. Never with a scale of 1."""
        if not self.scaler.is_enabled():
            return False
        by_device: dict[torch.device, list[Tensor]] = {}
        for param in params:
            if param.grad is not None:
                by_device.setdefault(param.device, []).append(param.grad)
        return any(bool(ops.measure_gradients(grads)[1].any()) for grads in by_device.values())

    def update_scale(self, overflow: bool) -> None:
        """Moves a dynamic scale by whether the last gradients overflowed.

        Raises:
            LossScaleError: See `lightning_apex.LossScaler.update`.
        """
        self.scaler.follow([cast(Any, _Outcome(torch.tensor(float(overflow))))])

    def scale_gradient(self, module: nn.Module, grad_in: tuple[Any, ...], grad_out: Any) -> tuple[Any, ...]:
        """Multiplies ``grad_in`` by the scale; for backward hooks."""
        return tuple(None if grad is None else self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Backpropagates the scaled loss."""
        self.scaler.scale(loss).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A loss scale that shrinks at every overflow and grows after ``scale_window`` steps without one.

    Args:
        init_scale: The first scale.
        scale_factor: By which it shrinks and grows.
        scale_window: Steps without overflow before it grows.
    """

    def __init__(self, init_scale: float = 2.0**32, scale_factor: float = 2.0, scale_window: int = 1000) -> None:
        if not scale_factor > 1:
            raise ValueError(f"scale_factor={scale_factor!r} is invalid: it must be a finite number above 1.")
        self.scaler = _core.LossScaler(
            init_scale=init_scale,
            growth_factor=scale_factor,
            backoff_factor=1 / scale_factor,
            growth_interval=scale_window,
            max_loss_scale=max(2.0**24, init_scale),
        )


@dataclass
class _Outcome:
    """What `lightning_apex.LossScaler.follow` asks of a step that somebody else made."""

    found_inf: Tensor
    number: int | None = None
    nonfinite: list[Any] = field(default_factory=list)
