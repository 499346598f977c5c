"""The batch norm kernels against the formula in float64."""

from __future__ import annotations

import pytest
import torch
from batch_norm_support import (
    BATCH_NORM_LAYOUTS,
    CHANNELS,
    EPS,
    LARGE,
    SHAPES,
    channels_innermost,
    close,
    forward,
    full_shape,
    make_inputs,
)
from cases import BF16, DTYPES, F16, F32, F64, combine, same_bits
from kernels import Kernels
from reference.batch_norm import batch_norm, running, statistics
from torch import Tensor


def shapes(backend: Kernels, channels: int) -> list[tuple[int, ...]]:
    if backend.slow:
        return [full_shape(channels, rest) for rest in (SHAPES[:3] if channels < 100 else SHAPES[:1])]
    return [full_shape(channels, rest) for rest in SHAPES + (LARGE if channels in (1, 3, 65) else [])]


def laid_out_like(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and all(x == y for x, y, n in zip(a.stride(), b.stride(), a.shape, strict=True) if n > 1)


def check(backend: Kernels, shape: tuple[int, ...], dtype: torch.dtype, layout: str, z: bool, relu: bool) -> None:
    """Forward and backward, at once and in parts, against the reference."""
    i = make_inputs(backend, shape, dtype, layout)
    out, mean, invstd = forward(backend, i, z=z, relu=relu)
    positive = out > 0 if relu else None
    wanted = batch_norm(i.x, i.grad_out, i.weight, i.bias, i.z if z else None, positive=positive, eps=EPS)
    expected_mean, expected_var = statistics(i.x)
    close(out, wanted.out)
    close(mean, expected_mean, F64 if dtype == F64 else F32)
    close(invstd, (expected_var + EPS).rsqrt(), F64 if dtype == F64 else F32)
    assert mean.dtype == invstd.dtype == F64
    if layout in ("contiguous", "offset", "channels_innermost") or (layout == "channels_last" and len(shape) == 4):
        assert laid_out_like(out, i.x)

    given = out if relu else None
    grad_input, grad_z, sum_dy, sum_dy_xhat = backend.batch_norm_backward(
        i.grad_out, i.x, given, mean, invstd, i.weight, z and relu
    )
    close(grad_input, wanted.grad_input, times=8)
    count = i.x.numel() / i.x.shape[1]
    kind = F64 if dtype == F64 else F32
    close(sum_dy / count**0.5, wanted.grad_bias / count**0.5, kind)
    close(sum_dy_xhat / count**0.5, wanted.grad_weight / count**0.5, kind)
    if z and relu:
        close(grad_z, wanted.grad_z)


@pytest.mark.parametrize(("channels", "dtype"), combine(CHANNELS, DTYPES))
def test_forward_and_backward(backend: Kernels, channels: int, dtype: torch.dtype) -> None:
    for shape in shapes(backend, channels):
        check(backend, shape, dtype, "contiguous", z=False, relu=False)
        check(backend, shape, dtype, "channels_innermost", z=True, relu=True)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("contiguous", F32), ("offset", BF16), ("offset", F64), ("channels_innermost", F32), ("channels_innermost", F16)],
)
def test_a_large_output(backend: Kernels, layout: str, dtype: torch.dtype) -> None:
    """Stored past the cache, where that is right: from line to line, with edges."""
    if backend.slow:
        pytest.skip("too many elements to emulate")
    check(backend, (3, 64, 55, 53), dtype, layout, z=True, relu=True)


@pytest.mark.parametrize(("layout", "dtype"), combine(BATCH_NORM_LAYOUTS, DTYPES))
def test_layouts(backend: Kernels, layout: str, dtype: torch.dtype) -> None:
    for shape in [(5, 35), (3, 19, 33), (2, 33, 3, 7), (2, 4, 3, 2, 3)]:
        check(backend, shape, dtype, layout, z=True, relu=False)


@pytest.mark.parametrize(("z", "relu", "dtype"), combine([False, True], [False, True], DTYPES))
def test_addend_and_relu(backend: Kernels, z: bool, relu: bool, dtype: torch.dtype) -> None:
    for layout in ("contiguous", "channels_innermost"):
        check(backend, (3, 17, 5, 7), dtype, layout, z, relu)


