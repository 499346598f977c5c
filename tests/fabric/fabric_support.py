"""Models, batches and loops of the Fabric tests."""

import warnings

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn import functional as F

from lightning_apex.fabric import ApexPrecision

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
BF16 = torch.bfloat16


def net(seed: int = 0, norm: type[nn.Module] = nn.LayerNorm) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), norm(16), nn.ReLU(), nn.Linear(16, 3))


def batches(count: int, rows: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    return [(draw(rows, 8), draw(rows, 3)) for _ in range(count)]


def plugin(level: str, **options: object) -> ApexPrecision:
    """With bf16 where the level would use fp16, as it does on a CPU, without the warning."""
    if level in ("O1", "O2", "O3"):
        options.setdefault("half_dtype", "bfloat16")
    return ApexPrecision(level, **options)


def fabric_with(precision: ApexPrecision, **options: object) -> Fabric:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Fabric(accelerator="cpu", devices=1, plugins=[precision], **options)


def train(fabric, model, optimizer, data, clip: float = 0.0, every: int = 1) -> list[float]:
    """An ordinary Fabric loop; ``every`` batches make a step."""
    losses = []
    for index, (x, y) in enumerate(data):
        last = (index + 1) % every == 0
        with fabric.no_backward_sync(model, enabled=not last):
            loss = F.mse_loss(model(x), y) / every
            fabric.backward(loss)
        losses.append(loss.item())
        if last:
            if clip:
                fabric.clip_gradients(model, optimizer, max_norm=clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_equal(actual, expected) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=0, msg=lambda m, name=name: f"{name}: {m}")


def assert_close(actual, expected, tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=tolerance, atol=tolerance)
