"""Callbacks that look at a running training: its losses, the time of its steps, and the memory its tensors hold."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_apex import ApexPrecision


@dataclass
class Memory:
    """Bytes per parameter, as the live tensors add up; masters count once."""

    weights: float
    gradients: float
    masters: float
    moments: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.masters + self.moments


def measure_memory(model: nn.Module, trainer: Trainer) -> Memory:
    """Walks parameters, their gradients, their fp32 masters and the optimizers' state."""
    params = [p for p in model.parameters() if p.requires_grad]
    masters = trainer.precision_plugin.masters if isinstance(trainer.precision_plugin, ApexPrecision) else None
    states = [
        value for optimizer in trainer.optimizers for state in optimizer.state.values() for value in state.values()
    ]
    elements = sum(p.numel() for p in params)
    return Memory(
        weights=_bytes(params) / elements,
        gradients=_bytes(p.grad for p in params if p.grad is not None) / elements,
        masters=_bytes(masters.of(p) for p in params if masters is not None and p in masters) / elements,
        moments=_bytes(value for value in states if isinstance(value, Tensor)) / elements,
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@dataclass(eq=False)
class Watch(Callback):
    """Keeps what the table and the picture show; calls ``on_step`` so that someone can draw a progress line."""

    on_step: Callable[[int, float], None] = lambda step, loss: None
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    memory: Memory | None = None
    compute_dtype: torch.dtype = torch.float32

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        convolution = next(m for m in pl_module.modules() if isinstance(m, nn.Conv2d))
        self._hook = convolution.register_forward_hook(self._note_dtype)

    def _note_dtype(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if module.training:
            self.compute_dtype = output.dtype

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        _wait(pl_module.device)
        self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        _wait(pl_module.device)
        self.seconds.append(time.perf_counter() - self._start)
        self.losses.append(float(outputs["loss"]))
        self.on_step(len(self.losses), self.losses[-1])
        if trainer.is_last_batch:  # the step's gradients are still there: this is all that it held at once
            self.memory = measure_memory(pl_module, trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._hook.remove()

    def median_step(self, warm_up: int = 3) -> float:
        """Seconds, without the first steps."""
        return median(self.seconds[warm_up:] or self.seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
