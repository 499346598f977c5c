"""A user's model and data for the CLI; imports nothing of lightning_apex."""

from __future__ import annotations

import json
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn


class Classifier(LightningModule):
    """A classifier, whose optimizer is the CLI's to add.

    Args:
        width: How wide it is.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))


class Noise(LightningDataModule):
    """Says so when it is asked for data."""

    def prepare_data(self) -> None:
        print("DATA ASKED FOR")

    def train_dataloader(self) -> Any:
        x, y = torch.randn(24, 8), torch.arange(24) % 4
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 8)

    val_dataloader = train_dataloader


def tell(cli: Any) -> None:
    """Prints what came of a command, for the test."""
    trainer = cli.trainer
    plugin = trainer.precision_plugin
    groups = [(type(o).__name__, o.param_groups[0]["lr"], o.defaults) for o in trainer.optimizers]
    outcome = {
        "plugin": f"{type(plugin).__module__}.{type(plugin).__qualname__}",
        "level": getattr(getattr(plugin, "level", None), "name", None),
        "half_dtype": str(getattr(getattr(plugin, "level", None), "half_dtype", None)),
        "keep_fp32": [getattr(k, "__name__", k) for k in getattr(plugin, "keep_fp32", ())],
        "layer_sync": repr(trainer._accelerator_connector._layer_sync),
        "strategy": type(trainer.strategy).__name__,
        "strategy_sync": repr(getattr(trainer.strategy, "_layer_sync", None)),
        "optimizers": [(name, lr, sorted((k, str(v)) for k, v in defaults.items())) for name, lr, defaults in groups],
        "schedulers": [type(config.scheduler).__name__ for config in trainer.lr_scheduler_configs],
        "callbacks": [type(callback).__name__ for callback in trainer.callbacks],
        "steps": trainer.global_step,
    }
    print("OUTCOME", json.dumps(outcome))
