"""Optimizer steps and their tails on the CPU: ours, torch's, other packages' and the memory roofline.

`python -m benchmarks.optimizers`, from the repository's root.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from benchmarks import family
from benchmarks.common import Contender, Options, Race, Result, parse_options, race
from benchmarks.contenders import DEFAULT, FUSED, OURS, Buffers, adamw, master_tails, scaled_tails
from benchmarks.report import Report
from lightning_apex.cli.benching import shapes
from lightning_apex.cli.benching.families import ROOF
from lightning_apex.cli.benching.roofline import Stream, traffic

STEP_BYTES = 28  # an element, fp32 AdamW: parameter and two moments read and written, gradient read
Goals = tuple[float, float]
Row = Callable[[str, Report], None]


def models(options: Options) -> dict[str, shapes.Shapes]:
    if options.quick:
        return {"ResNet-50": shapes.small(20, 1000), "GPT-2": shapes.small(5, 100_000)}
    return {"ResNet-50": shapes.resnet50(), "GPT-2": shapes.gpt2_small()}


def roofline(buffers: Buffers, options: Options) -> Contender:
    written = (buffers.params, *buffers.moments)
    sweep = [Stream(buffers.grads), *(Stream(tensors, written=True) for tensors in written)]
    return Contender(ROOF, traffic([sweep], options.threads))


def over(row: str, result: Race, peer: str, goals: Goals | None = None) -> Result:
    must, stretch = goals or (None, None)
    return Result(row, f"× {peer}", result.ratio(peer, OURS), must, stretch)


def of_roofline(row: str, result: Race, bytes_moved: int, goals: Goals | None = None) -> Result:
    must, stretch = goals or (None, None)
    share = result.ratio(ROOF, OURS, bytes_moved / STEP_BYTES)
    return Result(row, f"of roofline at {bytes_moved} B", share, must, stretch)


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


SLOW_ROUNDS = 7  # where peers take seconds


def of_family(way: Callable[..., None], name: str, model: str) -> Row:
    """A row of benchmarks/family.py."""

    def run(row: str, report: Report) -> None:
        rounds = report.options.rounds
        way(row, name, models(report.options)[model], report, min(rounds, SLOW_ROUNDS) if model == "GPT-2" else rounds)

    return run


def ten_thousand(name: str) -> Row:
    def run(row: str, report: Report) -> None:
        tensors = 100 if report.options.quick else 10_000
        family.many(row, name, shapes.mixed(tensors), report, report.options.rounds)

    return run


WAYS = {"fp32": family.fp32, "bf16 + masters": family.masters, "bf16 states": family.half_states}
ROWS: dict[str, Row] = {
    **{
        f"{name} {kind} {model}": of_family(way, name, model)
        for kind, way in WAYS.items()
        for name in family.FAMILIES
        for model in ("ResNet-50", "GPT-2")
    },
    **{f"{name} 10000 small tensors": ten_thousand(name) for name in family.FAMILIES},
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
            gc.collect()  # hundreds of MB
    report.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
