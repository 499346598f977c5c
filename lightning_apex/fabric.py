"""The precision plugin for Lightning's Fabric: ``Fabric(plugins=[lightning_apex.fabric.ApexPrecision("O2")])``."""

from importlib.util import find_spec

if find_spec("lightning") is None:
    raise ImportError("lightning_apex.fabric needs Lightning: run `pip install 'lightning>=2.6,<2.8'`.")

from lightning_apex.plugins.fabric import ApexPrecision

__all__ = ["ApexPrecision"]
