"""The CLI for ``pytorch_lightning``; imported on demand, since Lightning's own needs jsonargparse."""

from pytorch_lightning.cli import LightningCLI

from lightning_apex.pl import _LIGHTNING, ApexPrecision, ApexSyncBatchNorm
from lightning_apex.plugins.cli import ApexCLIBody


class ApexCLI(ApexCLIBody, LightningCLI):  # type: ignore[misc]  # noqa: D101
    __doc__ = ApexCLIBody.__doc__
    _lightning = _LIGHTNING
    _precision = ApexPrecision
    _layer_sync = ApexSyncBatchNorm
