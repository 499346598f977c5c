"""The kernels of SyncBatchNorm on a GPU, ours beside torch's: what one rank runs, without the collectives."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.batchnorm import OURS, TORCH, resnet50_norms
from benchmarks.common import Contender
from lightning_apex import ops

_EPS, _MOMENTUM = 1e-5, 0.1


class Layer:
    """One BatchNorm's tensors, and its forward and backward pass by either."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        def random() -> Tensor:
            t = torch.randn(shape, device="cuda").to(dtype)
            return t.contiguous(memory_format=torch.channels_last)

        self.x, self.grad, channels = random(), random(), shape[1]
        self.weight, self.bias, self.mean, self.var = (torch.rand(channels, device="cuda") + 0.5 for _ in range(4))
        self.count = self.x.numel() / channels
        self.counts = torch.tensor([self.count], device="cuda")
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


def contenders(dtype: torch.dtype, batch: int, quick: bool) -> list[Contender]:
    """Both, on the layers of ResNet-50 with the channels last, or on two small ones."""
    sizes = [(8, 8), (16, 5)] if quick else resnet50_norms()
    layers = [Layer((batch, channels, height, height), dtype) for channels, height in sizes]

    def all_of(passes: Callable[[Layer], None]) -> Callable[[], None]:
        def run() -> None:
            for layer in layers:
                passes(layer)

        return run

    return [Contender(OURS, all_of(Layer.ours)), Contender(TORCH, all_of(Layer.torchs))]
