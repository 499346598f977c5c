"""One opt level at work on one model: the middle layer that the plugins and the functional API stand on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_apex import fsdp, ops
from lightning_apex.boundaries import fp32_islands, matched_inputs, widened
from lightning_apex.cast_module import CastModule
from lightning_apex.casting import check_castable, kept_modules, map_tensors, needs_fp32
from lightning_apex.contexts import backward_context, convert_input, forward_context
from lightning_apex.levels import OptLevel
from lightning_apex.masters import MasterWeights
from lightning_apex.optimizer_state import FP32StateKeeper, match_state, warn_of_vanishing_eps
from lightning_apex.optimizers._base import FusedOptimizer
from lightning_apex.scaler import LossScaler
from lightning_apex.sharding import by_place
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
        self._casts: list[CastModule] = []
        self.device_type = "cpu"
        self._names: dict[Tensor, str] = {}
        self._roots: list[tuple[str, nn.Module]] = []
        self._unchecked: list[tuple[nn.Module, list[nn.Module]]] = []  # sharded after they were converted
        self._handles: list[RemovableHandle] = []
        self._optimizers: WeakSet[Optimizer] = WeakSet()  # whose hooks may hold this engine
        self._backwards = 0
        self._consumed: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    # --- the model ----------------------------------------------------------------------------------------------

    def convert(self, modules: nn.Module | Sequence[nn.Module], device_type: str) -> None:
        """Casts modules in place; everything is checked before anything changes. May be called again, for others.

        Args:
            modules: An fp32 module, or several that train together.
            device_type: Where they will run, such as ``"cuda"``.

        Raises:
            ValueError: If a trainable parameter is half already or on the meta device, or ``keep_fp32`` is wrong.
        """
        modules = [modules] if isinstance(modules, nn.Module) else modules
        kept = self.check(modules)
        self.device_type = device_type
        self._know_names_of(modules)
        if self.level.half_dtype is None:
            return
        self._handles += fp32_islands(kept)
        if not self.level.casts_weights:
            return
        masters = self._casts[0].masters if self._casts else MasterWeights()
        for module in modules:
            keep_batchnorm = self.level.keep_batchnorm_fp32
            self._casts.append(CastModule(module, self.level.half_dtype, kept, keep_batchnorm, masters))
            if self.level.autocasts:
                self._handles += matched_inputs(module)

    def convert_sharded(self, module: nn.Module, device_type: str, *, shards_later: bool = False) -> None:
        """Takes a model whose weights FSDP2 spreads over processes: they stay fp32; see `lightning_apex.fsdp`.

        Args:
            module: An fp32 module.
            device_type: Where it will run.
            shards_later: Whether its weights are spread only after this call, until the first forward pass.

        Raises:
            OptLevelError: If the level has no fp32 weights, or FSDP casts weights otherwise than the level.
            ValueError: See `convert`.
        """
        fsdp.check_level(self.level)
        fsdp.reshard(module)
        kept = list(dict.fromkeys(kept_modules(module, self._keep_fp32)))
        if self.level.casts_weights:
            kept += [m for m in module.modules() if needs_fp32(m) and m not in kept]
        self.device_type = device_type
        self._know_names_of([module])
        self._unchecked.append((module, kept))
        if not shards_later:
            self.check_shards()
        if self.level.half_dtype is not None:
            self._handles += fp32_islands(kept)
            if self.level.casts_weights:
                self._handles += matched_inputs(module, cast_later=True)

    def check_shards(self) -> None:
        """Refuses models of `convert_sharded`, each once, whose weights are not spread as the level needs it."""
        while self._unchecked:
            module, kept = self._unchecked.pop()
            check_castable(module, self.level.casts_weights)
            fsdp.check_shards(module, self.level, kept)

    def _know_names_of(self, modules: Sequence[nn.Module]) -> None:
        self._roots += [(f"models[{index}]." if len(modules) > 1 else "", m) for index, m in enumerate(modules)]
        self._find_names()

    def _find_names(self) -> None:
        self._names = {p: prefix + name for prefix, root in self._roots for name, p in root.named_parameters()}

    def check(self, modules: Sequence[nn.Module], cast_already: Sequence[nn.Module] = ()) -> list[nn.Module]:
        """Refuses what `convert` would, and returns the submodules that stay in fp32.

        Args:
            modules: To be converted together.
            cast_already: Those whose present cast is undone before.
        """
        kept = dict.fromkeys(kept_modules(modules, self._keep_fp32))
        for module in modules:
            if module not in cast_already:
                known = set(self._casts[0].masters) if self._casts else set()
                check_castable(module, self.level.casts_weights, known)
            if self.level.casts_weights:
                kept.update((m, None) for m in module.modules() if needs_fp32(m))
        return list(kept)

    def restore(self) -> None:
        """Gives the module its fp32 weights back and removes every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for cast in self._casts:
            cast.restore()
        self._casts.clear()
        for optimizer in self._optimizers:
            if (fused := _fused_within(optimizer)) is not None:
                fused.forget_plans()
            else:
                match_state(optimizer)
        self._optimizers.clear()
        self._names.clear()
        self._roots.clear()
        self._unchecked.clear()

    @property
    def masters(self) -> MasterWeights | None:
        """The fp32 weights that optimizers update; ``None`` where they update the module's own."""
        return self._casts[0].masters if self._casts and self.level.master_weights else None

    @property
    def cast(self) -> CastModule | None:
        """The cast module, at levels that cast weights; the first of several."""
        return self._casts[0] if self._casts else None

    def forward_context(self) -> AbstractContextManager[Any]:
        """What a forward pass runs in."""
        self.check_shards()
        return forward_context(self.level, self.device_type)

    def backward_context(self) -> AbstractContextManager[Any]:
        """What a backward pass runs in."""
        return backward_context(self.level, self.device_type)

    def convert_input(self, data: Any) -> Any:
        """Casts a batch where the level does so."""
        return convert_input(self.level, data)

    def convert_output(self, data: Any) -> Any:
        """Makes fp32 of what the model returns, where the level makes it half."""
        return data if self.level.half_dtype is None else map_tensors(data, widened)

    def agree_across_ranks(self, group: torch.distributed.ProcessGroup | None = None) -> None:
        """Makes rank 0's weights those of all ranks, to the last bit; DDP has done so for the half weights."""
        with torch.no_grad():
            for cast in self._casts:
                cast.broadcast_masters(group)

    # --- training -----------------------------------------------------------------------------------------------

    def adopt(self, optimizers: Iterable[Optimizer]) -> None:
        """Prepares for training with these optimizers, unless known already; the module is on its device by now."""
        optimizers = [optimizer for optimizer in optimizers if optimizer not in self._optimizers]
        self._optimizers.update(optimizers)
        if not self._casts:
            return
        for cast in self._casts:
            if self.level.master_weights:
                for half in cast.halves():
                    cast.masters.of(half)  # follows its parameter to the device
            else:
                cast.drop_masters()
        for optimizer in optimizers:
            if _fused_within(optimizer) is not None:  # its state is fp32 by itself
                continue
            if self.level.master_weights:
                self._handles += FP32StateKeeper().attach(optimizer)
            else:
                warn_of_vanishing_eps(optimizer)
                match_state(optimizer)

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those adopted that are still alive."""
        return list(self._optimizers)

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
        step = self.scaler.open(optimizer, self.masters, self.names_of)
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
        params = {p: None for o in optimizers for group in o.param_groups for p in group["params"]}
        grads = {p.grad: None for p in params if p.grad is not None}
        for (device, _), group in by_place(grads).items():
            ops.unscale_(group, factor.to(device))

    def names_of(self, params: Sequence[Tensor]) -> list[str]:
        """The names of parameters, in the order in which the module defines them."""
        if any(param not in self._names for param in params):  # FSDP puts other objects in their places
            self._find_names()
        places = {param: place for place, param in enumerate(self._names)}
        ordered = sorted(params, key=lambda param: places.get(param, len(places)))
        return [self._names.get(param, "(a parameter outside the module)") for param in ordered]


def _fused_within(optimizer: Optimizer) -> FusedOptimizer | None:
    return optimizer if isinstance(optimizer, FusedOptimizer) else getattr(optimizer, "wrapped_fused", None)
