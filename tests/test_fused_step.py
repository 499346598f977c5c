"""The fused step of every optimizer, against float64 references and torch's own unfused optimizers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import reference
import torch
from cases import (
    BF16,
    F16,
    F32,
    F64,
    LARGE,
    LAYOUTS,
    OPTIMIZER_ROWS,
    OPTIMIZERS,
    SHAPES,
    STEP_DTYPES,
    combine,
    same_bits,
)  # fmt: skip
from kernels import Kernels
from problems import TABLE, Problem, assert_is_reference, problem

from lightning_apex import ops

FIRST = [(name, rows[0]) for name, rows in OPTIMIZERS.items()]


def shapes_for(backend: Kernels) -> list[tuple[int, ...]]:
    return SHAPES if backend.slow else [*SHAPES, LARGE]


def test_every_optimizer_has_its_rows() -> None:
    assert TABLE.keys() == OPTIMIZERS.keys() == reference.OPTIMIZERS.keys()
    for name, hypers in OPTIMIZER_ROWS:
        assert set(hypers) == set(TABLE[name]["hypers"])


@pytest.mark.parametrize("dtypes", STEP_DTYPES, ids=lambda row: "-".join(str(x).removeprefix("torch.") for x in row))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_step(backend: Kernels, name: str, dtypes: tuple[Any, ...]) -> None:
    for hypers in OPTIMIZERS[name]:
        before = problem(name, hypers, SHAPES, dtypes, device=backend.device)
        assert_is_reference(before.clone().step(backend), before)


@pytest.mark.parametrize(("name", "hypers"), FIRST)
def test_tensors_of_several_chunks(backend: Kernels, name: str, hypers: dict[str, float]) -> None:
    before = problem(name, hypers, shapes_for(backend), device=backend.device)
    assert_is_reference(before.clone().step(backend), before)


@pytest.mark.parametrize("done", [0, 1, 2**24 - 1])
@pytest.mark.parametrize(("name", "hypers"), OPTIMIZER_ROWS)
def test_the_step_count(backend: Kernels, name: str, hypers: dict[str, float], done: int) -> None:
    """The first step starts a momentum buffer and corrects the most; each parameter counts its own."""
    before = problem(name, hypers, [(5,), (40,)], done=done, device=backend.device)
    before.steps[1] = torch.tensor(7.0, device=backend.device)
    if done == 0:
        before.states = [torch.zeros_like(s) for s in before.states]
    after = before.clone().step(backend)
    assert_is_reference(after, before)
    if done == 2**24 - 1:
        assert after.step(backend).steps[0].item() == 2**24, "a float32 count stands still, and does no harm"


@pytest.mark.parametrize("dtypes", [STEP_DTYPES[0], (F16, F16, F32, True), (BF16, F32, BF16, False)])
@pytest.mark.parametrize(("name", "hypers"), FIRST)
def test_layouts_that_differ(backend: Kernels, name: str, hypers: dict[str, float], dtypes: tuple[Any, ...]) -> None:
    before = problem(name, hypers, SHAPES * len(LAYOUTS), dtypes, device=backend.device, layouts=list(LAYOUTS))
    after = problem(name, hypers, SHAPES * len(LAYOUTS), dtypes, device=backend.device, layouts=list(LAYOUTS))
    for to, of in zip(after.written + after.grads, before.written + before.grads, strict=True):
        to.copy_(of)
    versions = [t._version for t in after.written]
    after.step(backend)
    assert_is_reference(after, before)
    assert all(t._version > version for t, version in zip(after.written, versions, strict=True))
    for t in after.written:
        if t.dim() and t.stride(-1) == 2 and t.numel() > 1:
            wide = t.as_strided((*t.shape, 2), (*t.stride(), 1))
            assert wide[..., 1].isnan().all(), "an element between those of the slice was written"


def test_gradients_that_are_expanded(backend: Kernels) -> None:
    before = problem("adam", OPTIMIZERS["adam"][0], [(4, 9)], device=backend.device)
    before.grads = [torch.tensor(0.5, device=backend.device).expand(4, 9)]
    assert_is_reference(replace(before.clone(), grads=before.grads).step(backend), before)


def test_all_dtypes_in_one_call(backend: Kernels) -> None:
    rows = [row for row in STEP_DTYPES if not row[3]]
    for name, hypers in OPTIMIZER_ROWS:
        parts = [problem(name, hypers, [(33,), (2, 5)], row, device=backend.device) for row in rows]
        n_state = len(TABLE[name]["states"]) + len(TABLE[name]["tensor_states"])
        before = Problem(name, hypers)
        before.params = [t for part in parts for t in part.params]
        before.grads = [t for part in parts for t in part.grads]
        before.steps = [t for part in parts for t in part.steps]
        before.states = [t for s in range(n_state) for part in parts for t in part.states[2 * s : 2 * s + 2]]
        assert_is_reference(before.clone().step(backend), before)


@pytest.mark.parametrize("lr_dtype", [None, F32, F64, F16, BF16])
@pytest.mark.parametrize("dtypes", [STEP_DTYPES[0], STEP_DTYPES[2], (F16, F16, F32, True)])
@pytest.mark.parametrize(("name", "hypers"), FIRST)
def test_multiplier_and_lr_on_the_device(
    backend: Kernels, name: str, hypers: dict[str, float], dtypes: tuple[Any, ...], lr_dtype: torch.dtype | None
) -> None:
    before = problem(name, hypers, [(100,), (3,)], dtypes, device=backend.device)
    lr = None if lr_dtype is None else backend.scalar(0.03, lr_dtype)
    after = before.clone().step(backend, lr=lr, multiplier=backend.scalar(0.25), found_inf=backend.scalar(0))
    assert_is_reference(after, before, 0.25, lr=hypers["lr"] if lr is None else float(lr))


@pytest.mark.parametrize("dtypes", [STEP_DTYPES[0], (F16, F16, F32, True), (BF16, BF16, BF16, False)])
@pytest.mark.parametrize(("name", "hypers"), FIRST)
@pytest.mark.parametrize("flag", [1.0, float("nan"), float("inf")])
def test_a_skipped_step_writes_nothing(
    backend: Kernels, name: str, hypers: dict[str, float], dtypes: tuple[Any, ...], flag: float
) -> None:
    before = problem(name, hypers, SHAPES, dtypes, device=backend.device, layouts=["contiguous", "sliced"])
    for grad in before.grads:
        grad.fill_(float("nan"))
    if before.masters:
        before.params = [p + 1 for p in before.params]  # not even a master that its parameter has left
    after = before.clone().step(backend, multiplier=backend.scalar(0.5), found_inf=backend.scalar(flag))
    assert all(map(same_bits, after.written, before.written))


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize(("name", "hypers"), FIRST)
def test_a_parameter_that_somebody_wrote_replaces_its_master(
    backend: Kernels, name: str, hypers: dict[str, float], dtype: torch.dtype
) -> None:
    before = problem(name, hypers, SHAPES, (dtype, dtype, F32, True), device=backend.device)
    written = [torch.rand_like(m) < 0.3 for m in before.masters]
    before.params = [torch.where(w, p * 2 + 1, p) for w, p in zip(written, before.params, strict=True)]
    after = before.clone().step(backend)
    rows = zip(written, before.params, before.masters, strict=True)
    assert_is_reference(after, replace(before, masters=[torch.where(w, p.float(), m) for w, p, m in rows]))


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_masters_add_up_steps_too_small_for_the_parameter(backend: Kernels, dtype: torch.dtype) -> None:
    p = problem("sgd", OPTIMIZERS["sgd"][0] | {"lr": 1e-6}, [(40,)], (dtype, dtype, F32, True), device=backend.device)
    p.masters = [torch.ones_like(p.masters[0])]
    p.params, p.grads = [torch.ones_like(p.params[0])], [torch.ones_like(p.grads[0])]
    for _ in range(100):
        p.step(backend)
    assert p.masters[0][-1].item() == pytest.approx(1 - 1e-4, abs=1e-5) and p.params[0][-1].item() == 1


def test_a_nan_stays_where_it_is(backend: Kernels) -> None:
    for name, hypers in OPTIMIZER_ROWS:
        before = problem(name, hypers, [(70,), (70,)], device=backend.device)
        before.grads[0][[0, 33, 69]] = torch.tensor([float("nan"), float("inf"), float("nan")], device=backend.device)
        after = before.clone().step(backend)
        assert after.params[1].isfinite().all()
        if TABLE[name]["n_norms"]:  # goes wherever the norm of the tensor does
            assert_is_reference(after, before)
            continue
        spoilt = ~after.params[0].isfinite()
        for state in after.states[::2]:
            spoilt |= ~state.isfinite()  # the sign of an infinity is finite, Lion's momentum is not
        assert spoilt.nonzero().flatten().tolist() == [0, 33, 69]


# ---- the CPU kernels among themselves ----


@pytest.fixture
def _cpu_settings() -> Any:
    threads, name = torch.get_num_threads(), ops.cpu_backend()
    yield
    torch.set_num_threads(threads)
    ops.set_cpu_backend(name)


@pytest.mark.usefixtures("_cpu_settings")
@pytest.mark.parametrize("dtypes", [STEP_DTYPES[0], STEP_DTYPES[2], (F16, F16, F32, True), (BF16, F32, BF16, False)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_thread_count_and_backend_gives_the_same_bits(name: str, dtypes: tuple[Any, ...]) -> None:
    cpu = Kernels("cpu", torch.ops.lightning_apex, "cpu")
    before = problem(name, OPTIMIZERS[name][-1], [*SHAPES, LARGE], dtypes)
    results = []
    for backend, threads in combine(ops.build_info()["cpu_backends"], (1, 3)):
        ops.set_cpu_backend(backend)
        torch.set_num_threads(threads)
        results.append(before.clone().step(cpu).written)
    for other in results[1:]:
        assert all(map(same_bits, results[0], other))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_place_in_the_list_and_in_the_tensor_gives_the_same_bits(backend: Kernels, name: str) -> None:
    whole = problem(name, OPTIMIZERS[name][1], [(101,)], device=backend.device)
    pieces = whole.clone()
    for attribute in ("params", "grads", "states"):
        cut = [
            list(reversed(t.clone().split((1, 40, 33, 27)))) if t.dim() else [t.clone() for _ in range(4)]
            for t in getattr(whole, attribute)
        ]
        setattr(pieces, attribute, [piece for tensor in cut for piece in tensor])
    pieces.steps = [whole.steps[0].clone() for _ in range(4)]
    norms, of_pieces = None, None
    if TABLE[name]["n_norms"]:  # those of the whole, as of a tensor that is spread over several machines
        norms = whole.norms(backend)
        assert pieces.norms(backend).sum(0).cpu().numpy() == pytest.approx(norms[0].cpu().numpy(), rel=backend.sum_rtol)
        of_pieces = norms.expand(4, -1).contiguous()
    whole.step(backend, norms=norms)
    pieces.step(backend, norms=of_pieces)
    assert same_bits(torch.cat(pieces.params[::-1]), whole.params[0])


# ---- torch's optimizers as second witness ----

TORCH = [
    (torch.optim.AdamW, "adam", {"weight_decay": 0.1, "betas": (0.9, 0.99)}),
    (torch.optim.AdamW, "adam_amsgrad", {"weight_decay": 0.1, "betas": (0.9, 0.99), "amsgrad": True}),
    (torch.optim.Adam, "adam", {"weight_decay": 0.1, "maximize": True}),
    (torch.optim.Adagrad, "adagrad", {"weight_decay": 0.1, "eps": 1e-10}),
    (torch.optim.SGD, "sgd", {"weight_decay": 0.1}),
    (torch.optim.SGD, "sgd_momentum", {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1}),
    (torch.optim.SGD, "sgd_momentum", {"momentum": 0.9, "nesterov": True, "maximize": True}),
]


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize(("peer", "name", "options"), TORCH)
def test_ten_steps_with_torch(
    backend: Kernels, peer: Any, name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    hypers = dict.fromkeys(TABLE[name]["hypers"], 0.0) | {"lr": 0.01, "eps": 1e-8, "bias_correction": 1.0}
    hypers |= {key: float(value) for key, value in options.items() if key not in ("betas", "amsgrad")}
    hypers |= {"adam_w_mode": float(peer is torch.optim.AdamW)}
    hypers |= dict(zip(("beta1", "beta2"), options.get("betas", (0.9, 0.999)), strict=True))
    ours = problem(name, hypers, [(40,), (3, 7)], (dtype, dtype, dtype, False), done=0, device=backend.device)
    for state in ours.states:
        state.zero_()
    theirs = [torch.nn.Parameter(p.clone()) for p in ours.params]
    optimizer = peer(theirs, lr=0.01, foreach=False, **options)
    for _ in range(10):
        ours.grads = [torch.randn_like(p) for p in ours.params]
        for p, grad in zip(theirs, ours.grads, strict=True):
            p.grad = grad.clone()
        optimizer.step()
        ours.step(backend)
    for mine, other in zip(ours.params, theirs, strict=True):
        rtol = 1e-4 if dtype == F32 else 1e-12
        torch.testing.assert_close(mine, other.detach(), rtol=rtol, atol=rtol / 100)
