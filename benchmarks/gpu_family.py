"""The other optimizers on a GPU: each with the bytes that it moves, and its peers where they are installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
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
        goals: Over some of them: what must be, and what is better.
    """

    bytes_moved: int
    ours: str
    arguments: dict[str, Any]
    peers: dict[str, Peer]
    goals: dict[str, tuple[float, float]] = field(default_factory=dict)


class TorchLamb(Optimizer):
    """LAMB in torch's own calls, a tensor at a time, for where no package that has it is installed."""

    def __init__(self, params: Sequence[nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
                state["step"] += 1
                m, v, t = state["m"], state["v"], state["step"]
                m.lerp_(p.grad, 0.1)
                v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                update = (m / (1 - 0.9**t)).div_((v / (1 - 0.999**t)).sqrt_().add_(1e-6))
                update.add_(p, alpha=group["weight_decay"])
                of_p, of_update = p.norm(), update.norm()
                trust = torch.where((of_p > 0) & (of_update > 0), of_p / of_update, 1.0)
                p.sub_(update.mul_(trust), alpha=group["lr"])


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
        "torch calls": Peer("benchmarks.gpu_family", "TorchLamb", _DECAY),
    }, {"timm": (8.0, 15.0), "torch calls": (8.0, 15.0)}),
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
