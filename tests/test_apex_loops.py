"""Loops as Apex's users wrote them, with the import changed and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_apex as apex
from lightning_apex import amp

# On a CPU, fp16 levels say that they use bf16.
pytestmark = pytest.mark.filterwarnings("ignore:amp.initialize.*uses bfloat16:UserWarning")


def loader(count: int, shape: tuple[int, ...], classes: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        target = torch.randint(classes, (8,), generator=generator)
        data = torch.randn(8, *shape, generator=generator)
        data[:, 0] += target.view(-1, *[1] * (len(shape) - 1)) / 2
        yield data, target


def test_resnet18_with_sgd_at_o1_and_autocast() -> None:
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    train_loader = loader(3, (3, 32, 32), 10)
    losses = []

    model = models.resnet18(num_classes=10)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    # the user's loop
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")

    for data, target in train_loader:
        optimizer.zero_grad()
        with amp.autocast():
            output = model(data)
            loss = criterion(output, target)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())

    torch.manual_seed(0)
    model = models.resnet18(num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    expected = plain(model, optimizer, loader(3, (3, 32, 32), 10), half=True)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any, half: bool = False) -> list[float]:
    """The losses of the same loop without any of this package; ``half`` under torch's own autocast."""
    losses = []
    for data, target in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = nn.functional.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4)
    )


OPTIMIZERS = {
    "FusedAdam": (
        lambda params: apex.optimizers.FusedAdam(params, lr=1e-2),
        lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.0),
    ),
    "FusedSGD": (
        lambda params: apex.optimizers.FusedSGD(params, lr=0.05, momentum=0.9),
        lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    ),
    "SGD": (lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),) * 2,
    "Adam": (lambda params: torch.optim.Adam(params, lr=1e-2),) * 2,
    "AdamW foreach": (lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),) * 2,
}
TOLERANCE = {"O0": 1e-5, "O1": 0.05, "O2": 0.05, "O3": 0.1, "O4": 0.05, "O5": 0.05}


@pytest.mark.parametrize("opt_level", TOLERANCE)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_autocast_at_every_level(name: str, opt_level: str) -> None:
    make, reference = OPTIMIZERS[name]
    train_loader = loader(6, (1, 6, 6), 4)
    losses = []
    criterion = nn.CrossEntropyLoss()

    model = small_net()
    optimizer = make(model.parameters())

    # the user's loop
    model, optimizer = apex.amp.initialize(model, optimizer, opt_level=opt_level)

    for data, target in train_loader:
        output = model(data)
        loss = criterion(output, target)
        optimizer.zero_grad()
        with apex.amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(apex.amp.master_params(optimizer), 1e3)
        optimizer.step()
        losses.append(loss.item())

    model = small_net()
    expected = plain(model, reference(list(model.parameters())), loader(6, (1, 6, 6), 4))
    assert losses == pytest.approx(expected, rel=TOLERANCE[opt_level])


def test_every_module_of_the_package_is_there_under_apexs_name() -> None:
    for name in ("amp", "optimizers", "parallel", "fp16_utils"):
        assert hasattr(apex, name)
    assert apex.parallel.DistributedDataParallel and apex.fp16_utils.FP16_Optimizer
