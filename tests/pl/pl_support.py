"""One model and one way to train it, in each of Lightning's packages."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import lightning.pytorch
import pytorch_lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_apex
import lightning_apex.pl

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
# A package of Lightning's, and ours for it.
PACKAGES = {
    "lightning": (lightning.pytorch, lightning_apex),
    "pytorch_lightning": (pytorch_lightning, lightning_apex.pl),
}


class Steps:
    """What a LightningModule of either package does."""

    def __init__(self, lr: float = 0.05, optimizer: Any = None, overflow_at: tuple[int, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        self.lr, self.make, self.overflow_at = lr, optimizer or torch.optim.SGD, overflow_at
        self.seen, self.losses = 0, []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        self.seen += 1
        return loss * torch.inf if self.seen - 1 in self.overflow_at else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.parameters(), lr=self.lr)


class OldNet(Steps, pytorch_lightning.LightningModule):
    pass


class NewNet(Steps, lightning.pytorch.LightningModule):
    pass


NETS = {"lightning": NewNet, "pytorch_lightning": OldNet}


def batches(count: int = 4, size: int = 8) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    x, y = (torch.randn(count * size, n, generator=generator) for n in (8, 3))
    return DataLoader(TensorDataset(x, y), size)


def plugin(ours: ModuleType, level: str, **options: Any) -> Any:
    if level in ("O1", "O2", "O3"):
        options.setdefault("half_dtype", "bfloat16")
    return ours.ApexPrecision(level, **options)


def trainer(package: str, level: str, options: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    top, ours = PACKAGES[package]
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    plugins = [plugin(ours, level, **(options or {})), *kwargs.pop("plugins", ())]
    defaults = {"accelerator": "cpu", "devices": 1, "max_epochs": 1}
    return top.Trainer(**quiet | defaults | kwargs, plugins=plugins)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert torch.equal(actual[name], value), name