@pytest.mark.parametrize(("dtype", "layout"), combine(DTYPES, ["contiguous", "channels_innermost"]))
def test_parts_are_the_whole(backend: Kernels, dtype: torch.dtype, layout: str) -> None:
    """Statistics, combination and normalisation give what the operator for all gives, to the bit; and so back."""
    for shape in [(3, 33, 5, 9), (7, 130)] + ([] if backend.slow else [(3, 70, 65, 67), (2, 3, 160, 161)]):
        i = make_inputs(backend, shape, dtype, layout)
        out, mean, invstd = forward(backend, i, z=True, relu=True)
        count = torch.full((1,), i.x.numel() / shape[1], dtype=F64, device=backend.device)
        local = backend.batch_norm_stats(i.x)
        combined = backend.batch_norm_combine(local[0][None], local[1][None], count, EPS, 0.1, None, None)
        assert same_bits(combined[0], mean) and same_bits(combined[1], invstd) and same_bits(combined[2], count)
        assert same_bits(backend.batch_norm_apply(i.x, mean, invstd, i.weight, i.bias, i.z, True), out)

        whole = backend.batch_norm_backward(i.grad_out, i.x, out, mean, invstd, i.weight, True)
        sums = backend.batch_norm_backward_reduce(i.grad_out, i.x, out, mean, invstd)
        parts = backend.batch_norm_backward_apply(
            i.grad_out, i.x, out, mean, invstd, i.weight, *sums, combined[2], True
        )
        assert all(map(same_bits, (*parts, *sums), whole))


@pytest.mark.parametrize(("dtype", "affine"), combine(DTYPES, [F16, BF16, F32, F64, None]))
def test_parameters_and_running_statistics_of_any_dtype(
    backend: Kernels, dtype: torch.dtype, affine: torch.dtype | None
) -> None:
    i = make_inputs(backend, (4, 5, 3, 3), dtype)
    if affine is None:
        weight = bias = mean = var = None
    else:
        weight, bias = i.weight.to(affine), i.bias.to(affine)
        mean, var = torch.randn(5).to(backend.device, affine), torch.rand(5).to(backend.device, affine)
        before, versions = (mean.clone(), var.clone()), (mean._version, var._version)
    out, *_ = backend.batch_norm_forward(i.x, weight, bias, mean, var, EPS, 0.3, None, False)
    close(out, batch_norm(i.x, i.grad_out, weight, bias).out)
    if affine is None:
        return
    now, biased = statistics(i.x)
    close(mean, running(before[0], now, 0.3), dtype if affine == F64 and dtype != F64 else None)
    close(var, running(before[1], biased * 36 / 35, 0.3), F32 if affine == F64 and dtype != F64 else None)
    assert mean._version > versions[0] and var._version > versions[1]


@pytest.mark.parametrize(("momentum", "count"), combine([0.0, 0.1, 1.0], [0, 1, 2]))
def test_running_statistics_of_few(backend: Kernels, momentum: float, count: int) -> None:
    """Of nothing they stay; of one element the variance is 0."""
    x = torch.randn(count, 3).to(backend.device)
    mean, var = torch.randn(3).to(backend.device), torch.rand(3).to(backend.device)
    before = mean.clone(), var.clone()
    backend.batch_norm_forward(x, None, None, mean, var, EPS, momentum, None, False)
    if count == 0:
        assert same_bits(mean, before[0]) and same_bits(var, before[1])
    else:
        expected_var = x.cpu().double().var(0) if count > 1 else torch.zeros(3, dtype=F64)
        close(mean, running(before[0], statistics(x)[0], momentum))
        close(var, running(before[1], expected_var, momentum))


