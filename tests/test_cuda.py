"""What only a GPU can show: that nothing waits, graphs, streams, launches, very large tensors.

The rows of all tests that take a backend run there too, as "cuda".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import BF16, F16, F32, OPTIMIZERS, STEP_DTYPES, same_bits
from kernels import Kernels
from problems import TABLE, Problem, problem
from torch import Tensor

from lightning_apex import FusedAdagrad, FusedLAMB, FusedLion, ops, optimizers

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not (ops.has_cuda() and torch.cuda.is_available()), reason="needs a GPU and an extension built with CUDA"
    ),
]
CUDA = Kernels("cuda", torch.ops.lightning_apex, "cuda")
FEW, MANY = [(3,), (40_000,), (77,)], [((7 * i) % 12,) for i in range(300)] + [(40_000,)]


def made(name: str, shapes: list[tuple[int, ...]], dtypes: Any = STEP_DTYPES[0]) -> Problem:
    return problem(name, OPTIMIZERS[name][-1], shapes, dtypes, device="cuda")


def kernels_of(call: Callable[[], object]) -> list[str]:
    """The names of our kernels that a call starts."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if "lightning_apex" in event.name]


@pytest.mark.parametrize("shapes", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_one_launch_a_pass_and_nothing_waits(name: str, shapes: list[tuple[int, ...]]) -> None:
    p = made(name, shapes, (F16, F16, F32, True))
    controls = {"multiplier": CUDA.scalar(0.5), "found_inf": CUDA.scalar(0)}
    p.step(CUDA, **controls)
    torch.cuda.set_sync_debug_mode("error")
    try:
        p.step(CUDA, **controls)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    started = kernels_of(lambda: p.step(CUDA, **controls))
    assert len(started) == 1 + (TABLE[name]["n_norms"] > 0), started
    assert {s.item() for s in p.steps} == {3.0 + 3}


@pytest.mark.parametrize("shapes", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_graph_holds_a_whole_step(name: str, shapes: list[tuple[int, ...]]) -> None:
    eager = made(name, shapes)
    captured = eager.clone()

    def step(p: Problem) -> None:
        scale, found_inf = torch.full((), 1024.0, device="cuda"), torch.zeros((), device="cuda")
        trackers = torch.zeros(4, dtype=torch.int32, device="cuda")
        total, flags = ops.measure_gradients(p.grads)
        _, factor = ops.step_factors(total, flags, scale, 1.0, found_inf)
        p.step(CUDA, multiplier=factor, found_inf=found_inf)
        ops.update_scale_(scale, trackers, found_inf, 2.0, 0.5, 2000, 1, 2.0**-10, 2.0**24)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(captured)
    for _ in range(3):
        graph.replay()
        step(eager)
    torch.cuda.synchronize()
    assert all(map(same_bits, captured.written, eager.written))


def test_streams_do_not_share_tables() -> None:
    expected = made("lamb", MANY)
    problems = [expected.clone() for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    for _ in range(5):
        for p, stream in zip(problems, streams, strict=True):
            with torch.cuda.stream(stream):
                p.step(CUDA)
    for _ in range(5):
        expected.step(CUDA)
    torch.cuda.synchronize()
    for p in problems:
        assert all(map(same_bits, p.written, expected.written))


def test_lists_that_move_every_step() -> None:
    expected = made("adam", MANY)
    moving = expected.clone()
    for _ in range(70):
        moving.grads = [g.clone() for g in moving.grads]
        moving.step(CUDA)
        expected.step(CUDA)
    assert all(map(same_bits, moving.written, expected.written))


@pytest.mark.parametrize("name", ["sgd", "lars"])
def test_more_elements_than_an_int_counts(name: str) -> None:
    n = 2**31 + 5
    if torch.cuda.mem_get_info()[0] < 8 * n:
        pytest.skip("needs 17 GB of GPU memory")
    p = Problem(name, OPTIMIZERS[name][0] | {"lr": 1.0})
    p.params, p.grads = [torch.ones(n, dtype=BF16, device="cuda")], [torch.zeros(n, dtype=BF16, device="cuda")]
    p.grads[0][-1] = 1
    p.steps = [torch.zeros((), device="cuda")]
    assert ops.tensor_norms(p.params, 2.0).item() == n
    assert ops.measure_gradients(p.params)[0].item() == pytest.approx(n)
    p.step(CUDA)
    assert p.params[0][-2].item() == 1 and p.params[0][-1].item() < 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_current_device_is_not_theirs() -> None:
    here = made("lamb", MANY)
    there = here.clone()
    for attribute in ("params", "grads", "states", "steps"):
        setattr(there, attribute, [t.to("cuda:1") for t in getattr(there, attribute)])
    here.step(CUDA)
    there.step(CUDA)
    assert all(map(same_bits, here.written, there.written))


# ---- the classes ----


def train(make: Callable[[list[Tensor]], torch.optim.Optimizer], device: str) -> list[Tensor]:
    """Five steps, with the same gradients everywhere."""
    generator = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in ((300, 70), (9,), ())]
    optimizer = make(params)
    for _ in range(5):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(device)
        optimizer.step()
    return [p.detach().cpu() for p in params]


@pytest.mark.parametrize("name", optimizers.__all__)
def test_a_class_trains_as_on_the_cpu(name: str) -> None:
    def make(params: list[Tensor]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = getattr(optimizers, name)(params, lr=0.01, weight_decay=0.1)
        return optimizer

    for ours, theirs in zip(train(make, "cuda"), train(make, "cpu"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


PEERS: dict[str, tuple[str, Any, dict[str, Any], dict[str, Any]]] = {
    "Adagrad": ("torch.optim", FusedAdagrad, {"lr": 0.01, "weight_decay": 0.1}, {}),
    "Lamb": ("timm.optim", FusedLAMB, {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-6, "max_grad_norm": 1.0}, {}),
    "Lion": ("timm.optim", FusedLion, {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.99)}, {"foreach": False}),
}


@pytest.mark.parametrize("name", PEERS)
def test_a_class_trains_as_a_peer(name: str) -> None:
    module, ours, options, own = PEERS[name]
    peer = getattr(pytest.importorskip(module), name)
    made = train(lambda params: ours(params, **options), "cuda")
    for a, b in zip(made, train(lambda params: peer(params, **options, **own), "cuda"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
