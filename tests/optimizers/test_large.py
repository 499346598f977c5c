"""One tensor of 400 million elements, against the same optimizer on one of its 400 000 equal parts."""

import os

import pytest
import torch
from cases import BF16
from optimizer_support import KINDS, close, takes
from reference_optimizer import Reference
from torch import nn

from lightning_apex import FusedNovoGrad

TILE, TILES = 1000, 400_000
NEEDED = 6 * 2**30


def available() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_400_million_elements(kind):
    if available() < NEEDED:
        pytest.skip("needs 6 GiB of free memory")
    tile, grad = torch.randn(TILE).to(BF16), torch.randn(TILE).to(BF16)
    # Ratios of norms are those of the tile; a norm alone is longer, which NovoGrad's learning rate makes good.
    hypers = {"lr": 0.05, "weight_decay": 0.1, **takes(kind, momentum=0.9, max_grad_norm=None, eps=0.0)}
    longer = TILES**0.5 if kind is FusedNovoGrad else 1.0
    hypers["weight_decay"] = 0.0 if kind is FusedNovoGrad else 0.1
    param = nn.Parameter(tile.repeat(TILES))
    param.grad = grad.repeat(TILES)
    optimizer = kind([param], **hypers | {"lr": hypers["lr"] * longer}, state_dtype=BF16)
    optimizer.step()
    rows = param.detach().view(TILES, TILE)
    assert torch.equal(rows, rows[:1].expand_as(rows)), "elements were treated differently"
    witness = nn.Parameter(tile.double())
    witness.grad = grad.double()
    Reference([witness], kind, **hypers).step()
    close(rows[0], witness, steps=2)
    assert not torch.equal(rows[0], tile)