@pytest.mark.parametrize(("dtype", "layout"), combine(DTYPES, ["contiguous", "channels_innermost"]))
@pytest.mark.parametrize("sizes", [(3, 5), (1, 7), (4, 0, 4), (0, 8), (2, 1, 3, 2)], ids=str)
def test_ranks_together_are_one_batch(
    backend: Kernels, dtype: torch.dtype, layout: str, sizes: tuple[int, ...]
) -> None:
    """Uneven and empty shares of a batch, combined by their counts."""
    shape = (8, 5, 3, 3)
    i = make_inputs(backend, shape, dtype)
    mean, var = torch.zeros(5).to(backend.device), torch.ones(5).to(backend.device)

    def share(t: Tensor) -> list[Tensor]:
        return [BATCH_NORM_LAYOUTS[layout](part) for part in t.split(sizes)]

    xs, zs, dys = map(share, (i.x, i.z, i.grad_out))
    means, m2s = map(torch.stack, zip(*map(backend.batch_norm_stats, xs), strict=True))
    counts = torch.tensor([x.numel() / 5 for x in xs], dtype=F64, device=backend.device)
    gathered = torch.cat([means, m2s, counts[:, None]], 1)  # as it comes from the collective: parts of one tensor
    m, invstd, total = backend.batch_norm_combine(
        gathered[:, :5], gathered[:, 5:10], gathered[:, 10], EPS, 0.1, mean, var
    )
    assert total.tolist() == [72]
    outs = [backend.batch_norm_apply(x, m, invstd, i.weight, i.bias, z, True) for x, z in zip(xs, zs, strict=True)]
    out = torch.cat(outs)
    wanted = batch_norm(i.x, i.grad_out, i.weight, i.bias, i.z, positive=out > 0)
    close(out, wanted.out)
    expected_mean, biased = statistics(i.x)
    close(mean, running(torch.zeros(5), expected_mean, 0.1))
    close(var, running(torch.ones(5), biased * 72 / 71, 0.1))

    ranks = list(zip(dys, xs, outs, strict=True))
    sums = [backend.batch_norm_backward_reduce(*rank, m, invstd) for rank in ranks]
    sum_dy, sum_dy_xhat = (torch.stack(part).sum(0) for part in zip(*sums, strict=True))
    back = [
        backend.batch_norm_backward_apply(*rank, m, invstd, i.weight, sum_dy, sum_dy_xhat, total, True)
        for rank in ranks
    ]
    close(torch.cat([grads[0] for grads in back]), wanted.grad_input, times=2)
    close(torch.cat([grads[1] for grads in back]), wanted.grad_z)
    kind = F64 if dtype == F64 else F32
    close(sum_dy, wanted.grad_bias, kind, times=9)
    close(sum_dy_xhat, wanted.grad_weight, kind, times=9)


@pytest.mark.parametrize("layout", ["contiguous", "channels_innermost"])
@pytest.mark.parametrize("shape", [(4, 3, 9, 9), (60, 4), (2, 1, 300)], ids=str)
def test_a_large_mean_with_a_small_variance(backend: Kernels, shape: tuple[int, ...], layout: str) -> None:
    """Where a sum of squares has no digit left. Exact in float32 are steps of 2^-10 here, a tenth of the deviation."""
    x = BATCH_NORM_LAYOUTS[layout]((1e4 + 1e-2 * torch.randn(shape)).to(backend.device))
    dy = torch.randn(shape).to(backend.device)
    out, mean, invstd = backend.batch_norm_forward(x, None, None, None, None, EPS, 0.1, None, False)
    wanted = batch_norm(x, dy)
    close(out, wanted.out)
    close(invstd, (statistics(x)[1] + EPS).rsqrt(), F32)
    grad_input, *_ = backend.batch_norm_backward(dy, x, None, mean, invstd, None, False)
    torch.testing.assert_close(grad_input.cpu().double(), wanted.grad_input, rtol=1e-5, atol=1e-5 * 100)

    halves = [part.clone() for part in x.chunk(2)]
    means, m2s = map(torch.stack, zip(*map(backend.batch_norm_stats, halves), strict=True))
    counts = torch.full((2,), x.numel() / shape[1] / 2, dtype=F64, device=backend.device)
    m, s, _ = backend.batch_norm_combine(means, m2s, counts, EPS, 0.1, None, None)
    close(torch.cat([backend.batch_norm_apply(half, m, s, None, None, None, False) for half in halves]), wanted.out)


