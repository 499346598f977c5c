"""One CUDA GPU: training steps of ResNet-50 and of GPT-2 small at O0 to O5, beside Lightning's own precisions.

`python -m benchmarks.gpu_training`, from the repository's root. Where Lightning is installed, both are run by its
Fabric; elsewhere ours is run as its plugin would, and Lightning's precisions are written out with torch's autocast and
GradScaler, which is what they are. One model is there at a time, so that its peak memory is its own.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from statistics import median

import torch
from torch import nn
from torch.optim import AdamW

from benchmarks.common import Race, Result, Spread
from benchmarks.gpu_common import Row, run_rows, sync, tidy
from benchmarks.models import Task, image_task, language_task, resnet50, small_network
from benchmarks.report import Report
from benchmarks.training import LevelStep, Step, torch_step
from lightning_apex import FusedAdam

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
# What is compared: a level, Lightning's precision, and the goals for time and for memory.
PAIRS: list[tuple[str, str, tuple[float, float] | None, tuple[float, float] | None]] = [
    ("O0", "32-true", None, None),
    ("O1", "16-mixed", (1.0, 1.05), None),
    ("O2", "16-mixed", (1.15, 1.25), (1.0, 1.1)),
    ("O3", "16-true", None, None),
    ("O4", "bf16-mixed", None, None),
    ("O5", "bf16-mixed", None, None),
    ("O5", "bf16-true", None, None),
]
SLOW_ON_CPUS = "16-true"
FABRIC = find_spec("lightning") is not None


def make_step(name: str, task: Task, device: str) -> Step:
    """What makes one training step at a level of ours, or in a precision of Lightning."""
    if FABRIC:
        return _fabric_step(name, task, device)
    return LevelStep(name, task, device) if name in LEVELS else torch_step(name, task, device)


def _fabric_step(name: str, task: Task, device: str) -> Step:
    from lightning.fabric import Fabric

    from lightning_apex.fabric import ApexPrecision

    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    torch.manual_seed(0)
    make, loss_of = task
    model: nn.Module = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on a CPU, half types other than the level's own
        how = {"plugins": [ApexPrecision(name)]} if name in LEVELS else {"precision": name}
        fabric = Fabric(accelerator=device, devices=1, **how)
        kind = FusedAdam if name in LEVELS else lambda params, lr: AdamW(params, lr=lr, fused=True)
        wrapped, optimizer = fabric.setup(model, kind(model.parameters(), lr=1e-4))

    def step() -> None:
        optimizer.zero_grad()
        fabric.backward(loss_of(wrapped))
        optimizer.step()

    return step


def measure(name: str, task: Task, device: str, rounds: int) -> tuple[list[float], float]:
    """Seconds of each step, from an idle device to an idle device, and the most bytes held."""
    step = make_step(name, task, device)
    for _ in range(3):
        step()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(rounds):
        sync(device)
        start = time.perf_counter()
        step()
        sync(device)
        seconds.append(time.perf_counter() - start)
    return seconds, float(torch.cuda.max_memory_allocated()) if device == "cuda" else 0.0


def training(row: str, report: Report, task: Task, device: str) -> None:
    """All of them one after another, and again the other way round: so that a drift of the clock cancels out."""
    pairs = [pair for pair in PAIRS if device == "cuda" or pair[1] != SLOW_ON_CPUS]
    names = [*LEVELS, *dict.fromkeys(native for _, native, _, _ in pairs)]
    result, peak = Race({name: [] for name in names}, keep_all=True), dict.fromkeys(names, 0.0)
    for order in (names, names[::-1]):
        for name in order:
            seconds, held = measure(name, task, device, report.options.rounds)
            result.seconds[name] += seconds
            peak[name] = max(peak[name], held)
            tidy(device)
    result.others = [0.0] * len(result.seconds[names[0]])
    results = []
    for level, native, time_goals, memory_goals in pairs:
        must, stretch = time_goals or (None, None)
        results.append(Result(row, f"{level} × {native}", _ratio(result, native, level), must, stretch))
        if device == "cuda":
            must, stretch = memory_goals or (None, None)
            memory = peak[native] / peak[level]
            results.append(Result(row, f"{level} × {native} memory", Spread(memory, memory, memory), must, stretch))
    report.notes[row] = {"peak bytes": peak, "run by": "Lightning Fabric" if FABRIC else "torch, written out"}
    report.add(row, result, *results)


def _ratio(result: Race, above: str, below: str) -> Spread:
    """Of medians: these were not taken in the same rounds."""
    by = median(result.seconds[below])
    return Spread.of([seconds / by for seconds in result.seconds[above]])


def rows(quick: bool, device: str) -> Mapping[str, Row]:
    network = small_network if quick else resnet50
    tasks: dict[str, Callable[[], Task]] = {
        "ResNet-50 channels_last batch 64": lambda: image_task(quick, device, batch=64, network=network),
        "GPT-2 small 8 x 1024": lambda: language_task(quick, device, gpt2_small=True),
    }
    return {name: lambda row, report, task=task: training(row, report, task(), device) for name, task in tasks.items()}


def main(argv: Sequence[str] | None = None) -> int:
    return run_rows("gpu_training", __doc__, rows, argv)


if __name__ == "__main__":
    sys.exit(main())
