"""The plugins for code that imports ``pytorch_lightning``.

``from lightning_apex.pl import ApexPrecision`` in place of ``from lightning_apex import ApexPrecision``, and so on;
optimizers and everything else that is not Lightning's come from `lightning_apex` itself. Fabric of ``lightning_fabric``
takes ``lightning_apex.pl.fabric.ApexPrecision``.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if find_spec("pytorch_lightning") is None:
    raise ImportError(
        "lightning_apex.pl is for code that imports pytorch_lightning, which is not installed: run `pip install "
        "'pytorch-lightning>=2.6,<2.8'`, or import from lightning_apex, whose plugins are for `lightning`."
    )

from pytorch_lightning import Callback
from pytorch_lightning.callbacks import ModelSummary
from pytorch_lightning.plugins.layer_sync import TorchSyncBatchNorm
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

from lightning_apex.plugins.callbacks import LossScaleMonitorBody
from lightning_apex.plugins.layer_sync import ApexSyncBatchNormBody
from lightning_apex.plugins.namespace import TrainerNamespace
from lightning_apex.plugins.precision import ApexPrecisionBody
from lightning_apex.plugins.strategies import ApexDDPStrategyBody
from lightning_apex.plugins.summary import ApexModelSummaryBody

__all__ = ["ApexCLI", "ApexDDPStrategy", "ApexModelSummary", "ApexPrecision", "ApexSyncBatchNorm", "LossScaleMonitor"]

if TYPE_CHECKING:
    from lightning_apex.pl.cli import ApexCLI

_LIGHTNING = TrainerNamespace("pytorch_lightning", "lightning_fabric")


class ApexPrecision(ApexPrecisionBody, Precision):  # type: ignore[misc]  # noqa: D101
    __doc__ = ApexPrecisionBody.__doc__
    _lightning = _LIGHTNING


class ApexSyncBatchNorm(ApexSyncBatchNormBody, TorchSyncBatchNorm):  # type: ignore[misc]  # noqa: D101
    __doc__ = ApexSyncBatchNormBody.__doc__
    _lightning = _LIGHTNING


class LossScaleMonitor(LossScaleMonitorBody, Callback):  # type: ignore[misc]  # noqa: D101
    __doc__ = LossScaleMonitorBody.__doc__
    _lightning = _LIGHTNING


class ApexModelSummary(ApexModelSummaryBody, ModelSummary):  # type: ignore[misc]  # noqa: D101
    __doc__ = ApexModelSummaryBody.__doc__
    _lightning = _LIGHTNING


class ApexDDPStrategy(ApexDDPStrategyBody, DDPStrategy):  # type: ignore[misc]  # noqa: D101
    __doc__ = ApexDDPStrategyBody.__doc__
    _lightning = _LIGHTNING
    _sync_batch_norm = ApexSyncBatchNorm


ApexDDPStrategy.register_strategies(StrategyRegistry)


def __getattr__(name: str) -> Any:
    if name == "ApexCLI":  # on demand: it imports jsonargparse
        from lightning_apex.pl.cli import ApexCLI

        return ApexCLI
    raise AttributeError(f"module 'lightning_apex.pl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
