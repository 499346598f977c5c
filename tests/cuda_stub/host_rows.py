"""The host side of the CUDA build on the stub runtime: rows of test_cuda_host.py, in a process that has loaded it."""

from __future__ import annotations

import re
from collections.abc import Callable

import cuda_stub_support as support
import pytest
import torch
from cases import BF16, F16, F32, OPTIMIZERS
from cuda_stub_support import Stub
from kernels import Kernels
from problems import TABLE, problem
from torch import Tensor

from lightning_apex import LossScaler, ops, optimizers
from lightning_apex.masters import MasterWeights

FEW, MANY = [(3,), (40_000,), (77,)], [(7 * i % 12,) for i in range(170)] + [(40_000,)]
THERE = "cuda:1"  # not the current device
Call = Callable[[], object]


@pytest.fixture
def stub() -> Stub:
    torch.cuda.init()
    return support.stub()


def made(shape: tuple[int, ...], dtype: torch.dtype = F32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=THERE)


def steps(name: str, shapes: list[tuple[int, ...]]) -> dict[str, Call]:
    p = problem(name, OPTIMIZERS[name][-1], shapes, (F16, F16, F32, True), device=THERE)
    backend = Kernels("cuda", torch.ops.lightning_apex, THERE)
    controls = {"multiplier": made(()), "found_inf": made(())}
    calls: dict[str, Call] = {f"fused_step_ {name}": lambda: p.step(backend, **controls)}
    if TABLE[name]["n_norms"] > 0:
        calls[f"fused_norms_ {name}"] = lambda: p.norms(backend, **controls)
    return calls


def batch_norm_calls() -> dict[str, Call]:
    x, per_channel = made((2, 16, 8, 8), F16), made((16,))
    wide, ranks, counts = made((16,), torch.float64), made((2, 16), torch.float64), made((2,), torch.float64)
    total = made((1,), torch.float64)
    return {
        "batch_norm_stats": lambda: ops.batch_norm_stats(x),
        "batch_norm_combine": lambda: ops.batch_norm_combine(ranks, ranks, counts, 1e-5, 0.1, per_channel, per_channel),
        "batch_norm_apply": lambda: ops.batch_norm_apply(x, wide, wide, per_channel, per_channel, x, True),
        "batch_norm_forward": lambda: ops.batch_norm_forward(
            x, per_channel, per_channel, per_channel, per_channel, 1e-5, 0.1, None, False
        ),
        "batch_norm_backward_reduce": lambda: ops.batch_norm_backward_reduce(x, x, x, wide, wide),
        "batch_norm_backward_apply": lambda: ops.batch_norm_backward_apply(
            x, x, x, wide, wide, per_channel, wide, wide, total, True
        ),
        "batch_norm_backward": lambda: ops.batch_norm_backward(x, x, x, wide, wide, per_channel, True),
    }


def list_calls(shapes: list[tuple[int, ...]]) -> dict[str, Call]:
    wide, half = [made(s) for s in shapes], [made(s, F16) for s in shapes]
    one, trackers, sums = made(()), torch.zeros(4, dtype=torch.int32, device=THERE), made((), torch.float64)
    flags = made((len(shapes),), torch.uint8)
    return {
        "measure_gradients": lambda: ops.measure_gradients([*wide, *half]),
        "tensor_norms": lambda: ops.tensor_norms(wide, 2.0),
        "step_factors": lambda: ops.step_factors(sums, flags, one, 1.0, one),
        "unscale_": lambda: ops.unscale_(half, one, one),
        "copy_scaled_": lambda: ops.copy_scaled_(wide, half, one, one),
        "reconcile_masters_": lambda: ops.reconcile_masters_(wide, half),
        "update_scale_": lambda: ops.update_scale_(one, trackers, one, 2.0, 0.5, 2000, 1, 2.0**-10, 2.0**24),
    }


def call_of(operator: str, shapes: list[tuple[int, ...]]) -> Call:
    """A call of it on tensors of the second device."""
    kind, _, name = operator.partition(" ")
    if name:
        return steps(name, shapes)[operator]
    return (batch_norm_calls() if kind.startswith("batch_norm") else list_calls(shapes))[operator]


OPERATORS = [*(["measure_gradients", "tensor_norms", "step_factors", "unscale_", "copy_scaled_", "reconcile_masters_"])]
OPERATORS += ["update_scale_", *(f"fused_step_ {name}" for name in OPTIMIZERS)]
OPERATORS += [f"fused_norms_ {name}" for name in OPTIMIZERS if TABLE[name]["n_norms"] > 0]
OPERATORS += [f"batch_norm_{name}" for name in ("stats", "combine", "apply", "forward", "backward")]
OPERATORS += ["batch_norm_backward_reduce", "batch_norm_backward_apply"]


