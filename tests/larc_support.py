"""What the tests of LARC share."""

import pytest
import torch
from cases import F32, F64
from torch import nn

from lightning_apex import FusedAdam, FusedLion, FusedSGD

SHAPES = ((7,), (), (0,), (3, 5), (2, 3, 2, 2))
INNER = {
    "torch sgd": lambda ps, **k: torch.optim.SGD(ps, **({"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1} | k)),
    "fused sgd": lambda ps, **k: FusedSGD(ps, **({"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1} | k)),
    "torch adam": lambda ps, **k: torch.optim.Adam(ps, **({"lr": 0.1, "weight_decay": 0.1} | k)),
    "fused adam": lambda ps, **k: FusedAdam(ps, **({"lr": 0.1, "weight_decay": 0.1} | k)),
    "fused lion": lambda ps, **k: FusedLion(ps, **({"lr": 0.01, "weight_decay": 0.1} | k)),
}
inner = pytest.mark.parametrize("inner", INNER)


def make_params(dtype=F32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=F64).to(dtype)) for s in SHAPES]


def fill(step, *lists, scale=1.0):
    generator = torch.Generator().manual_seed(100 + step)
    for same in zip(*lists, strict=True):
        grad = torch.randn(same[0].shape, generator=generator, dtype=F64) * scale
        for p in same:
            p.grad = grad.to(p.dtype)
