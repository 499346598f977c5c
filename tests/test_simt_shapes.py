"""The CUDA kernels on the SIMT machine in blocks and grids of other sizes than their own: nothing depends on these.

Every kernel is here, in its scalar and its vector path, with short and long lists, several blocks a tensor, tails and
empty tensors. So this is also what the sanitizers (test_simt_sanitizers.py) and the coverage (test_simt_coverage.py)
look at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from batch_norm_support import close, forward, make_inputs
from cases import BF16, DTYPES, F16, F32, F64, OPTIMIZERS
from kernels import Kernels
from simt_steps import WITH_NORMS, Lists, assert_same, copies, make_step, measure, odd_lists, step_lists
from simt_support import CPU, both, count, counters, exact, many
from torch import Tensor


class Shape(NamedTuple):
    """Threads a block, elements a chunk (0: as in the code), and the order of both."""

    threads: int
    chunk: int
    order: tuple[str, int]

    def __str__(self) -> str:
        return f"{self.threads}x{self.chunk}-{self.order[0]}"


FIRST, *MORE = [
    Shape(64, 1024, ("random", 3)),
    Shape(32, 520, ("reverse", 0)),
    Shape(128, 0, ("random", 4)),
    Shape(512, 1024, ("forward", 0)),
    Shape(1024, 4096, ("random", 5)),
]


@pytest.fixture(params=[FIRST, *(pytest.param(shape, marks=pytest.mark.slow) for shape in MORE)], ids=str)
def shaped(request: pytest.FixtureRequest, simt_namespace: Any) -> Iterator[Kernels]:
    shape: Shape = request.param
    torch.use_deterministic_algorithms(True)  # fresh memory is NaN
    simt_namespace.set_order(*shape.order)
    simt_namespace.set_overrides(shape.threads, shape.chunk)
    yield Kernels("simt", simt_namespace, "cpu")
    simt_namespace.set_overrides()
    simt_namespace.set_order("forward", 0)
    torch.use_deterministic_algorithms(False)


def test_measure(shaped: Kernels) -> None:
    grads = [*many(F32, 170, 5_000), *many(F16, 3, 9), *many(F64, 3, 5), *many(BF16, 3, 2_000)]
    total, flags = shaped.measure_gradients(grads)
    assert flags.tolist() == [0] * len(grads)
    assert total.item() == pytest.approx(sum(g.double().square().sum().item() for g in grads), rel=1e-6)
    grads[1][0] = math.nan
    assert shaped.measure_gradients(grads)[1].nonzero().flatten().tolist() == [1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_norms(shaped: Kernels, dtype: torch.dtype) -> None:
    tensors = [*many(dtype, 170, 5_000), exact(torch.randn(3_001).to(dtype), 1)]
    for ord in (2.0, math.inf):
        expected = [t.double().norm(ord).square() if ord == 2 else t.double().abs().max() if t.numel() else
                    torch.tensor(0.0, dtype=F64) for t in tensors]  # fmt: skip
        torch.testing.assert_close(shaped.tensor_norms(tensors, ord), torch.stack(expected), rtol=1e-13, atol=0)


@pytest.mark.parametrize(("to", "of"), [(F32, F16), (BF16, F32), (F16, F64), (F64, BF16)], ids=str)
def test_copies(shaped: Kernels, to: torch.dtype, of: torch.dtype) -> None:
    def unscale(kernels: Kernels, lists: Lists) -> list[Tensor]:
        return [kernels.unscale_(lists[0], *lists[1])]

    def copy(kernels: Kernels, lists: Lists) -> list[Tensor]:
        return [kernels.copy_scaled_(lists[0], lists[1], *lists[2])]

    src = many(of, 130, 3_000)
    both(shaped, unscale, [src, [torch.tensor(1 / 3), torch.zeros(())]])
    src[1][0] = math.inf
    dst = [exact(torch.full_like(s, math.nan, dtype=to), i % 3) for i, s in enumerate(src)]
    both(shaped, copy, [dst, src, [torch.tensor(0.3), torch.zeros(())]])


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_reconcile(shaped: Kernels, dtype: torch.dtype) -> None:
    masters = many(F32, 20, 3_000)
    params = [exact(m.to(dtype), i % 3) for i, m in enumerate(masters)]
    for p in params[::3]:
        p.mul_(2)

    def reconcile(kernels: Kernels, lists: Lists) -> list[Tensor]:
        kernels.reconcile_masters_(*lists)
        return []

    both(shaped, reconcile, [masters, params])


def test_scalars(shaped: Kernels) -> None:
    def factors(kernels: Kernels, lists: Lists) -> list[Tensor]:
        values, flags = lists
        return list(kernels.step_factors(values[0], flags[0], values[1], 0.5, values[2]))

    def update(kernels: Kernels, lists: Lists) -> list[Tensor]:
        kernels.update_scale_(*lists[0], 2.0, 0.5, 3, 2, 1.0, 100.0)
        return []

    for bad in (0, 1):
        flags = torch.zeros(1500, dtype=torch.uint8)
        flags[-1] = bad
        both(shaped, factors, [[torch.tensor(9.0, dtype=F64), torch.tensor(4.0), torch.zeros(())], [flags]])
        state = [torch.tensor(64.0), torch.tensor([2, 1, 0, 0], dtype=torch.int32), torch.tensor(float(bad))]
        both(shaped, update, [state])


STEPS = [(F32, F32, F32, False), (F16, F32, BF16, True), (F16, F16, F32, False), (BF16, BF16, F32, True)]


@pytest.mark.parametrize("dtypes", STEPS, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps(shaped: Kernels, name: str, dtypes: tuple[Any, ...]) -> None:
    lists, hypers = odd_lists(name, *dtypes, size=2_500), OPTIMIZERS[name][-1]
    lr = torch.tensor(0.5, dtype=DTYPES[list(OPTIMIZERS).index(name) % len(DTYPES)])
    controls = lr, torch.tensor(0.25), torch.zeros(())
    if name not in WITH_NORMS:
        both(shaped, make_step(name, hypers, *controls), lists)
        return
    ours, theirs, one_go = copies(lists), copies(lists), copies(lists)
    norms, expected = (measure(k, name, x, hypers, *controls) for k, x in ((shaped, ours), (CPU, theirs)))
    torch.testing.assert_close(norms, expected, rtol=1e-13, atol=0)
    for kernels, x in ((shaped, ours), (CPU, theirs)):
        make_step(name, hypers, *controls, norms)(kernels, x)
    assert_same(ours, theirs)
    make_step(name, hypers, *controls)(shaped, one_go)
    assert_same(one_go, ours)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_writes_nothing(shaped: Kernels, name: str) -> None:
    lists = odd_lists(name, F16, F16, F32, True, size=2_500)
    before, overflow = copies(lists), torch.tensor(1.0)
    make_step(name, OPTIMIZERS[name][0], None, None, overflow)(shaped, lists)
    if name in WITH_NORMS:
        assert measure(shaped, name, lists, OPTIMIZERS[name][0], None, None, overflow).abs().max() == 0
    assert_same(lists, before)


@pytest.mark.parametrize("name", ["adam", "sgd", "lamb", "novograd"])
def test_long_lists(shaped: Kernels, name: str) -> None:
    """On the device, and in several launches of a graph."""
    step, passes = make_step(name, OPTIMIZERS[name][-1]), 1 + (name in WITH_NORMS)
    lists = step_lists(name, many(F32, 150, 3_000), F32, F32, False)
    theirs = copies(lists)
    step(shaped, lists)
    assert count(shaped, lambda: step(shaped, lists)) == (passes, 0), "the list is there"
    shaped.namespace.set_capturing(True)
    try:
        before = counters(shaped).launches
        step(shaped, lists)
        assert counters(shaped).launches > before + passes
    finally:
        shaped.namespace.set_capturing(False)
    for _ in range(3):
        step(CPU, theirs)
    for got, expected in zip(lists[0] + lists[4], theirs[0] + theirs[4], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("layout", ["contiguous", "offset", "channels_innermost"])
@pytest.mark.parametrize(("dtype", "relu"), [(F32, False), (F32, True), (F16, True), (F64, True)], ids=str)
def test_batch_norm(shaped: Kernels, dtype: torch.dtype, relu: bool, layout: str) -> None:
    for shape in [(3, 5, 7, 8), (6, 80, 9), (2, 3, 16, 24), (300, 40)]:
        i = make_inputs(shaped, shape, dtype, layout)
        ours, theirs = (forward(k, i, z=relu, relu=relu) for k in (shaped, CPU))
        for got, expected in zip(ours, theirs, strict=True):
            close(got, expected, F32 if dtype != F64 and got.dtype == F64 else None, times=2)
        out = theirs[0] if relu else None
        grads, wanted = (
            k.batch_norm_backward(i.grad_out, i.x, out, *theirs[1:], i.weight, relu) for k in (shaped, CPU)
        )
        for got, expected in zip(grads, wanted, strict=True):
            if expected is None:
                continue  # there is no gradient of z without relu
            scale = max(1.0, expected.abs().max().item())
            close(got / scale, expected / scale, F32 if dtype != F64 and got.dtype == F64 else dtype, times=8)


@pytest.mark.parametrize("layout", ["contiguous", "channels_innermost"])
def test_batch_norm_in_parts(shaped: Kernels, layout: str) -> None:
    """What ranks call one after another is what the operators for one rank do at once."""
    i = make_inputs(shaped, (6, 80, 9), F32, layout)
    out, mean, invstd = forward(shaped, i, z=True, relu=True)
    local, count = shaped.batch_norm_stats(i.x), torch.full((1,), 54.0, dtype=F64)
    combined = shaped.batch_norm_combine(local[0][None], local[1][None], count, 1e-5, 0.1, None, None)
    again = shaped.batch_norm_apply(i.x, mean, invstd, i.weight, i.bias, i.z, True)
    assert_same([list(combined), [again]], [[mean, invstd, count], [out]])
    whole = shaped.batch_norm_backward(i.grad_out, i.x, out, mean, invstd, i.weight, True)
    sums = shaped.batch_norm_backward_reduce(i.grad_out, i.x, out, mean, invstd)
    parts = shaped.batch_norm_backward_apply(i.grad_out, i.x, out, mean, invstd, i.weight, *sums, count, True)
    assert_same([[*parts, *sums]], [list(whole)])


def test_statistics_of_ranks(shaped: Kernels) -> None:
    """A channel's parts may be many, and its statistics of any dtype."""
    means, m2s = torch.randn(70, 9, dtype=F64), torch.rand(70, 9, dtype=F64)
    counts = torch.arange(70, dtype=F64)
    for dtype in DTYPES:
        running = [torch.zeros(9, dtype=dtype), torch.ones(9, dtype=dtype)]
        results = []
        for kernels in (shaped, CPU):
            own = [t.clone() for t in running]
            results.append([*kernels.batch_norm_combine(means, m2s, counts, 1e-5, 0.1, *own), *own])
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-12 if got.dtype == F64 else 1e-3, atol=1e-12)


def test_nothing_at_all(shaped: Kernels) -> None:
    assert shaped.unscale_([], torch.tensor(2.0), None).numel() == 0
    assert shaped.measure_gradients([])[0].item() == 0


def test_a_launch_that_fails_leaves_nothing_behind(shaped: Kernels) -> None:
    """Not even arrivals that were counted already."""
    lists = step_lists("lamb", many(F32, 150, 3_000), F32, F32, False)
    step, theirs = make_step("lamb", OPTIMIZERS["lamb"][0]), copies(lists)
    shaped.namespace.set_overrides(48, 1024)
    with pytest.raises(RuntimeError, match="no whole number of warps"):
        step(shaped, copies(lists))
    shaped.namespace.set_overrides(64, 1024)
    step(shaped, lists)
    step(CPU, theirs)
    for got, expected in zip(lists[0] + lists[4], theirs[0] + theirs[4], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
