"""What the tests of this folder share: parameters, gradients, and two optimizers fed the same ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from cases import F32, TOLERANCES, same_bits
from reference_optimizer import Reference
from torch import Tensor, nn

from lightning_apex import optimizers
from lightning_apex.optimizers._base import FusedOptimizer

SHAPES = ((), (1,), (0,), (7,), (3, 5), (2, 3, 2, 2))
KINDS: list[type[FusedOptimizer]] = [getattr(optimizers, name) for name in optimizers.__all__]
# Ours, the torch optimizers that are the witnesses, and arguments that make them equal. Where torch has none (None),
# the witness is the float64 formula.
PAIRS: dict[str, tuple[str, type[torch.optim.Optimizer] | None, dict[str, Any], dict[str, Any]]] = {
    "adamw": ("FusedAdam", torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}, {}),
    "adam": ("FusedAdam", torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}, {"adam_w_mode": False}),
    "amsgrad": ("FusedAdam", torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}, {}),
    "adamw by name": ("FusedAdamW", torch.optim.AdamW, {"lr": 0.01}, {}),
    "sgd": ("FusedSGD", torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}, {}),
    "momentum": ("FusedSGD", torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9}, {}),
    "dampening": ("FusedSGD", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}, {}),
    "adagrad": (
        "FusedAdagrad",
        torch.optim.Adagrad,
        {"lr": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.25},
        {},
    ),
    "lamb": ("FusedLAMB", None, {"lr": 0.01, "weight_decay": 0.1, "max_grad_norm": None}, {}),
    "lars": ("FusedLARS", None, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "trust_coefficient": 0.1}, {}),
}
# An optimizer that has no row here gets one.
_DEFAULT = {"lr": 0.01, "weight_decay": 0.1}
for _kind in KINDS:
    if _kind.__name__ not in {row[0] for row in PAIRS.values()} and _kind is not optimizers.FusedMixedPrecisionLamb:
        PAIRS[_kind.__name__.removeprefix("Fused").lower()] = (
            _kind.__name__,
            None,
            {"lr": 0.01, "weight_decay": 0.1},
            {},
        )
TORCHS = {name: row for name, row in PAIRS.items() if row[1] is not None}
UNFUSED = {"foreach": False, "fused": False}
Params = Any


def ours(pair: str, params: Params, **changes: Any) -> FusedOptimizer:
    name, _, common, own = PAIRS[pair]
    return getattr(optimizers, name)(params, **(common | own | changes))


def theirs(pair: str, params: Params, **changes: Any) -> torch.optim.Optimizer:
    name, kind, common, _ = PAIRS[pair]
    if kind is None:
        return Reference(params, getattr(optimizers, name), **(common | changes))
    return kind(params, **(common | UNFUSED | changes))


def takes(kind: type[FusedOptimizer], **arguments: Any) -> dict[str, Any]:
    """Those of the arguments that a class knows."""
    return {name: value for name, value in arguments.items() if name in inspect.signature(kind).parameters}


def make_params(
    dtype: torch.dtype = F32, shapes: Iterable[Sequence[int]] = SHAPES, seed: int = 1
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [
        nn.Parameter(torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)) for shape in shapes
    ]


def copy_of(params: Iterable[Tensor], dtype: torch.dtype | None = None) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone().to(dtype or p.dtype), requires_grad=p.requires_grad) for p in params]


def params_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def moments_of(optimizer: FusedOptimizer, param: Tensor) -> list[Tensor]:
    """The states that hold as many numbers as the parameter."""
    return [v for k, v in optimizer.state[param].items() if k != "step" and v.shape == param.shape]


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
    """Parameters of two optimizers agree, and so does what the second keeps for each."""
    for group, other in zip(a.param_groups, b.param_groups, strict=True):
        for i, (p, q) in enumerate(zip(group["params"], other["params"], strict=True)):
            close(p, q, f"parameter {i}")
            for name, expected in b.state[q].items() if states else ():
                # torch's SGD carries a step count of ours along and does not know what it is
                if isinstance(expected, Tensor) and not (name == "step" and isinstance(b, torch.optim.SGD)):
                    if p not in a.state and b.state[q]["step"] == 0:
                        continue  # torch's Adagrad makes state before there is a gradient
                    close(a.state[p][name], expected, f"{name} of parameter {i}")


def assert_same_state(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> None:
    """Parameters and all state are the same bits."""
    for p, q in zip(params_of(a), params_of(b), strict=True):
        assert same_bits(p, q)
        assert a.state[p].keys() == b.state[q].keys()
        for name, value in a.state[p].items():
            assert same_bits(value, b.state[q][name]), name


def run(a: torch.optim.Optimizer, b: torch.optim.Optimizer, steps: Iterable[int] = range(5), **kwargs: Any) -> None:
    """Makes steps with both on equal gradients and compares after each."""
    for step in steps:
        fill_grads(step, params_of(a), params_of(b), **kwargs)
        a.step()
        b.step()
        compare(a, b)
