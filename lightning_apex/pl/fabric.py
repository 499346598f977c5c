"""The precision plugin for the Fabric of ``lightning_fabric``."""

from lightning_fabric.plugins.precision import Precision

from lightning_apex.plugins.fabric import FabricPrecisionBody
from lightning_apex.plugins.namespace import FabricNamespace

__all__ = ["ApexPrecision"]


class ApexPrecision(FabricPrecisionBody, Precision):  # type: ignore[misc]  # noqa: D101
    __doc__ = FabricPrecisionBody.__doc__
    _lightning = FabricNamespace("lightning_fabric")
