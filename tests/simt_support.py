"""What the tests of the emulated CUDA kernels share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from cases import same_bits
from kernels import Kernels
from torch import Tensor

# The orders of threads and blocks, with a seed, that test_simt*.py run in. All other tests run in the first.
ORDERS = [("forward", 0), ("reverse", 0), ("random", 1), ("random", 2)]
CPU = Kernels("cpu", torch.ops.lightning_apex, "cpu")


@dataclass
class Counters:
    """What the machine has counted since the order was set."""

    launches: int
    blocks: int
    switches: int
    copies: int


def counters(simt: Kernels) -> Counters:
    return Counters(*simt.namespace.counters())


def count(simt: Kernels, call: Callable[[], object]) -> tuple[int, int]:
    """The launches, and the copies to the device, that a call takes."""
    before = counters(simt)
    call()
    after = counters(simt)
    return after.launches - before.launches, after.copies - before.copies


def exact(values: Tensor, offset: int = 0) -> Tensor:
    """The values in a storage that ends with them, from its element `offset` on."""
    return torch.cat([values.new_zeros(offset), values.flatten()])[offset:].view(values.shape)


def many(dtype: torch.dtype, count: int, large: int) -> list[Tensor]:
    """Small tensors, some empty and most misaligned, and among them one of `large` elements."""
    sizes = [(7 * i) % 12 for i in range(count)]
    sizes[count // 2] = large
    return [exact(torch.randn(size).to(dtype), offset=i % 4) for i, size in enumerate(sizes)]


def both(simt: Kernels, call: Callable[[Kernels, list[list[Tensor]]], list[Tensor]], lists: list[list[Tensor]]) -> None:
    """Makes the same call here and on the CPU, and compares all that it was given and returned, to the bit."""

    def copies() -> list[list[Tensor]]:
        return [[exact(t, t.storage_offset()) for t in members] for members in lists]

    ours, theirs = copies(), copies()
    results = zip([call(simt, ours), *ours], [call(CPU, theirs), *theirs], strict=True)
    for i, (got, expected) in enumerate(results):
        for j, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert same_bits(a, b), f"list {i}, tensor {j}: {a} is not {b}"