@pytest.mark.parametrize("layout", ["contiguous", "channels_innermost"])
def test_an_outlier_at_the_start_of_a_channel(backend: Kernels, layout: str) -> None:
    """The first elements decide around what sums are taken."""
    x = 1000 + torch.randn(2, 3, 40, 40)
    x[0, :, 0, :8] = -1e4
    x = BATCH_NORM_LAYOUTS[layout](x.to(backend.device))
    _, mean, invstd = backend.batch_norm_forward(x, None, None, None, None, EPS, 0.1, None, False)
    expected_mean, var = statistics(x)
    torch.testing.assert_close(mean.cpu(), expected_mean, rtol=5e-6, atol=0)
    torch.testing.assert_close(invstd.cpu(), (var + EPS).rsqrt(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("grad_layout", [*BATCH_NORM_LAYOUTS, "expanded"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_gradients_in_another_layout(backend: Kernels, layout: str, grad_layout: str) -> None:
    i = make_inputs(backend, (3, 17, 5, 6), F32, layout, "contiguous" if grad_layout == "expanded" else grad_layout)
    if grad_layout == "expanded":
        i.grad_out = torch.full((), 0.7, device=backend.device).expand(i.x.shape)
    out, mean, invstd = forward(backend, i, relu=True)
    other = out.contiguous(memory_format=torch.channels_last if layout == "contiguous" else torch.contiguous_format)
    wanted = batch_norm(i.x, i.grad_out, i.weight, i.bias, positive=out > 0)
    for given in (out, other):
        grad_input, grad_z, *_ = backend.batch_norm_backward(i.grad_out, i.x, given, mean, invstd, i.weight, True)
        close(grad_input, wanted.grad_input, times=2)
        close(grad_z, wanted.grad_z)
        assert laid_out_like(grad_input, i.x) and laid_out_like(grad_z, i.x)


def test_without_relu_the_gradient_of_the_addend_is_the_gradient(backend: Kernels) -> None:
    i = make_inputs(backend, (3, 4, 5), F32)
    _, mean, invstd = forward(backend, i)
    if not backend.registered:
        assert backend.batch_norm_backward(i.grad_out, i.x, None, mean, invstd, None, True)[1] is i.grad_out
        assert backend.batch_norm_backward(i.grad_out, i.x, None, mean, invstd, None, False)[1] is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_constant_statistics(backend: Kernels, dtype: torch.dtype) -> None:
    """As in evaluation: with zero sums the gradient only passes through."""
    i = make_inputs(backend, (3, 5, 4), dtype)
    mean, invstd = (t.to(backend.device, F64) for t in (torch.randn(5), torch.rand(5) + 0.5))
    zeros, one = torch.zeros(5, dtype=F64, device=backend.device), backend.scalar(1, F64)
    out = backend.batch_norm_apply(i.x, mean, invstd, i.weight, i.bias, None, False)
    scale = (invstd.cpu() * i.weight.cpu().double()).view(1, 5, 1)
    close(out, (i.x.cpu().double() - mean.cpu().view(1, 5, 1)) * scale + i.bias.cpu().double().view(1, 5, 1), times=2)
    back = backend.batch_norm_backward_apply(i.grad_out, i.x, None, mean, invstd, i.weight, zeros, zeros, one, False)
    close(back[0], i.grad_out.cpu().double() * scale)


@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 4), (2, 3, 0, 5), (2, 0, 4), (0, 2048, 7, 7)], ids=str)
def test_empty_inputs(backend: Kernels, shape: tuple[int, ...]) -> None:
    x, channels = torch.randn(shape, device=backend.device), shape[1]
    zeros = torch.zeros(channels, dtype=F64)
    assert all(torch.equal(t.cpu(), zeros) for t in backend.batch_norm_stats(x))
    out, mean, invstd = backend.batch_norm_forward(x, None, None, None, None, EPS, 0.1, x, True)
    assert out.shape == shape and torch.equal(mean.cpu(), zeros) and invstd.isfinite().all()
    grad_input, grad_z, *sums = backend.batch_norm_backward(x, x, out, mean, invstd, None, True)
    assert grad_input.shape == grad_z.shape == shape and all(torch.equal(t.cpu(), zeros) for t in sums)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("layout", ["contiguous", "channels_innermost"])
def test_what_is_not_finite_stays_in_its_channel(backend: Kernels, layout: str, bad: float) -> None:
    i = make_inputs(backend, (3, 5, 4, 9), F32, layout)
    i.x[1, 2, 3, 4] = bad
    out, mean, invstd = forward(backend, i, relu=True)
    finite = [c for c in range(5) if c != 2]
    assert not out[:, 2].isfinite().any() and out[:, finite].isfinite().all()
    grad_input, *_ = backend.batch_norm_backward(i.grad_out, i.x, out, mean, invstd, i.weight, True)
    assert not grad_input[:, 2].isfinite().any() and grad_input[:, finite].isfinite().all()


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_relu_and_rounding_go_together(backend: Kernels, dtype: torch.dtype) -> None:
    """What a half type rounds to 0 counts as not positive, as for a ReLU of its own."""
    x = torch.tensor([[-1.0], [1.0]], dtype=dtype, device=backend.device)
    bias = torch.tensor([-1.0 + 5e-6], device=backend.device)
    out, mean, invstd = backend.batch_norm_forward(x, None, bias, None, None, EPS, 0.1, None, True)
    grad_z = backend.batch_norm_backward(torch.ones_like(x), x, out, mean, invstd, None, True)[1]
    assert torch.equal(grad_z > 0, out > 0) and not out.signbit().any()


def test_nothing_else_is_written(backend: Kernels) -> None:
    i = make_inputs(backend, (3, 5, 7), F32, "channels_innermost")
    given = [i.x, i.z, i.grad_out, i.weight, i.bias]
    before, versions = [t.clone() for t in given], [t._version for t in given]
    out, mean, invstd = forward(backend, i, z=True, relu=True)
    backend.batch_norm_backward(i.grad_out, i.x, out, mean, invstd, i.weight, True)
    assert all(map(same_bits, given, before)) and [t._version for t in given] == versions
    assert laid_out_like(out, channels_innermost(out))
