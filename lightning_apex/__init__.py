"""Mixed precision, loss scaling and fused optimizers for PyTorch Lightning.

``Trainer(plugins=[ApexPrecision("O2")])`` trains at an opt level; `FusedAdam` and its relatives are optimizers that
make one or two passes over memory. Importing needs the compiled extension; everything but the plugins works without
Lightning.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lightning_apex import amp, fp16_utils, optimizers, parallel
from lightning_apex._extension import build_info, has_cuda
from lightning_apex.clipping import clip_grad_norm_
from lightning_apex.levels import OptLevelError
from lightning_apex.optimizers import *  # noqa: F403  # all it exports, so that a new optimizer is exported there only
from lightning_apex.parallel import (
    LARC,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
    revert_syncbn_model,
)
from lightning_apex.scaler import LossScaleError, LossScaler

__version__: str = build_info()["version"]
__all__ = [
    "LARC",
    "LossScaleError",
    "LossScaler",
    "OptLevelError",
    "SyncBatchNorm",
    "amp",
    "build_info",
    "clip_grad_norm_",
    "convert_syncbn_model",
    "create_syncbn_process_group",
    "fp16_utils",
    "has_cuda",
    "optimizers",
    "parallel",
    "revert_syncbn_model",
]
__all__ += optimizers.__all__

if TYPE_CHECKING or find_spec("lightning") is not None:
    # Imported here, not on demand: Lightning's CLI knows a class by its short name once it is imported, and a Trainer
    # the strategies that the import registers.
    from lightning_apex.plugins import (
        ApexDDPStrategy,
        ApexModelSummary,
        ApexPrecision,
        ApexSyncBatchNorm,
        LossScaleMonitor,
    )

    if TYPE_CHECKING:
        from lightning_apex.plugins.trainer_cli import ApexCLI

    __all__ += ["ApexCLI", "ApexDDPStrategy", "ApexModelSummary", "ApexPrecision", "ApexSyncBatchNorm"]
    __all__ += ["LossScaleMonitor"]


def __getattr__(name: str) -> Any:
    if name == "ApexCLI" and find_spec("lightning") is not None:  # on demand: it imports jsonargparse
        from lightning_apex.plugins.trainer_cli import ApexCLI

        return ApexCLI
    if name in (
        "ApexCLI",
        "ApexDDPStrategy",
        "ApexModelSummary",
        "ApexPrecision",
        "ApexSyncBatchNorm",
        "LossScaleMonitor",
    ):
        raise ImportError(
            f"lightning_apex.{name} needs Lightning: run `pip install 'lightning>=2.6,<2.8'`, or import it from "
            "lightning_apex.pl with pytorch_lightning."
        )
    raise AttributeError(f"module 'lightning_apex' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
