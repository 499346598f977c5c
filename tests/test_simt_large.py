"""Tensors of more than 2^31 elements on the SIMT machine: an index of 32 bits would be elsewhere.

The tensors are virtual: fresh memory that nobody touches takes no room, and of a launch's blocks only those run that
work near the beginning, around element 2^31 and at the end. There the results are the CPU kernels'.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import BF16, F16, F32, OPTIMIZERS, same_bits
from kernels import Kernels
from problems import TABLE
from simt_steps import WITH_NORMS, Lists, make_step, measure
from simt_support import CPU
from torch import Tensor

CHUNK = 16_384  # of the kernels that go through lists
SIZE = 2**31 + 3 * CHUNK + 1_003
BLOCKS = [0, 2**31 // CHUNK - 1, 2**31 // CHUNK, SIZE // CHUNK]
# What the blocks work on, with a margin that they must leave alone.
WINDOWS = [slice(0, 2 * CHUNK), slice(2**31 - 2 * CHUNK, 2**31 + 2 * CHUNK), slice(SIZE - 1_003 - CHUNK, SIZE)]
WORK = [slice(0, CHUNK), slice(CHUNK, 3 * CHUNK), slice(CHUNK, CHUNK + 1_003)]  # in the windows


@pytest.fixture(params=[BLOCKS], ids=["lists"])
def few_blocks(request: pytest.FixtureRequest, simt_namespace: Any) -> Iterator[Kernels]:
    simt_namespace.set_overrides(0, 0, request.param)
    yield Kernels("simt", simt_namespace, "cpu")
    simt_namespace.set_overrides()


def virtual(dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Random in the windows; nothing else is touched."""
    t = torch.empty(SIZE, dtype=dtype)
    for window in WINDOWS:
        t[window] = (scale * torch.rand(window.stop - window.start)).to(dtype)
    return t


def windows(tensors: list[Tensor]) -> list[list[Tensor]]:
    return [[t[window].clone() for t in tensors] for window in WINDOWS]


def check(tensors: list[Tensor], expected: list[list[Tensor]]) -> None:
    for w, (window, members) in enumerate(zip(WINDOWS, expected, strict=True)):
        for k, (t, e) in enumerate(zip(tensors, members, strict=True)):
            assert same_bits(t[window], e), f"tensor {k} in window {w}"


def in_windows(call: Any, kernels: Kernels, before: list[list[Tensor]]) -> list[list[Tensor]]:
    """What a call makes of the parts of the windows where there is work, which begin with a chunk."""
    after = []
    for work, members in zip(WORK, before, strict=True):
        parts = [m[work].clone() for m in members]
        call(kernels, parts)
        after.append([m.clone() for m in members])
        for whole, part in zip(after[-1], parts, strict=True):
            whole[work] = part
    return after


def test_copies(few_blocks: Kernels) -> None:
    def copy(kernels: Kernels, t: list[Tensor]) -> None:
        kernels.copy_scaled_([t[0]], [t[1]], torch.tensor(0.3), None)

    def unscale(kernels: Kernels, t: list[Tensor]) -> None:
        kernels.unscale_([t[0]], torch.tensor(0.3), None)

    def reconcile(kernels: Kernels, t: list[Tensor]) -> None:
        kernels.reconcile_masters_([t[0]], [t[1]])

    for call, tensors in ((copy, [virtual(F32), virtual(F16)]), (unscale, [virtual(F16)])):
        expected = in_windows(call, CPU, windows(tensors))
        call(few_blocks, tensors)
        check(tensors, expected)
    masters, params = virtual(F32), virtual(BF16)
    expected = in_windows(reconcile, CPU, windows([masters, params]))
    reconcile(few_blocks, [masters, params])
    check([masters, params], expected)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps(few_blocks: Kernels, name: str) -> None:
    tensors = [virtual(F16), virtual(F16), *(virtual(BF16) for _ in TABLE[name]["states"])]
    numbers = [torch.tensor(0.5) for _ in TABLE[name]["tensor_states"]]
    given = torch.full((1, TABLE[name]["n_norms"]), 2.0, dtype=torch.float64) if name in WITH_NORMS else None
    hypers = OPTIMIZERS[name][0]

    def lists(t: list[Tensor], steps: Tensor) -> Lists:
        return [[t[0]], [t[1]], [], [*t[2:], *(n.clone() for n in numbers)], [steps]]

    def step(kernels: Kernels, t: list[Tensor]) -> None:
        steps = torch.tensor(3.0)
        if name in WITH_NORMS:
            measure(kernels, name, lists(t, steps), hypers)  # of a few blocks: what it says is of no use
        make_step(name, hypers, None, torch.tensor(0.25), None, given)(kernels, lists(t, steps))
        assert steps.item() == 4

    expected = in_windows(step, CPU, windows(tensors))
    step(few_blocks, tensors)
    check(tensors, expected)


