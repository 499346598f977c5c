"""The precision plugin for Lightning's Fabric: ``Fabric(plugins=[lightning_apex.fabric.ApexPrecision("O2")])``."""

from importlib.util import find_spec

if find_spec("lightning") is None:
    raise ImportError(
        "lightning_apex.fabric needs Lightning: run `pip install 'lightning>=2.6,<2.8'`, or import from "
        "lightning_apex.pl.fabric with lightning_fabric."
    )

from lightning.fabric.plugins.precision import Precision

from lightning_apex.plugins.fabric import FabricPrecisionBody
from lightning_apex.plugins.namespace import FabricNamespace

__all__ = ["ApexPrecision"]


class ApexPrecision(FabricPrecisionBody, Precision):  # type: ignore[misc]  # noqa: D101
    __doc__ = FabricPrecisionBody.__doc__
    _lightning = FabricNamespace("lightning.fabric")
