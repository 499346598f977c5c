"""What plugs into Lightning's Trainer; the bodies of the classes are beside it, for `lightning_apex.pl`, too."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING or find_spec("lightning") is not None:
    from lightning_apex.plugins.trainer import (
        ApexDDPStrategy,
        ApexModelSummary,
        ApexPrecision,
        ApexSyncBatchNorm,
        LossScaleMonitor,
    )

    __all__ = ["ApexDDPStrategy", "ApexModelSummary", "ApexPrecision", "ApexSyncBatchNorm", "LossScaleMonitor"]
