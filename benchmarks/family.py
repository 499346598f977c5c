"""Every fused optimizer on the CPU: beside its peers, and the roofline of its own traffic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.common import Contender, Options, Result, race
from benchmarks.contenders import DEFAULT, FOREACH, FUSED, OURS, Buffers
from benchmarks.peers import Peer
from benchmarks.report import Report
from benchmarks.roofline import Stream, Sweep, bytes_of, traffic
from benchmarks.shapes import Shapes
from lightning_apex import optimizers
from lightning_apex.masters import MasterWeights
from lightning_apex.optimizers._base import StepInputs

ROOF = "roofline"
COMPOSITION = "torch composition"
_DECAY: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}
_SGD: dict[str, Any] = _DECAY | {"momentum": 0.9}
Lists = list[Sequence[Tensor]]


def _read(lists: Lists) -> list[Stream]:
    return [Stream(tensors) for tensors in lists]


def _written(lists: Lists) -> list[Stream]:
    return [Stream(tensors, written=True) for tensors in lists]


def one_sweep(weights: Lists, grads: Lists, states: Lists) -> list[Sweep]:
    return [_read(grads) + _written(weights + states)]


def lamb_sweeps(weights: Lists, grads: Lists, states: Lists) -> list[Sweep]:
    return [_read(weights + grads) + _written(states), _read(states) + _written(weights)]


def novograd_sweeps(weights: Lists, grads: Lists, states: Lists) -> list[Sweep]:
    return [_read(grads), _read(grads) + _written(weights + states)]


def lars_sweeps(weights: Lists, grads: Lists, states: Lists) -> list[Sweep]:
    return [_read(weights + grads), _read(grads) + _written(weights + states)]


@dataclass(frozen=True)
class Family:
    """One of ours.

    Attributes:
        ours: The class.
        arguments: Its arguments.
        states: Its states of one number an element.
        roof: The goals as shares of the roofline.
        sweeps: What its step reads and writes, sweep by sweep.
        torch: Its class in torch.optim, if torch has a fused one.
        peers: Others by the names that reports give them.
    """

    ours: str
    arguments: dict[str, Any]
    states: tuple[str, ...]
    roof: tuple[float, float] = (0.95, 1.0)
    sweeps: Callable[[Lists, Lists, Lists], list[Sweep]] = one_sweep
    torch: str | None = None
    peers: dict[str, Peer] = field(default_factory=dict)


def _of_torch(kind: str, arguments: dict[str, Any], **goals: tuple[float, float]) -> dict[str, Peer]:
    how = {FUSED: {"fused": True}, DEFAULT: {"foreach": False}, FOREACH: {"foreach": True}}
    keys = {FUSED: "fused", DEFAULT: "default", FOREACH: "foreach"}
    return {
        name: Peer("torch.optim", kind, arguments | flags, *goals.get(keys[name], ())) for name, flags in how.items()
    }


FAMILIES: dict[str, Family] = {
    "AdamW": Family("FusedAdam", _DECAY, ("exp_avg", "exp_avg_sq"), torch="AdamW", peers={
        **_of_torch("AdamW", _DECAY, fused=(1.25, 1.35), default=(3.5, 4.1), foreach=(4.0, 4.5)),
        "DeepSpeed": Peer("deepspeed.ops.adam", "DeepSpeedCPUAdam", _DECAY, 1.25, 1.4),
        "optimi": Peer("optimi", "AdamW", _DECAY),
        "bitsandbytes 8 bit": Peer("bitsandbytes.optim", "AdamW8bit", _DECAY),
    }),
    "SGD": Family("FusedSGD", _SGD, ("momentum_buffer",), torch="SGD", peers={
        **_of_torch("SGD", _SGD, fused=(1.3, 1.35)),
        "optimi": Peer("optimi", "SGD", _SGD),
    }),
    "Adagrad": Family("FusedAdagrad", _DECAY, ("sum",), torch="Adagrad", peers={
        **_of_torch("Adagrad", _DECAY, fused=(1.3, 1.35)),
        "DeepSpeed": Peer("deepspeed.ops.adagrad", "DeepSpeedCPUAdagrad", _DECAY),
    }),
    "Lion": Family("FusedLion", _DECAY, ("exp_avg",), peers={
        "timm": Peer("timm.optim", "Lion", _DECAY),
        "pytorch_optimizer": Peer("pytorch_optimizer", "Lion", _DECAY),
        "optimi": Peer("optimi", "Lion", _DECAY),
        "bitsandbytes 8 bit": Peer("bitsandbytes.optim", "Lion8bit", _DECAY),
    }),
    "LAMB": Family("FusedLAMB", _DECAY | {"max_grad_norm": None}, ("exp_avg", "exp_avg_sq"), (0.92, 0.95), lamb_sweeps,
                   peers={
        "timm": Peer("timm.optim", "Lamb", _DECAY | {"max_grad_norm": None}, 8.0, 9.0),
        "pytorch_optimizer": Peer("pytorch_optimizer", "Lamb", _DECAY | {"max_grad_norm": 0.0}, 6.0, 6.5),
    }),
    "NovoGrad": Family("FusedNovoGrad", _DECAY, ("exp_avg",), (0.90, 0.95), novograd_sweeps, peers={
        "timm": Peer("timm.optim", "NvNovoGrad", _DECAY, 4.8, 5.5),
        "pytorch_optimizer": Peer("pytorch_optimizer", "NovoGrad", _DECAY),
    }),
    "LARS": Family("FusedLARS", _SGD, ("momentum_buffer",), (0.92, 0.95), lars_sweeps, peers={
        "timm": Peer("timm.optim", "Lars", _SGD),
        "pytorch_optimizer": Peer("pytorch_optimizer", "LARS", _SGD),
    }),
}  # fmt: skip


def our_optimizer(family: Family, params: Sequence[nn.Parameter], **more: Any) -> Optimizer:
    optimizer: Optimizer = getattr(optimizers, family.ours)(params, **family.arguments, **more)
    return optimizer


def roofline(family: Family, optimizer: Optimizer, weights: Lists, options: Options) -> tuple[Contender, int]:
    """Moves what the optimizer moves, and says how many bytes that is for an element."""
    params = weights[0]
    grads = [p.grad for p in params if p.grad is not None]
    states: Lists = [[optimizer.state[p][name] for p in params] for name in family.states]
    sweeps = family.sweeps(weights, [grads], states)
    return Contender(ROOF, traffic(sweeps, options.threads)), bytes_of(sweeps)


def compare(
    row: str, report: Report, ours: Contender, roof: tuple[Contender, int] | None, peers: dict[str, Peer],
    made: Sequence[Contender], goals: tuple[float, float] | None, rounds: int,
) -> None:  # fmt: skip
    contenders = [ours, *([roof[0]] if roof else []), *made]
    result = race(contenders, rounds)
    figures = []
    if roof is not None:
        share = result.ratio(ROOF, OURS)
        figures.append(Result(row, f"of roofline at {roof[1]} B", share, *(goals or ())))
    for contender in made:
        peer = peers[contender.name]
        ratio = result.ratio(contender.name, OURS)
        figures.append(Result(row, f"× {contender.name}", ratio, peer.must, peer.stretch))
    report.add(row, result, *figures)


def start(row: str, report: Report, peers: dict[str, Peer], params: Sequence[nn.Parameter]) -> list[Contender]:
    """Those peers that are here; a line for each that is not."""
    made = []
    for name, peer in peers.items():
        optimizer, why = peer.first_step(params)
        if optimizer is None:
            report.console.print(f"  {row}: without {name} ({why})", highlight=False, soft_wrap=True)
        else:
            made.append(Contender(name, optimizer.step))
    return made


def fp32(row: str, name: str, chosen: Shapes, report: Report, rounds: int) -> None:
    family, buffers = FAMILIES[name], Buffers(chosen, moments=False)
    optimizer = our_optimizer(family, buffers.params)
    optimizer.step()
    roof = roofline(family, optimizer, [buffers.params], report.options)
    made = start(row, report, family.peers, buffers.params)
    compare(row, report, Contender(OURS, optimizer.step), roof, family.peers, made, family.roof, rounds)


def masters(row: str, name: str, chosen: Shapes, report: Report, rounds: int) -> None:
    """bf16 weights and gradients, fp32 masters and states: the step alone."""
    family, buffers = FAMILIES[name], Buffers(chosen, moments=False)
    halves = [nn.Parameter(p.detach().bfloat16()) for p in buffers.params]
    for half, grad in zip(halves, buffers.grads, strict=True):
        half.grad = grad.bfloat16()
    weights = MasterWeights()
    for half, param in zip(halves, buffers.params, strict=True):
        weights.put(half, param.detach())
    optimizer = our_optimizer(family, halves)

    def ours() -> None:
        optimizer.hand(StepInputs(masters=weights))
        optimizer.step()

    ours()
    roof = roofline(family, optimizer, [halves, [p.detach() for p in buffers.params]], report.options)
    peers, made = {}, []
    if family.torch is not None:
        peers[COMPOSITION] = Peer("torch.optim", family.torch, family.arguments | {"fused": True})
        made = [Contender(COMPOSITION, _composition(peers[COMPOSITION], buffers, halves))]
    compare(row, report, Contender(OURS, ours), roof, peers, made, None, rounds)


def _composition(peer: Peer, buffers: Buffers, halves: list[nn.Parameter]) -> Callable[[], None]:
    """The quickest we know to compose of torch's own: a fused step between foreach copies."""
    optimizer = peer.make(buffers.params)
    assert optimizer is not None
    half_weights, weights = [half.detach() for half in halves], [param.detach() for param in buffers.params]
    half_grads = [half.grad for half in halves]

    def step() -> None:
        torch._foreach_copy_(buffers.grads, half_grads)
        optimizer.step()
        torch._foreach_copy_(half_weights, weights)

    return step