def test_an_overflow_at_the_end_is_found(few_blocks: Kernels) -> None:
    grad = virtual(F16)
    assert few_blocks.measure_gradients([grad])[1].item() == 0
    grad[-1] = math.inf
    assert few_blocks.measure_gradients([grad])[1].item() == 0, "65536 elements a chunk: this block was not among them"
    few_blocks.namespace.set_overrides(0, 0, [SIZE // 65_536])
    assert few_blocks.measure_gradients([grad])[1].item() == 1
    few_blocks.namespace.set_overrides(0, CHUNK, BLOCKS)
    assert few_blocks.measure_gradients([grad])[1].item() == 1


# Aligned planes; planes whose elements are counted in 64 bits too; rows.
BATCH_NORMS = {
    "planes": ((2, 2, 2**29 + 64), 0),
    "one plane, misaligned": ((1, 1, 2**31 + 72), 1),
    "rows": ((2**25 + 8, 64), 0),
    "rows, misaligned": ((2**25 + 8, 64), 1),
}


@pytest.mark.parametrize("name", BATCH_NORMS)
def test_batch_norm(simt_namespace: Any, name: str) -> None:
    """The last blocks write the last elements."""
    shape, offset = BATCH_NORMS[name]
    kernels = Kernels("simt", simt_namespace, "cpu")
    x, dy = (torch.empty(math.prod(shape) + offset, dtype=F16)[offset:].view(shape) for _ in range(2))
    ends = [slice(None, 1), slice(-1, None)]
    inner = [slice(None, 64), slice(-64, None)] if len(shape) == 3 else [...] * 2
    channels = shape[1]
    for t in (x, dy):
        for end, part in zip(ends, inner, strict=True):
            t[end, :, part] = torch.randn(t[end, :, part].shape).half()
    weight, bias = torch.rand(channels) + 0.5, torch.randn(channels)
    mean, invstd = torch.randn(channels).double(), torch.rand(channels).double() + 0.5
    sums, total = (torch.randn(channels).double(), torch.randn(channels).double()), torch.tensor([10.0]).double()
    simt_namespace.set_overrides(0, 0, [0, 1, -2, -1])
    out = kernels.batch_norm_apply(x, mean, invstd, weight, bias, None, False)
    dx, _ = kernels.batch_norm_backward_apply(dy, x, None, mean, invstd, weight, *sums, total, False)
    simt_namespace.set_overrides()
    for end, part in zip(ends, inner, strict=True):
        along = (1, channels, 1) if len(shape) == 3 else (1, channels)
        m, i, w, b, s, sx = (t.double().view(along) for t in (mean, invstd, weight, bias, *sums))
        xhat = (x[end, :, part].double() - m) * i
        torch.testing.assert_close(out[end, :, part].double(), xhat * w + b, rtol=2e-3, atol=2e-3)
        wanted = w * i * (dy[end, :, part].double() - s / 10 - xhat * sx / 10)
        torch.testing.assert_close(dx[end, :, part].double(), wanted, rtol=2e-3, atol=2e-3)
