"""Runs every kernel once on small tensors, and compares with float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lightning_apex.cli.doctoring import formulas
from lightning_apex.cli.doctoring.findings import KernelResult
from lightning_apex.cli.doctoring.operators import OPERATORS, SHAPES, worst


@dataclass(frozen=True)
class Check:
    """One kernel.

    Attributes:
        op: The operator in ``torch.ops.lightning_apex``.
        run: Runs it on a device and returns the largest difference.
        detail: The optimizer, where it is one's.
    """

    op: str
    run: Callable[[torch.device], float]
    detail: str = ""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.op} {self.detail}".rstrip()


def places(backends: tuple[str, ...]) -> list[tuple[str, torch.device, str | None]]:
    """Where kernels can run: name, device, and the CPU's instruction set."""
    found: list[tuple[str, torch.device, str | None]] = [
        (f"cpu ({backend})", torch.device("cpu"), backend) for backend in backends
    ]
    from lightning_apex import ops

    if ops.has_cuda() and torch.cuda.is_available():
        found += [(f"cuda:{i}", torch.device("cuda", i), None) for i in range(torch.cuda.device_count())]
    return found


def run(check: Check, where: str, device: torch.device, backend: str | None) -> KernelResult:
    """Runs one check; whatever goes wrong is the result."""
    try:
        # Not the caller's random numbers: they are as they were afterwards.
        with torch.random.fork_rng(devices=[]), _cpu_backend(backend):
            torch.manual_seed(0)
            error = check.run(device)
    except Exception as problem:
        words = " ".join(str(problem).split())
        return KernelResult(check.name, where, None, f"{type(problem).__name__}: {words[:200]}")
    return KernelResult(check.name, where, error)


@contextmanager
def _cpu_backend(name: str | None) -> Iterator[None]:
    from lightning_apex import ops

    before = ops.cpu_backend()
    if name is not None:
        ops.set_cpu_backend(name)
    try:
        yield
    finally:
        ops.set_cpu_backend(before)


def all_checks() -> list[Check]:
    """Every operator, and every optimizer of the two that make steps."""
    from lightning_apex import ops

    checks = [Check(name, function) for name, function in OPERATORS.items()]
    for row in ops.optimizer_table():
        checks.append(Check("fused_step_", partial(_step, row, False), row["name"]))
        if row["n_norms"]:
            checks.append(Check("fused_norms_", partial(_step, row, True), row["name"]))
    return checks


def _step(row: dict[str, Any], in_two_passes: bool, device: torch.device) -> float:
    """One step of an optimizer on fp32 tensors, against its formula."""
    case = formulas.StepCase.random(row, SHAPES)
    expected = case.reference()
    actual = case.to(device, torch.float32)
    actual.step(in_two_passes)
    return worst(list(zip(actual.written(), expected, strict=True)))
