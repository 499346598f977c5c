"""A program on LightningCLI, for YAML blocks of pages that show none."""

from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, DemoModel

import lightning_apex  # noqa: F401

LightningCLI(DemoModel, BoringDataModule)
