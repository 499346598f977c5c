"""How a dynamic loss scale moves, and the factor of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class LossScale:
    """Micikevicius et al. 2018, section 3.2, with bounds and hysteresis."""

    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    hysteresis: int
    low: float
    high: float
    good_steps: int = 0
    skips_in_a_row: int = 0
    skips: int = 0

    def __post_init__(self) -> None:
        self.patience = self.hysteresis

    def see(self, overflow: bool) -> None:
        if overflow:
            self.good_steps = 0
            self.skips_in_a_row += 1
            self.skips += 1
            self.patience = max(self.patience - 1, 0)
            if self.patience == 0:
                self.scale = max(self.scale * self.backoff_factor, self.low)
            return
        self.skips_in_a_row = 0
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale = min(self.scale * self.growth_factor, self.high)
            self.good_steps = 0
            self.patience = self.hysteresis

    @property
    def trackers(self) -> list[int]:
        return [self.good_steps, self.patience, self.skips_in_a_row, self.skips]


def step_factors(sum_of_squares: float, scale: float, max_norm: float) -> tuple[float, float]:
    """The unscaled norm, and what gradients are multiplied with (Pascanu et al. 2013 where max_norm > 0)."""
    norm = math.sqrt(sum_of_squares) / scale
    clip = min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0
    return norm, clip / scale
