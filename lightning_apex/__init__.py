"""Mixed precision, loss scaling and fused optimizers for PyTorch Lightning.

``Trainer(plugins=[ApexPrecision("O2")])`` trains at an opt level; `FusedAdam` and `FusedSGD` are optimizers that make
one pass over memory. Importing needs the compiled extension; everything but the plugins works without Lightning.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lightning_apex import amp, fp16_utils, optimizers, parallel
from lightning_apex._extension import build_info, has_cuda
from lightning_apex.levels import OptLevelError
from lightning_apex.optimizers import FusedAdam, FusedSGD
from lightning_apex.scaler import LossScaleError, LossScaler

__version__: str = build_info()["version"]
__all__ = [
    "FusedAdam",
    "FusedSGD",
    "LossScaleError",
    "LossScaler",
    "OptLevelError",
    "amp",
    "build_info",
    "fp16_utils",
    "has_cuda",
    "optimizers",
    "parallel",
]

if TYPE_CHECKING or find_spec("lightning") is not None:
    # Imported here, not on demand: Lightning's CLI knows a class by its short name once it is imported.
    from lightning_apex.plugins import ApexPrecision, LossScaleMonitor

    __all__ += ["ApexPrecision", "LossScaleMonitor"]


def __getattr__(name: str) -> Any:
    if name in ("ApexPrecision", "LossScaleMonitor"):
        raise ImportError(f"lightning_apex.{name} needs Lightning: run `pip install 'lightning>=2.6,<2.8'`.")
    raise AttributeError(f"module 'lightning_apex' has no attribute {name!r}")
