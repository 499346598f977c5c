"""Two processes, two digits a step each: BatchNorm fails, synchronised it learns: `python examples/syncbn_digits.py`.

Statistics over two samples say next to nothing: a layer behind them sees little more than which of the two is larger.
The only difference between the two runs is a word: strategy="ddp_fork" or "apex_ddp_fork" ("spawn" outside Linux).
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from lightning.fabric.utilities.warnings import disable_possible_user_warnings
from lightning.pytorch import LightningModule, Trainer, seed_everything
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from lightning_apex import FusedSGD

PROCESSES, SAMPLES = 2, 2
FAILED, LEARNED = 0.80, 0.90
# A fork is there at once; a spawned process imports torch and Lightning first. Only Linux forks safely.
START = "fork" if sys.platform == "linux" else "spawn"


def prepare() -> None:
    """Keeps hints out of the output, and threads out of a process that is going to fork."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    disable_possible_user_warnings()
    warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated", module="lightning")


if __name__ in ("__main__", "__mp_main__"):  # in the processes that are started, too
    prepare()


class Digits(LightningModule):
    """A small convolutional network with three BatchNorm layers."""

    def __init__(self, epochs: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(512, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU()),
            nn.Linear(64, 10),
        )
        # What the processes write and the one that started them reads: loss and accuracy of each epoch.
        self.history = torch.zeros(epochs, 2).share_memory_()
        self.losses: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, targets = batch
        loss = F.cross_entropy(self.net(images), targets)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, targets = batch
        hits = (self.net(images).argmax(dim=1) == targets).float()
        self.log("accuracy", hits.mean(), batch_size=len(targets), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        loss = self.trainer.strategy.reduce(torch.stack(self.losses).mean())
        self.losses.clear()
        if self.trainer.is_global_zero:
            self.history[self.current_epoch] = torch.stack((loss, self.trainer.callback_metrics["accuracy"]))

    def configure_optimizers(self) -> FusedSGD:
        return FusedSGD(self.parameters(), lr=0.02, momentum=0.9)


@dataclass
class Run:
    """A training run: loss and accuracy of each epoch."""

    name: str
    history: list[list[float]]
    seconds: float

    @property
    def accuracy(self) -> float:
        return self.history[-1][1]


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    console = Console()
    runs = []
    for name, strategy in (("local BatchNorm", f"ddp_{START}"), ("SyncBatchNorm", f"apex_ddp_{START}")):
        runs.append(train(name, strategy, options))
    print_side_by_side(runs, console)
    return verdict(runs, options, console)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fast", action="store_true", help="one epoch, no demands on the accuracy")
    options = parser.parse_args(argv)
    options.epochs = 1 if options.fast else options.epochs
    if options.epochs < 1:
        parser.error(f"--epochs {options.epochs}: give at least 1")
    return options


def loaders(seed: int) -> tuple[DataLoader[tuple[Tensor, ...]], DataLoader[tuple[Tensor, ...]]]:
    """scikit-learn's 1,797 digits; Lightning deals them out to the processes."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    digits = TensorDataset(images, torch.tensor(labels))
    train, valid = random_split(digits, (0.7, 0.3), torch.Generator().manual_seed(seed))
    return DataLoader(train, SAMPLES, shuffle=True, drop_last=True), DataLoader(valid, 128)


def train(name: str, strategy: str, options: argparse.Namespace) -> Run:
    seed_everything(options.seed, verbose=False)
    model = Digits(options.epochs)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=PROCESSES,
        max_epochs=options.epochs,
        limit_train_batches=50 if options.fast else 1.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
    )
    began = time.perf_counter()
    trainer.fit(model, *loaders(options.seed))
    return Run(name, model.history.tolist(), time.perf_counter() - began)


def print_side_by_side(runs: Sequence[Run], console: Console) -> None:
    title = f"Digits, {PROCESSES} processes with {SAMPLES} samples a step each"
    table = Table(title=title, title_justify="left", caption_justify="left", min_width=len(title))
    table.add_column("epoch", justify="right")
    for run in runs:
        table.add_column(f"{run.name}\nloss", justify="right")
        table.add_column("\naccuracy", justify="right")
    for number, values in enumerate(zip(*(run.history for run in runs), strict=True), 1):
        table.add_row(str(number), *(cell for loss, hits in values for cell in (f"{loss:.3f}", f"{hits:.1%}")))
    console.print(table)
    times = " and ".join(f"{run.seconds:.0f} s" for run in runs)
    console.print(f"{times}, starting the processes included.")


def verdict(runs: Sequence[Run], options: argparse.Namespace, console: Console) -> int:
    local, synced = runs
    if options.fast:
        return 0
    if local.accuracy < FAILED and synced.accuracy >= LEARNED:
        console.print(f"Local statistics failed ({local.accuracy:.1%}), shared ones learned ({synced.accuracy:.1%}).")
        return 0
    console.print(
        f"Expected below {FAILED:.0%} with local statistics and at least {LEARNED:.0%} with shared ones, "
        f"and got {local.accuracy:.1%} and {synced.accuracy:.1%}.",
        style="red",
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
