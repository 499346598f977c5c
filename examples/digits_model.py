"""A small ResNet and the handwritten digits it learns: what examples/digits.py trains."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from lightning_apex import FusedAdam


class DigitsData(LightningDataModule):
    """scikit-learn's 1,797 digits, 8x8 grey, enlarged to 32x32; the split and the order are the same in every run."""

    def __init__(self, batch_size: int = 64, validation_share: float = 0.3, seed: int = 0) -> None:
        super().__init__()
        self.batch_size, self.validation_share, self.seed = batch_size, validation_share, seed

    def setup(self, stage: str) -> None:
        pixels, labels = load_digits(return_X_y=True)
        small = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        images = F.interpolate(small, size=32, mode="bilinear", align_corners=False) * 2 - 1
        targets = torch.tensor(labels)
        train, valid = train_test_split(
            range(len(targets)), test_size=self.validation_share, random_state=self.seed, stratify=labels
        )
        self.train, self.valid = (
            TensorDataset(images[train], targets[train]),
            TensorDataset(images[valid], targets[valid]),
        )

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        order = torch.Generator().manual_seed(self.seed)
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True, generator=order)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.valid, 4 * self.batch_size)


class Residual(nn.Module):
    """Two 3x3 convolutions with BatchNorm around a shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride == 2:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def small_resnet(width: int = 32, classes: int = 10) -> nn.Sequential:
    """A ResNet of seven convolutions for 32x32 grey images."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        Residual(width, width),
        Residual(width, 2 * width),
        Residual(2 * width, 4 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, classes),
    )


class DigitsClassifier(LightningModule):
    """Nothing here knows of precision: the Trainer's plugin chooses the opt level."""

    def __init__(self, lr: float = 3e-3) -> None:
        super().__init__()
        self.lr = lr
        self.net = small_resnet()

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, targets = batch
        return F.cross_entropy(self(images), targets)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, targets = batch
        hits = (self(images).argmax(dim=1) == targets).float()
        self.log("accuracy", hits.mean(), batch_size=len(targets))

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = FusedAdam(self.parameters(), lr=self.lr, weight_decay=0.01)
        schedule = OneCycleLR(optimizer, max_lr=self.lr, total_steps=int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
