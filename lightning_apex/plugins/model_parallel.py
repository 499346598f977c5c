"""What a Trainer's strategy means for the plugin: refused ones, and models that FSDP2 spreads over processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_apex.plugins.namespace import TrainerNamespace


def refuse_strategy(trainer: Trainer, lightning: TrainerNamespace) -> None:
    """Raises if a Trainer's strategy casts the model itself."""
    if isinstance(trainer.strategy, lightning.cast_themselves):
        raise lightning.misuse(
            f"ApexPrecision does not work with {type(trainer.strategy).__name__}, which casts the model itself: "
            "use strategy='ddp', or ModelParallelStrategy() with plugin.fully_shard() in configure_model for a "
            "model that is too large for one device; or Trainer(precision='bf16-mixed') without this plugin."
        )


def evaluate_without_inference_mode(trainer: Trainer) -> None:
    """Lets a Trainer evaluate under ``no_grad`` alone, as Lightning does for its `FSDPStrategy`.

    FSDP keeps the memory it has gathered weights in, and what was made in inference mode cannot be trained with.
    """
    for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False
