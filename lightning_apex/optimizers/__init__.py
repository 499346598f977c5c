"""Fused optimizers: one or two passes over memory a step, on the CPU and on CUDA."""

from lightning_apex.optimizers.adagrad import FusedAdagrad
from lightning_apex.optimizers.adam import FusedAdam, FusedAdamW
from lightning_apex.optimizers.lamb import FusedLAMB, FusedMixedPrecisionLamb
from lightning_apex.optimizers.lars import FusedLARS
from lightning_apex.optimizers.lion import FusedLion
from lightning_apex.optimizers.novograd import FusedNovoGrad
from lightning_apex.optimizers.sgd import FusedSGD

__all__ = [
    "FusedAdagrad",
    "FusedAdam",
    "FusedAdamW",
    "FusedLAMB",
    "FusedLARS",
    "FusedLion",
    "FusedMixedPrecisionLamb",
    "FusedNovoGrad",
    "FusedSGD",
]
