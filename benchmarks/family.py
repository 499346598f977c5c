"""Every fused optimizer on the CPU: beside its peers, and the roofline of its own traffic."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from benchmarks.common import Contender, Result, race
from benchmarks.report import Report
from lightning_apex.cli.benching.buffers import Buffers
from lightning_apex.cli.benching.families import FAMILIES, FUSED, ROOF, our_optimizer, roofline
from lightning_apex.cli.benching.peers import Peer
from lightning_apex.cli.benching.race import OURS
from lightning_apex.cli.benching.shapes import Shapes
from lightning_apex.masters import MasterWeights
from lightning_apex.optimizers._base import StepInputs

COMPOSITION = "torch composition"
Goals = tuple[float, float]
ROOF_GOALS: dict[str, Goals] = {"LAMB": (0.92, 0.95), "NovoGrad": (0.90, 0.95), "LARS": (0.92, 0.95)}
ROOF_GOAL: Goals = (0.95, 1.0)  # of the others
# How much faster than a peer ours should be, in fp32.
GOALS: dict[tuple[str, str], Goals] = {
    ("AdamW", FUSED): (1.25, 1.35),
    ("AdamW", "torch for-loop"): (3.5, 4.1),
    ("AdamW", "torch foreach"): (4.0, 4.5),
    ("AdamW", "DeepSpeed"): (1.25, 1.4),
    ("SGD", FUSED): (1.3, 1.35),
    ("Adagrad", FUSED): (1.3, 1.35),
    ("LAMB", "timm"): (8.0, 9.0),
    ("LAMB", "pytorch_optimizer"): (6.0, 6.5),
    ("NovoGrad", "timm"): (4.8, 5.5),
}
HALF_GOALS: Goals = (2.0, 2.2)  # against torch fused, all in bf16
SMALL_GOALS: Goals = (3.0, 8.0)  # against the quickest peer, on tensors so small that bytes do not count


def compare(
    row: str, report: Report, ours: Contender, roof: tuple[Contender, int] | None, made: Sequence[Contender],
    roof_goals: Goals | None, goals: dict[str, Goals], rounds: int,
) -> None:  # fmt: skip
    contenders = [ours, *([roof[0]] if roof else []), *made]
    result = race(contenders, rounds)
    figures = []
    if roof is not None:
        share = result.ratio(ROOF, OURS)
        figures.append(Result(row, f"of roofline at {roof[1]} B", share, *(roof_goals or ())))
    for contender in made:
        ratio = result.ratio(contender.name, OURS)
        figures.append(Result(row, f"× {contender.name}", ratio, *goals.get(contender.name, ())))
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
    roof = roofline(family, optimizer, [buffers.params], report.options.threads)
    made = start(row, report, family.peers, buffers.params)
    goals = {peer: goal for (of, peer), goal in GOALS.items() if of == name}
    ours = Contender(OURS, optimizer.step)
    compare(row, report, ours, roof, made, ROOF_GOALS.get(name, ROOF_GOAL), goals, rounds)


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
    roof = roofline(family, optimizer, [halves, [p.detach() for p in buffers.params]], report.options.threads)
    made = []
    if family.torch is not None:
        peer = Peer("torch.optim", family.torch, family.arguments | {"fused": True})
        made = [Contender(COMPOSITION, _composition(peer, buffers, halves))]
    compare(row, report, Contender(OURS, ours), roof, made, None, {}, rounds)


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
    roof = roofline(family, optimizer, [halves], report.options.threads)
    peers = {}
    if family.torch is not None:
        peers[FUSED] = Peer("torch.optim", family.torch, family.arguments | {"fused": True})
    made = start(row, report, peers, halves)
    compare(row, report, Contender(OURS, optimizer.step), roof, made, None, {FUSED: HALF_GOALS}, rounds)


def many(row: str, name: str, chosen: Shapes, report: Report, rounds: int) -> None:
    """Tensors so small that a step's cost is not bytes."""
    family, buffers = FAMILIES[name], Buffers(chosen, moments=False)
    optimizer = our_optimizer(family, buffers.params)
    optimizer.step()
    peers = {FUSED: Peer("torch.optim", family.torch or "", family.arguments | {"fused": True})}
    if family.torch is None:
        peers = {name: peer for name, peer in family.peers.items() if peer.module.startswith("timm")}
    made = start(row, report, peers, buffers.params)
    goals = dict.fromkeys([FUSED] if family.torch is not None else [], SMALL_GOALS)
    compare(row, report, Contender(OURS, optimizer.step), None, made, None, goals, rounds)
