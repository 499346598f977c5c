"""Whole training steps on the CPU: what a Trainer adds, bf16 levels against torch's own bf16, memory.

`python -m benchmarks.step`, from the repository's root.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.warnings import disable_possible_user_warnings
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.common import Contender, Race, Result, Spread, parse_options, race
from benchmarks.models import image_task, language_task
from benchmarks.report import Report
from benchmarks.training import AUTOCAST, FP32, PURE, LevelStep, contenders, peak_bytes_per_parameter, torch_step
from lightning_apex import ApexPrecision, FusedAdam


class TinyModel(LightningModule):
    """So small that a step's time is Python's."""

    def __init__(self, fused_adam: bool) -> None:
        super().__init__()
        self.fused_adam = fused_adam
        self.net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.fused_adam:
            return FusedAdam(self.parameters(), lr=1e-3)
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


class Stopwatch(Callback):
    """The seconds of a step, without those of the first steps and of setting up."""

    def __init__(self, warm_up: int = 20) -> None:
        self.warm_up, self.seconds = warm_up, 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.warm_up:
            self._start = time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seconds = (time.perf_counter() - self._start) / (trainer.global_step - self.warm_up)


def tiny_fit(ours: bool, steps: int) -> float:
    """Trains the tiny model; gives the seconds a step."""
    watch = Stopwatch()
    precision: dict[str, Any] = {"plugins": [ApexPrecision("O0")]} if ours else {"precision": "32-true"}
    trainer = Trainer(
        accelerator="cpu",
        max_steps=steps,
        callbacks=[watch],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **precision,
    )
    batch = torch.randn(8, 16), torch.randint(4, (8,))
    gc.collect()
    trainer.fit(TinyModel(ours), train_dataloaders=DataLoader([batch] * steps, batch_size=None))
    return watch.seconds


def trainer_overhead(row: str, report: Report) -> None:
    steps = 60 if report.options.quick else 400
    names = {"ours": True, "native": False}
    result = Race({name: [] for name in names})
    tiny_fit(True, 40)
    tiny_fit(False, 40)
    for turn in range(report.options.rounds):
        for name in sorted(names, reverse=turn % 2 == 0):
            result.seconds[name].append(tiny_fit(names[name], steps))
        result.others.append(0.0)
    value = result.ratio("ours", "native")
    report.add(row, result, Result(row, "time / native 32-true, AdamW fused", value, 1.0, 0.95, higher=False))


def transformer(row: str, report: Report) -> None:
    task = language_task(report.options.quick)
    result = race(contenders(task, ("O0", "O4", "O5")), report.options.rounds)
    report.add(row, result, *_bf16_results(row, result, {"O4": (1.6, 1.8), "O5": (1.8, 2.0)}, FP32))


def resnet(row: str, report: Report) -> None:
    quick = report.options.quick
    nchw = Contender(f"{FP32} NCHW", torch_step(FP32, image_task(quick, channels_last=False)))
    result = race([nchw, *contenders(image_task(quick), ("O0", "O4", "O5"))], report.options.rounds)
    report.add(
        row,
        result,
        *_bf16_results(row, result, {"O4": (1.75, 2.1), "O5": (1.75, 2.1)}, FP32),
        Result(row, f"O4 × {nchw.name}", result.ratio(nchw.name, "O4"), 2.1),
        Result(row, f"O5 × {nchw.name}", result.ratio(nchw.name, "O5"), 2.1),
    )


def _bf16_results(row: str, result: Race, goals: dict[str, tuple[float, float]], reference: str) -> list[Result]:
    results = [Result(row, f"O0 × {reference}", result.ratio(reference, "O0"), 1.0)]
    for level, peer in (("O4", AUTOCAST), ("O5", PURE)):
        results.append(Result(row, f"{level} × {reference}", result.ratio(reference, level), *goals[level]))
        results.append(Result(row, f"{peer} × {reference}", result.ratio(reference, peer)))
        results.append(Result(row, f"{level} × {peer}", result.ratio(peer, level), 1.0))
    return results


def memory(row: str, report: Report) -> None:
    for level, ideal in (("O0", 16.0), ("O5", 16.0)):
        step = LevelStep(level, language_task(report.options.quick))
        held, peak = peak_bytes_per_parameter(step)
        bound = ideal * 1.01  # step counts and, at most, a chunk for each thread
        for what, value in (("held", held), ("at the peak of a step", peak)):
            spread = Spread(value, value, value)
            report.add(row, None, Result(row, f"{level} {what}", spread, bound, unit=" B/param", higher=False))


ROWS: dict[str, Callable[[str, Report], None]] = {
    "Trainer overhead, tiny model": trainer_overhead,
    "transformer 20M": transformer,
    "ResNet-18 224 NHWC": resnet,
    "memory": memory,
}


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(__doc__, list(ROWS), argv)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    disable_possible_user_warnings()
    warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated", module="lightning")
    report = Report("step", options)
    for row, run in ROWS.items():
        if options.wants(row):
            run(row, report)
    report.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
