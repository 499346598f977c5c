"""Models and data that the tests of the program train, named as ``compare_models.py:Class``."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Data(LightningDataModule):
    def __init__(self, batches: int = 4, batch_size: int = 8) -> None:
        super().__init__()
        self.rows = batches * batch_size
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        inputs = torch.randn(self.rows, 6, generator=torch.Generator().manual_seed(5))
        return DataLoader(TensorDataset(inputs, inputs[:, :2].abs()), self.batch_size, shuffle=True)


class Empty(LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader([])


class Bare(LightningModule):
    """Its optimizer, if any, is the config's."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 2))
        self.calls = 0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.calls += 1
        return F.mse_loss(self.net(batch[0]), batch[1])


class Net(Bare):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)

    @property
    def is_half(self) -> bool:
        return self.net[0].weight.dtype is not torch.float32


class Plain(Bare):
    """Unlike Adam, its optimizer feels the size of a gradient."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=2.0)


class NoOptimizer(Net):
    def configure_optimizers(self) -> None:
        return None


class Overflows(Net):
    """Its gradients are not finite at the third step, where a loss scale is."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * (float("inf") if self.calls == 3 and self.trainer.scaler.is_enabled() else 1.0)


class NotANumber(Net):
    """Its outputs are NaN from the first step on."""

    def __init__(self) -> None:
        super().__init__()
        torch.nn.init.constant_(self.net[0].bias, float("nan"))


class Silent(Net):
    """Optimizes by hand, and neither returns nor logs a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()


class ReturnsNone(Net):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        return None


class Diverges(Net):
    """Its loss is NaN from the fourth step on, where weights are half."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.calls > 3 and self.is_half else loss


class Breaks(Net):
    """Where weights are half, the second step fails."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.is_half and self.calls == 2:
            raise ValueError("half weights are not for me\n\nand more that nobody needs")
        return loss


class Hungry(Net):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        torch.empty(2**60, dtype=torch.uint8)


class Killed(Net):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.is_half and self.calls == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss


class MadeOnTheGPU(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = self.net.cuda()


class RunsOnTheGPU(Net):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return self.net(batch[0].cuda()).sum()


class TwoByHand(Net):
    """Two optimizers, the second every other batch; logs its losses and returns none."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(6, 2)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        for number, (net, optimizer) in enumerate(((self.net, first), (self.other, second))):
            if number and batch_idx % 2:
                continue
            loss = F.mse_loss(net(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.log(f"part{number}", loss)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(net.parameters(), lr=1e-2) for net in (self.net, self.other)]


class Remembers(Callback):
    """A user's callback: writes down the Trainer's batches."""

    seen: list[int] = []  # noqa: RUF012

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        self.seen.append(trainer.global_step)
