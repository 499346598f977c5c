"""The kernels of one backend, as an object with the operators' names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_apex import ops


class Kernels:
    """Calls the operators of one namespace; optional tensors at the end may be left out.

    There are two ways to the real ones. The portable CPU backend is reached as torch.compile does, through the
    registered operators, all others as everybody does, through lightning_apex.ops.
    """

    def __init__(self, name: str, namespace: Any, device: str) -> None:
        self.name = name
        self.namespace = namespace
        self.device = device
        self.slow = name == "simt"
        self.registered = name in ("simt", "cpu-portable")
        # The GPU kernels add the squares of a few neighbours in float32 before they go on in float64.
        self.sum_rtol = 1e-12 if name.startswith("cpu") else 3e-7

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not self.registered:
            return getattr(ops, name)
        op = getattr(self.namespace, name).default
        n_arguments = len(op._schema.arguments)
        return lambda *given: op(*given, *[None] * (n_arguments - len(given)))

    def scalar(self, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(value, dtype=dtype, device=self.device)
