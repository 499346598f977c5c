"""What autograd holds for backward, against sums by hand."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_apex.cli.comparing.saved import SavedBytes

KIB = 256 * 4  # an fp32 tensor of 256 numbers


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def test_each_piece_of_memory_counts_once_and_no_longer_than_it_is_held() -> None:
    x = leaf(256)
    with SavedBytes([x]) as saved:
        y = x.exp()  # saves y
        z = y * y.view(16, 16).flatten()  # saves views of y
        assert saved.peak == KIB
        z.sum().backward()
        del y, z
        gc.collect()
        assert saved._now == 0
        (x.exp() * x.exp()).sum().backward()  # saves two results
    assert saved.peak == 2 * KIB
    assert x.grad is not None


def test_the_peak_is_of_one_time() -> None:
    x = leaf(256)
    with SavedBytes([x]) as saved:
        for _ in range(3):
            x.exp().sum().backward()
    assert saved.peak == KIB and saved._now == 0


def test_parameters_do_not_count_and_half_activations_count_half() -> None:
    net = nn.Linear(16, 16, bias=False)
    batch = leaf(16, 16)  # its gradient needs the weight
    with SavedBytes([]) as saved:
        net(batch).sum().backward()
    assert saved.peak == 2 * KIB
    with SavedBytes(net.parameters()) as saved:
        net(batch).sum().backward()
    assert saved.peak == KIB  # the batch
    half = nn.Linear(16, 16, bias=False).bfloat16()
    with SavedBytes(half.parameters()) as saved:
        half(batch.bfloat16()).sum().backward()
    assert saved.peak == KIB // 2


def test_gradients_are_the_same() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    batch = torch.randn(5, 4)
    net(batch).sum().backward()
    expected = [param.grad for param in net.parameters()]
    net.zero_grad()
    with SavedBytes(net.parameters()):
        net(batch).sum().backward()
    for param, grad in zip(net.parameters(), expected, strict=True):
        assert param.grad is not None and grad is not None
        torch.testing.assert_close(param.grad, grad, rtol=0, atol=0)


def test_a_checkpointed_block_holds_less() -> None:
    block = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)))

    def peak(checkpointed: bool) -> int:
        batch = leaf(64, 16)
        with SavedBytes(block.parameters()) as saved:
            out = checkpoint(block, batch, use_reentrant=False) if checkpointed else block(batch)
            before_backward = saved.peak
            out.sum().backward()
        return before_backward

    assert peak(checkpointed=True) < peak(checkpointed=False) / 3


@pytest.mark.parametrize("fails", [False, True])
def test_the_hooks_are_gone_afterwards(fails: bool) -> None:
    x = leaf(256)
    saved = SavedBytes([x])
    try:
        with saved:
            if fails:
                raise ValueError
    except ValueError:
        pass
    x.exp().sum().backward()
    assert saved.peak == 0
