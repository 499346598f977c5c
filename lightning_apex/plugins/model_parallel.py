"""What a Trainer needs for a model that FSDP2 spreads over processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def evaluate_without_inference_mode(trainer: Trainer) -> None:
    """Lets a Trainer evaluate under ``no_grad`` alone, as Lightning does for its `FSDPStrategy`.

    FSDP keeps the memory it has gathered weights in, and what was made in inference mode cannot be trained with.
    """
    for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False
