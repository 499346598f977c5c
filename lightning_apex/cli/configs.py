"""What a user trains, from a LightningCLI config or names of classes: a model, its data, arguments for the Trainer."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_apex.cli.errors import CommandError
from lightning_apex.cli.sections import (
    SECTIONS,
    about_config,
    about_cuda,
    check_keys,
    class_named,
    find_modules,
    has_class,
    read_config,
    said,
)

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule

# Trainer arguments that change what is computed. The rest is for running, logging and saving.
_KEPT = (
    "accelerator",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "limit_train_batches",
    "overfit_batches",
    "reload_dataloaders_every_n_epochs",
    "deterministic",
    "benchmark",
    "detect_anomaly",
)
_UNWANTED_CALLBACKS = (
    "Checkpoint",
    "EarlyStopping",
    "Monitor",
    "ProgressBar",
    "ModelSummary",
    "Timer",
    "SaveConfigCallback",
    "BatchSizeFinder",
    "LearningRateFinder",
)
_OF_THE_LEVEL = ("opt_level", "half_dtype", "keep_batchnorm_fp32", "master_weights", "loss_scale")
QUIET: dict[str, Any] = {
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
}


@dataclass
class Training:
    """What is trained.

    Attributes:
        model: With the optimizer of the config, if it has one.
        data: ``None`` where the model has its own.
        trainer: Arguments for ``Trainer``: one device, quiet, no logger and no checkpoints, no precision.
        precision: Arguments for ``ApexPrecision`` that the config gives and no level decides, such as ``keep_fp32``.
        notes: What of the config is left out, in sentences.
    """

    model: LightningModule
    data: LightningDataModule | None
    trainer: dict[str, Any]
    precision: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def load_training(
    config: str | Path | None = None,
    model: str | None = None,
    data: str | None = None,
    *,
    seed: int = 0,
    accelerator: str | None = None,
) -> Training:
    """Makes the model and its data.

    Args:
        config: A ``config.yaml`` as LightningCLI reads and writes it.
        model: ``"package.module:Class"`` or ``"file.py:Class"``, for a config whose ``model`` has no ``class_path``,
            or for none.
        data: The same of the data module; none where the model has its own.
        seed: For everything that is drawn.
        accelerator: ``"cpu"``, ``"gpu"``, ...; ``None`` for the config's.

    Raises:
        CommandError: If anything of it cannot be used; the message names the key or argument.
    """
    sections = read_config(config, model, data)
    find_modules(config)
    return _Maker(sections, class_named("model", model), class_named("data", data)).make(seed, accelerator)


# --- objects --------------------------------------------------------------------------------------------------------


class _Maker:
    """Turns sections into a `Training`."""

    def __init__(self, sections: Mapping[str, Any], model_class: Any, data_class: Any) -> None:
        self._sections = dict(sections)
        self._model_class = None if has_class(sections.get("model")) else model_class
        self._data_class = None if has_class(sections.get("data")) else data_class
        self._notes: list[str] = []
        if model_class is not None and self._model_class is None:
            raise CommandError("--model and the config's model.class_path both name a model: give one of them.")
        if data_class is not None and self._data_class is None:
            raise CommandError("--data and the config's data.class_path both name the data: give one of them.")

    def make(self, seed: int, accelerator: str | None) -> Training:
        trainer = dict(self._sections.get("trainer") or {})
        self._check_trainer(trainer)
        precision = self._precision_of(trainer)
        kept = {key: trainer[key] for key in _KEPT if trainer.get(key) is not None}
        callbacks = self._callbacks_of(trainer)
        self._note_what_is_left_out(trainer)
        if accelerator is not None:
            kept["accelerator"] = accelerator
        sections = {key: self._sections[key] for key in SECTIONS if key != "trainer" and self._sections.get(key)}
        sections["trainer"] = kept | ({"callbacks": callbacks} if callbacks else {})
        made = self._instantiate(sections, seed)
        self._check_made(made)
        return Training(made.model, made.datamodule, made.trainer | QUIET, precision, self._notes)

    def _check_trainer(self, trainer: Mapping[str, Any]) -> None:
        from lightning.pytorch import Trainer

        check_keys(
            trainer, [name for name in inspect.signature(Trainer.__init__).parameters if name != "self"], "trainer."
        )

    def _precision_of(self, trainer: Mapping[str, Any]) -> dict[str, Any]:
        """What of the config's own ApexPrecision holds at any level."""
        for entry in _listed(trainer.get("plugins")):
            if _class_path(entry).rpartition(".")[2] == "ApexPrecision" and isinstance(entry, Mapping):
                arguments = entry.get("init_args") or {}
                return {
                    key: value for key, value in arguments.items() if key not in _OF_THE_LEVEL and value is not None
                }
        return {}

    def _callbacks_of(self, trainer: Mapping[str, Any]) -> list[Any]:
        callbacks = _listed(trainer.get("callbacks"))
        return [entry for entry in callbacks if not _class_path(entry).endswith(_UNWANTED_CALLBACKS)]

    def _note_what_is_left_out(self, trainer: Mapping[str, Any]) -> None:
        if trainer.get("devices") not in (None, 1, "1", "auto", [0]) or trainer.get("num_nodes") not in (None, 1):
            self._notes.append("One device is used, though the config asks for more.")
        if trainer.get("strategy") not in (None, "auto"):
            self._notes.append("The config's strategy is left out: one process trains on one device.")

    def _instantiate(self, sections: dict[str, Any], seed: int) -> Any:
        import jsonargparse

        try:
            with warnings.catch_warnings(), quiet_lightning():
                warnings.simplefilter("ignore")
                return _cli_class()(self._model_class, self._data_class, sections, seed)
        except (jsonargparse.ArgumentError, SystemExit) as error:
            raise CommandError(about_config(error)) from error
        except CommandError:
            raise
        except Exception as error:
            raise CommandError(self._about_classes(error)) from error

    def _about_classes(self, error: Exception) -> str:
        return about_cuda(error) or f"the model or its data cannot be made: {said(error)}."

    def _check_made(self, made: Any) -> None:
        from lightning.pytorch.utilities.model_helpers import is_overridden

        name = type(made.model).__name__
        if not is_overridden("configure_optimizers", made.model):
            raise CommandError(
                f"{name} has no optimizer: add `optimizer:` with a class_path to the config, or write "
                "configure_optimizers."
            )
        owner = made.datamodule if made.datamodule is not None else made.model
        if not is_overridden("train_dataloader", owner):
            raise CommandError(
                f"{name} has no data: add `data:` with a class_path to the config, or give --data module:Class."
            )


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Keeps Lightning's hints and greetings out of the output."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value in (None, False, True) else [value]


def _class_path(entry: Any) -> str:
    return str(entry.get("class_path", "")) if isinstance(entry, Mapping) else str(entry)


def _cli_class() -> Any:
    """A LightningCLI that makes the model and its data, and hands out the Trainer's arguments as they are."""
    from lightning.pytorch.cli import LightningCLI

    class _Loader(LightningCLI):
        def __init__(self, model_class: Any, data_class: Any, sections: dict[str, Any], seed: int) -> None:
            self._given = sections
            super().__init__(
                model_class,
                data_class,
                args=sections,
                run=False,
                save_config_callback=None,
                seed_everything_default=seed,
                parser_kwargs={"exit_on_error": False},
            )

        def instantiate_trainer(self, **kwargs: Any) -> Any:
            trainer = self._get(self.config_init, "trainer", default={})
            return {key: trainer[key] for key in self._given["trainer"]}

    return _Loader
