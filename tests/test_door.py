"""What the kernels refuse: each call names the argument, and leaves every tensor as it was."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from cases import BF16, F16, F32, F64, same_bits
from kernels import Kernels
from torch import Tensor

from lightning_apex import ops

HYPERS = [0.1, 0.9, 0.99, 1e-8, 0.0, 1.0, 1.0, 0.0]


def step_arguments(device: str, masters: bool = False) -> dict[str, Any]:
    dtype = F16 if masters else F32

    def make(dtype: torch.dtype, n: int = 2) -> list[Tensor]:
        return [torch.ones(3, 4, dtype=dtype, device=device) for _ in range(n)]

    return {
        "name": "adam", "params": make(dtype), "grads": make(dtype), "masters": make(F32) if masters else [],
        "states": make(F32, 4), "steps": [torch.zeros((), device=device) for _ in range(2)], "hypers": HYPERS,
        "lr": None, "multiplier": None, "found_inf": None, "norms": None,
    }  # fmt: skip


def novograd_arguments(device: str) -> dict[str, Any]:
    """One with norms, and with states of one number a tensor behind the others."""
    states = [torch.ones(3, 4, device=device) for _ in range(2)] + [torch.ones((), device=device) for _ in range(2)]
    hypers = [0.1, 0.9, 0.98, 1e-8, 0.0, 1.0, 1.0, 0.0, 2.0, 0.0, 0.0]
    return step_arguments(device) | {"name": "novograd", "states": states, "hypers": hypers}


def put(name: str, index: int, change: Callable[[Tensor], Any]) -> Callable[[dict[str, Any]], None]:
    """Changes one tensor of one list."""

    def apply(arguments: dict[str, Any]) -> None:
        arguments[name][index] = change(arguments[name][index])

    return apply


def drop(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda arguments: arguments[name].pop()


def give(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda arguments: arguments.update({name: value})


def expand(t: Tensor) -> Tensor:
    return torch.ones(4, dtype=t.dtype, device=t.device).expand(3, 4)


# (does the call have masters, what is wrong with it, the error, what the message says)
REFUSED: list[tuple[bool, Callable[[dict[str, Any]], Any], type[Exception], str]] = [
    (False, give("name", "adamm"), ValueError, 'no optimizer "adamm"'),
    (False, drop("grads"), ValueError, "grads has 1 tensors, expected 2"),
    (False, drop("states"), ValueError, "states has 3 tensors, expected 4"),
    (False, drop("steps"), ValueError, "steps has 1 tensors, expected 2"),
    (True, drop("masters"), ValueError, "masters has 1 tensors, expected 2"),
    (False, give("hypers", HYPERS[:-1]), ValueError, 'hypers has 7 values, "adam" takes 8'),
    (False, put("grads", 1, lambda t: t[:2]), ValueError, "grads[1] has shape [2, 4], expected [3, 4] as params[1]"),
    (False, put("states", 3, lambda t: t[0]), ValueError, "states[3] has shape [4], expected [3, 4] as params[1]"),
    (False, put("params", 0, lambda t: t.int()), TypeError, "params[0] is torch.int32"),
    (
        False,
        put("grads", 1, lambda t: t.double()),
        TypeError,
        "grads[1] is torch.float64 and params[1] is torch.float32",
    ),
    (False, put("grads", 0, lambda t: t.half()), TypeError, "grads[0] is torch.float16 and params[0] is torch.float32"),
    (False, put("grads", 1, lambda t: t.to_sparse()), NotImplementedError, "grads[1] has layout Sparse"),
    (False, put("states", 2, lambda t: t.half()), TypeError, "states[2] is torch.float16"),
    (
        False,
        put("states", 2, lambda t: t.to(BF16)),
        TypeError,
        "states[2] is torch.bfloat16 and states[0] is torch.float32",
    ),
    (True, put("masters", 0, lambda t: t.double()), TypeError, "masters[0] is torch.float64; expected torch.float32"),
    (True, put("params", 1, lambda t: t.float()), TypeError, "params[1] is torch.float32"),
    (False, put("params", 1, expand), ValueError, "params[1] is written, but its elements share memory"),
    (False, put("states", 3, expand), ValueError, "states[3] is written, but its elements share memory"),
    (True, put("masters", 1, expand), ValueError, "masters[1] is written, but its elements share memory"),
    (False, put("steps", 1, lambda t: t.double()), TypeError, "steps[1] must be torch.float32, not torch.float64"),
    (False, put("steps", 0, lambda t: t.new_zeros(2)), ValueError, "steps[0] must be contiguous with 1 element"),
    (False, give("lr", torch.ones(2)), ValueError, "lr must hold one number"),
    (False, give("lr", torch.tensor(1)), TypeError, "lr is torch.int64"),
    (
        False,
        give("multiplier", torch.ones((), dtype=F64)),
        TypeError,
        "multiplier must be torch.float32, not torch.float64",
    ),
    (False, give("found_inf", torch.zeros(2)), ValueError, "found_inf must be contiguous with 1 element"),
    (False, give("norms", torch.zeros(2, 2, dtype=F64)), ValueError, 'norms are given, but "adam" needs none'),
]
NORMED_REFUSED: list[tuple[Callable[[dict[str, Any]], Any], type[Exception], str]] = [
    (give("norms", torch.zeros(2, 2, dtype=F64)), ValueError, "norms must be contiguous with 2 elements"),
    (give("norms", torch.zeros(2, 1)), TypeError, "norms must be torch.float64, not torch.float32"),
    (drop("states"), ValueError, "states has 3 tensors, expected 4"),
    (put("states", 1, lambda t: t[0]), ValueError, "states[1] has shape [4], expected [3, 4] as params[1]"),
    (put("states", 2, lambda t: t.double()), TypeError, "states[2] must be torch.float32, not torch.float64"),
    (put("states", 3, lambda t: t.to(BF16)), TypeError, "states[3] must be torch.float32, not torch.bfloat16"),
    (put("states", 3, lambda t: t.expand(2)), ValueError, "states[3] must be contiguous with 1 element"),
    (put("params", 0, lambda t: t.double()), TypeError, "grads[0] is torch.float32 and params[0] is torch.float64"),
]


def tensors_in(arguments: dict[str, Any]) -> list[Tensor]:
    return [t for value in arguments.values() if isinstance(value, list) for t in value if isinstance(t, Tensor)]


@pytest.mark.parametrize(("masters", "spoil", "error", "message"), REFUSED, ids=[row[3] for row in REFUSED])
def test_the_fused_step_refuses(
    backend: Kernels, masters: bool, spoil: Callable[[dict[str, Any]], Any], error: type[Exception], message: str
) -> None:
    arguments = step_arguments(backend.device, masters)
    spoil(arguments)
    assert_refused(backend, arguments, "fused_step_", error, message)


@pytest.mark.parametrize(("spoil", "error", "message"), NORMED_REFUSED, ids=[row[2] for row in NORMED_REFUSED])
def test_an_optimizer_with_norms_refuses(
    backend: Kernels, spoil: Callable[[dict[str, Any]], Any], error: type[Exception], message: str
) -> None:
    arguments = novograd_arguments(backend.device)
    backend.fused_step_(*arguments.values())
    spoil(arguments)
    assert_refused(backend, arguments, "fused_step_", error, message)
    if arguments.pop("norms") is None:
        assert_refused(backend, arguments, "fused_norms_", error, message)


def test_an_optimizer_without_norms_has_no_first_pass(backend: Kernels) -> None:
    arguments = step_arguments(backend.device)
    del arguments["norms"]
    assert_refused(backend, arguments, "fused_norms_", ValueError, '"adam" needs no norms; call fused_step_ alone')
    empty = {k: [] if isinstance(v, list) and k != "hypers" else v for k, v in arguments.items()}
    assert_refused(backend, empty, "fused_norms_", ValueError, '"adam" needs no norms')


def assert_refused(backend: Kernels, arguments: dict[str, Any], op: str, error: type[Exception], message: str) -> None:
    for name in ("lr", "multiplier", "found_inf", "norms"):
        if arguments.get(name) is not None:
            arguments[name] = arguments[name].to(backend.device)
    before = [t.clone() for t in tensors_in(arguments)]
    with pytest.raises(error, match=f"{op}: .*" + re.escape(message)):
        getattr(backend, op)(*arguments.values())
    dense = [(a, b) for a, b in zip(tensors_in(arguments), before, strict=True) if a.layout == torch.strided]
    assert all(same_bits(a, b) for a, b in dense)


def test_the_others_refuse(backend: Kernels) -> None:
    wide, half = torch.ones(4, device=backend.device), torch.ones(4, device=backend.device).half()
    one, expanded = backend.scalar(2), torch.ones(1, device=backend.device).expand(4)
    flags = torch.zeros(1, dtype=torch.uint8, device=backend.device)
    total = backend.scalar(1, F64)
    rows: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
        ("measure_gradients", ([wide, wide.int()],), TypeError, "grads[1] is torch.int32"),
        ("measure_gradients", ([wide.to_sparse()],), NotImplementedError, "grads[0] has layout Sparse"),
        (
            "step_factors",
            (one, flags, None, 0.0, one),
            TypeError,
            "sum_of_squares must be torch.float64, not torch.float32",
        ),
        (
            "step_factors",
            (total, flags.int(), None, 0.0, one),
            TypeError,
            "nonfinite must be torch.uint8, not torch.int32",
        ),
        ("tensor_norms", ([wide, wide.int()], 2.0), TypeError, "tensors[1] is torch.int32"),
        ("step_factors", (total, flags, wide, 0.0, one), ValueError, "scale must be contiguous with 1 element"),
        ("unscale_", ([expanded], one), ValueError, "grads[0] is written, but its elements share memory"),
        ("unscale_", ([wide], wide), ValueError, "multiplier must be contiguous with 1 element"),
        ("copy_scaled_", ([wide], []), ValueError, "src has 0 tensors, expected 1"),
        ("copy_scaled_", ([wide], [half[:3]]), ValueError, "src[0] has shape [3], expected [4] as dst[0]"),
        ("copy_scaled_", ([expanded], [wide]), ValueError, "dst[0] is written, but its elements share memory"),
        ("reconcile_masters_", ([half], [half]), TypeError, "masters[0] is torch.float16; expected torch.float32"),
        ("reconcile_masters_", ([wide], [wide]), TypeError, "params[0] is torch.float32; only float16 and bfloat16"),
        ("reconcile_masters_", ([wide], []), ValueError, "masters has 1 tensors, expected 0"),
        (
            "update_scale_",
            (one, flags, one, 2.0, 0.5, 2, 1, 1.0, 2.0),
            TypeError,
            "trackers must be torch.int32, not torch.uint8",
        ),
        ("update_scale_", (wide, flags, one, 2.0, 0.5, 2, 1, 1.0, 2.0), ValueError, "scale must be contiguous"),
    ]
    for name, arguments, error, message in rows:
        with pytest.raises(error, match=f"{name}: .*" + re.escape(message)):
            getattr(backend, name)(*arguments)
    assert wide.tolist() == [1] * 4 and half.tolist() == [1] * 4


def test_errors_in_ten_threads_at_once(backend: Kernels) -> None:
    """A refusal in one thread never disturbs a step in another."""

    spoilers = [row[1] for row in REFUSED if not row[0]]

    def work(i: int) -> bool:
        for _ in range(3 if backend.slow else 20):
            good, bad = step_arguments(backend.device), step_arguments(backend.device)
            spoilers[i](bad)
            try:
                backend.fused_step_(*bad.values())
            except (ValueError, TypeError):
                backend.fused_step_(*good.values())
            else:
                return False
            if not all(p.flatten()[0].item() == pytest.approx(0.9) for p in good["params"]):
                return False
        return True

    if backend.slow:  # the emulated machine is one for all threads
        pytest.skip("the emulation runs one kernel at a time")
    with ThreadPoolExecutor(10) as pool:
        assert all(pool.map(work, range(10)))


def test_a_member_that_is_no_tensor(backend: Kernels) -> None:
    arguments = step_arguments(backend.device)
    arguments["grads"][1] = None
    with pytest.raises((TypeError, RuntimeError), match=r"grads|Tensor\[\]"):
        backend.fused_step_(*arguments.values())
    with pytest.raises((TypeError, RuntimeError)):
        backend.fused_step_(*(arguments | {"grads": 3}).values())
    assert arguments["params"][0].eq(1).all()


def test_the_lists_are_let_go(backend: Kernels) -> None:
    """Done or refused, a call leaves as many owners of a tensor as there were."""
    good, bad = step_arguments(backend.device), step_arguments(backend.device)
    bad["grads"][1] = bad["grads"][1].double()
    counts = [(sys.getrefcount(t), t._use_count()) for t in tensors_in(good) + tensors_in(bad)]
    backend.fused_step_(*good.values())
    with pytest.raises(TypeError):
        backend.fused_step_(*bad.values())
    assert [(sys.getrefcount(t), t._use_count()) for t in tensors_in(good) + tensors_in(bad)] == counts


def test_the_compiler_follows_the_functions() -> None:
    """As registered operators: it could not follow the shorter way, and would refuse the whole graph."""

    def work(grads: list[Tensor]) -> Tensor:
        return ops.measure_gradients(grads)[0] * 2

    assert torch.compile(work, backend="eager", fullgraph=True)([torch.ones(3), torch.ones(4)]).item() == 14
