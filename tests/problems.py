"""Calls of the fused step: made up, made, and compared with the float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import reference
import torch
from cases import BF16, F32, F64, LAYOUTS, STEP_DTYPES, assert_close, same_bits
from kernels import Kernels
from torch import Tensor

from lightning_apex import ops

TABLE = {row["name"]: row for row in ops.optimizer_table()}


SIGNED_STATES = ("exp_avg", "momentum_buffer")  # any other may be under a root


@dataclass
class Problem:
    """The arguments of one call of fused_step_, by name."""

    name: str
    hypers: dict[str, float]
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    masters: list[Tensor] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)

    @property
    def written(self) -> list[Tensor]:
        return [*self.params, *self.masters, *self.states, *self.steps]

    def clone(self) -> Problem:
        lists = ("params", "grads", "masters", "states", "steps")
        return replace(self, **{name: [t.clone() for t in getattr(self, name)] for name in lists})

    def step(self, backend: Kernels, **controls: Any) -> Problem:
        hypers = [self.hypers[name] for name in TABLE[self.name]["hypers"]]
        lists = (self.params, self.grads, self.masters, self.states, self.steps)
        optional = [controls.get(name) for name in ("lr", "multiplier", "found_inf", "norms")]
        backend.fused_step_(self.name, *lists, hypers, *optional)
        return self

    def norms(self, backend: Kernels, **controls: Any) -> Tensor:
        """The first pass alone."""
        hypers = [self.hypers[name] for name in TABLE[self.name]["hypers"]]
        lists = (self.params, self.grads, self.masters, self.states, self.steps)
        result: Tensor = backend.fused_norms_(
            self.name, *lists, hypers, *[controls.get(name) for name in ("lr", "multiplier", "found_inf")]
        )
        return result

    def reference_of(self, i: int, after: Problem, of: Callable[..., Any], factor: float, **changed: float) -> Any:
        """Calls a function of tests/reference with all that belongs to tensor i, in float64."""
        n = len(self.params)
        value = (self.masters or self.params)[i].cpu().double()
        states = [state.cpu().double() for state in self.states[i::n]]
        options = {}
        if self.name == "lamb":
            half = self.states[i].dtype == BF16
            options["stored"] = lambda state, k: after.states[k * n + i].cpu().double() if half else state
        grad, t = self.grads[i].cpu().double() * factor, int(self.steps[i].item()) + 1
        return of(value, grad, states, t, self.hypers | changed, **options)


def problem(
    name: str, hypers: dict[str, float], shapes: list[tuple[int, ...]], dtypes: tuple[Any, ...] = STEP_DTYPES[0],
    done: int = 3, device: str = "cpu", layouts: list[str] | None = None,
) -> Problem:  # fmt: skip
    """Random values; `done` steps behind them. The layouts go round, differently for each list."""
    param_dtype, grad_dtype, state_dtype, has_masters = dtypes
    names = layouts or ["contiguous"]

    def fill(dtype: torch.dtype, shift: int, positive: bool = False) -> list[Tensor]:
        values = [torch.randn(shape, dtype=F64) for shape in shapes]
        values = [v.abs() * 0.1 if positive else v for v in values]
        return [LAYOUTS[names[(i + shift) % len(names)]](v.to(device, dtype)) for i, v in enumerate(values)]

    p = Problem(name, hypers, grads=fill(grad_dtype, 1))
    if has_masters:
        p.masters = fill(F32, 2)
        p.params = [LAYOUTS[names[i % len(names)]](m.to(param_dtype)) for i, m in enumerate(p.masters)]
    else:
        p.params = fill(param_dtype, 0)
    for i, state in enumerate(TABLE[name]["states"]):
        p.states += fill(state_dtype, i, positive=state not in SIGNED_STATES)
    for _ in TABLE[name]["tensor_states"]:
        dtype = F64 if param_dtype == F64 else F32
        p.states += [torch.rand((), dtype=dtype, device=device) for _ in shapes]
    p.steps = [torch.tensor(float(done), device=device) for _ in shapes]
    return p


def assert_is_reference(after: Problem, before: Problem, factor: float = 1.0, **changed: float) -> None:
    """Every written value is what the float64 reference makes of the values before."""
    n = len(before.params)
    for i in range(n):
        update = reference.OPTIMIZERS[before.name]
        value, states = before.reference_of(i, after, update, factor, **changed)
        where = f"{before.name} {before.hypers} tensor {i} {tuple(value.shape)}"
        if before.masters:
            assert_close(after.masters[i], value, f"{where} master")
            assert torch.equal(after.params[i], after.masters[i].to(after.params[i].dtype))
        assert_close(after.params[i], value, f"{where} param")
        for s, state in enumerate(states):
            assert_close(after.states[s * n + i], state, f"{where} state {s}")
        assert same_bits(after.grads[i], before.grads[i])
        assert after.steps[i].item() == before.steps[i].item() + 1
