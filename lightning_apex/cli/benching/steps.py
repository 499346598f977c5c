"""Whole training steps of a user's model, at opt levels and in Lightning's own precisions."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_apex import ApexPrecision
from lightning_apex.cli.benching.benchmark import Line
from lightning_apex.cli.benching.race import MachineClock, Race
from lightning_apex.cli.configs import Training, quiet_lightning
from lightning_apex.cli.errors import CommandError
from lightning_apex.cli.output import Bar
from lightning_apex.cli.sections import about_cuda, said
from lightning_apex.levels import LEVELS

Make = Callable[[], Training]
OptLevelName = Literal["O0", "O1", "O2", "O3", "O4", "O5"]


class _Stopwatch(Callback):
    """The seconds of a step, without those of the first steps and of setting up."""

    def __init__(self, warm_up: int) -> None:
        self._warm_up, self._begun, self._first = warm_up, 0.0, 0
        self.seconds: float | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step >= self._warm_up and not self._begun:
            self._wait(pl_module)
            self._first, self._begun = trainer.global_step, time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._wait(pl_module)
        if self._begun and trainer.global_step > self._first:
            self.seconds = (time.perf_counter() - self._begun) / (trainer.global_step - self._first)

    @staticmethod
    def _wait(module: LightningModule) -> None:
        if module.device.type == "cuda":
            torch.cuda.synchronize(module.device)


def native_precisions(device_type: str) -> tuple[str, ...]:
    """Lightning's own that are of use on a type of device."""
    of_gpus = ("16-mixed",) if device_type == "cuda" else ()
    return ("32-true", *of_gpus, "bf16-mixed", "bf16-true")


def time_steps(
    make: Make, levels: Sequence[str], natives: Sequence[str], steps: int, rounds: int, bar: Bar
) -> tuple[list[Line], list[str]]:
    """Trains anew in every round, one contender after another; lines over the first level's time, and notes.

    Raises:
        CommandError: If every contender fails.
    """
    names = [*levels, *natives]
    race = Race({name: [] for name in names})
    notes: list[str] = []
    for turn in range(rounds):
        clock = MachineClock()
        for i in range(len(names)):
            name = names[(i + turn) % len(names)]
            if name in race.seconds:
                bar.update(note=name)
                try:
                    race.seconds[name].append(_seconds(make, name, steps))
                except _FailedError as error:
                    notes.append(f"without {name}: {error}.")
                    del race.seconds[name]
            bar.advance()
        race.others.append(clock.share_of_others())
    if not race.seconds:
        raise CommandError(f"no contender could train: {notes[0]}")
    return _lines(race), notes


class _FailedError(Exception):
    pass


def _seconds(make: Make, name: str, steps: int) -> float:
    """Seconds a step, of a fresh model."""
    training = make()
    warm_up = max(2, steps // 4)
    watch = _Stopwatch(warm_up)
    arguments = dict(training.trainer)
    arguments["callbacks"] = [*arguments.get("callbacks", ()), watch]
    if name in LEVELS:
        arguments["plugins"] = [ApexPrecision(cast(OptLevelName, name), **training.precision)]
    else:
        arguments["precision"] = name
    gc.collect()
    try:
        with quiet_lightning(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = Trainer(**arguments, max_steps=warm_up + steps, max_epochs=-1)
            trainer.fit(training.model, datamodule=training.data)
    except Exception as error:
        raise _FailedError((about_cuda(error) or said(error)).rstrip(".")) from error
    if watch.seconds is None:
        raise _FailedError(f"its data ended after {trainer.global_step} steps, of {warm_up + steps}")
    return watch.seconds


def _lines(race: Race) -> list[Line]:
    reference = next(iter(race.seconds))
    medians = race.milliseconds()
    return [Line("training step", name, medians[name], race.ratio(name, reference)) for name in race.seconds]
