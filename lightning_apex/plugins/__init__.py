"""What plugs into Lightning's Trainer."""

from lightning_apex.plugins.callbacks import LossScaleMonitor
from lightning_apex.plugins.layer_sync import ApexSyncBatchNorm
from lightning_apex.plugins.precision import ApexPrecision
from lightning_apex.plugins.strategies import ApexDDPStrategy

__all__ = ["ApexDDPStrategy", "ApexPrecision", "ApexSyncBatchNorm", "LossScaleMonitor"]
