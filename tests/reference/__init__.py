"""What the kernels should compute, written from the papers' formulas, in float64."""

from reference.optimizers import REFERENCES as OPTIMIZERS
from reference.optimizers import norms
from reference.scaling import LossScale, step_factors

__all__ = ["OPTIMIZERS", "LossScale", "norms", "step_factors"]
