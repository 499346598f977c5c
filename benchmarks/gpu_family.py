"""The other optimizers on a GPU: each with the bytes that it moves, and its peers where they are installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from benchmarks.common import Contender
from benchmarks.contenders import OURS, Buffers
from lightning_apex import optimizers
from lightning_apex.cli.benching.peers import Peer


@dataclass(frozen=True)
class Family:
    """One of ours.

    Attributes:
        bytes_moved: By an element of an fp32 step: what is read once and what is written once, pass by pass.
        ours: The class.
        arguments: Its arguments.
        peers: Others by the names that reports give them.
    """

    bytes_moved: int
    ours: str
    arguments: dict[str, Any]
    peers: dict[str, Peer]


_SGD: dict[str, Any] = {"lr": 1e-4, "momentum": 0.9, "weight_decay": 0.01}
_DECAY: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}
FAMILIES = {
    "SGD momentum": Family(
        20,
        "FusedSGD",
        _SGD,
        {
            "torch fused": Peer("torch.optim", "SGD", _SGD | {"fused": True}),
            "torch foreach": Peer("torch.optim", "SGD", _SGD | {"foreach": True}),
        },
    ),
    "Adagrad": Family(
        20, "FusedAdagrad", _DECAY, {"torch foreach": Peer("torch.optim", "Adagrad", _DECAY | {"foreach": True})}
    ),
    "Lion": Family(20, "FusedLion", _DECAY, {"timm": Peer("timm.optim", "Lion", _DECAY | {"foreach": True})}),
    "LAMB": Family(40, "FusedLAMB", _DECAY | {"max_grad_norm": None}, {
        "timm": Peer("timm.optim", "Lamb", _DECAY | {"max_grad_norm": None}),
    }),
    "NovoGrad": Family(24, "FusedNovoGrad", _DECAY, {"timm": Peer("timm.optim", "NvNovoGrad", _DECAY)}),
    "LARS": Family(28, "FusedLARS", _SGD, {"timm": Peer("timm.optim", "Lars", _SGD)}),
}  # fmt: skip


def contenders(name: str, buffers: Buffers) -> list[Contender]:
    """Ours, and those of its peers that are here. All work on the same parameters and gradients."""
    family, params = FAMILIES[name], buffers.params
    made: dict[str, Callable[[], Optimizer | None]] = {
        OURS: lambda: getattr(optimizers, family.ours)(params, **family.arguments)
    }
    made |= {peer: lambda p=p: p.make(params) for peer, p in family.peers.items()}  # type: ignore[misc]
    there = [(title, optimizer) for title, make in made.items() if (optimizer := make()) is not None]
    return [Contender(title, optimizer.step) for title, optimizer in there]
