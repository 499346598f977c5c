"""fp16 training on the CPU: a ResNet-18 step on 64x64 images at O1 and O2, in fp32, and under torch's autocast fp16.

`python -m benchmarks.half_convolutions`, from the repository's root.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from benchmarks.common import Contender, Result, parse_options, race
from benchmarks.models import image_task
from benchmarks.report import Report
from benchmarks.training import AUTOCAST_FP16, FP32, LevelStep, torch_step

ROW = "ResNet-18 64x64, batch 4"
LEVELS = ("O1", "O2")
SLOW_ROUNDS = 3  # a step under torch's autocast fp16 takes seconds


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(__doc__, [ROW], argv)
    task = image_task(options.quick, channels_last=False, batch=4, size=64)
    levels = [Contender(level, LevelStep(level, task, half_dtype=torch.float16)) for level in LEVELS]
    report = Report("half_convolutions", options)
    fast = race([*levels, Contender(FP32, torch_step(FP32, task))], options.rounds)
    report.add(
        ROW,
        fast,
        *(Result(ROW, f"{level} fp16: time / {FP32}", fast.ratio(level, FP32), 2.0, higher=False) for level in LEVELS),
    )
    slow = race([*levels, Contender(AUTOCAST_FP16, torch_step(AUTOCAST_FP16, task))], min(SLOW_ROUNDS, options.rounds))
    report.add(
        f"{ROW}, with the slow peer",
        slow,
        *(Result(ROW, f"{level} fp16 × {AUTOCAST_FP16}", slow.ratio(AUTOCAST_FP16, level), 50.0) for level in LEVELS),
        Result(ROW, "O2 fp16 × O1 fp16", slow.ratio("O1", "O2")),
    )
    report.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
