"""Each optimizer trains the demo's model to the demo's accuracy."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_apex import (
    LARC,
    ApexPrecision,
    FusedAdagrad,
    FusedAdam,
    FusedAdamW,
    FusedLAMB,
    FusedLARS,
    FusedLion,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)

pytest.importorskip("sklearn")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
EXAMPLES = Path(__file__).parents[1] / "examples"
LIKE_ADAM: dict[str, Any] = {"weight_decay": 0.01}
# The optimizer and its largest learning rate in a cycle.
ROWS: dict[str, tuple[Callable[..., torch.optim.Optimizer], float, dict[str, Any]]] = {
    "FusedAdagrad": (FusedAdagrad, 0.03, {}),
    "FusedAdam": (FusedAdam, 3e-3, LIKE_ADAM),
    "FusedAdamW": (FusedAdamW, 3e-3, {}),
    "FusedLAMB": (FusedLAMB, 0.02, {}),
    "FusedLARS": (FusedLARS, 2.0, {"momentum": 0.9, "weight_decay": 1e-4, "trust_coefficient": 0.02}),
    "FusedLion": (FusedLion, 1e-3, {"weight_decay": 0.1}),
    "FusedMixedPrecisionLamb": (FusedMixedPrecisionLamb, 0.02, {}),
    "FusedNovoGrad": (FusedNovoGrad, 0.2, {"betas": (0.95, 0.98), "weight_decay": 1e-3}),
    "FusedSGD": (FusedSGD, 0.1, {"momentum": 0.9, "weight_decay": 1e-4}),
    "LARC": (lambda ps, **k: LARC(FusedSGD(ps, **k)), 0.1, {"momentum": 0.9, "weight_decay": 1e-4}),
}


def accuracy(row: str, level: str, epochs: int, batch_size: int, lr: float | None = None) -> float:
    from lightning.pytorch import Trainer, seed_everything

    demo, model_of_demo = importlib.import_module("digits"), importlib.import_module("digits_model")
    make, usual, hypers = ROWS[row]

    class Model(model_of_demo.DigitsClassifier):
        def configure_optimizers(self) -> dict[str, object]:
            optimizer = make(self.parameters(), lr=lr or usual, **hypers)
            schedule = torch.optim.lr_scheduler.OneCycleLR(
                optimizer,
                max_lr=lr or usual,
                total_steps=int(self.trainer.estimated_stepping_batches),
                cycle_momentum=False,
            )
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    seed_everything(0, verbose=False)
    precision = ApexPrecision(level, half_dtype="bfloat16" if level == "O2" else None)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        plugins=[precision],
        max_epochs=epochs,
        check_val_every_n_epoch=epochs,
        gradient_clip_val=1.0,
        **demo.QUIET,
    )
    trainer.fit(Model(), model_of_demo.DigitsData(batch_size))
    return float(trainer.callback_metrics["accuracy"])


@pytest.fixture(autouse=True)
def demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
@pytest.mark.parametrize("row", ROWS)
def test_to_the_demos_accuracy(row: str, level: str) -> None:
    assert accuracy(row, level, epochs=6, batch_size=64) >= importlib.import_module("digits").GOOD_ACCURACY


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_lamb_with_a_batch_of_1024(level: str) -> None:
    """One step an epoch: of 1257 images 1024 make a batch."""
    reached = accuracy("FusedLAMB", level, epochs=40, batch_size=1024, lr=0.03)
    assert reached >= importlib.import_module("digits").GOOD_ACCURACY
