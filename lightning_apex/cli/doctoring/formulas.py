"""One optimizer step in float64, from the papers' formulas: what the doctor compares the kernels with.

An optimizer without a formula here is compared with its own kernel on float64 tensors, in the portable build.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Hypers = dict[str, float]
Formula = Callable[[Tensor, Tensor, list[Tensor], float, Hypers], tuple[Tensor, list[Tensor]]]

_STEPS_DONE = 3
# A flag that is not here is 0, and so is the momentum of an optimizer without a buffer.
_VALUES = {
    "lr": 0.05,
    "beta1": 0.9,
    "beta2": 0.99,
    "eps": 1e-6,
    "weight_decay": 0.1,
    "adam_w_mode": 1.0,
    "bias_correction": 1.0,
    "grad_averaging": 1.0,
    "norm_type": 2.0,
    "trust_coefficient": 0.1,
}
_OF_MOMENTUM = {"momentum": 0.9, "dampening": 0.3}


@dataclass
class StepCase:
    """The arguments of one call of ``fused_step_``."""

    row: dict[str, Any]
    hypers: Hypers
    params: list[Tensor]
    grads: list[Tensor]
    states: list[Tensor]
    steps: list[Tensor]

    @classmethod
    def random(cls, row: dict[str, Any], shapes: Sequence[tuple[int, ...]]) -> StepCase:
        """Values in float64 that fp32 holds exactly; states of squares are positive."""
        values = _VALUES | (_OF_MOMENTUM if "momentum_buffer" in row["states"] else {})
        hypers = {name: values.get(name, 0.0) for name in row["hypers"]}

        def draw(shape: tuple[int, ...], positive: bool) -> Tensor:
            value = torch.randn(shape)
            return (0.1 * value.square() if positive else value).double()

        positive = {name: name not in ("exp_avg", "momentum_buffer") for name in row["states"]}
        states = [draw(shape, positive[name]) for name in row["states"] for shape in shapes]
        states += [draw((), True) for _ in row["tensor_states"] for _ in shapes]
        params, grads = [draw(shape, False) for shape in shapes], [draw(shape, False) for shape in shapes]
        steps = [torch.tensor(float(_STEPS_DONE)) for _ in shapes]
        return cls(row, hypers, params, grads, states, steps)

    def to(self, device: torch.device, dtype: torch.dtype) -> StepCase:
        """A copy."""

        def copied(tensors: list[Tensor]) -> list[Tensor]:
            return [t.to(device, dtype, copy=True) for t in tensors]

        steps = [t.to(device, copy=True) for t in self.steps]
        return StepCase(self.row, self.hypers, copied(self.params), copied(self.grads), copied(self.states), steps)

    def step(self, in_two_passes: bool = False) -> None:
        """Runs the kernel."""
        from lightning_apex import ops

        masters: list[Tensor] = []
        hypers = [self.hypers[name] for name in self.row["hypers"]]
        lists = (self.params, self.grads, masters, self.states, self.steps, hypers)
        norms = ops.fused_norms_(self.row["name"], *lists) if in_two_passes else None
        ops.fused_step_(self.row["name"], *lists, norms=norms)

    def written(self) -> list[Tensor]:
        """What a step writes."""
        return [*self.params, *self.states, *self.steps]

    def reference(self) -> list[Tensor]:
        """What it should write."""
        formula = FORMULAS.get(self.row["name"])
        if formula is None:
            return self._own_kernel()
        n = len(self.params)
        results = [
            formula(self.params[i], self.grads[i], self.states[i::n], _STEPS_DONE + 1.0, self.hypers) for i in range(n)
        ]
        states = [results[i][1][k] for k in range(len(self.states) // n) for i in range(n)]
        return [*(param for param, _ in results), *states, *(t + 1 for t in self.steps)]

    def _own_kernel(self) -> list[Tensor]:
        from lightning_apex import ops

        before, case = ops.cpu_backend(), self.to(torch.device("cpu"), torch.float64)
        ops.set_cpu_backend("portable")
        try:
            case.step()
        finally:
            ops.set_cpu_backend(before)
        return case.written()


def _moments(g: Tensor, states: list[Tensor], h: Hypers) -> tuple[Tensor, Tensor]:
    b1, b2 = h["beta1"], h["beta2"]
    return b1 * states[0] + (1 - b1) * g, b2 * states[1] + (1 - b2) * g * g


def _adam(p: Tensor, g: Tensor, states: list[Tensor], t: float, h: Hypers) -> tuple[Tensor, list[Tensor]]:
    m, v = _moments(g, states, h)
    seconds = [v, torch.maximum(states[2], v)] if len(states) == 3 else [v]
    root = (seconds[-1] / (1 - h["beta2"] ** t)).sqrt() + h["eps"]
    return p * (1 - h["lr"] * h["weight_decay"]) - h["lr"] * (m / (1 - h["beta1"] ** t)) / root, [m, *seconds]


def _sgd(p: Tensor, g: Tensor, states: list[Tensor], t: float, h: Hypers) -> tuple[Tensor, list[Tensor]]:
    step = g + h["weight_decay"] * p
    if states:
        step = h["momentum"] * states[0] + (1 - h["dampening"]) * step
    return p - h["lr"] * step, [step] if states else []


def _adagrad(p: Tensor, g: Tensor, states: list[Tensor], t: float, h: Hypers) -> tuple[Tensor, list[Tensor]]:
    g = g + h["weight_decay"] * p
    total = states[0] + g * g
    return p - h["lr"] * g / (total.sqrt() + h["eps"]), [total]


def _lion(p: Tensor, g: Tensor, states: list[Tensor], t: float, h: Hypers) -> tuple[Tensor, list[Tensor]]:
    blend, m = (h[beta] * states[0] + (1 - h[beta]) * g for beta in ("beta1", "beta2"))
    return p - h["lr"] * (blend.sign() + h["weight_decay"] * p), [m]


def _lamb(p: Tensor, g: Tensor, states: list[Tensor], t: float, h: Hypers) -> tuple[Tensor, list[Tensor]]:
    m, v = _moments(g, states, h)
    root = (v / (1 - h["beta2"] ** t)).sqrt() + h["eps"]
    step = m / (1 - h["beta1"] ** t) / root + h["weight_decay"] * p
    return p - h["lr"] * p.norm() / step.norm() * step, [m, v]


def _novograd(p: Tensor, g: Tensor, states: list[Tensor], t: float, h: Hypers) -> tuple[Tensor, list[Tensor]]:
    m, v = _moments(g, [states[0], torch.zeros(())], h)[0], h["beta2"] * states[1] + (1 - h["beta2"]) * (g * g).sum()
    root = (v / (1 - h["beta2"] ** t)).sqrt() + h["eps"]
    return p - h["lr"] * (m / (1 - h["beta1"] ** t) / root + h["weight_decay"] * p), [m, v]


def _lars(p: Tensor, g: Tensor, states: list[Tensor], t: float, h: Hypers) -> tuple[Tensor, list[Tensor]]:
    trust = h["trust_coefficient"] * p.norm() / (g.norm() + h["weight_decay"] * p.norm() + h["eps"])
    return _sgd(p, trust * g, states, t, h | {"weight_decay": float(trust) * h["weight_decay"]})


FORMULAS: dict[str, Formula] = {
    "adam": _adam,
    "adam_amsgrad": _adam,
    "sgd": _sgd,
    "sgd_momentum": _sgd,
    "adagrad": _adagrad,
    "lion": _lion,
    "lamb": _lamb,
    "novograd": _novograd,
    "lars": _lars,
    "lars_momentum": _lars,
}
