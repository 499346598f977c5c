"""What holds for all batch norm operators: errors before anything is written, fakes, bits that depend on nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from batch_norm_support import EPS, channels_innermost, forward, make_inputs
from cases import BF16, DTYPES, F16, F32, F64, same_bits
from kernels import Kernels
from torch import Tensor

from lightning_apex import ops

OPERATORS = [name for name in ops.__all__ if name.startswith("batch_norm_")]


def calls(backend: Kernels, layout: str = "contiguous", dtype: torch.dtype = F32) -> dict[str, list[Any]]:
    """A right call of every operator."""
    i = make_inputs(backend, (2, 3, 4, 5), dtype, layout)
    mean, var = torch.zeros(3).to(backend.device), torch.ones(3).to(backend.device)
    out, m, invstd = forward(backend, i, z=True, relu=True)
    sums = [torch.randn(3, dtype=F64, device=backend.device) for _ in range(2)]
    ranks = [torch.rand(2, 3, dtype=F64, device=backend.device) for _ in range(2)]
    counts = torch.tensor([3.0, 5.0], dtype=F64, device=backend.device)
    back = [i.grad_out, i.x, out, m, invstd]
    return {
        "batch_norm_stats": [i.x],
        "batch_norm_combine": [*ranks, counts, EPS, 0.1, mean, var],
        "batch_norm_apply": [i.x, m, invstd, i.weight, i.bias, i.z, True],
        "batch_norm_forward": [i.x, i.weight, i.bias, mean, var, EPS, 0.1, i.z, True],
        "batch_norm_backward_reduce": back,
        "batch_norm_backward_apply": [*back, i.weight, *sums, backend.scalar(40, F64), True],
        "batch_norm_backward": [*back, i.weight, True],
    }


def test_every_operator_is_called_here(backend: Kernels) -> None:
    assert sorted(calls(backend)) == sorted(OPERATORS)


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(backend: Kernels, name: str) -> None:
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    for layout, dtype in (("contiguous", F32), ("channels_innermost", BF16), ("sliced", F64), ("transposed", F16)):
        arguments = calls(backend, layout, dtype)[name]
        torch.library.opcheck(getattr(backend.namespace, name).default, tuple(arguments), test_utils=tests)


# (operator, place of the argument, what becomes of it, the error, a part of its message)
WRONG: list[tuple[str, int, Callable[[Any], Any], type[Exception], str]] = [
    ("batch_norm_stats", 0, lambda t: t.int(), TypeError, "input is torch.int32; expected torch.float32"),
    ("batch_norm_stats", 0, lambda t: t.view(-1), ValueError, r"input has shape \[120\]; expected \(N, C\)"),
    ("batch_norm_stats", 0, lambda t: t.to_sparse(), NotImplementedError, "(layout|no kernels|backend)"),
    ("batch_norm_combine", 0, lambda t: t[0], ValueError, r"means has shape \[3\]; expected \(ranks, channels\)"),
    ("batch_norm_combine", 0, lambda t: t.float(), TypeError, "means is torch.float32; statistics are torch.float64"),
    ("batch_norm_combine", 1, lambda t: t[:1], ValueError, r"m2s has shape \[1, 3\], expected \[2, 3\]"),
    ("batch_norm_combine", 2, lambda t: t[:1], ValueError, r"counts has shape \[1\], expected \[2\]"),
    ("batch_norm_combine", 5, lambda t: None, ValueError, "running_mean|running_var is None"),
    ("batch_norm_combine", 6, lambda t: t[:2], ValueError, r"running_var has shape \[2\]"),
    ("batch_norm_combine", 6, lambda t: t.long(), TypeError, "running_var is torch.int64"),
    ("batch_norm_apply", 1, lambda t: t.float(), TypeError, "mean is torch.float32; statistics are torch.float64"),
    ("batch_norm_apply", 2, lambda t: t[:2], ValueError, r"invstd has shape \[2\], expected \[3\]"),
    ("batch_norm_apply", 3, lambda t: t[:2], ValueError, r"weight has shape \[2\], expected \[3\]"),
    ("batch_norm_apply", 4, lambda t: t.int(), TypeError, "bias is torch.int32"),
    ("batch_norm_apply", 5, lambda t: t[:1], ValueError, r"z has shape \[1, 3, 4, 5\], expected \[2, 3, 4, 5\]"),
    ("batch_norm_apply", 5, lambda t: t.half(), TypeError, "z is torch.float16, expected torch.float32 as for input"),
    ("batch_norm_forward", 3, lambda t: t.new_zeros(6)[::2], ValueError, "expected a contiguous"),
    ("batch_norm_forward", 4, lambda t: None, ValueError, "running_var is None and the other one is not"),
    ("batch_norm_backward_reduce", 0, lambda t: t.double(), TypeError, "grad_out is torch.float64, expected"),
    ("batch_norm_backward_apply", 2, lambda t: t[:, :2], ValueError, "out has shape"),
    ("batch_norm_backward_apply", 6, lambda t: t.float(), TypeError, "sum_dy is torch.float32"),
    ("batch_norm_backward_apply", 8, lambda t: t.float(), ValueError, "total_count must be one torch.float64 number"),
    ("batch_norm_backward", 0, lambda t: t[..., :1], ValueError, "grad_out has shape"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "place", "spoil", "error", "message"), WRONG)
def test_a_wrong_argument_is_named_and_nothing_written(
    backend: Kernels, name: str, place: int, spoil: Callable[[Any], Any], error: type[Exception], message: str
) -> None:
    arguments = calls(backend)[name]
    arguments[place] = spoil(arguments[place])
    before = [t.clone() if isinstance(t, Tensor) and not t.is_sparse else t for t in arguments]
    with pytest.raises(error, match=message):
        getattr(backend, name)(*arguments)
    for old, new in zip(before, arguments, strict=True):
        if isinstance(new, Tensor) and not new.is_sparse:
            assert same_bits(old, new)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_innermost"])
@pytest.mark.parametrize("shape", [(2, 3, 120, 121), (40, 70, 7, 9), (900, 65)], ids=str)
def test_bits_depend_neither_on_threads_nor_on_the_instruction_set(
    threads: Callable[[int], None], shape: tuple[int, ...], layout: str, dtype: torch.dtype
) -> None:
    before, seen = ops.cpu_backend(), []
    i = make_inputs(Kernels("cpu", torch.ops.lightning_apex, "cpu"), shape, dtype, layout)
    for isa, n in product(ops.build_info()["cpu_backends"], (1, 3)):
        ops.set_cpu_backend(isa)
        threads(n)
        out, mean, invstd = ops.batch_norm_forward(i.x, i.weight, i.bias, None, None, EPS, 0.1, i.z, True)
        back = ops.batch_norm_backward(i.grad_out, i.x, out, mean, invstd, i.weight, True)
        seen.append([out, mean, invstd, *back])
    ops.set_cpu_backend(before)
    for other in seen[1:]:
        assert all(map(same_bits, seen[0], other))


@pytest.mark.parametrize("layout", ["contiguous", "channels_innermost"])
def test_the_cuda_kernels_sum_in_one_order(simt_namespace: Any, layout: str) -> None:
    """Whatever the order of blocks and threads, to the bit, in vectors and without."""
    simt = Kernels("simt", simt_namespace, "cpu")
    results: list[list[Tensor]] = []
    for shape in [(5, 36, 8, 8), (5, 35, 7, 9)]:
        i = make_inputs(simt, shape, BF16, layout)
        results.clear()
        for order in [("forward", 0), ("reverse", 0), ("random", 1), ("random", 2)]:
            simt_namespace.set_order(*order)
            out, mean, invstd = forward(simt, i, z=True, relu=True)
            results.append(
                [out, mean, invstd, *simt.batch_norm_backward(i.grad_out, i.x, out, mean, invstd, None, True)]
            )
        simt_namespace.set_order("forward", 0)
        for other in results[1:]:
            assert all(map(same_bits, results[0], other))


def test_an_overlap_of_memory_formats(backend: Kernels) -> None:
    """Sizes of 1 make a tensor contiguous and channels_last at once; both agree."""
    x = torch.randn(4, 1, 6, 6, device=backend.device)
    y = torch.randn(4, 6, 1, 1, device=backend.device)
    for t in (x, y):
        results = [backend.batch_norm_stats(u)[0] for u in (t, t.contiguous(memory_format=torch.channels_last))]
        torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)
    assert channels_innermost(x).is_contiguous()
