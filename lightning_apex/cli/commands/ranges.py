"""``lightning-apex ranges``."""

from __future__ import annotations

from typing import Any

from lightning_apex.cli.errors import CommandError
from lightning_apex.cli.ranging.ranges import Ranges


def find_ranges(
    config: str | None = None,
    model: str | None = None,
    data: str | None = None,
    steps: int = 200,
    every: int = 5,
    seed: int = 0,
    accelerator: str | None = None,
    out: str | None = None,
) -> Ranges:
    """Trains a model at O0, counts the exponents of its values, and says what fp16 and bf16 would make of them.

    It suggests an init_scale, and keep_fp32 patterns for modules whose values fp16 cannot hold.

    Args:
        config: A config.yaml as LightningCLI reads and writes it.
        model: package.module:Class or file.py:Class of the LightningModule, without a config or for one that names
            none.
        data: The same of the LightningDataModule; none where the model has its own data.
        steps: How many optimizer steps to train.
        every: Count on every so many batches only; counting reads every value.
        seed: Of everything that is drawn.
        accelerator: cpu, gpu, ...; the config's if not given.
        out: A folder for report.json, report.html and a picture of every module; without it nothing is written.

    Returns:
        Counts and suggestions.

    Raises:
        CommandError: If the input cannot be used, or the training fails.
    """
    for name, value in (("steps", steps), ("every", every)):
        if value < 1:
            raise CommandError(f"{name}={value} is too few: give 1 or more.")
    from lightning_apex.cli import output

    if out is not None:
        output.writable_folder(out)
    from lightning_apex.cli.configs import load_training
    from lightning_apex.cli.ranging.training import train

    training = load_training(config, model, data, seed=seed, accelerator=accelerator)
    with output.progress() as bars:
        report, made, measured = train(training, steps, every, bars.add("training at O0", total=steps))
    ranges = Ranges(type(training.model).__name__, made, measured, report, tuple(training.notes), _versions())
    if out is not None:
        ranges.save(out)
    return ranges


def _versions() -> dict[str, Any]:
    from importlib.metadata import version

    import torch

    import lightning_apex

    return {"lightning-apex": lightning_apex.__version__, "torch": torch.__version__, "lightning": version("lightning")}
