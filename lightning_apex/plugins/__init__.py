"""What plugs into Lightning's Trainer."""

from lightning_apex.plugins.callbacks import LossScaleMonitor
from lightning_apex.plugins.precision import ApexPrecision

__all__ = ["ApexPrecision", "LossScaleMonitor"]
