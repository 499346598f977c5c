"""Trains at O0 with a probe attached."""

from __future__ import annotations

import warnings
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_apex.cli.configs import Training, quiet_lightning
from lightning_apex.cli.errors import CommandError
from lightning_apex.cli.output import Bar
from lightning_apex.cli.probe import ExponentProbe, ProbeReport
from lightning_apex.cli.sections import about_cuda, said


class ProbeCallback(Callback):
    """Counts a model's exponents while it trains, on every ``every``-th batch.

    Args:
        every: 1 for all batches.
        bar: Shows how far the training is.
    """

    def __init__(self, every: int = 1, bar: Bar | None = None) -> None:
        self.batches = 0
        self.measured_batches = 0
        self.probe: ExponentProbe | None = None
        self._every = every
        self._bar = bar

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The model is complete and on its device now."""
        self.probe = ExponentProbe(pl_module)
        self.probe.recording = False
        self.probe.__enter__()
        self.probe.count_weights()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Counts this batch or not."""
        assert self.probe is not None
        self.probe.recording = self.batches % self._every == 0
        self.measured_batches += self.probe.recording
        self.batches += 1

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Pauses: what runs between batches is not training."""
        assert self.probe is not None
        self.probe.recording = False
        if self._bar is not None:
            self._bar.update(trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Counts the weights once more, as they have become."""
        assert self.probe is not None
        self.probe.count_weights()

    def detach(self) -> None:
        """Removes the hooks."""
        if self.probe is not None:
            self.probe.__exit__(None, None, None)


def train(training: Training, steps: int, every: int, bar: Bar | None = None) -> tuple[ProbeReport, int, int]:
    """Trains for some steps in fp32.

    Returns:
        What was counted, how many optimizer steps there were, and how many batches were counted.

    Raises:
        CommandError: If the training fails, or there is nothing to train with.
    """
    callback = ProbeCallback(every, bar)
    arguments = dict(training.trainer)
    given = arguments.pop("callbacks", None) or []
    callbacks = [*(given if isinstance(given, list) else [given]), callback]
    try:
        with warnings.catch_warnings(), quiet_lightning():
            warnings.simplefilter("ignore")
            trainer = Trainer(**arguments, callbacks=callbacks, max_steps=steps, max_epochs=-1)
            _fit(trainer, training)
    finally:
        callback.detach()
    if callback.probe is None or not callback.batches:
        raise CommandError("the training data has no batches: nothing can be counted.")
    return callback.probe.report(), trainer.global_step, callback.measured_batches


def _fit(trainer: Trainer, training: Training) -> None:
    try:
        trainer.fit(training.model, datamodule=training.data)
    except SystemExit as error:  # Lightning's answer to Ctrl-C
        if trainer.interrupted:
            raise KeyboardInterrupt from error
        raise
    except Exception as error:
        raise CommandError(about_cuda(error) or f"training at O0 fails: {said(error)}.") from error
