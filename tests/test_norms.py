"""Norms of whole tensors: by themselves, and as the first of two passes of an optimizer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import reference
import torch
from cases import BF16, DTYPES, F16, F32, F64, LARGE, LAYOUTS, OPTIMIZERS, SHAPES, STEP_DTYPES, combine, same_bits
from kernels import Kernels
from problems import TABLE, Problem, assert_is_reference, problem
from torch import Tensor

from lightning_apex import ops

NORMED = [name for name in OPTIMIZERS if TABLE[name]["n_norms"]]
NORMED_ROWS = [(name, hypers) for name in NORMED for hypers in OPTIMIZERS[name]]
FIRST = [(name, OPTIMIZERS[name][0]) for name in NORMED] + [("novograd", OPTIMIZERS["novograd"][2])]  # of maxima
DTYPE_ROWS = [STEP_DTYPES[0], STEP_DTYPES[2], (F32, F32, BF16, False), (F16, F16, F32, True), (BF16, F32, BF16, True)]
HUGE = 1e25  # its square is no float


def shapes_for(backend: Kernels) -> list[tuple[int, ...]]:
    return SHAPES if backend.slow else [*SHAPES, LARGE]


def squares_of(tensors: list[Tensor]) -> list[float]:
    return [t.double().square().sum().item() for t in tensors]


def maxima_of(tensors: list[Tensor]) -> list[float]:
    return [t.double().abs().amax().item() if t.numel() else 0.0 for t in tensors]


# ---- tensor_norms ----


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_norms_of_all_dtypes_at_once(backend: Kernels, layout: str) -> None:
    shapes = shapes_for(backend)
    tensors = [LAYOUTS[layout](torch.randn(s).to(backend.device, dtype)) for dtype in DTYPES for s in shapes]
    versions = [t._version for t in tensors]
    norms, largest = backend.tensor_norms(tensors, 2.0), backend.tensor_norms(tensors, math.inf)
    assert norms.shape == largest.shape == (len(tensors),) and norms.dtype == largest.dtype == F64
    assert norms.tolist() == pytest.approx(squares_of(tensors), rel=backend.sum_rtol)
    assert largest.tolist() == maxima_of(tensors)
    assert [t._version for t in tensors] == versions


@pytest.mark.parametrize(("dtype", "place"), combine(DTYPES, (0, 32, 40)))
def test_the_norm_of_a_tensor_that_is_not_finite(backend: Kernels, dtype: torch.dtype, place: int) -> None:
    tensors = [torch.ones(41, dtype=dtype, device=backend.device) for _ in range(4)]
    for t, bad in zip(tensors, (math.nan, -math.nan, -math.inf), strict=False):
        t[place] = bad
    tensors[1][20] = math.inf  # does not hide a NaN
    for ord, finite in ((2.0, 41), (math.inf, 1)):
        norms = backend.tensor_norms(tensors, ord)
        assert norms[:2].isnan().all() and norms[2:].tolist() == [math.inf, finite]


@pytest.mark.parametrize("dtype", [F32, F64, BF16])
def test_the_norm_of_huge_and_tiny_values(backend: Kernels, dtype: torch.dtype) -> None:
    tensors = [torch.full((77,), value, dtype=dtype, device=backend.device) for value in (HUGE, 1e-25, -HUGE)]
    assert backend.tensor_norms(tensors, 2.0).tolist() == pytest.approx(squares_of(tensors), rel=backend.sum_rtol)
    assert backend.tensor_norms(tensors, math.inf).tolist() == maxima_of(tensors)


@pytest.mark.parametrize("ord", [1.0, 0.0, 3.0, -math.inf, math.nan])
def test_other_norms_are_refused(backend: Kernels, ord: float) -> None:
    for tensors in ([torch.ones(3, device=backend.device)], []):
        with pytest.raises(ValueError, match=r"tensor_norms: ord is .*; expected 2 or inf"):
            backend.tensor_norms(tensors, ord)


def test_the_norms_of_nothing(backend: Kernels) -> None:
    for ord in (2.0, math.inf):
        assert backend.tensor_norms([], ord).shape == (0,)
        assert backend.tensor_norms([torch.empty(0, device=backend.device)], ord).tolist() == [0]
    for name in NORMED:
        hypers = [0.0] * len(TABLE[name]["hypers"])
        assert backend.fused_norms_(name, [], [], [], [], [], hypers).shape == (0, TABLE[name]["n_norms"])
        backend.fused_step_(name, [], [], [], [], [], hypers)


# ---- the first pass ----


@pytest.mark.parametrize("dtypes", DTYPE_ROWS)
@pytest.mark.parametrize(("name", "hypers"), NORMED_ROWS)
def test_the_first_pass(backend: Kernels, name: str, hypers: dict[str, float], dtypes: tuple[Any, ...]) -> None:
    """It measures, makes LAMB's moments, and writes nothing else."""
    before = problem(name, hypers, shapes_for(backend), dtypes, device=backend.device, layouts=["contiguous", "sliced"])
    after = before.clone()
    norms = after.norms(backend, multiplier=backend.scalar(0.25))
    assert norms.shape == (len(before.params), TABLE[name]["n_norms"]) and norms.dtype == F64
    rtol = 1e-12 if dtypes[0] == F64 or (name.startswith("lars") and dtypes[0] == F32) else 1e-5
    for i, of_tensor in enumerate(norms.tolist()):
        named = lambda *a, **k: reference.norms(name, *a, **{"stored": lambda s, _: s} | k)  # noqa: E731
        assert of_tensor == pytest.approx(before.reference_of(i, after, named, 0.25), rel=max(rtol, backend.sum_rtol))
    unchanged = ["params", "masters", "steps", "grads"] + ["states"] * (name != "lamb")
    for attribute in unchanged:
        assert all(map(same_bits, getattr(after, attribute), getattr(before, attribute))), attribute


