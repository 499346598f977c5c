"""The kernels of SyncBatchNorm on a GPU, ours beside torch's: what one rank runs, without the collectives.

`python -m benchmarks.gpu_batchnorm`, from the repository's root: ResNet-50's layers at batch 64.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from benchmarks.batchnorm import OURS, TORCH, resnet50_norms
from benchmarks.common import Contender
from benchmarks.gpu_common import Row, device_race, over, run_rows
from benchmarks.report import Report
from lightning_apex import ops

_EPS, _MOMENTUM = 1e-5, 0.1


class Layer:
    """One BatchNorm's tensors, and its forward and backward pass by either."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
        def random() -> Tensor:
            t = torch.randn(shape, device=device).to(dtype)
            return t.contiguous(memory_format=torch.channels_last)

        self.x, self.grad, channels = random(), random(), shape[1]
        self.weight, self.bias, self.mean, self.var = (torch.rand(channels, device=device) + 0.5 for _ in range(4))
        self.count = self.x.numel() / channels
        self.counts = torch.tensor([self.count], device=device)
        self.wide_counts = self.counts.double()
        self.whole_counts = self.counts.int()

    def ours(self) -> None:
        mean, m2 = ops.batch_norm_stats(self.x)
        mean, invstd, total = ops.batch_norm_combine(
            mean[None], m2[None], self.wide_counts, _EPS, _MOMENTUM, self.mean, self.var
        )
        ops.batch_norm_apply(self.x, mean, invstd, self.weight, self.bias, None, False)
        sums = ops.batch_norm_backward_reduce(self.grad, self.x, None, mean, invstd)
        ops.batch_norm_backward_apply(self.grad, self.x, None, mean, invstd, self.weight, *sums, total, False)

    def torchs(self) -> None:
        mean, invstd = torch.batch_norm_stats(self.x, _EPS)
        mean, invstd = torch.batch_norm_gather_stats_with_counts(
            self.x, mean[None], invstd[None], self.mean, self.var, _MOMENTUM, _EPS, self.counts
        )
        torch.batch_norm_elemt(self.x, self.weight, self.bias, mean, invstd, _EPS)
        sum_dy, sum_dy_xmu, _, _ = torch.batch_norm_backward_reduce(
            self.grad, self.x, mean, invstd, self.weight, True, True, True
        )
        torch.batch_norm_backward_elemt(
            self.grad, self.x, mean, invstd, self.weight, sum_dy, sum_dy_xmu, self.whole_counts
        )


def contenders(dtype: torch.dtype, batch: int, quick: bool, device: str) -> list[Contender]:
    """Both, on the layers of ResNet-50 with the channels last, or on two small ones. On a CPU torch has none."""
    sizes = [(8, 8), (16, 5)] if quick else resnet50_norms()
    layers = [Layer((batch, channels, height, height), dtype, device) for channels, height in sizes]

    def all_of(passes: Callable[[Layer], None]) -> Callable[[], None]:
        def run() -> None:
            for layer in layers:
                passes(layer)

        return run

    ours = [Contender(OURS, all_of(Layer.ours))]
    return ours if device == "cpu" else [*ours, Contender(TORCH, all_of(Layer.torchs))]


def sync_batch_norm(row: str, report: Report, dtype: torch.dtype, device: str) -> None:
    ways = contenders(dtype, 64, report.options.quick, device)
    result = device_race(ways, report.options, device)
    report.add(row, result, *(over(row, result, way.name, OURS, (1.1, 1.3)) for way in ways[1:]))


def rows(quick: bool, device: str) -> Mapping[str, Row]:
    types = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    return {
        f"SyncBatchNorm {name} NHWC": lambda row, report, dtype=dtype: sync_batch_norm(row, report, dtype, device)
        for name, dtype in types.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    return run_rows("gpu_batchnorm", __doc__, rows, argv)


if __name__ == "__main__":
    sys.exit(main())
