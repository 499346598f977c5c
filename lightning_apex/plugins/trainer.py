"""The classes for ``lightning.pytorch``. `lightning_apex.pl` has those for ``pytorch_lightning``."""

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lightning_apex.plugins.callbacks import LossScaleMonitorBody
from lightning_apex.plugins.layer_sync import ApexSyncBatchNormBody
from lightning_apex.plugins.namespace import TrainerNamespace
from lightning_apex.plugins.precision import ApexPrecisionBody
from lightning_apex.plugins.strategies import ApexDDPStrategyBody
from lightning_apex.plugins.summary import ApexModelSummaryBody

_LIGHTNING = TrainerNamespace("lightning.pytorch", "lightning.fabric")


class ApexPrecision(ApexPrecisionBody, Precision):  # type: ignore[misc]  # noqa: D101
    __doc__ = ApexPrecisionBody.__doc__
    _lightning = _LIGHTNING


class ApexSyncBatchNorm(ApexSyncBatchNormBody, TorchSyncBatchNorm):  # noqa: D101
    __doc__ = ApexSyncBatchNormBody.__doc__
    _lightning = _LIGHTNING


class LossScaleMonitor(LossScaleMonitorBody, Callback):  # noqa: D101
    __doc__ = LossScaleMonitorBody.__doc__
    _lightning = _LIGHTNING


class ApexModelSummary(ApexModelSummaryBody, ModelSummary):  # noqa: D101
    __doc__ = ApexModelSummaryBody.__doc__
    _lightning = _LIGHTNING


class ApexDDPStrategy(ApexDDPStrategyBody, DDPStrategy):  # noqa: D101
    __doc__ = ApexDDPStrategyBody.__doc__
    _lightning = _LIGHTNING
    _sync_batch_norm = ApexSyncBatchNorm


ApexDDPStrategy.register_strategies(StrategyRegistry)
