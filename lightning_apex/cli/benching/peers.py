"""Optimizers of other packages that benchmarks compare with, where they are installed."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed's import would look for a GPU


@dataclass(frozen=True)
class Peer:
    """An optimizer class of another package, and the arguments that make it do the same work."""

    module: str
    kind: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def make(self, params: Sequence[nn.Parameter]) -> Optimizer | None:
        """The optimizer, or None where its package is not installed."""
        try:
            kind = getattr(importlib.import_module(self.module), self.kind)
        except (ImportError, AttributeError):
            return None
        optimizer: Optimizer = kind(params, **self.arguments)
        return optimizer

    def first_step(self, params: Sequence[nn.Parameter]) -> tuple[Optimizer | None, str]:
        """The optimizer after its first step, or why there is none: not installed, or it does not run here."""
        try:
            optimizer = self.make(params)
            if optimizer is None:
                return None, f"{self.module.split('.')[0]} is not installed"
            optimizer.step()
        except Exception as error:  # another package's, of whatever kind
            return None, f"{self.module}.{self.kind}: {type(error).__name__}: {str(error).splitlines()[0][:80]}"
        return optimizer, ""