@pytest.mark.parametrize("dtypes", DTYPE_ROWS)
@pytest.mark.parametrize(("name", "hypers"), FIRST)
def test_two_passes_by_hand_are_those_of_one_call(
    backend: Kernels, name: str, hypers: dict[str, float], dtypes: tuple[Any, ...]
) -> None:
    before = problem(name, hypers, shapes_for(backend), dtypes, device=backend.device, layouts=["contiguous", "sliced"])
    controls = {"multiplier": backend.scalar(0.5), "lr": backend.scalar(0.02), "found_inf": backend.scalar(0)}
    at_once, by_hand = before.clone().step(backend, **controls), before.clone()
    norms = by_hand.norms(backend, **controls)
    by_hand.step(backend, norms=norms, **controls)
    assert all(map(same_bits, by_hand.written, at_once.written))


@pytest.mark.parametrize("name", NORMED)
def test_skipped_passes_write_nothing(backend: Kernels, name: str) -> None:
    before = problem(name, OPTIMIZERS[name][0], SHAPES, done=0, device=backend.device)
    for grad in before.grads:
        grad.fill_(math.nan)
    after, found_inf = before.clone(), backend.scalar(1)
    norms = after.norms(backend, found_inf=found_inf)
    assert norms.eq(0).all() and norms.shape == (len(SHAPES), TABLE[name]["n_norms"])
    after.step(backend, norms=norms, found_inf=found_inf)
    assert all(map(same_bits, after.written, before.written))


@pytest.mark.parametrize(("name", "hypers"), NORMED_ROWS)
def test_shards_step_as_the_whole(backend: Kernels, name: str, hypers: dict[str, float]) -> None:
    """One of three machines has none of the tensor."""
    whole = problem(name, hypers, [(90,)], device=backend.device)
    after = whole.clone().step(backend)
    shards = []
    for begin, end in ((0, 55), (55, 90), (90, 90)):
        cut = {k: [t[begin:end].clone() if t.dim() else t.clone() for t in getattr(whole, k)]
               for k in ("params", "grads", "states", "steps")}  # fmt: skip
        shards.append(replace(whole, **cut))
    norms = torch.stack([shard.norms(backend) for shard in shards])
    maxima = name == "novograd" and hypers["norm_type"] != 2
    norms = norms.amax(0) if maxima else norms.sum(0)
    for shard in shards:
        shard.step(backend, norms=norms)
    together = replace(whole, params=[torch.cat([s.params[0] for s in shards])], states=[])
    for k, state in enumerate(whole.states):
        parts = [s.states[k] for s in shards]
        together.states.append(torch.cat(parts) if state.dim() else parts[2])
    together.steps = shards[2].steps
    assert_is_reference(together, whole)
    torch.testing.assert_close(together.params[0], after.params[0], rtol=1e-6, atol=1e-7)


# ---- norms that are special ----


