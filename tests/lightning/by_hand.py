"""Steps of a sharded model by hand in one process, in the arithmetic that is promised of several."""

from __future__ import annotations

from typing import Any

import torch
from helpers import batches
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

PER_RANK = 4  # rows of a batch


def network(norm: str = "LayerNorm") -> nn.Sequential:
    """Shards of unequal size, one of which a process has nothing, and a norm that meets the fp32 input."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.LayerNorm(8),
        nn.Linear(8, 15, bias=False),
        getattr(nn, norm)(15),
        nn.Tanh(),
        nn.Linear(15, 4),
        nn.Linear(4, 1),
        nn.Linear(1, 4),
    )


def rows_of(rank: int, ranks: int, count: int, per_rank: int = PER_RANK) -> DataLoader[Any]:
    """Rank r gets rows r, r + ranks, ... of each whole batch."""
    x, y = batches(count, per_rank * ranks).dataset.tensors
    return DataLoader(TensorDataset(x[rank::ranks], y[rank::ranks]), per_rank)


def by_hand(
    level: str,
    make_optimizer: Any,
    ranks: int = 2,
    count: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    scale: float = 1.0,
    clip: float = 0.0,
    accumulate: int = 1,
    norm: str = "LayerNorm",
    skip: tuple[int, ...] = (),
) -> dict[str, Tensor]:
    """The weights after steps in one process, in the arithmetic that is promised of several."""
    net = network(norm)
    optimizer = make_optimizer(net.parameters())
    half_weights = level in ("O2", "O5")
    halves = {
        name
        for name, _ in net.named_parameters()
        if half_weights and not (norm == "BatchNorm1d" and name.startswith("2."))
    }
    data = [iter(rows_of(rank, ranks, count)) for rank in range(ranks)]
    for step in range(count // accumulate):
        total = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
        for _ in range(accumulate):
            of_ranks = []
            buffers = {name: b.clone() for name, b in net.named_buffers()}
            for loader in data:
                used = {
                    name: p.detach().to(dtype if name in halves else p.dtype).requires_grad_()
                    for name, p in net.named_parameters()
                }
                x, y = next(loader)
                with torch.autocast("cpu", dtype, enabled=level != "O0"):
                    inputs = x.to(dtype) if half_weights else x
                    out = torch.func.functional_call(net, used | {n: b.clone() for n, b in buffers.items()}, inputs)
                    loss = nn.functional.cross_entropy(out.float(), y) / accumulate
                of_ranks.append(torch.autograd.grad(loss * scale, list(used.values())))
            for name, grads in zip(total, zip(*of_ranks, strict=True), strict=True):
                total[name] += (sum(grads[1:], grads[0]) / ranks).float()  # in the dtype they are exchanged in
        for (name, p), grad in zip(net.named_parameters(), total.values(), strict=True):
            assert grad.abs().max() > 0, name
            p.grad = grad / scale
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        if step not in skip:
            optimizer.step()
    return {f"net.{name}": p.detach().clone() for name, p in net.named_parameters()}
