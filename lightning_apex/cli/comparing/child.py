"""One run in a process of its own: ``python -m lightning_apex.cli.comparing.child TASK.json EVENTS.jsonl``."""

from __future__ import annotations

import json
import math
import platform
import sys
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_apex.cli.comparing.records import BAD_INPUT, FAILED, FINISHED, OUT_OF_MEMORY
from lightning_apex.cli.errors import FINDING, OK, CommandError, one_sentence
from lightning_apex.cli.sections import about_cuda


@dataclass
class Task:
    """What a child process is to do.

    Attributes:
        config: As of `load_training`; likewise ``model``, ``data`` and ``accelerator``.
        level: ``"O0"`` to ``"O5"``.
        seed: For everything that is drawn.
        steps: How many.
        half_dtype: For the levels O1 to O3; ``None`` for the level's own.
        probes_ranges: Whether activations and gradients are looked at.
        import_paths: Where the parent finds modules.
    """

    config: str | None
    model: str | None
    data: str | None
    accelerator: str | None
    level: str
    seed: int
    steps: int
    half_dtype: str | None
    probes_ranges: bool
    import_paths: list[str] = field(default_factory=list)


def main(argv: Sequence[str]) -> int:
    """Trains, and writes one JSON line an event; the last one says how it ended."""
    task = Task(**json.loads(Path(argv[0]).read_text()))
    sys.path += [path for path in task.import_paths if path not in sys.path]
    with open(argv[1], "w") as file:

        def emit(event: dict[str, Any]) -> None:
            file.write(json.dumps(_finite(event), allow_nan=False) + "\n")
            file.flush()

        status, sentence = FINISHED, ""
        try:
            train(task, emit)
        except CommandError as error:
            status, sentence = BAD_INPUT, str(error)
        except Exception as error:
            traceback.print_exc()
            status, sentence = _status(error), f"{type(error).__name__}: {one_sentence(error)}"
            if (needs_cuda := about_cuda(error)) is not None:
                status, sentence = BAD_INPUT, needs_cuda
        emit({"kind": "end", "status": status, "error": sentence})
    return OK if status == FINISHED else FINDING


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _status(error: Exception) -> str:
    text = str(error).lower()
    memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text
    return OUT_OF_MEMORY if memory or "out of memory" in text else FAILED


def train(task: Task, emit: Any) -> None:
    """The run itself."""
    from lightning.pytorch import Trainer

    from lightning_apex import ApexPrecision
    from lightning_apex.cli.comparing.watch import Watch
    from lightning_apex.cli.configs import load_training, quiet_lightning

    training = load_training(task.config, task.model, task.data, seed=task.seed, accelerator=task.accelerator)
    half_dtype = task.half_dtype if task.level in ("O1", "O2", "O3") else None
    watch = Watch(emit, task.steps, task.seed, task.probes_ranges)
    arguments = training.trainer | {"callbacks": [*training.trainer.get("callbacks", []), watch]}
    # By hand, an optimizer step is not a step: the watch stops the Trainer.
    max_steps = task.steps if training.model.automatic_optimization else -1
    with warnings.catch_warnings(), quiet_lightning():
        warnings.simplefilter("ignore")
        plugin = ApexPrecision(task.level, half_dtype=half_dtype, **training.precision)  # type: ignore[arg-type]
        trainer = Trainer(**arguments, plugins=[plugin], max_steps=max_steps, max_epochs=-1)
        device = trainer.strategy.root_device
        half = plugin.level.on(device.type).half_dtype
        name = str(half).removeprefix("torch.") if half is not None else ""
        emit({"kind": "begin", "device": _name_of(device), "half_dtype": name, "notes": training.notes})
        trainer.fit(training.model, training.data)
    watch.check_complete()


def _name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    cpu = f"CPU ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})"
    return f"{cpu}, {threads} thread{'s' if threads != 1 else ''}" if device.type == "cpu" else str(device)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
