"""One opt level at work on one model: the middle layer that the plugins and the functional API stand on."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_apex import ops
from lightning_apex.boundaries import fp32_islands, matched_inputs
from lightning_apex.cast_module import CastModule
from lightning_apex.casting import HALF, cast_tree, check_castable, kept_modules, needs_fp32
from lightning_apex.levels import OptLevel
from lightning_apex.masters import MasterWeights
from lightning_apex.optimizers._base import FusedOptimizer
from lightning_apex.scaler import LossScaler
from lightning_apex.step import OptimizerStep


class PrecisionEngine:
    """Casts a model to an opt level, runs its forward passes and optimizer steps, and undoes the cast.

    Args:
        level: The opt level as it runs on the device; see `OptLevel.on`.
        scaler: Scales losses.
        keep_fp32: Names or classes of modules that compute in fp32; see `kept_modules`.
    """

    def __init__(self, level: OptLevel, scaler: LossScaler, keep_fp32: Sequence[str | type] = ()) -> None:
        self.level = level
        self.scaler = scaler
        self.measures_always = False
        self.last_norm: Tensor | None = None
        self._keep_fp32 = keep_fp32
        self._cast: CastModule | None = None
        self._device_type = "cpu"
        self._names: dict[Tensor, str] = {}
        self._handles: list[RemovableHandle] = []
        self._optimizers: list[Optimizer] = []
        self._backwards = 0
        self._consumed: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    # --- the model ----------------------------------------------------------------------------------------------

    def convert(self, module: nn.Module, device_type: str) -> None:
        """Casts a module in place; everything is checked before anything changes.

        Args:
            module: An fp32 module.
            device_type: Where it will run, such as ``"cuda"``.

        Raises:
            ValueError: If a trainable parameter is half already or on the meta device, or ``keep_fp32`` is wrong.
        """
        check_castable(module, self.level.casts_weights)
        kept = kept_modules(module, self._keep_fp32)
        if self.level.casts_weights:
            kept += [m for m in module.modules() if needs_fp32(m) and m not in kept]
        self._device_type = device_type
        self._names = {param: name for name, param in module.named_parameters()}
        if self.level.half_dtype is None:
            return
        self._handles += fp32_islands(kept)
        if self.level.casts_weights:
            self._cast = CastModule(module, self.level.half_dtype, kept, self.level.keep_batchnorm_fp32)
            if self.level.autocasts:
                self._handles += matched_inputs(module)

    def restore(self) -> None:
        """Gives the module its fp32 weights back and removes every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._cast is not None:
            self._cast.restore()
            self._cast = None
        for optimizer in self._optimizers:
            if (fused := _fused_within(optimizer)) is not None:
                fused.forget_plans()
            else:
                _match_state(optimizer)
        self._optimizers.clear()
        self._names.clear()

    @property
    def masters(self) -> MasterWeights | None:
        """The fp32 weights that optimizers update; ``None`` where they update the module's own."""
        return self._cast.masters if self._cast is not None and self.level.master_weights else None

    @property
    def cast(self) -> CastModule | None:
        """The cast module, at levels that cast weights."""
        return self._cast

    def forward_context(self) -> AbstractContextManager[Any]:
        """What a forward pass runs in."""
        if not self.level.autocasts:
            return nullcontext()
        # No weight cache: a weight cast under no_grad would be found again, without its graph, by a later forward.
        return torch.autocast(self._device_type, dtype=self.level.half_dtype, cache_enabled=False)

    def convert_input(self, data: Any) -> Any:
        """Casts a batch where the level does so."""
        if self.level.casts_inputs and self.level.half_dtype is not None:
            return cast_tree(data, self.level.half_dtype)
        return data

    def agree_across_ranks(self) -> None:
        """Makes rank 0's weights those of all ranks, to the last bit; the strategy has done so for the half weights."""
        if self._cast is not None:
            with torch.no_grad():
                self._cast.broadcast_masters()

    # --- training -----------------------------------------------------------------------------------------------

    def adopt(self, optimizers: Iterable[Optimizer]) -> None:
        """Prepares for training with these optimizers; the module is on its device by now."""
        self._optimizers = list(optimizers)
        if self._cast is None:
            return
        if self.level.master_weights:
            for half in self._cast.halves():
                self._cast.masters.of(half)  # follows its parameter to the device
        else:
            self._cast.drop_masters()
        for optimizer in self._optimizers:
            if _fused_within(optimizer) is not None:  # its state is fp32 by itself
                continue
            if self.level.master_weights:
                self._handles += _FP32StateKeeper().attach(optimizer)
            else:
                _warn_of_vanishing_eps(optimizer)
                _match_state(optimizer)

    @property
    def steps_itself(self) -> bool:
        """Whether an optimizer step needs more than ``optimizer.step(closure)``."""
        return self.scaler.is_enabled() or self.masters is not None

    def scale(self, loss: Any) -> Any:
        """Scales a loss, about to be backpropagated."""
        self._backwards += 1
        return self.scaler.scale(loss)

    def has_gradients(self, optimizer: Optimizer) -> bool:
        """Whether any parameter of an optimizer has a gradient."""
        return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])

    def has_fresh_gradients(self, optimizer: Optimizer) -> bool:
        """Whether a scaled loss was backpropagated since the optimizer's last step, and reached its parameters."""
        return self._consumed.get(optimizer, 0) != self._backwards and self.has_gradients(optimizer)

    def open(self, optimizer: Optimizer) -> OptimizerStep:
        """The optimizer's step under way, or a new one."""
        step = self.scaler.open(optimizer, self.masters, self.name_of)
        step.measures_always = self.measures_always
        return step

    def hand_over(self, optimizer: Optimizer) -> None:
        """Where `steps_itself` is False: lets the ``optimizer.step()`` under way take what was asked of its step."""
        if self.measures_always:
            self.open(optimizer)
        step = self.scaler.take(optimizer)
        if step is None:
            return
        if isinstance(optimizer, FusedOptimizer) and not step.exposed:
            optimizer.hand(step.inputs())
        else:
            step.measure()
        self.last_norm = step.norm

    def finish(self, optimizer: Optimizer, others: Iterable[Optimizer] = (), **kwargs: Any) -> OptimizerStep:
        """Makes an optimizer's step or skips it, and moves the loss scale.

        Args:
            optimizer: Whose step.
            others: All optimizers of the model. Gradients that one of them has not used yet were scaled with the old
                scale, and are brought to the new one.
            **kwargs: For ``optimizer.step``.

        Raises:
            LossScaleError: See `LossScaler.update`.
        """
        step = self.open(optimizer)
        self.scaler.take(optimizer)
        step.finish(**kwargs)
        self.last_norm = step.norm
        self._consumed[optimizer] = self._backwards
        waiting = [o for o in others if o is not optimizer and self._waits(o)] if self.scaler.is_enabled() else []
        before = self.scaler.scale_tensor.clone() if waiting else None
        self.scaler.follow([step])
        if before is not None:
            self._rescale(waiting, self.scaler.scale_tensor / before)
        return step

    def _waits(self, optimizer: Optimizer) -> bool:
        step = self.scaler.pending(optimizer)
        return self.has_fresh_gradients(optimizer) and not (step is not None and step.exposed)

    def _rescale(self, optimizers: list[Optimizer], factor: Tensor) -> None:
        if not factor.is_cuda and float(factor) == 1.0:
            return
        grads = {p.grad: None for o in optimizers for group in o.param_groups for p in group["params"]}
        by_device: dict[torch.device, list[Tensor]] = {}
        for grad in grads:
            if grad is not None:
                by_device.setdefault(grad.device, []).append(grad)
        for device, group in by_device.items():
            ops.unscale_(group, factor.to(device))

    def name_of(self, param: Tensor) -> str:
        """The name of a parameter in the module."""
        return self._names.get(param, "(a parameter outside the module)")


