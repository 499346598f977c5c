"""Optimizer steps and their tails on the CPU: ours, torch's, and the memory roofline.

`python -m benchmarks.optimizers`, from the repository's root.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from benchmarks import shapes
from benchmarks.common import Contender, Options, Race, Result, parse_options, race
from benchmarks.contenders import DEFAULT, FOREACH, FUSED, OURS, Buffers, adamw, master_tails, scaled_tails
from benchmarks.report import Report
from benchmarks.roofline import traffic

ROOF = "roofline"
STEP_BYTES = 28  # an element, fp32 AdamW: parameter and two moments read and written, gradient read
Goals = tuple[float, float]


def models(options: Options) -> dict[str, shapes.Shapes]:
    if options.quick:
        return {"ResNet-50": shapes.small(20, 1000), "GPT-2": shapes.small(5, 100_000)}
    return {"ResNet-50": shapes.resnet50(), "GPT-2": shapes.gpt2_small()}


def roofline(buffers: Buffers, options: Options) -> Contender:
    return Contender(ROOF, traffic(buffers.params, buffers.grads, buffers.moments, options.threads))


def over(row: str, result: Race, peer: str, goals: Goals | None = None) -> Result:
    must, stretch = goals or (None, None)
    return Result(row, f"× {peer}", result.ratio(peer, OURS), must, stretch)


def of_roofline(row: str, result: Race, bytes_moved: int, goals: Goals | None = None) -> Result:
    must, stretch = goals or (None, None)
    share = result.ratio(ROOF, OURS, bytes_moved / STEP_BYTES)
    return Result(row, f"of roofline at {bytes_moved} B", share, must, stretch)


def fp32_step(row: str, model: str, report: Report, fused_goals: Goals) -> None:
    buffers = Buffers(models(report.options)[model])
    contenders = [roofline(buffers, report.options), *adamw(buffers, (OURS, FUSED, DEFAULT, FOREACH))]
    result = race(contenders, report.options.rounds)
    report.add(
        row,
        result,
        of_roofline(row, result, STEP_BYTES, (0.97, 1.0)),
        over(row, result, FUSED, fused_goals),
        over(row, result, DEFAULT, (3.5, 4.1)),
        over(row, result, FOREACH, (4.0, 4.5)),
    )


def channels_last(row: str, report: Report) -> None:
    chosen = [(8, 4, 3, 3)] * 20 if report.options.quick else shapes.resnet50()
    buffers = Buffers(chosen, channels_last=True)
    result = race([roofline(buffers, report.options), *adamw(buffers, (OURS, FUSED))], report.options.rounds)
    report.add(row, result, of_roofline(row, result, STEP_BYTES), over(row, result, FUSED, (1.8, 2.1)))


def busy_cores(row: str, report: Report) -> None:
    buffers = Buffers(models(report.options)["ResNet-50"])
    with busy_processes():
        result = race(adamw(buffers, (OURS, FUSED)), report.options.rounds, keep_all=True)
    report.add(row, result, over(row, result, FUSED, (2.5, 3.3)))


@contextmanager
def busy_processes() -> Iterator[None]:
    """One process that never rests on each core."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    pin = "hasattr(os, 'sched_setaffinity') and os.sched_setaffinity(0, [int(sys.argv[1])])"
    spin = f"import os, sys\n{pin}\nwhile True: pass"
    processes = [subprocess.Popen([sys.executable, "-c", spin, str(core)]) for core in cores]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def many_small(row: str, tensors: int, elements: int, report: Report) -> None:
    buffers = Buffers(shapes.small(tensors, elements))
    result = race(adamw(buffers, (OURS, FUSED, DEFAULT)), report.options.rounds)
    report.add(row, result, over(row, result, FUSED, (3.0, 6.0)), over(row, result, DEFAULT))


def scaled_tail(row: str, model: str, report: Report) -> None:
    buffers, contenders = scaled_tails(models(report.options)[model])
    result = race([roofline(buffers, report.options), *contenders], report.options.rounds)
    report.add(
        row,
        result,
        over(row, result, FUSED, (2.3, 3.1)),
        over(row, result, DEFAULT, (4.0, 4.4)),
        of_roofline(row, result, 32, (0.85, 0.88)),
    )


def master_tail(row: str, model: str, report: Report) -> None:
    buffers, contenders = master_tails(models(report.options)[model])
    result = race([roofline(buffers, report.options), *contenders], report.options.rounds)
    # bf16: gradient read twice, weight read (has it left its master?) and written; fp32: three read and written
    report.add(
        row, result, over(row, result, "torch composition", (3.0, 3.6)), of_roofline(row, result, 32, (0.92, 0.95))
    )


ROWS: dict[str, Callable[[str, Report], None]] = {
    "AdamW fp32 ResNet-50": lambda row, report: fp32_step(row, "ResNet-50", report, (1.3, 1.45)),
    "AdamW fp32 GPT-2": lambda row, report: fp32_step(row, "GPT-2", report, (1.25, 1.35)),
    "AdamW fp32 channels_last": channels_last,
    "AdamW fp32 busy cores": busy_cores,
    "AdamW fp32 161 x 4096": lambda row, report: many_small(row, 161, 4096, report),
    "AdamW fp32 1000 x 16": lambda row, report: many_small(row, 1000, 16, report),
    "O1 tail ResNet-50": lambda row, report: scaled_tail(row, "ResNet-50", report),
    "O1 tail GPT-2": lambda row, report: scaled_tail(row, "GPT-2", report),
    "O5 tail ResNet-50": lambda row, report: master_tail(row, "ResNet-50", report),
    "O5 tail GPT-2": lambda row, report: master_tail(row, "GPT-2", report),
}


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(__doc__, list(ROWS), argv)
    report = Report("optimizers", options)
    for row, run in ROWS.items():
        if options.wants(row):
            run(row, report)
    report.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
