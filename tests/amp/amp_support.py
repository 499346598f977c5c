"""Models, optimizers and loops for the tests of the functional API, and loops without it to compare with."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from cases import same_bits
from torch import Tensor, nn

from lightning_apex import FusedAdam, FusedSGD, amp

F16, BF16 = torch.float16, torch.bfloat16
LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]
SCALED = [("O1", "bfloat16"), ("O1", "float16"), ("O2", "bfloat16"), ("O2", "float16")]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p, **kw: torch.optim.AdamW(p, lr=1e-2, **kw),
    "sgd": lambda p, **kw: torch.optim.SGD(p, lr=0.1, momentum=0.9, **kw),
    "fused_adam": lambda p, **kw: FusedAdam(p, lr=1e-2, weight_decay=1e-2, **kw),
    "fused_sgd": lambda p, **kw: FusedSGD(p, lr=0.1, momentum=0.9, **kw),
}
TORCHS = {"fused_adam": "adamw", "fused_sgd": "sgd"}


def thinned(every: int, *axes: Iterable[Any]) -> list[Any]:
    """All combinations of some axes; ``-m slow`` runs those that are left out, and one in ``every`` is not.

    Which are kept turns from row to row, so that each value meets the values of every other axis.
    """
    lists = [list(axis) for axis in axes]
    rows = []
    for at in itertools.product(*map(range, map(len, lists))):
        values = [options[i] for options, i in zip(lists, at, strict=True)]
        rows.append(pytest.param(*values, marks=[pytest.mark.slow] if sum(at) % every else []))
    return rows


def net(seed: int = 2) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def batch(index: int = 0, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + index)
    return torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def loss_of(model: Any, index: int = 0, size: int = 8) -> Tensor:
    x, y = batch(index, size)
    return nn.functional.cross_entropy(model(x), y)


def start(level: str, optimizer: str = "sgd", model: nn.Module | None = None, **kwargs: Any):
    """An initialised model and optimizer, without the warning of bf16 on CPUs."""
    model = net() if model is None else model
    made = OPTIMIZERS[optimizer](model.parameters())
    kwargs = {"verbosity": 0, "init_scale": 2.0**8} | kwargs
    return amp.initialize(model, made, opt_level=level, **kwargs)


def step(model: Any, optimizer: Any, index: int = 0, factor: float = 1.0, **kwargs: Any) -> float:
    """One ordinary step; a factor of inf overflows."""
    optimizer.zero_grad()
    loss = loss_of(model, index) * factor
    with amp.scale_loss(loss, optimizer, **kwargs) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    return loss.item()


def fp32(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint would hold."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return copy.deepcopy(optimizer.state_dict())


def same(a: Any, b: Any) -> bool:
    """Whether nested dictionaries, lists, numbers and tensors are equal, tensors to the last bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and same_bits(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def scale_of(optimizer: Any, loss_id: int = 0) -> float:
    return amp.state_dict(optimizer)[f"loss_scaler{loss_id}"]["loss_scale"]


class HalfByHand:
    """Half weights, fp32 masters, a loss scale and torch's optimizer, as one would write them down."""

    def __init__(self, optimizer: str, dtype: torch.dtype, scale: float) -> None:
        self.masters, self.model = net(), net()
        for module in self.model:
            if not isinstance(module, nn.BatchNorm1d):
                module.to(dtype)
        self.dtype, self.scale = dtype, scale
        self.optimizer = OPTIMIZERS[optimizer](self.masters.parameters())

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.model.parameters(), self.masters.parameters(), strict=True)

    def backward(self, index: int, max_norm: float | None = None, size: int = 8) -> None:
        self.model.zero_grad()
        x, y = batch(index, size)
        with torch.autocast("cpu", dtype=self.dtype, cache_enabled=False):
            output = self.model(x)
        (nn.functional.cross_entropy(output.float(), y) * self.scale).backward()
        for half, master in self.pairs():
            master.grad = half.grad.float() / self.scale
        if max_norm is not None:
            nn.utils.clip_grad_norm_(self.masters.parameters(), max_norm)

    def step(self, index: int, **kwargs: Any) -> None:
        self.backward(index, **kwargs)
        self.optimizer.step()
        with torch.no_grad():
            for half, master in self.pairs():
                half.copy_(master)

    def fp32(self) -> dict[str, Tensor]:
        weights = dict(self.masters.named_parameters())
        return {name: weights.get(name, value).detach().clone() for name, value in self.model.state_dict().items()}


def by_grad_scaler(
    optimizer: str, dtype: torch.dtype, factors: list[float], max_norm: float | None = None, **scaler: Any
):
    """The same steps with torch.autocast and torch.amp.GradScaler; returns weights, state and scale after each."""
    model = net()
    made = OPTIMIZERS[optimizer](model.parameters())
    grad_scaler = torch.amp.GradScaler("cpu", **{"init_scale": 2.0**8} | scaler)
    trace = []
    for index, factor in enumerate(factors):
        made.zero_grad()
        x, y = batch(index)
        with torch.autocast("cpu", dtype=dtype, cache_enabled=False):
            output = model(x)
        loss = nn.functional.cross_entropy(output.float(), y) * factor
        grad_scaler.scale(loss).backward()
        if max_norm is not None:
            grad_scaler.unscale_(made)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        grad_scaler.step(made)
        grad_scaler.update()
        trace.append((fp32(model), state_of(made), grad_scaler.get_scale()))
    return trace
