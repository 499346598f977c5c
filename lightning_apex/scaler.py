"""Loss scaling: the factor between a loss and what is backpropagated, and how it follows overflows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_apex import ops
from lightning_apex.casting import map_tensors
from lightning_apex.levels import is_scale
from lightning_apex.overflow import LossScaleError, OverflowReport, OverflowWatch
from lightning_apex.scale_rule import BOUNDS, check_start, checked_rule, from_apex
from lightning_apex.sections import Sections

if TYPE_CHECKING:
    from lightning_apex.masters import MasterWeights
    from lightning_apex.step import OptimizerStep

__all__ = ["LossScaleError", "LossScaler"]

_GROWTH, _HYSTERESIS, _CONSECUTIVE, _SKIPPED = range(4)


class LossScaler:
    r"""Scales a loss so that small fp16 gradients do not vanish, and skips steps whose gradients overflow.

    Used like ``torch.amp.GradScaler``: ``scale(loss).backward()``, optionally ``unscale_(optimizer)``,
    ``step(optimizer)``, ``update()``. With a fused optimizer of this package nothing is read back to the host.

    A dynamic scale :math:`s` follows Micikevicius et al., "Mixed Precision Training" (2018): after
    ``growth_interval`` steps in a row without overflow it grows, :math:`s \leftarrow \min(s \cdot
    \text{growth\_factor}, \text{max\_loss\_scale})`; at the ``hysteresis``-th overflow since it last grew, and at
    each one after that, it backs off, :math:`s \leftarrow \max(s \cdot \text{backoff\_factor},
    \text{min\_loss\_scale})`.

    Args:
        loss_scale: ``"dynamic"``, or a fixed factor above 0. A fixed factor of 1 disables scaling: nothing is measured
            and no step is skipped.
        init_scale: The first dynamic scale; brought between ``min_loss_scale`` and ``max_loss_scale``.
        growth_factor: Above 1.
        backoff_factor: Between 0 and 1.
        growth_interval: Steps without overflow before the scale grows.
        hysteresis: Overflows tolerated before the scale backs off; 1 backs off at the first.
        min_loss_scale: The floor of the dynamic scale, above 0. It may lie below 1.
        max_loss_scale: The ceiling of the dynamic scale.
        max_consecutive_skips: After so many skipped steps in a row `LossScaleError` is raised; ``None`` for never.
        enabled: False is the same as a fixed factor of 1.

    Raises:
        ValueError: If an argument is out of range; the message names it.
    """

    def __init__(
        self,
        loss_scale: float | str = "dynamic",
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        min_loss_scale: float = 2.0**-10,
        max_loss_scale: float = 2.0**24,
        max_consecutive_skips: int | None = 50,
        enabled: bool = True,
    ) -> None:
        loss_scale = loss_scale if enabled else 1.0
        self.dynamic = loss_scale == "dynamic"
        rule = {
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "hysteresis": hysteresis,
            "min_loss_scale": min_loss_scale,
            "max_loss_scale": max_loss_scale,
        }
        self._rule = checked_rule(rule)
        check_start(init_scale, max_consecutive_skips)
        if not self.dynamic and not is_scale(loss_scale):
            raise ValueError(f"loss_scale={loss_scale!r} is invalid: use a finite number above 0, or 'dynamic'.")
        self.max_consecutive_skips = max_consecutive_skips
        self.fixed_scale = None if self.dynamic else float(loss_scale)
        first = self._bounded(float(init_scale)) if self.fixed_scale is None else self.fixed_scale
        self._scale = torch.tensor(first, dtype=torch.float32)
        self._trackers = torch.tensor([0, hysteresis, 0, 0], dtype=torch.int32)
        self._reset()

    def _reset(self) -> None:
        self._steps: WeakKeyDictionary[Optimizer, OptimizerStep] = WeakKeyDictionary()
        self._finished: list[OptimizerStep] = []
        self.watch = OverflowWatch()
        self.sections = Sections()

    # --- what a training loop calls -----------------------------------------------------------------------------

    def is_enabled(self) -> bool:
        """Whether losses are scaled and overflows looked for."""
        return self.fixed_scale != 1.0

    def scale(self, outputs: Any) -> Any:
        """Multiplies a loss, or nested containers of losses, by the scale; 16-bit losses become fp32 first."""
        if not self.is_enabled():
            self.reopen_steps()
            return outputs
        return map_tensors(outputs, self._scale_one)

    def _scale_one(self, loss: Tensor) -> Tensor:
        if not loss.is_floating_point():
            return loss
        # 65536 is inf in fp16, so the product must be formed in fp32.
        wide = loss if loss.dtype is torch.float64 else loss.float()
        scaled = wide * self.scale_on(loss.device)
        if scaled.requires_grad:
            scaled.register_hook(self._backward_begins)
        return scaled

    def _backward_begins(self, grad: Tensor) -> None:
        # Not in scale(): a scaled loss may be kept for later, while other gradients are unscaled and clipped.
        self.reopen_steps()

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the gradients of an optimizer's parameters by the scale, in place, and looks for overflow."""
        self.open(optimizer).expose()

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscales unless that was done, and makes the optimizer's step unless a gradient is not finite.

        Returns:
            What ``optimizer.step(*args, **kwargs)`` returned, or ``None`` if the step was skipped.

        Raises:
            RuntimeError: If a closure is given while scaling is enabled, as its gradients would not be unscaled; or at
                a second step of the same optimizer without an `update` in between.
        """
        if self.is_enabled() and (kwargs.get("closure") or any(map(callable, args))):
            raise RuntimeError(
                "LossScaler.step() cannot unscale what a closure computes during the step: call the closure first, "
                "then scaler.step(optimizer)."
            )
        if self.is_enabled() and any(step.is_of(optimizer) for step in self._finished):
            raise RuntimeError(
                f"LossScaler.step() was called twice for one {type(optimizer).__name__}: call scaler.update() after "
                "each step."
            )
        step = self.open(optimizer)
        del self._steps[optimizer]
        result = step.finish(*args, **kwargs)
        if self.is_enabled():
            self._finished.append(step)
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Moves the scale by what was found in gradients since the last update, or to ``new_scale``.

        Gradients that were unscaled but not used for a step count too.

        Args:
            new_scale: A scale to go on with; a dynamic one is brought between its floor and its ceiling.

        Raises:
            LossScaleError: After ``max_consecutive_skips`` skipped steps in a row.
            ValueError: If ``new_scale`` is not a finite number above 0.
        """
        steps = [*self._finished, *self._steps.values()]
        self.forget_steps()
        if not self.is_enabled():
            return
        if new_scale is not None:
            self._set_scale(float(new_scale))
        else:
            self.follow(steps)

    def follow(self, steps: Sequence[OptimizerStep]) -> None:
        """Moves the scale by the outcome of these steps; see `update`."""
        measured = [step for step in steps if step.found_inf is not None]
        if not measured or not self.is_enabled():
            return
        before = self._scale.clone()
        found_inf = measured[0].found_inf
        assert found_inf is not None
        for step in measured[1:]:
            assert step.found_inf is not None
            found_inf = torch.maximum(found_inf, step.found_inf.to(found_inf.device))
        self._move_to(found_inf.device)
        rule = self._rule
        growth, backoff = rule["growth_factor"], rule["backoff_factor"]
        floor, ceiling = rule["min_loss_scale"], rule["max_loss_scale"]
        if self.fixed_scale is not None:  # only the trackers move
            growth, backoff, floor, ceiling = 1.0, 1.0, self.fixed_scale, self.fixed_scale
        interval, hysteresis = rule["growth_interval"], rule["hysteresis"]
        ops.update_scale_(self._scale, self._trackers, found_inf, growth, backoff, interval, hysteresis, floor, ceiling)
        self.watch.post(measured, found_inf, before, self._scale, self._trackers)
        self.check()

    def get_scale(self) -> float:
        """The scale, as a number; reads it from the device."""
        return float(self._scale)

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped so far; reads it from the device."""
        return int(self._trackers[_SKIPPED])

    @property
    def skipped_tensor(self) -> Tensor:
        """How many steps were skipped so far, as an int32 0-dim tensor where it lives."""
        return self._trackers[_SKIPPED]

    @property
    def last_overflow(self) -> OverflowReport | None:
        """The newest skipped step; waits for the device, where a step is under way."""
        self.watch.collect(wait=True)
        return self.watch.last

    def check(self, *, wait: bool = False) -> list[OverflowReport]:
        """Overflows that the host has not seen yet.

        Args:
            wait: Whether to wait for what the device has not delivered yet.

        Raises:
            LossScaleError: If one of them was the ``max_consecutive_skips``-th in a row.
        """
        return self.watch.deliver(self.max_consecutive_skips, wait=wait)

    # --- what the plugins and the functional API use ------------------------------------------------------------

    def open(
        self,
        optimizer: Optimizer,
        masters: MasterWeights | None = None,
        names_of: Callable[[Sequence[Tensor]], list[str]] | None = None,
    ) -> OptimizerStep:
        """The step of an optimizer that is under way, or a new one on its present gradients."""
        step = self._steps.get(optimizer)
        if step is None:
            from lightning_apex.step import OptimizerStep

            step = self._steps[optimizer] = OptimizerStep(optimizer, self, masters, names_of)
        return step

    def pending(self, optimizer: Optimizer) -> OptimizerStep | None:
        """The step of an optimizer that is under way, if any."""
        return self._steps.get(optimizer)

    def reopen_steps(self) -> None:
        """Makes room for gradients of another backward pass in steps whose gradients are unscaled already."""
        for optimizer, step in list(self._steps.items()):
            if step.exposed:
                step.reopen()
                del self._steps[optimizer]

    def begin_run(self) -> None:
        """Starts the count of consecutive skips at 0: the skips of a run that has ended say nothing of the next."""
        self._trackers[_CONSECUTIVE] = 0
        self.watch = OverflowWatch()

    def forget_steps(self) -> None:
        """Forgets all steps under way."""
        for optimizer in list(self._steps):
            self.drop(optimizer)
        self._finished.clear()

    def drop(self, optimizer: Optimizer) -> None:
        """Forgets a step under way."""
        step = self._steps.pop(optimizer, None)
        if step is not None:
            step.abandon()

    def take(self, optimizer: Optimizer) -> OptimizerStep | None:
        """The step under way, which is the caller's to finish from now on."""
        return self._steps.pop(optimizer, None)

    @property
    def scale_tensor(self) -> Tensor:
        """The scale as an fp32 0-dim tensor, where it lives."""
        return self._scale

    def scale_on(self, device: torch.device) -> Tensor:
        """The scale as an fp32 0-dim tensor on a device; state moves to the first device that asks."""
        if self._scale.device != device and self._scale.device.type == "cpu":
            self._move_to(device)
        return self._scale.to(device, non_blocking=True)

    def _move_to(self, device: torch.device) -> None:
        self._scale = self._scale.to(device)
        self._trackers = self._trackers.to(device)

    def _set_scale(self, value: float) -> None:
        if not is_scale(value):
            raise ValueError(f"new_scale={value!r} is invalid: use a finite number above 0.")
        if self.fixed_scale is not None:
            self.fixed_scale = value
        self._scale.fill_(value if self.fixed_scale is not None else self._bounded(value))

    def _bounded(self, value: float) -> float:
        return min(max(value, float(self._rule["min_loss_scale"])), float(self._rule["max_loss_scale"]))

    # --- checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers: the keys of ``torch.amp.GradScaler`` and ours; empty if scaling is disabled."""
        if not self.is_enabled():
            return {}
        growth, hysteresis, consecutive, skipped = self._trackers.tolist()
        return {
            "scale": self.get_scale(),
            **{key: self._rule[key] for key in ("growth_factor", "backoff_factor", "growth_interval")},
            "_growth_tracker": growth,
            **{key: self._rule[key] for key in ("hysteresis", *BOUNDS)},
            "_hysteresis_tracker": hysteresis,
            "consecutive_skips": consecutive,
            "skipped_steps": skipped,
            "dynamic": self.dynamic,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the state of this class, of ``torch.amp.GradScaler`` or of one of Apex's loss scalers.

        A fixed scale stays as it was constructed; of another fixed one's state only the counts are taken. A dynamic
        scale takes nothing from a fixed one, nor the other way round.

        A scale of 0, where ``torch.amp.GradScaler`` ends up after too many overflows, becomes ``min_loss_scale``.

        Raises:
            ValueError: If the dictionary is none of these, or its scale is negative or not finite.
        """
        if not self.is_enabled() or not state_dict:
            return
        state = from_apex(state_dict)
        if "scale" not in state:
            raise ValueError(
                f"Loss scaler state with the keys {sorted(map(str, state_dict))} is not known: give the state_dict() "
                "of a LossScaler, a torch.amp.GradScaler or an Apex loss scaler."
            )
        scale = float(state["scale"])
        if not 0 <= scale < math.inf:
            raise ValueError(f"Loss scaler state holds scale={scale}: it must be a finite number above 0.")
        if self.dynamic is not state.get("dynamic", True):
            return
        if not self.dynamic:
            self._load_trackers(state)
            return
        self._rule = checked_rule({key: state.get(key, value) for key, value in self._rule.items()})
        self._scale.fill_(self._bounded(scale))
        self._load_trackers(state)

    def _load_trackers(self, state: dict[str, Any]) -> None:
        consecutive = state.get("consecutive_skips", 0)
        trackers = (
            state.get("_growth_tracker", 0),
            state.get("_hysteresis_tracker", self._rule["hysteresis"]),
            0 if consecutive >= (self.max_consecutive_skips or math.inf) else consecutive,  # such a run has ended
            state.get("skipped_steps", 0),
        )
        self._trackers.copy_(torch.tensor([int(value) for value in trackers], dtype=torch.int32))

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for key in ("_steps", "_finished", "watch", "sections"):
            del state[key]
        # Numbers: a worker process may lack this device, and would share the memory of tensors with all others.
        return state | {"_scale": self.get_scale(), "_trackers": self._trackers.tolist()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._scale = torch.tensor(state["_scale"], dtype=torch.float32)
        self._trackers = torch.tensor(state["_trackers"], dtype=torch.int32)
        self._reset()
