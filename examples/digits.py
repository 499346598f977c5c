"""Trains a small ResNet on handwritten digits at each opt level, and compares them: `python examples/digits.py`."""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from digits_model import DigitsClassifier, DigitsData
from digits_report import draw_losses, level_progress, print_table
from digits_watch import Watch
from lightning.fabric.utilities.warnings import disable_possible_user_warnings
from lightning.pytorch import Trainer, seed_everything
from rich.console import Console

from lightning_apex import ApexPrecision

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
NO_MASTERS = "O3"  # shown as it is: weights without masters round small updates away
GOOD_ACCURACY, WITHIN = 0.97, 0.01


@dataclass
class Run:
    """One level, trained."""

    level: str
    accuracy: float
    skipped: int
    watch: Watch
    model: DigitsClassifier
    time_ratio: float = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    console = Console()
    torch.set_num_threads(options.threads)
    quieten_lightning()
    began = time.perf_counter()
    runs = [train(level, options, console) for level in options.levels]
    compare_times(runs, options, console)
    picture = draw_losses({run.level: run.watch.losses for run in runs}, options.out)
    print_table(runs, console, time.perf_counter() - began)
    console.print(f"Loss curves: {picture}")
    return verdict(runs, options, console)


def quieten_lightning() -> None:
    """Keeps its hints out of the output, by the ways it offers."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    disable_possible_user_warnings()
    # Lightning calls what newer versions of torch call out of date.
    warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated", module="lightning")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--levels", nargs="+", choices=LEVELS, metavar="O0..O5", help="default: all six")
    parser.add_argument("--epochs", type=int, help="default: 6")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--accelerator", default="auto", help="auto (default), cpu, gpu, ...")
    parser.add_argument(
        "--half-dtype", choices=("float16", "bfloat16"), help="for O1 to O3; default: fp16, on a CPU bf16"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="CPU threads; for a model this small one (default) is best"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out", help="folder for the picture")
    parser.add_argument("--fast", action="store_true", help="O0 and O2, one epoch, no demands on the accuracy")
    options = parser.parse_args(argv)
    options.levels = options.levels or (["O0", "O2"] if options.fast else list(LEVELS))
    options.epochs = options.epochs or (1 if options.fast else 6)
    if options.epochs < 1:
        parser.error(f"--epochs {options.epochs}: give at least 1")
    return options


def precision(level: str, options: argparse.Namespace) -> ApexPrecision:
    """The level's plugin; the one line that a Lightning user adds."""
    half_dtype = options.half_dtype if level in ("O1", "O2", "O3") else None
    if half_dtype is None and level in ("O1", "O2", "O3") and runs_on_cpu(options.accelerator):
        half_dtype = "bfloat16"  # what the plugin would choose too, after a warning
    return ApexPrecision(level, half_dtype=half_dtype)


def runs_on_cpu(accelerator: str) -> bool:
    trainer = Trainer(accelerator=accelerator, devices=1, **QUIET)
    return trainer.strategy.root_device.type == "cpu"


QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "num_sanity_val_steps": 0,
}


def trainer_for(level: str, options: argparse.Namespace, watch: Watch, **limits: Any) -> Trainer:
    return Trainer(
        accelerator=options.accelerator,
        devices=1,
        plugins=[precision(level, options)],
        callbacks=[watch],
        gradient_clip_val=1.0,
        **QUIET,
        **limits,
    )


def train(level: str, options: argparse.Namespace, console: Console) -> Run:
    seed_everything(options.seed, verbose=False)
    model, data = DigitsClassifier(), DigitsData(seed=options.seed)
    with level_progress(level, console) as progress:
        watch = Watch(progress.step)
        # Validation waits for the last epoch: it decides nothing before.
        trainer = trainer_for(level, options, watch, max_epochs=options.epochs, check_val_every_n_epoch=options.epochs)
        progress.expect(options.epochs * steps_of(data))
        trainer.fit(model, data)
        accuracy = float(trainer.callback_metrics["accuracy"])
        progress.done(accuracy)
    return Run(level, accuracy, trainer.precision_plugin.scaler.skipped_steps, watch, model)


def steps_of(data: DigitsData) -> int:
    data.setup("fit")
    return len(data.train_dataloader())


def compare_times(runs: list[Run], options: argparse.Namespace, console: Console) -> None:
    """Gives each run its time per step over the first run's.

    The levels take turns, a few steps each, and a ratio is taken within a turn: a machine that is busy for a while
    then slows all levels down alike.
    """
    turns, steps = (2, 5) if options.fast else (5, 7)
    ratios: dict[str, list[float]] = {run.level: [] for run in runs}
    with console.status("comparing the time of a step, level by level"):
        for _ in range(turns):
            seconds = {}
            for run in runs:
                watch = Watch()
                trainer_for(run.level, options, watch, max_steps=steps, limit_val_batches=0).fit(
                    run.model, DigitsData()
                )
                seconds[run.level] = watch.median_step()
            for run in runs:
                ratios[run.level].append(seconds[run.level] / seconds[runs[0].level])
    for run in runs:
        run.time_ratio = median(ratios[run.level])


def verdict(runs: list[Run], options: argparse.Namespace, console: Console) -> int:
    if options.fast:
        return 0
    demanded = [run for run in runs if run.level != NO_MASTERS]
    reference = next((run.accuracy for run in runs if run.level == "O0"), None)
    floor = GOOD_ACCURACY if reference is None else max(GOOD_ACCURACY, reference - WITHIN)
    missed = [f"{run.level} ({run.accuracy:.1%})" for run in demanded if run.accuracy < floor - 1e-6]
    if missed:
        console.print(f"Below the {floor:.1%} that was to be reached: {', '.join(missed)}.", style="red")
        return 1
    console.print(f"Every level that had to reach {floor:.1%} did.", style="green")
    return 0


if __name__ == "__main__":
    sys.exit(main())