def half_states(row: str, name: str, chosen: Shapes, report: Report, rounds: int) -> None:
    """Everything in bf16, states as well."""
    family, buffers = FAMILIES[name], Buffers(chosen, moments=False)
    halves = [nn.Parameter(p.detach().bfloat16()) for p in buffers.params]
    for half, grad in zip(halves, buffers.grads, strict=True):
        half.grad = grad.bfloat16()
    del buffers
    optimizer = our_optimizer(family, halves, state_dtype=torch.bfloat16)
    optimizer.step()
    roof = roofline(family, optimizer, [halves], report.options)
    peers = {}
    if family.torch is not None:
        peers[FUSED] = Peer("torch.optim", family.torch, family.arguments | {"fused": True}, 2.0, 2.2)
    made = start(row, report, peers, halves)
    compare(row, report, Contender(OURS, optimizer.step), roof, peers, made, None, rounds)


def many(row: str, name: str, chosen: Shapes, report: Report, rounds: int) -> None:
    """Tensors so small that a step's cost is not bytes."""
    family, buffers = FAMILIES[name], Buffers(chosen, moments=False)
    optimizer = our_optimizer(family, buffers.params)
    optimizer.step()
    peers = {FUSED: Peer("torch.optim", family.torch or "", family.arguments | {"fused": True}, 3.0, 8.0)}
    if family.torch is None:
        peers = {name: peer for name, peer in family.peers.items() if peer.module.startswith("timm")}
    made = start(row, report, peers, buffers.params)
    compare(row, report, Contender(OURS, optimizer.step), None, peers, made, None, rounds)
