"""One CUDA GPU: optimizer steps (device time, and wall time with the host), tails, and training steps O0 to O5.

`python -m benchmarks.gpu`, from the repository's root.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch

from benchmarks import gpu_family
from benchmarks.common import Contender, Options, Race, Result, parse_options, race
from benchmarks.contenders import FOREACH, FUSED, OURS, Buffers, adamw, master_tails, scaled_tails
from benchmarks.models import Task, image_task, language_task
from benchmarks.optimizers import STEP_BYTES, Goals
from benchmarks.report import Report
from benchmarks.training import AUTOCAST, AUTOCAST_FP16, FP32, PURE, LevelStep, torch_step
from lightning_apex.cli.benching import shapes
from lightning_apex.cli.benching.families import ROOF

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


def wall_race(contenders: Sequence[Contender], options: Options) -> Race:
    """From an idle device to an idle device: what the host does counts."""
    return race(contenders, options.rounds, sync=torch.cuda.synchronize, keep_all=True, pause=0.0)


def device_race(contenders: Sequence[Contender], options: Options) -> Race:
    """The device's time alone: while it sleeps, the host queues the whole step."""
    result = Race({contender.name: [] for contender in contenders}, keep_all=True)
    for turn in range(options.rounds + 2):
        for i in range(len(contenders)):
            contender = contenders[(i + turn) % len(contenders)]
            if contender.prepare is not None:
                contender.prepare()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(50_000_000)  # clock ticks: some 25 ms
            start.record()
            contender.run()
            end.record()
            torch.cuda.synchronize()
            if turn >= 2:  # the first two warm up
                result.seconds[contender.name].append(start.elapsed_time(end) / 1e3)
    result.others = [0.0] * options.rounds
    return result


def step_device(row: str, chosen: shapes.Shapes, report: Report) -> None:
    from benchmarks.gpu_roofline import FlatTraffic

    buffers = Buffers(chosen, "cuda")
    roof = Contender(ROOF, FlatTraffic(sum(p.numel() for p in buffers.params)))
    result = device_race([roof, *adamw(buffers, (OURS, FUSED, FOREACH))], report.options)
    share = result.ratio(ROOF, OURS)
    report.add(
        row,
        result,
        Result(row, f"of roofline at {STEP_BYTES} B", share, 0.93, 0.97),
        over(row, result, FUSED, (1.0, 1.1)),
        over(row, result, FOREACH),
    )


def family_device(row: str, report: Report, name: str, chosen: shapes.Shapes) -> None:
    from benchmarks.gpu_roofline import FlatTraffic

    buffers = Buffers(chosen, "cuda")
    ways = gpu_family.contenders(name, buffers)
    roof = Contender(ROOF, FlatTraffic(sum(p.numel() for p in buffers.params)))
    result = device_race([roof, *ways], report.options)
    moved = gpu_family.FAMILIES[name].bytes_moved
    share = result.ratio(ROOF, OURS, moved / STEP_BYTES)
    peers = [over(row, result, way.name) for way in ways if way.name != OURS]
    report.add(row, result, Result(row, f"of roofline at {moved} B", share), *peers)


def step_wall(row: str, chosen: shapes.Shapes, report: Report, goals: Goals | None) -> None:
    result = wall_race(adamw(Buffers(chosen, "cuda"), (OURS, FUSED, FOREACH)), report.options)
    report.add(row, result, over(row, result, FUSED, goals), over(row, result, FOREACH))


def tails(row: str, chosen: shapes.Shapes, report: Report, scaled: bool, goals: Goals) -> None:
    _, contenders = scaled_tails(chosen, "cuda") if scaled else master_tails(chosen, "cuda")
    result = wall_race(contenders, report.options)
    report.add(row, result, over(row, result, contenders[1].name, goals))


def sync_batch_norm(row: str, report: Report, dtype: torch.dtype) -> None:
    from benchmarks import gpu_batchnorm

    result = device_race(gpu_batchnorm.contenders(dtype, 64, report.options.quick), report.options)
    report.add(row, result, over(row, result, gpu_batchnorm.TORCH, (1.1, 1.3)))


def training(row: str, task: Task, report: Report) -> None:
    """One level at a time beside torch's fp32, so that only two models are held at once."""
    peers = {"O0": FP32, "O1": AUTOCAST_FP16, "O4": AUTOCAST, "O5": PURE}
    for level in LEVELS:
        contenders = [Contender(level, LevelStep(level, task, "cuda")), Contender(FP32, torch_step(FP32, task, "cuda"))]
        if level in peers and peers[level] != FP32:
            contenders.append(Contender(peers[level], torch_step(peers[level], task, "cuda")))
        result = wall_race(contenders, report.options)
        results = [Result(row, f"{level} × {c.name}", result.ratio(c.name, level)) for c in contenders[1:]]
        report.add(f"{row} {level}", result, *results)
        del contenders
        gc.collect()
        torch.cuda.empty_cache()


def over(row: str, result: Race, peer: str, goals: Goals | None = None) -> Result:
    must, stretch = goals or (None, None)
    return Result(row, f"× {peer}", result.ratio(peer, OURS), must, stretch)


Row = Callable[[str, Report], None]


def rows(quick: bool) -> dict[str, Row]:
    resnet = shapes.small(20, 1000) if quick else shapes.resnet50()
    gpt = shapes.small(5, 100_000) if quick else shapes.gpt2_small()
    few = shapes.small(161, 4096)
    many = shapes.small(1000 if quick else 10_000, 1000)
    return {
        **{f"device: {name} GPT-2": partial(family_device, name=name, chosen=gpt) for name in gpu_family.FAMILIES},
        "wall: AdamW 10000 x 1000": lambda row, report: step_wall(row, many, report, (3.0, 8.0)),
        "device: AdamW GPT-2": lambda row, report: step_device(row, gpt, report),
        "device: AdamW ResNet-50": lambda row, report: step_device(row, resnet, report),
        "wall: AdamW GPT-2": lambda row, report: step_wall(row, gpt, report, None),
        "wall: AdamW ResNet-50": lambda row, report: step_wall(row, resnet, report, (3.0, 8.0)),
        "wall: AdamW 161 x 4096": lambda row, report: step_wall(row, few, report, (3.0, 8.0)),
        "O1 tail GPT-2": lambda row, report: tails(row, gpt, report, True, (1.45, 1.5)),
        "O1 tail 161 x 4096": lambda row, report: tails(row, few, report, True, (3.0, 6.0)),
        "O5 tail GPT-2": lambda row, report: tails(row, gpt, report, False, (1.6, 1.7)),
        "device: SyncBatchNorm fp16 NHWC": lambda row, report: sync_batch_norm(row, report, torch.float16),
        "device: SyncBatchNorm fp32 NHWC": lambda row, report: sync_batch_norm(row, report, torch.float32),
        "transformer 20M": lambda row, report: training(row, language_task(quick, "cuda"), report),
        "ResNet-18 NHWC batch 64": lambda row, report: training(row, image_task(quick, "cuda", batch=64), report),
    }


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(__doc__, list(rows(False)), argv)
    if not torch.cuda.is_available():
        print("benchmarks.gpu needs a CUDA GPU and a CUDA build of torch, and finds none here.", file=sys.stderr)
        return 2
    report = Report("gpu", options)
    for row, run in rows(options.quick).items():
        if options.wants(row):
            run(row, report)
            gc.collect()
            torch.cuda.empty_cache()
    report.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