def _fused_within(optimizer: Optimizer) -> FusedOptimizer | None:
    return optimizer if isinstance(optimizer, FusedOptimizer) else getattr(optimizer, "wrapped_fused", None)


def _match_state(optimizer: Optimizer) -> None:
    """Gives an optimizer's state its parameters' dtype, which torch's optimizers demand, after a cast."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.is_floating_point() and name != "step":
                    state[name] = value.to(param.dtype)


class _FP32StateKeeper:
    """Keeps the fp32 state of an optimizer of half parameters fp32 while it is loaded.

    ``Optimizer.load_state_dict`` casts floating-point state to the parameter's dtype; 1e-9 becomes 0 in fp16.
    """

    def __init__(self) -> None:
        self._saved: dict[str, Any] | None = None

    def attach(self, optimizer: Optimizer) -> list[RemovableHandle]:
        """Registers the hooks; on the inner optimizer of a wrapper that has none itself."""
        if not hasattr(optimizer, "_optimizer_load_state_dict_pre_hooks"):
            optimizer = getattr(optimizer, "optimizer", optimizer)
        if not hasattr(optimizer, "_optimizer_load_state_dict_pre_hooks"):
            return []
        return [
            optimizer.register_load_state_dict_pre_hook(self.before),
            optimizer.register_load_state_dict_post_hook(self.after),
        ]

    def before(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict

    def after(self, optimizer: Optimizer) -> None:
        saved, self._saved = self._saved, None
        if saved is None:
            return
        for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            for param, index in zip(group["params"], saved_group["params"], strict=True):
                if param.dtype not in HALF:
                    continue
                for name, value in saved["state"].get(index, {}).items():
                    if name != "step" and isinstance(value, Tensor) and value.is_floating_point():
                        fp32 = value.detach().to(device=param.device, dtype=torch.float32, copy=True)
                        optimizer.state[param][name] = fp32


def _warn_of_vanishing_eps(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        eps = group.get("eps")
        if (
            isinstance(eps, float)
            and eps > 0
            and any(p.dtype is torch.float16 and torch.tensor(eps, dtype=p.dtype) == 0 for p in group["params"])
        ):
            warnings.warn(
                f"{type(optimizer).__name__} with eps={eps:g} keeps its state in float16, where eps is 0, and will "
                "divide by zero: use a fused optimizer of lightning_apex, whose state is fp32, or eps=1e-4.",
                stacklevel=2,
            )
            return
