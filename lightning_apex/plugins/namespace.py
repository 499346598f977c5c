"""Lightning under its two names: the package ``lightning``, and ``pytorch_lightning`` beside ``lightning_fabric``.

Their classes have the same names and methods and nothing else in common. So a plugin is written once, as a body that
imports neither and finds Lightning's classes through its namespace; and there is one class a namespace, which inherits
from the body and from Lightning's own class.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.fabric.strategies.strategy import Strategy as FabricStrategy
    from lightning.fabric.wrappers import _FabricOptimizer
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
    from lightning.pytorch.plugins import LayerSync, Precision, TorchSyncBatchNorm
    from lightning.pytorch.profilers import PassThroughProfiler
    from lightning.pytorch.strategies import ModelParallelStrategy

# Where this package keeps its classes for a package of Lightning's.
OURS = {
    "lightning.pytorch": "lightning_apex",
    "pytorch_lightning": "lightning_apex.pl",
    "lightning.fabric": "lightning_apex.fabric",
    "lightning_fabric": "lightning_apex.pl.fabric",
}
_OTHER = {
    "lightning.pytorch": "pytorch_lightning",
    "pytorch_lightning": "lightning.pytorch",
    "lightning.fabric": "lightning_fabric",
    "lightning_fabric": "lightning.fabric",
}


class Namespace:
    """What both kinds of plugin use of one of Lightning's packages.

    Args:
        package: The package's name.
        fabric: Where its parts for Fabric are.
    """

    def __init__(self, package: str, fabric: str) -> None:
        self.package = package
        self.fabric = fabric
        self.misuse: type[Exception] = import_module(f"{fabric}.utilities.exceptions").MisconfigurationException

    def hint(self, name: str) -> str:
        """Says which package a class of ours is for, and where its twin is if the other package is in use, too."""
        other = _OTHER[self.package]
        text = f"for {self.package}"
        if sys.modules.get(other) is not None:
            text += f"; the one for {other} is {OURS[other]}.{name}"
        return text


class TrainerNamespace(Namespace):
    """What the Trainer's plugins use of ``lightning.pytorch`` or ``pytorch_lightning``."""

    def __init__(self, package: str, fabric: str) -> None:
        super().__init__(package, fabric)
        top, strategies, callbacks = (import_module(package + part) for part in ("", ".strategies", ".callbacks"))
        self.LightningModule: type[LightningModule] = top.LightningModule
        self.Trainer: type[Trainer] = top.Trainer
        self.Callback: type[Callback] = top.Callback
        self.StochasticWeightAveraging: type[StochasticWeightAveraging] = callbacks.StochasticWeightAveraging
        self.WeightAveraging: type[WeightAveraging] = callbacks.WeightAveraging
        plugins = import_module(f"{package}.plugins")
        self.Precision: type[Precision] = plugins.Precision
        self.LayerSync: type[LayerSync] = plugins.LayerSync
        self.TorchSyncBatchNorm: type[TorchSyncBatchNorm] = plugins.TorchSyncBatchNorm
        self.PassThroughProfiler: type[PassThroughProfiler] = import_module(f"{package}.profilers").PassThroughProfiler
        self.human_count: Callable[[int], str] = import_module(
            f"{package}.utilities.model_summary"
        ).get_human_readable_count
        self.is_overridden: Callable[..., bool] = import_module(f"{package}.utilities.model_helpers").is_overridden
        xla = import_module(f"{package}.strategies.xla")
        self.cast_themselves: tuple[type, ...] = (
            strategies.FSDPStrategy,
            strategies.DeepSpeedStrategy,
            xla.XLAStrategy,
        )
        self.ModelParallelStrategy: type[ModelParallelStrategy] = strategies.ModelParallelStrategy
        self.apply_layer_sync: tuple[type, ...] = (strategies.DDPStrategy, strategies.FSDPStrategy)

    def refuse_stranger(self, obj: Any, ours: str) -> None:
        """Raises if an object that was to be a `LightningModule` or a `Trainer` is the other package's."""
        stranger = _OTHER[self.package]
        for kind in type(obj).__mro__:
            if kind.__name__ in ("LightningModule", "Trainer") and kind.__module__.startswith(f"{stranger}."):
                raise self.misuse(
                    f"This {ours} is for {self.package}, but {type(obj).__name__} is a {stranger}.{kind.__name__}: "
                    f"write `from {OURS[stranger]} import {ours}`, or import everything from {self.package}."
                )


class FabricNamespace(Namespace):
    """What Fabric's plugin uses of ``lightning.fabric`` or ``lightning_fabric``."""

    def __init__(self, package: str) -> None:
        super().__init__(package, package)
        strategies = import_module(f"{package}.strategies")
        self.FabricOptimizer: type[_FabricOptimizer] = import_module(f"{package}.wrappers")._FabricOptimizer
        self.Strategy: type[FabricStrategy] = strategies.Strategy
        self.DDPStrategy: type[FabricStrategy] = strategies.DDPStrategy
        self.cast_themselves: tuple[type, ...] = (
            strategies.FSDPStrategy,
            strategies.DeepSpeedStrategy,
            strategies.XLAStrategy,
            strategies.XLAFSDPStrategy,
        )
        self.ModelParallelStrategy: type[FabricStrategy] = strategies.ModelParallelStrategy
