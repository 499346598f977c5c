"""``lightning-apex compare``."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from lightning_apex.cli.comparing.comparison import Comparison
from lightning_apex.cli.comparing.judging import REFERENCE
from lightning_apex.cli.comparing.runs import train_all
from lightning_apex.cli.comparing.settings import Settings
from lightning_apex.cli.errors import CommandError
from lightning_apex.cli.output import writable_folder

Level = Literal["O0", "O1", "O2", "O3", "O4", "O5"]


def compare(
    config: str | None = None,
    model: str | None = None,
    data: str | None = None,
    levels: Sequence[Level] = ("O0", "O1", "O2", "O4", "O5"),
    steps: int = 200,
    seeds: int = 2,
    half_dtype: Literal["float16", "bfloat16"] | None = None,
    accelerator: str | None = None,
    out: str = "comparison",
    fresh: bool = False,
) -> Comparison:
    """Trains a model at several opt levels, each in a process of its own, and says which level to use.

    The report (report.html, report.png, report.json) lies in the folder ``out``. A comparison that was interrupted goes
    on where it stopped. Validation, loggers and checkpoints of the config are left out; accumulation, clipping, limits
    and callbacks are not.

    Args:
        config: A config.yaml as LightningCLI reads and writes it.
        model: module:Class or file.py:Class of the LightningModule, where the config does not say.
        data: The same of the LightningDataModule; none where the model has its own.
        levels: What to compare with O0, which is always trained.
        steps: Optimizer steps of each run; batches where the model optimizes by hand.
        seeds: Runs a level; two or more tell noise from damage.
        half_dtype: The 16-bit type of O1 to O3; by default fp16, on a CPU bf16.
        accelerator: cpu, gpu, ...; by default the config's.
        out: Folder for runs and report.
        fresh: Discard the runs that the folder holds.

    Returns:
        The comparison.

    Raises:
        CommandError: If an argument, the config, the model or the data cannot be used.
    """
    for name, count in (("steps", steps), ("seeds", seeds)):
        if count < 1:
            raise CommandError(f"{name}={count}: give at least 1.")
    unknown = [level for level in levels if level not in ("O0", "O1", "O2", "O3", "O4", "O5")]
    if unknown:
        raise CommandError(f"levels={unknown[0]!r} is unknown: use O0 to O5.")
    settings = Settings(config, model, data, accelerator, steps, half_dtype).complete()
    folder = writable_folder(out)
    runs_folder = writable_folder(folder / "runs")
    with _alone(runs_folder):
        settings.keep_in(runs_folder, fresh)
        if fresh:
            _discard(runs_folder)
        order = list(dict.fromkeys([REFERENCE, *levels]))
        with _tidied(runs_folder):
            runs = train_all(settings, order, range(seeds), runs_folder)
            if not any(run.finished for run in runs):
                first = runs[0]
                raise CommandError(
                    f"no level could be trained: {first.level} {first.status} ({first.error.rstrip('.')})."
                )
    comparison = Comparison(asdict(settings), sorted(runs, key=lambda run: order.index(run.level)))
    comparison.save(folder)
    return comparison


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two comparisons in one folder would write and discard each other's runs; the lock goes with its process."""
    with (folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CommandError(
                f"out={str(folder.parent)!r} is in use by another comparison: wait for it, or give another folder."
            ) from error
        yield


@contextmanager
def _tidied(folder: Path) -> Iterator[None]:
    """Leaves nothing behind where the input was bad and no run is worth keeping."""
    try:
        yield
    except CommandError:
        if not any(folder.glob("*-seed*.jsonl")):
            for path in (folder / "settings.json", folder / "lock", *folder.glob("*.log")):
                path.unlink(missing_ok=True)
            with suppress(OSError):  # not empty: somebody else's
                folder.rmdir()
                folder.parent.rmdir()
        raise


def _discard(folder: Path) -> None:
    for path in (*folder.glob("*.jsonl"), *folder.glob(".*.jsonl")):
        path.unlink()
