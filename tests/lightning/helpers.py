"""Small models, data and trainers that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_apex import ApexPrecision, FusedAdam, FusedSGD

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
MASTERED = ("O2", "O5")
SCALED = ("O1", "O2")
FEATURES, CLASSES = 8, 4

Optimizers = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizers] = {
    "fused_adam": lambda params: FusedAdam(params, lr=1e-2, weight_decay=0.01),
    "fused_sgd": lambda params: FusedSGD(params, lr=0.1, momentum=0.9),
    "torch_adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "torch_sgd": lambda params: torch.optim.SGD(params, lr=0.1),
}


class Net(LightningModule):
    """A classifier with BatchNorm; remembers losses and can be told to overflow.

    Args:
        optimizer: A key of `OPTIMIZERS`, or what makes an optimizer of parameters.
        scheduler: What makes a scheduler config of an optimizer; None for no scheduler.
        overflow_at: Numbers of training batches, counted over the whole run, whose loss is multiplied by ``overflow``.
    """

    def __init__(
        self,
        optimizer: str | Optimizers = "fused_adam",
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        overflow_at: Iterable[int] = (),
        overflow: float = float("inf"),
        width: int = 16,
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        # No bias before the BatchNorm: its gradient is rounding noise, and Adam makes steps of it.
        linear = nn.Linear(FEATURES, width, bias=False)
        self.net = nn.Sequential(linear, nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, CLASSES))
        self.make_optimizer = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
        self.make_scheduler = scheduler
        self.overflow_at = frozenset(overflow_at)
        self.overflow = overflow
        self.losses: list[float] = []
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        if self.seen in self.overflow_at:
            loss = loss * self.overflow
        self.seen += 1
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        if self.make_scheduler is None:
            return optimizer
        return [optimizer], [self.make_scheduler(optimizer)]


def every_step(make: Callable[[torch.optim.Optimizer], Any], **config: Any) -> Callable[[torch.optim.Optimizer], Any]:
    """A scheduler config for a scheduler that is asked after every batch."""
    return lambda optimizer: {"scheduler": make(optimizer), "interval": "step", **config}


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def batches(count: int, size: int = 8, seed: int = 7, only: Iterable[int] | None = None) -> DataLoader[Any]:
    """``count`` batches of a learnable problem, in a fixed order; or ``only`` those with these numbers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count * size, FEATURES, generator=generator)
    y = (x[:, :CLASSES] + 0.1 * torch.randn(count * size, CLASSES, generator=generator)).argmax(1)
    if only is not None:
        rows = torch.cat([torch.arange(i * size, (i + 1) * size) for i in only])
        x, y = x[rows], y[rows]
    return DataLoader(TensorDataset(x, y), size)


def plugin(level: str, **kwargs: Any) -> ApexPrecision:
    """The plugin at a level, agreeing to bf16 where a CPU would warn."""
    if level in ("O1", "O2", "O3"):
        kwargs.setdefault("half_dtype", "bfloat16")
    return ApexPrecision(level, **kwargs)


def trainer(precision: str | ApexPrecision | None = None, epochs: int = 1, **kwargs: Any) -> Trainer:
    """A quiet CPU trainer; ``precision`` is a level, a plugin, or one of Lightning's own strings."""
    if isinstance(precision, str) and precision in LEVELS:
        precision = plugin(precision)
    if isinstance(precision, str):
        kwargs["precision"] = precision
    elif precision is not None:
        kwargs["plugins"] = [*kwargs.get("plugins", ()), precision]
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return Trainer(**{"accelerator": "cpu", "devices": 1, "max_epochs": epochs, **quiet, **kwargs})


def fit(model: LightningModule, precision: Any, loader: Any, epochs: int = 1, **kwargs: Any) -> Trainer:
    """Trains a model and returns the trainer."""
    made = trainer(precision, epochs, **kwargs)
    made.fit(model, loader)
    return made


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of everything a checkpoint would hold of a model."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same(actual: Any, expected: Any, path: str = "") -> None:
    """Asserts that two nested structures are equal bit for bit, dtypes included."""
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor), path
        assert actual.dtype == expected.dtype, f"{path}: {actual.dtype} instead of {expected.dtype}"
        same = torch.equal(torch.nan_to_num(actual.detach()), torch.nan_to_num(expected.detach()))
        assert same, f"{path} differs by {(actual - expected).abs().max()}"
    elif isinstance(expected, dict):
        assert set(actual) == set(expected), path
        for key, value in expected.items():
            assert_same(actual[key], value, f"{path}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), path
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert_same(a, e, f"{path}[{i}]")
    else:
        assert actual == expected, f"{path}: {actual} instead of {expected}"


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], atol: float, rtol: float = 0.0) -> None:
    """Asserts that two dicts of tensors agree within a tolerance."""
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name].float(), tensor.float(), atol=atol, rtol=rtol, msg=lambda m, n=name: f"{n}: {m}"
        )


def all_fp32(model: nn.Module) -> bool:
    """Whether every floating-point parameter and buffer is fp32."""
    tensors = [*model.parameters(), *model.buffers()]
    return all(t.dtype is torch.float32 for t in tensors if t.is_floating_point())
