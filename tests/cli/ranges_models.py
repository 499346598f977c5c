"""Small LightningModules whose values leave fp16's range in a known place."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


class Times(nn.Module):
    """Multiplies by a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Numbers(LightningDataModule):
    def __init__(self, batches: int = 8) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(8 * self.batches, 6, generator=generator)
        return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), 8)


class Plain(LightningModule):
    """Nothing unusual; its subclasses change one thing each."""

    loss_factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), self.block(), nn.Linear(16, 3))

    def block(self) -> nn.Module:
        return nn.ReLU()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y) * self.loss_factor

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Overflowing(Plain):
    """An activation of 1e5 that a LayerNorm brings back."""

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), Times(1e5), nn.LayerNorm(16))


class Stuck(Plain):
    """An activation of 1e6 that comes back outside of every module."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 3), Times(1e6))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x) * 1e-6, y)


class Tiny(Plain):
    """Gradients around 1e-9."""

    loss_factor = 1e-8


class Odd(LightningModule):
    """A recurrent module, tied weights, a checkpointed block, one module called twice and one never; by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.lstm = nn.Linear(6, 5), nn.LSTM(5, 5, batch_first=True)
        self.tied, self.unused, self.head = nn.Linear(6, 5), nn.Linear(2, 2), nn.Linear(5, 3)
        self.tied.weight = self.first.weight

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        steps = torch.stack([self.first(x), self.first(-x), self.tied(x)], 1)
        out, _ = checkpoint(self.lstm, steps, use_reentrant=False)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.head(out[:, -1]), y))
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class NotANumber(Plain):
    loss_factor = float("nan")


class ReturnsNone(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)


class CallsNothing(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        return None


class Raising(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise RuntimeError("the shapes are wrong\n\nlong story")


class Interrupted(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise KeyboardInterrupt