@pytest.mark.parametrize("zero", ["params", "grads", "states"])
@pytest.mark.parametrize(("name", "hypers"), NORMED_ROWS)
def test_norms_of_zero(backend: Kernels, name: str, hypers: dict[str, float], zero: str) -> None:
    for zeros in ((zero,), (zero, "grads")):
        before = problem(name, hypers, [(5,), (40,)], done=0, device=backend.device)
        for attribute in zeros:
            setattr(before, attribute, [torch.zeros_like(t) for t in getattr(before, attribute)])
        after = before.clone().step(backend)
        assert_is_reference(after, before)
        assert all(t.isfinite().all() for t in after.written)


def test_only_elements_are_measured(backend: Kernels) -> None:
    """Without an eps the zeros behind a tensor's end would be measured as 0 / 0."""
    shapes = [(n,) for n in range(1, 34)]
    before = problem("lamb", OPTIMIZERS["lamb"][0] | {"eps": 0.0}, shapes, done=0, device=backend.device)
    before.states = [torch.zeros_like(state) for state in before.states]
    assert_is_reference(before.clone().step(backend), before)


@pytest.mark.parametrize("name", ["lamb", "lars", "lars_momentum"])
def test_norms_beyond_float(backend: Kernels, name: str) -> None:
    before = problem(name, OPTIMIZERS[name][0], [(40,), (33,)], done=0, device=backend.device)
    before.params[0] *= HUGE
    before.params[1] *= 1e-25
    if name != "lamb":  # whose moments are floats, and squares
        before.grads = [grad * HUGE for grad in before.grads]
    before.states = [torch.zeros_like(state) for state in before.states]
    after = before.clone().step(backend)
    assert all(p.isfinite().all() for p in after.params)
    assert_is_reference(after, before)


# ---- many tensors ----


@pytest.mark.parametrize(("name", "hypers"), [(name, rows[0]) for name, rows in OPTIMIZERS.items()])
def test_ten_thousand_tensors_of_one_element(backend: Kernels, name: str, hypers: dict[str, float]) -> None:
    n = 300 if backend.slow else 10_000
    rows = problem(name, hypers, [(n,)], device=backend.device)
    before = Problem(name, hypers)
    for attribute in ("params", "grads", "states"):
        lists = [list(t) if t.dim() else [t.clone() for _ in range(n)] for t in getattr(rows, attribute)]
        setattr(before, attribute, [t for members in lists for t in members])
    before.steps = [rows.steps[0].clone() for _ in range(n)]
    after = replace(before.clone()).step(backend)
    some = slice(0, n, n // 100)  # the reference is slow
    for p in (before, after):
        lists = (p.params, p.grads, p.steps)
        p.params, p.grads, p.steps = (members[some] for members in lists)
        p.states = [t for k in range(0, len(p.states), n) for t in p.states[k : k + n][some]]
    assert_is_reference(after, before)


@pytest.mark.parametrize("place", [0, 150, 299])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_empty_tensor_among_300(backend: Kernels, name: str, place: int) -> None:
    n = 40 if backend.slow else 300
    shapes: list[tuple[int, ...]] = [(i % 7 + 1,) for i in range(n)]
    shapes[place * n // 300] = (0, 3)
    before = problem(name, OPTIMIZERS[name][0], shapes, device=backend.device)
    assert_is_reference(before.clone().step(backend), before)


# ---- the CPU kernels among themselves ----


@pytest.mark.parametrize("dtypes", DTYPE_ROWS)
def test_the_bits_of_norms_depend_on_neither_threads_nor_backend(dtypes: tuple[Any, ...]) -> None:
    threads, backend = torch.get_num_threads(), ops.cpu_backend()
    cpu = Kernels("cpu", torch.ops.lightning_apex, "cpu")
    problems = [problem(name, hypers, [*SHAPES, LARGE, (200_003,)], dtypes) for name, hypers in NORMED_ROWS]
    results = []
    try:
        for isa, n in combine(ops.build_info()["cpu_backends"], (1, 2, 3)):
            ops.set_cpu_backend(isa)
            torch.set_num_threads(n)
            afters = [p.clone() for p in problems]
            results.append([after.norms(cpu) for after in afters] + [t for p in afters for t in p.states])
            results[-1] += [cpu.tensor_norms(p.grads, ord) for p in problems for ord in (2.0, math.inf)]
    finally:
        torch.set_num_threads(threads)
        ops.set_cpu_backend(backend)
    for other in results[1:]:
        assert all(map(same_bits, results[0], other))
