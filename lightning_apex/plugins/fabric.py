"""The body of the precision plugin for Lightning's Fabric; see `lightning_apex.plugins.namespace`."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_apex.casting import HALF
from lightning_apex.optimizers._base import FusedOptimizer
from lightning_apex.plugins.namespace import FabricNamespace
from lightning_apex.plugins.shared import PluginBase

if TYPE_CHECKING:
    from lightning.fabric.plugins.precision import Precision
else:
    Precision = object


class FabricPrecisionBody(PluginBase, Precision):  # type: ignore[misc]
    """Mixed precision at an opt level for Fabric: ``Fabric(plugins=[ApexPrecision("O2")])``.

    The levels and the arguments are those of `lightning_apex.ApexPrecision`, the Trainer's plugin; what the model
    returns is fp32 at every level, for the loss. ``fabric.save(path, {"model": model, "optimizer": optimizer, "amp":
    plugin})`` saves the loss scale, too; weights are saved in fp32, and any level loads them. Give one plugin to one
    Fabric. `teardown`, which Fabric never calls by itself, gives the models their fp32 weights back.
    """

    _lightning: FabricNamespace

    @override
    def _begin(self) -> None:
        super()._begin()
        self._modules: WeakSet[Module] = WeakSet()
        self._under_ddp = False
        self._sharded = False
        self._ranks_agree = True
        self._handles: list[RemovableHandle] = []

    # --- the models ---------------------------------------------------------------------------------------------

    @override
    def convert_module(self, module: Module) -> Module:
        # Fabric tells a plugin neither its strategy nor the optimizers, which may load their state before they step.
        strategy = next((s for s in _alive(self._lightning.Strategy) if getattr(s, "_precision", None) is self), None)
        if isinstance(strategy, self._lightning.cast_themselves):
            raise self._lightning.misuse(
                f"ApexPrecision does not work with {type(strategy).__name__}, which casts the model itself: use "
                "strategy='ddp', or ModelParallelStrategy(parallelize_fn=...) with plugin.fully_shard() in it for a "
                "model that is too large for one device; or Fabric(precision='bf16-mixed') without this plugin."
            )
        if module not in self._modules:
            if strategy is not None:
                device = strategy.root_device.type
            else:
                device = next((p.device.type for p in module.parameters()), "cpu")
            engine = self._engine if self._modules else self._new_engine(device)
            if isinstance(strategy, self._lightning.ModelParallelStrategy):
                engine.convert_sharded(module, device, shards_later=True)
                self._sharded = True
            else:
                engine.convert(module, device)
            self._engine = engine
            self._modules.add(module)
        self._under_ddp = isinstance(strategy, self._lightning.DDPStrategy)
        self._ranks_agree = False
        self._watch_optimizers_of(module)
        if self._engine.cast is not None:
            self._handles.append(module.register_load_state_dict_pre_hook(_LoadHook(self)))
        return module

    def _watch_optimizers_of(self, module: Module) -> None:
        params = set(module.parameters())
        wrapper = self._lightning.FabricOptimizer
        self.watch(*(o for o in _alive(Optimizer) if not isinstance(o, wrapper) and _shares(o, params)))

    def watch(self, *optimizers: Optimizer) -> None:
        """Prepares optimizers that were made after ``fabric.setup(model)`` for loading state before their first step.

        Needed only where an optimizer of torch's is loaded before its model: loading a model finds its optimizers.
        """
        found = [o.optimizer if isinstance(o, self._lightning.FabricOptimizer) else o for o in optimizers]
        if self.masters is not None:
            for optimizer in found:
                if optimizer not in self._engine.optimizers:
                    _warn_of_rounded_state(optimizer)
        self._engine.adopt(found)

    @override
    def teardown(self) -> None:
        """Gives the models their fp32 weights back and forgets them, for another Fabric or another level."""
        for handle in self._handles:
            handle.remove()
        self._engine.restore()
        self.scaler.forget_steps()
        self._begin()

    @override
    def convert_output(self, data: Any) -> Any:
        return self._engine.convert_output(data)

    # --- the training step --------------------------------------------------------------------------------------

    @override
    def backward(self, tensor: Tensor, model: Module | None, *args: Any, **kwargs: Any) -> None:
        with self._engine.backward_context():
            super().backward(self._engine.scale(tensor), model, *args, **kwargs)

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        self._meet(optimizer)
        if not self._engine.steps_itself:
            return optimizer.step(**kwargs)
        self._refuse_closure_driven(optimizer)
        result = None
        closure = kwargs.pop("closure", None)
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if not self._has_scaled_gradients(optimizer, "fabric.backward(loss)"):
            self._drop_step(optimizer)
            return result
        self._engine.finish(optimizer, self._others(optimizer), **kwargs)
        return result

    @override
    def unscale_gradients(self, optimizer: Optimizer) -> None:
        self._meet(optimizer)
        if self._engine.steps_itself:
            self._engine.open(optimizer).expose()

    @override
    def main_params(self, optimizer: Optimizer) -> list[Tensor]:  # type: ignore[override]
        """The parameters to clip; none before a step that will be skipped, where Fabric would raise."""
        step = self.scaler.pending(optimizer)
        if step is not None and step.was_skipped():
            return []
        return [param for group in optimizer.param_groups for param in group["params"]]

    def _meet(self, optimizer: Optimizer) -> None:
        if optimizer not in self._engine.optimizers:
            if self._sharded:
                self._refuse_old_parameters(optimizer)
            self.watch(optimizer)
        if not self._ranks_agree:
            # DDP has given all ranks the half weights of rank 0 by now. All ranks make this step.
            self._ranks_agree = True
            if self._under_ddp and torch.distributed.is_initialized():
                self._engine.agree_across_ranks()

    def _refuse_old_parameters(self, optimizer: Optimizer) -> None:
        """FSDP puts parameters of its own into a model, and an optimizer of those before would train nothing."""
        params = {param for module in self._modules for param in module.parameters()}
        if not _shares(optimizer, params):
            raise self._lightning.misuse(
                f"{type(optimizer).__name__} holds none of the parameters that fully_shard has put into the model: "
                "call model = fabric.setup(model) first, then make the optimizer of model.parameters() and call "
                "fabric.setup_optimizers(optimizer)."
            )

    def _others(self, optimizer: Optimizer) -> list[Optimizer]:
        """Optimizers of other parameters; an optimizer around another one shares them."""
        optimizers = self._engine.optimizers
        if len(optimizers) < 2 or not self.scaler.is_enabled():
            return []
        own = {param for group in optimizer.param_groups for param in group["params"]}
        return [other for other in optimizers if other is not optimizer and not _shares(other, own)]

    # --- checkpoints --------------------------------------------------------------------------------------------

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        # A worker process sets up models of its own.
        running = ("_engine", "_modules", "_under_ddp", "_sharded", "_ranks_agree", "_handles")
        return {key: value for key, value in self.__dict__.items() if key not in running}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()


class _LoadHook:
    """Before a model is loaded, and its optimizers most likely next: meets those made since ``fabric.setup(model)``."""

    def __init__(self, plugin: FabricPrecisionBody) -> None:
        self._plugin: ref[FabricPrecisionBody] | None = ref(plugin)

    def __call__(self, module: Module, *_: Any) -> None:
        plugin = None if self._plugin is None else self._plugin()
        if plugin is not None:
            plugin._watch_optimizers_of(module)

    def __getstate__(self) -> dict[str, Any]:
        return {"_plugin": None}  # copies of a model are none of its business


def _alive(kind: type) -> list[Any]:
    """All objects of a class; by type(), because isinstance() would wake lazy objects, and is slow for millions."""
    objects = gc.get_objects()
    kinds = {found for found in set(map(type, objects)) if kind in found.__mro__}
    return [item for item in objects if type(item) in kinds]


def _shares(optimizer: Optimizer, params: Iterable[Tensor]) -> bool:
    groups = getattr(optimizer, "param_groups", ())
    return any(param in params for group in groups for param in group["params"])


def _warn_of_rounded_state(optimizer: Optimizer) -> None:
    """Warns of state that torch has rounded to half while it loaded it, before anybody could prevent it."""
    if isinstance(optimizer, FusedOptimizer):
        return
    for param, state in optimizer.state.items():
        if param.dtype in HALF and any(
            isinstance(v, Tensor) and v.dtype in HALF and bool(v.any()) for v in state.values()
        ):
            warnings.warn(
                f"The state of {type(optimizer).__name__} was rounded to {param.dtype} when it was loaded: load the "
                "model before it, or call plugin.watch(optimizer) before, or give fabric.setup() the model and the "
                "optimizer together.",
                stacklevel=2,
            )
            return
