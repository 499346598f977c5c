"""Every fused optimizer: its arguments, what its step moves, and who does the same work elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_apex import optimizers
from lightning_apex.cli.benching.peers import Peer
from lightning_apex.cli.benching.race import Contender
from lightning_apex.cli.benching.roofline import Stream, Sweep, bytes_of, traffic

ROOF = "roofline"
FUSED, DEFAULT, FOREACH = "torch fused", "torch for-loop", "torch foreach"
_DECAY: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}
_SGD: dict[str, Any] = _DECAY | {"momentum": 0.9}
Lists = list[Sequence[Tensor]]


def _read(lists: Lists) -> list[Stream]:
    return [Stream(tensors) for tensors in lists]


def _written(lists: Lists) -> list[Stream]:
    return [Stream(tensors, written=True) for tensors in lists]


def one_sweep(weights: Lists, grads: Lists, states: Lists) -> list[Sweep]:
    """Everything once."""
    return [_read(grads) + _written(weights + states)]


def lamb_sweeps(weights: Lists, grads: Lists, states: Lists) -> list[Sweep]:
    """The update is computed again once its norms are known."""
    return [_read(weights + grads) + _written(states), _read(states) + _written(weights)]


def novograd_sweeps(weights: Lists, grads: Lists, states: Lists) -> list[Sweep]:
    """The gradients' norms come first."""
    return [_read(grads), _read(grads) + _written(weights + states)]


def lars_sweeps(weights: Lists, grads: Lists, states: Lists) -> list[Sweep]:
    """Norms of weights and gradients come first."""
    return [_read(weights + grads), _read(grads) + _written(weights + states)]


@dataclass(frozen=True)
class Family:
    """One of ours.

    Attributes:
        ours: The class.
        arguments: Its arguments.
        states: Its states of one number an element.
        sweeps: What its step reads and writes, sweep by sweep.
        torch: Its class in torch.optim, if torch has a fused one.
        peers: Others by the names that reports give them.
    """

    ours: str
    arguments: dict[str, Any]
    states: tuple[str, ...]
    sweeps: Callable[[Lists, Lists, Lists], list[Sweep]] = one_sweep
    torch: str | None = None
    peers: dict[str, Peer] = field(default_factory=dict)


def _of_torch(kind: str, arguments: dict[str, Any]) -> dict[str, Peer]:
    how = {FUSED: {"fused": True}, DEFAULT: {"foreach": False}, FOREACH: {"foreach": True}}
    return {name: Peer("torch.optim", kind, arguments | flags) for name, flags in how.items()}


FAMILIES: dict[str, Family] = {
    "AdamW": Family("FusedAdam", _DECAY, ("exp_avg", "exp_avg_sq"), torch="AdamW", peers={
        **_of_torch("AdamW", _DECAY),
        "DeepSpeed": Peer("deepspeed.ops.adam", "DeepSpeedCPUAdam", _DECAY),
        "optimi": Peer("optimi", "AdamW", _DECAY),
        "bitsandbytes 8 bit": Peer("bitsandbytes.optim", "AdamW8bit", _DECAY),
    }),
    "SGD": Family("FusedSGD", _SGD, ("momentum_buffer",), torch="SGD", peers={
        **_of_torch("SGD", _SGD),
        "optimi": Peer("optimi", "SGD", _SGD),
    }),
    "Adagrad": Family("FusedAdagrad", _DECAY, ("sum",), torch="Adagrad", peers={
        **_of_torch("Adagrad", _DECAY),
        "DeepSpeed": Peer("deepspeed.ops.adagrad", "DeepSpeedCPUAdagrad", _DECAY),
    }),
    "Lion": Family("FusedLion", _DECAY, ("exp_avg",), peers={
        "timm": Peer("timm.optim", "Lion", _DECAY),
        "pytorch_optimizer": Peer("pytorch_optimizer", "Lion", _DECAY),
        "optimi": Peer("optimi", "Lion", _DECAY),
        "bitsandbytes 8 bit": Peer("bitsandbytes.optim", "Lion8bit", _DECAY),
    }),
    "LAMB": Family("FusedLAMB", _DECAY | {"max_grad_norm": None}, ("exp_avg", "exp_avg_sq"), lamb_sweeps,
                   peers={
        "timm": Peer("timm.optim", "Lamb", _DECAY | {"max_grad_norm": None}),
        "pytorch_optimizer": Peer("pytorch_optimizer", "Lamb", _DECAY | {"max_grad_norm": 0.0}),
    }),
    "NovoGrad": Family("FusedNovoGrad", _DECAY, ("exp_avg",), novograd_sweeps, peers={
        "timm": Peer("timm.optim", "NvNovoGrad", _DECAY),
        "pytorch_optimizer": Peer("pytorch_optimizer", "NovoGrad", _DECAY),
    }),
    "LARS": Family("FusedLARS", _SGD, ("momentum_buffer",), lars_sweeps, peers={
        "timm": Peer("timm.optim", "Lars", _SGD),
        "pytorch_optimizer": Peer("pytorch_optimizer", "LARS", _SGD),
    }),
}  # fmt: skip


def our_optimizer(family: Family, params: Sequence[nn.Parameter], **more: Any) -> Optimizer:
    """One of ours, with the family's arguments."""
    optimizer: Optimizer = getattr(optimizers, family.ours)(params, **family.arguments, **more)
    return optimizer


def sweeps_of(family: Family, optimizer: Optimizer, weights: Lists) -> list[Sweep]:
    """What a step reads and writes; ``weights`` are the parameters, and their masters if they have some."""
    params = weights[0]
    grads = [p.grad for p in params if p.grad is not None]
    states: Lists = [[optimizer.state[p][name] for p in params] for name in family.states]
    return family.sweeps(weights, [grads], states)


def roofline(family: Family, optimizer: Optimizer, weights: Lists, threads: int) -> tuple[Contender, int]:
    """Moves what the optimizer moves, and says how many bytes that is for an element."""
    sweeps = sweeps_of(family, optimizer, weights)
    return Contender(ROOF, traffic(sweeps, threads)), bytes_of(sweeps)
