"""The optimizers' CUDA kernels on the SIMT machine: every mixture of types, in every order of threads and blocks.

Passes that work element by element equal the CPU's to the bit. Norms are sums, whose order is an engine's own.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import BF16, F16, F32, F64, OPTIMIZERS, STEP_DTYPES
from kernels import Kernels
from simt_steps import (
    WITH_NORMS,
    Lists,
    assert_same,
    copies,
    make_step,
    measure,
    odd_lists,
    step_lists,
)
from simt_support import CPU, ORDERS, both, count, counters, many

FACTOR, FINE = torch.tensor(0.25), torch.zeros(())


@pytest.mark.parametrize("simt", ORDERS[1:3], indirect=True, ids=str)  # test_fused_step.py has them forward
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("param", "grad", "state", "masters"), STEP_DTYPES, ids=str)
def test_one_step(
    simt: Kernels, name: str, param: torch.dtype, grad: torch.dtype, state: torch.dtype, masters: bool
) -> None:
    lists = odd_lists(name, param, grad, state, masters)
    for hypers in OPTIMIZERS[name][:1] + OPTIMIZERS[name][-1:]:
        if name not in WITH_NORMS:
            both(simt, make_step(name, hypers, None, FACTOR, FINE), lists)
            continue
        one_go, ours, theirs = copies(lists), copies(lists), copies(lists)
        norms, expected = (
            measure(k, name, x, hypers, None, FACTOR, FINE) for k, x in zip((simt, CPU), (ours, theirs), strict=True)
        )
        torch.testing.assert_close(norms, expected, rtol=1e-13, atol=0)
        assert_same(ours, theirs)
        step = make_step(name, hypers, None, FACTOR, FINE, norms)
        step(simt, ours)
        step(CPU, theirs)
        assert_same(ours, theirs)
        make_step(name, hypers, None, FACTOR, FINE)(simt, one_go)
        assert_same(one_go, ours)


def test_a_mixed_list_takes_a_launch_for_each_mixture(simt: Kernels) -> None:
    wide, half = many(F32, 80, 17_000), many(BF16, 80, 17_000)
    lists: Lists = [[], [], [], [], []]
    for part in (step_lists("adam", wide, F32, F32, False), step_lists("adam", half, F32, BF16, False)):
        lists = [have + more for have, more in zip(lists, part, strict=True)]
    first, second = (lists[3][k : k + 80] for k in (0, 160)), (lists[3][k : k + 80] for k in (80, 240))
    lists[3] = [t for group in (*first, *second) for t in group]
    both(simt, make_step("adam", OPTIMIZERS["adam"][1], torch.tensor(0.5, dtype=F64)), lists)
    assert counters(simt).launches == 2


@pytest.mark.parametrize("name", ["sgd", "adam", "novograd", "lamb"])
def test_many_tensors_take_the_launches_of_few(simt: Kernels, name: str) -> None:
    """Each with its own step count, those without elements too; when moved, and in a graph."""
    hypers, passes = OPTIMIZERS[name][-1], 1 + (name in WITH_NORMS)
    few = step_lists(name, many(F32, 5, 20_000), F32, F32, False)
    step = make_step(name, hypers)
    assert count(simt, lambda: step(simt, few)) == (passes, 0)
    lists = step_lists(name, many(F32, 200, 20_000), F32, F32, False)
    reference = copies(lists)
    assert count(simt, lambda: step(simt, lists)) == (passes, 1), "both passes share a table"
    assert count(simt, lambda: step(simt, lists)) == (passes, 0), "nothing has moved"
    stayed, lists[1][30] = lists[1][30], lists[1][30].clone()
    assert count(simt, lambda: step(simt, lists)) == (passes, 1), "a gradient has"
    lists[1][30] = stayed
    assert count(simt, lambda: step(simt, lists)) == (passes, 0), "both are remembered"
    simt.namespace.set_capturing(True)
    try:
        launches, copied = count(simt, lambda: step(simt, lists))
    finally:
        simt.namespace.set_capturing(False)
    assert launches > passes and copied == 0, "a graph holds all that it needs"
    assert [s.item() for s in lists[4]] == [s.item() + 5 for s in reference[4]]
    for _ in range(5):
        step(CPU, reference)
    for a, b in zip(lists[0], reference[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_a_shorter_or_reordered_list_is_another_list(simt: Kernels) -> None:
    lists = step_lists("sgd", [torch.ones(1) for _ in range(120)], F32, F32, False)
    step = make_step("sgd", OPTIMIZERS["sgd"][0])
    step(simt, lists)
    for change in (lambda x: x[:-1], lambda x: x[::-1]):
        changed = [change(members) for members in lists]
        assert count(simt, lambda c=changed: step(simt, c)) == (1, 1)
    assert [s.item() for s in lists[4]] == [i % 3 + 3.0 for i in range(119)] + [119 % 3 + 2.0]


def test_only_so_many_lists_are_remembered(simt: Kernels) -> None:
    pool = [torch.ones(1) for _ in range(200)]
    halves = [t.half() for t in pool]
    reconcile = simt.reconcile_masters_
    calls = [lambda n=n: reconcile(pool[:n], halves[:n]) for n in range(130, 130 + 65)]
    for call in calls:
        assert count(simt, call)[0] == 1
    assert count(simt, calls[-1]) == (1, 0) and count(simt, calls[1]) == (1, 0) and count(simt, calls[0]) == (1, 1)


@pytest.mark.parametrize(("dtypes", "found_inf"), [((F16, F16, F32, True), 1.0), ((F64, F64, F64, False), math.nan)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_overflow_writes_nothing(simt: Kernels, name: str, dtypes: tuple[Any, ...], found_inf: float) -> None:
    lists, flag = step_lists(name, many(dtypes[0], 5, 20_000), *dtypes[1:]), torch.tensor(found_inf)
    before, hypers = copies(lists), OPTIMIZERS[name][0]
    make_step(name, hypers, None, None, flag)(simt, lists)
    if name in WITH_NORMS:
        norms = measure(simt, name, lists, hypers, None, None, flag)
        assert norms.abs().max() == 0
        make_step(name, hypers, None, None, flag, norms)(simt, lists)
    assert_same(lists, before)
    make_step(name, hypers, None, None, FINE)(simt, lists)
    make_step(name, hypers, None, None, FINE)(simt, before)
    assert_same(lists, before)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("name", WITH_NORMS)
def test_norms_have_the_same_bits_in_every_order(simt_namespace: Any, name: str, dtype: torch.dtype) -> None:
    kernels = Kernels("simt", simt_namespace, "cpu")
    params, seen = [torch.randn(size, dtype=dtype) for size in (33_000, 777, 16_385, 5)], set()  # 7 blocks
    lists, hypers = step_lists(name, params, dtype, dtype, False), OPTIMIZERS[name][-1]
    expected = measure(CPU, name, copies(lists), hypers)
    for order in ORDERS:
        kernels.namespace.set_order(*order)
        norms = measure(kernels, name, copies(lists), hypers)
        torch.testing.assert_close(norms, expected, rtol=1e-13, atol=0)
        seen.add(tuple(norms.flatten().tolist()))
    kernels.namespace.set_order("forward", 0)
    assert len(seen) == 1
