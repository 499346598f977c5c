"""Whole training steps: at our opt levels, and in torch's own precisions."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import AdamW

from benchmarks.common import Contender
from benchmarks.models import Task
from lightning_apex import FusedAdam, LossScaler
from lightning_apex.engine import PrecisionEngine
from lightning_apex.levels import resolve

FP32, AUTOCAST, PURE = "torch fp32", "torch autocast bf16", "torch pure bf16"
AUTOCAST_FP16 = "torch autocast fp16"
# Lightning's names for the same, and for fp16 weights.
_SAME = {"32-true": FP32, "16-mixed": AUTOCAST_FP16, "bf16-mixed": AUTOCAST, "bf16-true": PURE}
_WEIGHTS = {PURE: torch.bfloat16, "16-true": torch.float16}
Step = Callable[[], None]


class LevelStep:
    """One training step at an opt level, as the precision plugin makes it, without a Trainer around it."""

    def __init__(self, level: str, task: Task, device: str = "cpu", half_dtype: torch.dtype | None = None) -> None:
        torch.manual_seed(0)
        make, self.loss = task
        self.model = make()
        row = resolve(level, half_dtype=half_dtype).on(device)
        self.engine = PrecisionEngine(row, LossScaler(row.loss_scale))
        self.engine.convert(self.model, device)
        self.optimizer = FusedAdam(self.model.parameters(), lr=1e-4)
        self.engine.adopt([self.optimizer])

    def __call__(self) -> None:
        self.backward()
        self.update()

    def backward(self) -> None:
        self.optimizer.zero_grad()
        with self.engine.forward_context():
            loss = self.loss(self.model)
        with self.engine.backward_context():
            self.engine.scale(loss).backward()

    def update(self) -> None:
        if self.engine.steps_itself:
            self.engine.finish(self.optimizer)
        else:
            self.optimizer.step()

    def tensors(self) -> Iterable[Tensor]:
        """Weights, gradients, masters and optimizer state."""
        for param in self.model.parameters():
            yield param
            if param.grad is not None:
                yield param.grad
            if self.engine.masters is not None and param in self.engine.masters:
                yield self.engine.masters.of(param)
            yield from self.optimizer.state[param].values()


def torch_step(precision: str, task: Task, device: str = "cpu") -> Step:
    """The same step in torch's own precision, with torch's fused AdamW."""
    torch.manual_seed(0)
    make, loss_of = task
    precision = _SAME.get(precision, precision)
    model = make().to(_WEIGHTS.get(precision, torch.float32))
    optimizer = AdamW(model.parameters(), lr=1e-4, fused=True)
    half = {AUTOCAST: torch.bfloat16, AUTOCAST_FP16: torch.float16}.get(precision)
    scaler = torch.amp.GradScaler(device, enabled=precision == AUTOCAST_FP16)

    def step() -> None:
        optimizer.zero_grad()
        with nullcontext() if half is None else torch.autocast(device, half):
            loss = loss_of(model)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def contenders(task: Task, levels: Iterable[str], device: str = "cpu") -> list[Contender]:
    ours = [Contender(level, LevelStep(level, task, device)) for level in levels]
    return ours + [Contender(name, torch_step(name, task, device)) for name in (FP32, AUTOCAST, PURE)]


def peak_bytes_per_parameter(step: LevelStep) -> tuple[float, float]:
    """Bytes that live through an optimizer step, and the most that it held at once, a parameter."""
    step()  # makes the state
    step.backward()
    elements = sum(p.numel() for p in step.model.parameters())
    held = sum({t.data_ptr(): t.untyped_storage().nbytes() for t in step.tensors() if t.numel()}.values())
    return held / elements, (held + max(0, growth_during(step.update))) / elements


def growth_during(work: Step) -> int:
    """How far the process's resident memory rises above where it is; 0 where the system does not tell."""
    try:
        # Blocks above this size then come from the system and go back to it, so that none of them hides in the heap.
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 16)
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    except (OSError, AttributeError):
        work()
        return 0
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


_MMAP_THRESHOLD = -3


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])
