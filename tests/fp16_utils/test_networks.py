"""Casts of whole networks: what becomes half, what stays, and that the result computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_apex.fp16_utils import (
    BN_convert_float,
    FP16Model,
    convert_module,
    convert_network,
    network_to_half,
    tofp16,
)

HALVES = [torch.float16, torch.bfloat16]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.bare = nn.BatchNorm2d(8, affine=False)
        self.head = nn.Linear(8, 4)
        self.tied = nn.Linear(8, 4)
        self.tied.weight = self.head.weight
        self.register_buffer("table", torch.rand(8))
        self.register_buffer("index", torch.arange(4))
        self.loss = nn.CrossEntropyLoss(weight=torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bare(self.bn(self.conv(x))).mean((2, 3)) * self.table
        return self.head(y) + self.tied(y)


@pytest.mark.parametrize("dtype", HALVES)
def test_everything_but_batchnorm_and_losses_is_cast_in_place(dtype: torch.dtype) -> None:
    net = Net()
    before = dict(net.named_parameters())
    statistics = net.bn.running_var.clone()
    weight = net.bn.weight.detach().clone().normal_()
    with torch.no_grad():
        net.bn.weight.copy_(weight)
    half = network_to_half(net, dtype)
    assert isinstance(half[0], tofp16) and half[1] is net
    assert dict(net.named_parameters()) == before and all(net.get_parameter(n) is p for n, p in before.items())
    kept = {"bn.weight", "bn.bias", "bn.running_mean", "bn.running_var"}
    kept |= {"bare.running_mean", "bare.running_var", "loss.weight"}
    for name, tensor in net.state_dict().items():
        if tensor.is_floating_point():
            assert tensor.dtype is (torch.float32 if name in kept else dtype), name
    assert net.index.dtype is torch.int64
    assert torch.equal(net.bn.weight, weight) and torch.equal(net.bn.running_var, statistics)  # not rounded on the way
    assert net.tied.weight is net.head.weight
    out = half(torch.rand(4, 3, 6, 6))
    assert out.dtype is dtype
    out.float().sum().backward()
    assert {p.grad.dtype for n, p in net.named_parameters() if n not in kept} == {dtype}
    assert net.bn.weight.grad.dtype is torch.float32


def test_the_default_is_fp16_and_bfloat16_can_be_asked_for() -> None:
    assert network_to_half(nn.Linear(2, 2))(torch.ones(1, 2)).dtype is torch.float16
    assert FP16Model(nn.Linear(2, 2), torch.bfloat16)(torch.ones(1, 2)).dtype is torch.bfloat16


def test_inputs_are_cast_in_their_containers_and_integers_are_not() -> None:
    class Two(nn.Module):
        def forward(self, pair: dict, *, scale: torch.Tensor) -> tuple:
            return pair["x"] * scale, pair["index"]

    pair = {"x": torch.rand(2), "index": torch.arange(2)}
    out, index = FP16Model(Two())(pair, scale=torch.tensor(2.0))
    assert out.dtype is torch.float16 and index.dtype is torch.int64
    assert torch.equal(out, pair["x"].half() * 2)
    assert tofp16()(pair)["x"].dtype is torch.float16 and pair["x"].dtype is torch.float32


def test_convert_module_leaves_submodules_alone_and_casts_gradients() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    net.scale = nn.Parameter(torch.ones(2))
    net.scale.grad = torch.ones(2)
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    convert_module(net, torch.float16)
    assert net.scale.dtype is net.scale.grad.dtype is torch.float16 and net[0].weight.dtype is torch.float32
    optimizer.step()
    assert net.scale.tolist() == [0.5, 0.5]


def test_convert_network_goes_back_and_bn_convert_float_mends_a_half_network() -> None:
    net = Net().half()
    assert net.bn.weight.dtype is torch.float16
    assert BN_convert_float(net) is net
    assert (
        net.bn.weight.dtype is net.bare.running_mean.dtype is torch.float32 and net.conv.weight.dtype is torch.float16
    )
    assert convert_network(net, torch.float32) is net
    assert {p.dtype for p in net.parameters()} == {torch.float32}


def test_an_lstm_is_cast() -> None:
    net = network_to_half(nn.LSTM(3, 5), torch.bfloat16)
    out, _ = net(torch.rand(2, 1, 3))
    assert out.dtype is torch.bfloat16