def test_no_operator_is_left_out(stub: Stub) -> None:
    names = {operator.split()[0] for operator in OPERATORS}
    kernels = {n for n in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA") if "lightning_apex::" in n}
    assert names == {name.partition("::")[2] for name in kernels}


@pytest.mark.parametrize("shapes", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_works_on_the_tensors_device_and_its_current_stream_without_waiting(
    stub: Stub, operator: str, shapes: list[tuple[int, ...]]
) -> None:
    call = call_of(operator, shapes)
    stream = torch.cuda.Stream(THERE)
    before = torch.cuda.current_stream(THERE)
    torch.cuda.set_stream(stream)  # makes its device the current one, too
    torch.cuda.set_device(0)
    try:
        logs = [stub.log_of(call) for _ in range(2)]
        assert torch.cuda.current_device() == 0
    finally:
        torch.cuda.set_stream(before)
        torch.cuda.set_device(0)
    for log in logs:
        assert log.ours
        for launch in log.launches:
            assert (launch.device, launch.stream) == (1, stream.cuda_stream), launch
        assert not [line for line in log.others if line.startswith("sync") or "d2h" in line]
    assert logs[1].others == [], "the second time there is nothing to allocate and nothing to send"


@pytest.mark.parametrize("operator", OPERATORS)
def test_in_a_graph_nothing_is_allocated_sent_or_read(stub: Stub, operator: str) -> None:
    call = call_of(operator, MANY)
    call()
    with stub.capturing():
        call()  # of memory that goes into the graph, the allocator has enough from here on
        log = stub.log_of(call)
    assert log.ours and log.others == []


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_launch_that_fails_names_its_kernel(stub: Stub, operator: str) -> None:
    call = call_of(operator, MANY)
    kernels = {launch.kernel for launch in stub.log_of(call).ours}
    for kernel in kernels:
        name = re.search(r"[a-z_]+_kernel", re.sub(r"\d+", " ", kernel))
        assert name is not None, kernel
        with (
            stub.failing(kernel),
            pytest.raises(RuntimeError, match=rf"csrc/cuda/\S+:\d+, launching .*{name[0]}.*too many resources"),
        ):
            call()
    assert {launch.kernel for launch in stub.log_of(call).ours} == kernels, "and the next call is a call like any other"


def test_a_table_is_sent_when_a_tensor_has_moved(stub: Stub) -> None:
    grads = [made(shape) for shape in MANY]
    sent = [len(stub.log_of(lambda: ops.tensor_norms(grads, 2.0)).copies()) for _ in range(2)]
    stayed, grads[7] = grads[7], made(MANY[7])
    sent += [len(stub.log_of(lambda: ops.tensor_norms(grads, 2.0)).copies()) for _ in range(2)]
    grads[7] = stayed
    sent.append(len(stub.log_of(lambda: ops.tensor_norms(grads, 2.0)).copies()))
    assert sent == [1, 0, 1, 0, 0]
    with stub.failing("tensor_norms_kernel"), pytest.raises(RuntimeError):
        ops.tensor_norms(grads, 2.0)
    log = stub.log_of(lambda: ops.tensor_norms(grads, 2.0))
    assert len(log.copies()) == 1 and "h2d" in log.copies()[0], "what a failed launch left behind is not used again"


def test_tensors_of_two_devices_are_refused(stub: Stub) -> None:
    mixed = [made((3,)), torch.empty(3, device="cuda:0")]
    for call in (lambda: ops.measure_gradients(mixed), lambda: ops.unscale_(mixed, made(()), None)):
        with pytest.raises(ValueError, match=r"\[1\] is on cuda:0, others are on cuda:1; call once for each device"):
            call()


# ---- whole steps ----


@pytest.mark.parametrize("name", optimizers.__all__)
def test_an_optimizer_serves_each_device_on_its_own(stub: Stub, name: str) -> None:
    params = [torch.nn.Parameter(torch.empty(50, device=f"cuda:{i % 2}")) for i in range(4)]
    for p in params:
        p.grad = torch.empty_like(p)
    optimizer = getattr(optimizers, name)(params, lr=0.01)
    for _ in range(2):
        optimizer.step()
    log = stub.log_of(optimizer.step)
    assert {launch.device for launch in log.ours} == {0, 1}
    assert not [line for line in log.others if line.startswith("sync") or "d2h" in line]
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD", "FusedLAMB"])
def test_the_whole_tail_of_a_step_waits_for_nothing(stub: Stub, name: str, dtype: torch.dtype) -> None:
    params = [torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="cuda")) for shape in MANY]
    for p in params:
        p.grad = torch.empty_like(p)
    optimizer, scaler, masters = getattr(optimizers, name)(params, lr=0.01), LossScaler(), MasterWeights()
    if dtype != F32:
        for p in params:
            masters.put(p, p.detach().float())

    def tail() -> None:
        scaler.open(optimizer, masters if dtype != F32 else None).clip_norm(1.0)
        scaler.step(optimizer)
        scaler.update()

    with stub.busy():
        for _ in range(3):
            tail()
        log = stub.log_of(tail)
    assert len(log.ours) == 5 + (name == "FusedLAMB")
    assert not [line for line in log.others if line.startswith(("sync", "malloc device"))]
    assert not [line for line in log.copies() if "h2d" in line]
    assert len([line for line in log.copies() if "d2h" in line]) == 2, "the outcome, sent off into pinned memory"
