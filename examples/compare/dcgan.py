"""A DCGAN on handwritten digits that optimizes by hand: two models, two optimizers, no loss returned."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from lightning_apex import FusedAdam


class Digits(LightningDataModule):
    """1,797 images, 1x16x16, between -1 and 1."""

    def __init__(self, batch_size: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        pixels = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1
        self.train = TensorDataset(F.interpolate(pixels, size=16, mode="bilinear", align_corners=False))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)


class DCGAN(LightningModule):
    def __init__(self, width: int = 32, latent: int = 32, lr: float = 1e-3) -> None:
        super().__init__()
        self.latent, self.lr = latent, lr
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(latent, 2 * width, 4, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 1, 4, 2, 1),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 1, 4),
            nn.Flatten(0),
        )

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        (real,) = batch
        optimizer_d, optimizer_g = self.optimizers()
        ones, zeros = torch.ones(len(real), device=self.device), torch.zeros(len(real), device=self.device)
        fake = self.generator(torch.randn(len(real), self.latent, 1, 1, device=self.device))

        self.toggle_optimizer(optimizer_d)
        loss = F.binary_cross_entropy_with_logits
        loss_d = loss(self.discriminator(real), ones) + loss(self.discriminator(fake.detach()), zeros)
        optimizer_d.zero_grad()
        self.manual_backward(loss_d)
        optimizer_d.step()
        self.untoggle_optimizer(optimizer_d)

        loss_g = loss(self.discriminator(fake), ones)
        optimizer_g.zero_grad()
        self.manual_backward(loss_g)
        optimizer_g.step()
        self.log_dict({"discriminator": loss_d, "generator": loss_g})

    def configure_optimizers(self) -> list[Optimizer]:
        return [
            FusedAdam(net.parameters(), lr=self.lr, betas=(0.5, 0.999)) for net in (self.discriminator, self.generator)
        ]
