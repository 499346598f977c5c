"""An optimizer of half parameters with fp32 masters and loss scaling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_apex.casting import HALF
from lightning_apex.fp16_utils.scalers import DynamicLossScaler, LossScaler
from lightning_apex.masters import MasterWeights
from lightning_apex.optimizers._base import FusedOptimizer
from lightning_apex.step import OptimizerStep


class FP16_Optimizer:
    """Wraps an optimizer of half parameters, which may be mixed with others: it updates their fp32 masters.

    ``loss.backward()`` becomes ``optimizer.backward(loss)``; the rest of the loop stays. The wrapped optimizer's groups
    hold the model's own parameters at all times but inside its step. A step whose gradients overflowed is skipped, with
    a fixed scale other than 1 too.

    Args:
        init_optimizer: Any optimizer, over half parameters.
        static_loss_scale: The fixed loss scale, unless ``dynamic_loss_scale``.
        dynamic_loss_scale: Whether the scale follows overflows.
        dynamic_loss_args: For `DynamicLossScaler`.
        verbose: Whether to print a line at each skipped step.

    Attributes:
        optimizer: The wrapped optimizer; learning-rate schedulers take this one.
        loss_scaler: A `LossScaler` or `DynamicLossScaler`.
        masters: The fp32 masters.
    """

    def __init__(
        self,
        init_optimizer: Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        if not isinstance(init_optimizer, Optimizer):
            raise TypeError(
                f"init_optimizer is a {type(init_optimizer).__name__}: give an optimizer of a half model's parameters."
            )
        self.optimizer = init_optimizer
        self.dynamic_loss_scale = dynamic_loss_scale
        self.loss_scaler: LossScaler = (
            DynamicLossScaler(**(dynamic_loss_args or {})) if dynamic_loss_scale else LossScaler(static_loss_scale)
        )
        self.verbose = verbose
        self.masters = MasterWeights()
        for group in self._halves():
            for half in group:
                self.masters.of(half)
        self._last: OptimizerStep | None = None
        self._inside: list[Tensor] | None = None  # the half parameters, while a closure is at work

    # --- the loop -----------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Backpropagates a loss, scaled.

        Args:
            loss: The unscaled loss.
            update_master_grads: Whether all gradients of this step are there now; otherwise call
                `update_master_grads` after the last backward pass.
            retain_graph: As in ``loss.backward``.
        """
        self.loss_scaler.backward(loss, retain_graph=retain_graph)
        if update_master_grads and self._inside is None:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Takes the gradients that parameters hold as those of the coming step."""
        self._pending()

    def _pending(self) -> OptimizerStep:
        scaler = self.loss_scaler.scaler
        step = scaler.pending(self.optimizer)
        if step is None or not step.exposed:
            scaler.drop(self.optimizer)  # another backward pass may have reached more parameters
            step = scaler.open(self.optimizer, self.masters)
        return step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the masters and rounds them into the parameters, unless a gradient overflowed.

        Args:
            closure: Zeroes the gradients, computes a loss, calls `backward` with it and returns it. After an overflow
                it is called again at a smaller scale.

        Returns:
            What the wrapped optimizer's step returned; ``None`` if it was skipped.

        Raises:
            LossScaleError: After 50 overflows in a row.
        """
        if closure is not None:
            return self._step_with_closure(closure)
        step = self._pending()
        self.loss_scaler.scaler.take(self.optimizer)
        result = step.finish()
        self._follow(step)
        return result

    def _follow(self, step: OptimizerStep) -> None:
        self._last = step
        scaler = self.loss_scaler.scaler
        try:
            scaler.follow([step])
        finally:
            for report in scaler.watch.take_unread():
                if self.verbose:
                    print(f"FP16_Optimizer: {report}")

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        self.loss_scaler.scaler.drop(self.optimizer)
        halves = [half for group in self._halves() for half in group]

        # During the step the groups hold the masters: they need the model's gradients, it needs their values.
        def evaluate() -> Any:
            for half in halves:
                half.data.copy_(self.masters.of(half))
            while True:
                with torch.enable_grad():
                    loss = closure()
                for half in halves:
                    self.masters.of(half).grad = None if half.grad is None else half.grad.float()
                step = self.loss_scaler.scaler.open(self.optimizer)
                step.expose()
                self.loss_scaler.scaler.take(self.optimizer)
                self._follow(step)
                if not step.was_skipped():
                    return loss

        self._inside = halves
        try:
            with self.masters.swapped_into(self.optimizer):
                return self.optimizer.step(evaluate)
        finally:
            self._inside = None

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        """Clears the gradients."""
        self.loss_scaler.scaler.drop(self.optimizer)
        self.optimizer.zero_grad(set_to_none=set_grads_to_None)
        for half in self._inside or ():
            half.grad = None

    # --- between backward and step ------------------------------------------------------------------------------

    @property
    def overflow(self) -> bool:
        """Whether the gradients of the step under way, or else of the last one, overflowed; waits for the device."""
        step = self.loss_scaler.scaler.pending(self.optimizer)
        if step is None:
            return self._last is not None and self._last.was_skipped()
        step.expose()
        return step.was_skipped()

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Tensor | float:
        """Clips the unscaled fp32 gradients by their global norm.

        Args:
            max_norm: The norm they have at most afterwards.
            norm_type: 2, another order, or ``float("inf")``.

        Returns:
            Their norm before; -1 if they overflowed.
        """
        step = self._pending()
        step.expose()
        if step.was_skipped():
            return -1.0
        params = [param for param in step.params if param.grad is not None]
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """The unscaled fp32 gradients, a list a group; ``None`` if they overflowed. May be written to."""
        step = self._pending()
        step.expose()
        if step.was_skipped():
            return None
        return [[p.grad if p.grad is None else p.grad.data for p in group["params"]] for group in self.param_groups]

    @property
    def loss_scale(self) -> float:
        """The loss scale; reads it from the device. May be set, between steps."""
        return self.loss_scaler.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.loss_scale = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the wrapped optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        """The state of the wrapped optimizer."""
        return self.optimizer.state

    def _halves(self) -> list[list[Tensor]]:
        """The trainable half parameters, a list a group."""
        return [[p for p in group["params"] if p.dtype in HALF and p.requires_grad] for group in self.param_groups]

    # --- checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and tensors, under Apex's keys: load the model's state first, then this."""
        for group in self._halves():
            self.masters.reconcile(group)
        return {
            "loss_scaler": self.loss_scaler.scaler.state_dict(),
            "loss_scale": self.loss_scale,
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [[self.masters.of(half) for half in group] for group in self._halves()],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave, or Apex's did; the parameters become the rounded masters.

        Raises:
            ValueError: If the masters do not fit the parameters.
        """
        halves, saved = self._halves(), state_dict["fp32_from_fp16"]
        if [[half.shape for half in group] for group in halves] != [[m.shape for m in group] for group in saved]:
            raise ValueError(
                f"state_dict['fp32_from_fp16'] holds {[len(group) for group in saved]} masters in its groups, of other "
                f"number or shape than the {[len(group) for group in halves]} trainable half parameters: build the "
                "model and the optimizer as they were when the state was saved."
            )
        for group, masters in zip(halves, saved, strict=True):
            for half, master in zip(group, masters, strict=True):
                self.masters.of(half).copy_(master.detach())
            self.masters.write(group)
        if isinstance(self.optimizer, FusedOptimizer):
            self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        else:
            # Beside half parameters, Optimizer.load_state_dict would round moments to half.
            with self.masters.swapped_into(self.optimizer):
                self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        self._load_scaler(state_dict)

    def _load_scaler(self, state_dict: Mapping[str, Any]) -> None:
        self._last = None
        scaler = state_dict["loss_scaler"]
        if not isinstance(scaler, Mapping):  # Apex pickled its object
            scaler = {"loss_scale": scaler.cur_scale}
        if self.dynamic_loss_scale:
            self.loss_scaler.scaler.load_state_dict(dict(scaler))
        elif not state_dict["dynamic_loss_scale"]:
            self.loss_scale = float(state_dict.get("loss_scale", scaler.get("loss_scale", self.loss_scale)))
