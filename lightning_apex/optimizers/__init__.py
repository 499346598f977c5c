"""Fused optimizers: one pass over memory a step, on the CPU and on CUDA."""

from lightning_apex.optimizers.adam import FusedAdam
from lightning_apex.optimizers.sgd import FusedSGD

__all__ = ["FusedAdam", "FusedSGD"]
