"""The small model and data that pages assume, where they do not show one."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_apex import FusedAdam


def loader(batches: int = 4, batch_size: int = 8) -> DataLoader[tuple[Tensor, ...]]:
    """Batches of a problem that a small network learns."""
    made = torch.Generator().manual_seed(0)
    x = torch.randn(batches * batch_size, 8, generator=made)
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


class WithoutOptimizer(LightningModule):
    """Its configure_optimizers is the CLI's to add."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


class Model(WithoutOptimizer):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return FusedAdam(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return loader()


class Data(LightningDataModule):
    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return loader()
