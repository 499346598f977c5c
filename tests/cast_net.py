"""A model with one of everything that a cast must get right, and how tests look at it."""

from __future__ import annotations

import torch
from cases import same_bits
from torch import nn

from lightning_apex.cast_module import CastModule
from lightning_apex.casting import kept_modules

F16, BF16 = torch.float16, torch.bfloat16


class Net(nn.Module):
    """Tied weights, buffers of every kind, BatchNorm, a loss with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.LayerNorm(3))
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embedding.weight
        self.loss = nn.CrossEntropyLoss(weight=torch.rand(5))
        self.register_buffer("table", torch.rand(4) + 1e-5)
        self.register_buffer("hidden", torch.rand(4) + 1e-5, persistent=False)
        self.register_buffer("index", torch.arange(4))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("wide", torch.rand(4, dtype=torch.float64))
        self.register_buffer("phase", torch.rand(4, dtype=torch.complex64))
        self.register_buffer("absent", None)
        self.scalar = nn.Parameter(torch.tensor(1.0001))
        with torch.no_grad():
            self.body[1].running_mean.uniform_()


CAST = {"embedding.weight", "body.0.weight", "body.0.bias", "body.2.weight", "body.2.bias", "scalar"}
CAST |= {"head.weight", "head.bias"}
CAST_BUFFERS = {"table", "hidden"}


def tensors(net: nn.Module) -> dict[str, torch.Tensor]:
    return dict(net.named_parameters(remove_duplicate=False)) | dict(net.named_buffers())


def values(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors(net).items()}


def cast(net: nn.Module, dtype: torch.dtype = BF16, keep=(), keep_batchnorm: bool = True) -> CastModule:
    return CastModule(net, dtype, kept_modules(net, keep), keep_batchnorm)


def assert_same(actual: dict, expected: dict) -> None:
    assert list(actual) == list(expected)
    for name in expected:
        assert same_bits(actual[name], expected[name]), name
