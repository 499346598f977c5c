"""What the tests of this folder share: parameters, gradients, and two optimizers fed the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from cases import F32, TOLERANCES
from torch import Tensor, nn

SHAPES = ((), (1,), (0,), (7,), (3, 5), (2, 3, 2, 2))
# Ours, the torch optimizers that are the witnesses, and arguments that make them equal.
PAIRS: dict[str, tuple[str, type[torch.optim.Optimizer], dict[str, Any], dict[str, Any]]] = {
    "adamw": ("FusedAdam", torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}, {}),
    "adam": ("FusedAdam", torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}, {"adam_w_mode": False}),
    "amsgrad": ("FusedAdam", torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}, {}),
    "sgd": ("FusedSGD", torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}, {}),
    "momentum": ("FusedSGD", torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9}, {}),
    "dampening": ("FusedSGD", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}, {}),
}
UNFUSED = {"foreach": False, "fused": False}
Params = Any


def ours(pair: str, params: Params, **changes: Any) -> torch.optim.Optimizer:
    import lightning_apex.optimizers

    name, _, common, own = PAIRS[pair]
    return getattr(lightning_apex.optimizers, name)(params, **(common | own | changes))


def theirs(pair: str, params: Params, **changes: Any) -> torch.optim.Optimizer:
    _, kind, common, _ = PAIRS[pair]
    return kind(params, **(common | UNFUSED | changes))


def make_params(
    dtype: torch.dtype = F32, shapes: Iterable[Sequence[int]] = SHAPES, seed: int = 1
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [
        nn.Parameter(torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)) for shape in shapes
    ]


def copy_of(params: Iterable[Tensor], dtype: torch.dtype | None = None) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone().to(dtype or p.dtype), requires_grad=p.requires_grad) for p in params]


def fill_grads(step: int, *lists: Sequence[Tensor], skip: Callable[[int], bool] = lambda i: False) -> None:
    """Gives the parameters of each list the same gradients, which differ from step to step; none where ``skip(i)``."""
    generator = torch.Generator().manual_seed(1000 + step)
    for i, same in enumerate(zip(*lists, strict=True)):
        grad = torch.randn(same[0].shape, generator=generator, dtype=torch.float64).to(same[0].dtype)
        for param in same:
            param.grad = None if skip(i) else torch.empty_like(param).copy_(grad)


def close(actual: Tensor, expected: Tensor, what: str = "", steps: int = 5) -> None:
    """As near as ``steps`` roundings of the arithmetic allow."""
    rtol, atol = TOLERANCES[actual.dtype]
    if steps > 1:  # what was rounded when values were near 1 stays when they come near 0
        atol, rtol = rtol * steps, rtol * steps
    actual, expected = actual.detach().double(), expected.detach().double()
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, msg=lambda m: f"{what}: {m}")


def compare(a: torch.optim.Optimizer, b: torch.optim.Optimizer, states: bool = True) -> None:
    """Parameters of two optimizers agree, and so does what torch keeps for each."""
    for group, other in zip(a.param_groups, b.param_groups, strict=True):
        for i, (p, q) in enumerate(zip(group["params"], other["params"], strict=True)):
            close(p, q, f"parameter {i}")
            for name, expected in b.state[q].items() if states else ():
                # torch's SGD carries a step count of ours along and does not know what it is
                if isinstance(expected, Tensor) and not (name == "step" and isinstance(b, torch.optim.SGD)):
                    close(a.state[p][name], expected, f"{name} of parameter {i}")


def run(a: torch.optim.Optimizer, b: torch.optim.Optimizer, steps: Iterable[int] = range(5), **kwargs: Any) -> None:
    """Makes steps with both on equal gradients and compares after each."""
    lists = [[p for group in optimizer.param_groups for p in group["params"]] for optimizer in (a, b)]
    for step in steps:
        fill_grads(step, *lists, **kwargs)
        a.step()
        b.step()
        compare(a, b)
