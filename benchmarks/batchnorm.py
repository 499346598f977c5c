"""BatchNorm forward and backward on the CPU, over the 53 layers of ResNet-50: ours, torch's, and the memory roofline.

`python -m benchmarks.batchnorm`, from the repository's root.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common import MachineClock, Options, Race, Result, parse_options, race
from benchmarks.report import Report
from lightning_apex import SyncBatchNorm
from lightning_apex.cli.benching.families import ROOF
from lightning_apex.cli.benching.norms import ROOF_BYTES, ROOF_PART, TORCH, Layers
from lightning_apex.cli.benching.race import OURS

APART, NAIVE = "three calls", "naive"
Goals = tuple[float, float]
Size = tuple[int, int]  # channels, height


def resnet50_norms() -> list[Size]:
    """Channels and height of the input of each BatchNorm, for images of 224 x 224."""
    sizes, height = [(64, 112)], 56
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            before = height
            if block == 0 and stage > 0:
                height //= 2
            sizes += [(width, before), (width, height), (4 * width, height)]
            if block == 0:
                sizes.append((4 * width, height))
    return sizes


def layers_of(options: Options, dtype: torch.dtype, memory: torch.memory_format, sizes: Sequence[Size] = ()) -> Layers:
    """The BatchNorms of ResNet-50, or those of some sizes."""
    chosen, batch = sizes_and_batch(options)
    shapes = [(batch, channels, height, height) for channels, height in sizes or chosen]
    return Layers(shapes, dtype, [memory] * len(shapes))


def sizes_and_batch(options: Options) -> tuple[list[Size], int]:
    return ([(8, 8), (16, 5)], 2) if options.quick else (resnet50_norms(), 8)


def one_process(
    row: str, report: Report, dtype: torch.dtype, memory: torch.memory_format, elements_moved: int, goals: Goals
) -> None:
    layers = layers_of(report.options, dtype, memory)
    contenders = [layers.contender(OURS, SyncBatchNorm), layers.contender(TORCH, nn.BatchNorm2d)]
    result = race([layers.roofline(report.options.threads), *contenders], report.options.rounds)
    moved = elements_moved * dtype.itemsize
    report.add(
        row,
        result,
        Result(row, f"× {TORCH}", result.ratio(TORCH, OURS), *goals),
        Result(row, f"of roofline at {moved} B", result.ratio(ROOF, OURS, ROOF_PART * moved / ROOF_BYTES)),
    )


def fused(row: str, report: Report, memory: torch.memory_format) -> None:
    """The BatchNorms at the end of blocks, each with a residual to add and a ReLU."""
    sizes = [] if report.options.quick else [size for size in resnet50_norms() if size[0] * size[1] == 256 * 56]
    wide = [size for size in sizes if size[0] >= 256]
    layers = layers_of(report.options, torch.float32, memory, wide).with_addends()

    def apart(module: nn.Module, x: Tensor, z: Tensor) -> Tensor:
        return F.relu(module(x) + z)

    contenders = [
        layers.contender(OURS, partial(SyncBatchNorm, fuse_relu=True), lambda module, x, z: module(x, z)),
        layers.contender(APART, SyncBatchNorm, apart),
        layers.contender(TORCH, nn.BatchNorm2d, apart),
    ]
    result = race(contenders, report.options.rounds)
    report.add(
        row,
        result,
        Result(row, f"× {APART}", result.ratio(APART, OURS), 1.4, 1.8),
        Result(row, f"× {TORCH}", result.ratio(TORCH, OURS)),
    )


# ---- two processes ----


class _NaiveNorm(torch.autograd.Function):
    """What one writes down without kernels: sums, squares, and a collective for each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        dims, shape = (0, 2, 3), (1, -1, 1, 1)
        count = torch.tensor([x.numel() / x.size(1)])
        sums = [x.sum(dims), x.square().sum(dims), count]
        for part in sums:
            dist.all_reduce(part)
        mean = sums[0] / count
        invstd = (sums[1] / count - mean.square() + eps).rsqrt()
        xhat = (x - mean.view(shape)) * invstd.view(shape)
        ctx.save_for_backward(xhat, weight, invstd, count)
        return xhat * weight.view(shape) + bias.view(shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        xhat, weight, invstd, count = ctx.saved_tensors
        dims, shape = (0, 2, 3), (1, -1, 1, 1)
        local = [dy.sum(dims), (dy * xhat).sum(dims)]
        sums = [part.clone() for part in local]
        for part in sums:
            dist.all_reduce(part)
        dx = dy - (sums[0] / count).view(shape) - xhat * (sums[1] / count).view(shape)
        return dx * (weight * invstd).view(shape), local[1], local[0], None


class NaiveSyncNorm(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _NaiveNorm.apply(x, self.weight, self.bias, self.eps)
        return out


def _rank(rank: int, meeting: str, options: Options, results: Any) -> None:
    """Times all contenders, in step with the other process; the first reports."""
    torch.set_num_threads(max(1, options.threads // 2))
    torch.manual_seed(rank)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    layers = layers_of(options, torch.float32, torch.contiguous_format)
    contenders = [
        layers.contender(OURS, SyncBatchNorm),
        layers.contender(TORCH, nn.BatchNorm2d),
        layers.contender(NAIVE, NaiveSyncNorm),
    ]
    result = Race({contender.name: [] for contender in contenders})
    for turn in range(options.rounds + 1):  # the first warms up
        clock = MachineClock()
        for i in range(len(contenders)):
            contender = contenders[(i + turn) % len(contenders)]
            time.sleep(0.05)
            dist.barrier()
            start = time.perf_counter()
            contender.run()
            dist.barrier()  # both are through
            result.seconds[contender.name].append(time.perf_counter() - start)
        result.others.append(clock.share_of_others())
    if rank == 0:
        results.put(({name: seconds[1:] for name, seconds in result.seconds.items()}, result.others[1:]))
    dist.destroy_process_group()


def two_processes(row: str, report: Report) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder, "meeting"))
        ranks = [context.Process(target=_rank, args=(r, meeting, report.options, results)) for r in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode != 0 for process in ranks):
        sys.exit(f"{row}: a process failed, see above")
    seconds, others = results.get()
    # Each process sees the other's work as that of strangers.
    result = Race(seconds, [max(0.0, share - 0.5) for share in others])
    report.add(
        row,
        result,
        Result(row, f"of {TORCH}'s local time", result.ratio(OURS, TORCH), 1.25, 1.0, higher=False),
        Result(row, f"× {NAIVE}", result.ratio(NAIVE, OURS), 2.7, 3.3),
    )


CONTIGUOUS, CHANNELS_LAST = torch.contiguous_format, torch.channels_last
# Elements moved: x and result forward, dy, x and dx backward. With the channels last, x and dy are read twice.
ROWS: dict[str, Callable[[str, Report], None]] = {
    "fp32": lambda row, report: one_process(row, report, torch.float32, CONTIGUOUS, 5, (2.2, 2.5)),
    "fp32 channels_last": lambda row, report: one_process(row, report, torch.float32, CHANNELS_LAST, 8, (1.45, 1.9)),
    "bf16 channels_last": lambda row, report: one_process(row, report, torch.bfloat16, CHANNELS_LAST, 8, (1.5, 2.0)),
    "BN + add + ReLU": lambda row, report: fused(row, report, CONTIGUOUS),
    "BN + add + ReLU channels_last": lambda row, report: fused(row, report, CHANNELS_LAST),
    "two processes, synced": two_processes,
}


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(__doc__, list(ROWS), argv)
    report = Report("batchnorm", options)
    for row, run in ROWS.items():
        if options.wants(row):
            run(row, report)
    report.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
