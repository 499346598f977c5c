"""The CLI for ``lightning.pytorch``; imported on demand, since Lightning's own needs jsonargparse."""

from lightning.pytorch.cli import LightningCLI

from lightning_apex.plugins.cli import ApexCLIBody
from lightning_apex.plugins.trainer import _LIGHTNING, ApexPrecision, ApexSyncBatchNorm


class ApexCLI(ApexCLIBody, LightningCLI):  # noqa: D101
    __doc__ = ApexCLIBody.__doc__
    _lightning = _LIGHTNING
    _precision = ApexPrecision
    _layer_sync = ApexSyncBatchNorm
