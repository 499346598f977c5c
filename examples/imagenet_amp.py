"""The shape of Apex's ImageNet example: a ResNet, DistributedDataParallel after amp.initialize, exact resume.

    torchrun --nproc_per_node 2 examples/imagenet_amp.py                    # gloo on CPUs, NCCL on GPUs
    torchrun --nproc_per_node 2 examples/imagenet_amp.py --sync-bn --opt-level O5
    python examples/imagenet_amp.py                                         # one process

The images are scikit-learn's handwritten digits, so that it runs anywhere, in less than a minute on two cores.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_apex as apex
from lightning_apex import amp
from lightning_apex.parallel import DistributedDataParallel as DDP

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    device = start_processes()
    torch.manual_seed(options.seed)
    model = build(options.arch)
    if options.sync_bn:
        model = apex.parallel.convert_syncbn_model(model)
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), options.lr, momentum=0.9, weight_decay=1e-4)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=options.opt_level,
        keep_batchnorm_fp32=options.keep_batchnorm_fp32,
        loss_scale=options.loss_scale,
        half_dtype="bfloat16" if device.type == "cpu" and options.opt_level in ("O1", "O2", "O3") else None,
        verbosity=int(RANK == 0),
    )
    first_epoch = load(options.resume, model, optimizer) if options.resume else 0
    network: nn.Module = DDP(model) if dist.is_initialized() else model

    train, valid = data(device)
    accuracy = 0.0
    for epoch in range(first_epoch, options.epochs):
        began = time.perf_counter()
        loss = train_epoch(network, optimizer, train, epoch, options)
        accuracy = validate(network, valid)
        if RANK == 0:
            print(
                f"epoch {epoch + 1}  loss {loss:.3f}  accuracy {accuracy:.1%}  {time.perf_counter() - began:.1f} s",
                flush=True,
            )
            if options.checkpoint:
                save(options.checkpoint, model, optimizer, epoch + 1)
    if dist.is_initialized():
        dist.destroy_process_group()
    if accuracy < options.demand and RANK == 0:
        print(f"below the accuracy of {options.demand:.0%} that was to be reached")
    return int(accuracy < options.demand)


def start_processes() -> torch.device:
    """Joins the processes that torchrun started, if it did."""
    cuda = torch.cuda.is_available()
    if WORLD > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    if not cuda:
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cuda")


def build(arch: str) -> nn.Module:
    if arch != "small":
        from torchvision import models

        return models.get_model(arch, num_classes=10)
    return nn.Sequential(
        *stage(3, 16, 1), *stage(16, 32, 2), *stage(32, 64, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    )


def has_torchvision() -> bool:
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):  # the latter where it was built for another torch
        return False
    return True


def stage(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def data(device: torch.device) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and validation images, 3x32x32, with their labels; every fifth is for validation."""
    pixels, labels = load_digits(return_X_y=True)
    small = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    images = F.interpolate(small, size=32, mode="bilinear", align_corners=False).expand(-1, 3, -1, -1).to(device)
    targets = torch.tensor(labels, device=device)
    held_out = torch.arange(len(targets)) % 5 == 0
    return (images[~held_out], targets[~held_out]), (images[held_out], targets[held_out])


def batches(pair: tuple[Tensor, Tensor], size: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of each batch, in an order that all ranks agree on."""
    images, targets = pair
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(epoch))
    for rows in order[: len(order) // size * size].view(-1, size):
        yield images[rows[RANK::WORLD]], targets[rows[RANK::WORLD]]


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    pair: tuple[Tensor, Tensor],
    epoch: int,
    options: argparse.Namespace,
) -> float:
    model.train()
    criterion = nn.CrossEntropyLoss()
    steps = len(pair[1]) // options.batch_size
    total = torch.zeros(())
    for i, (images, target) in enumerate(batches(pair, options.batch_size, epoch)):
        adjust_learning_rate(optimizer, options, epoch + i / steps)
        output = model(images)
        loss = criterion(output, target)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        total += loss.detach().cpu()
    return average(total / steps)


def adjust_learning_rate(optimizer: torch.optim.Optimizer, options: argparse.Namespace, epoch: float) -> None:
    """Half an epoch of warm-up, then linearly down to a tenth."""
    factor = min(1.0, (epoch + 0.05) / 0.5) * (1 - 0.9 * epoch / options.epochs)
    for group in optimizer.param_groups:
        group["lr"] = options.lr * factor


def validate(model: nn.Module, pair: tuple[Tensor, Tensor]) -> float:
    model.eval()
    images, targets = pair[0][RANK::WORLD], pair[1][RANK::WORLD]
    with torch.no_grad():
        right = sum((model(x).argmax(1) == y).sum() for x, y in zip(images.split(64), targets.split(64), strict=True))
    return average(torch.as_tensor(right).float().cpu() / len(targets))


def average(value: Tensor) -> float:
    """The mean over ranks."""
    if dist.is_initialized():
        value = value.cuda() if dist.get_backend() == "nccl" else value
        dist.all_reduce(value)
    return value.item() / WORLD


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Weights are fp32 in here, whatever the level."""
    state: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state | {"amp": amp.state_dict(), "epoch": epoch}, path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    amp.load_state_dict(state["amp"])
    return int(state["epoch"])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="resnet18", help="a classifier of torchvision, or 'small'")
    parser.add_argument("--opt-level", default="O1", choices=("O0", "O1", "O2", "O3", "O4", "O5"))
    parser.add_argument("--keep-batchnorm-fp32", help="True or False; default: the level's own")
    parser.add_argument("--loss-scale", help="a number or 'dynamic'; default: the level's own")
    parser.add_argument("--sync-bn", action="store_true", help="BatchNorm statistics over all processes")
    parser.add_argument("--epochs", type=int, help="default: 3, for the small network 10")
    parser.add_argument("--batch-size", type=int, default=64, help="over all processes")
    parser.add_argument("--lr", type=float, help="default: 0.05, for the small network 0.1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="written after each epoch")
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from")
    parser.add_argument("--demand", type=float, default=0.9, help="the accuracy below which the exit status is 1")
    options = parser.parse_args(argv)
    if options.arch != "small" and not has_torchvision():
        print(f"torchvision cannot be imported: a small network instead of {options.arch}")
        options.arch = "small"
    if options.epochs is None:
        options.epochs = 10 if options.arch == "small" else 3
    if options.lr is None:
        options.lr = 0.1 if options.arch == "small" else 0.05
    if options.batch_size % WORLD:
        parser.error(f"--batch-size {options.batch_size}: give a multiple of the {WORLD} processes")
    return options


if __name__ == "__main__":
    sys.exit(main())
