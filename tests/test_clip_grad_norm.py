"""clip_grad_norm_ equals torch's in value and effect."""

import math
import warnings

import pytest
import torch
from cases import BF16, DTYPES, F16, F32, F64, LAYOUTS, same_bits
from torch import nn
from torch.nn.utils import clip_grad_norm_ as torchs

from lightning_apex import clip_grad_norm_, ops

SHAPES = ((), (1,), (0,), (7,), (3, 5), (2, 3, 2, 2), (70_000,))
# Norms and gradients are rounded to the dtype, once by us and by torch more than once, each tensor's norm too.
RTOL = {F32: 1e-5, F64: 1e-13, F16: 4e-3, BF16: 3e-2}


def make(dtypes, scale=1.0, shapes=SHAPES, layout="contiguous"):
    torch.manual_seed(3)
    lists = ([], [])
    for i, shape in enumerate(shapes):
        dtype = dtypes[i % len(dtypes)]
        grad = (torch.randn(shape, dtype=F64) * scale).to(dtype)
        for params in lists:
            param = nn.Parameter(torch.zeros(shape, dtype=dtype))
            param.grad = LAYOUTS[layout](grad.clone())
            params.append(param)
    for params in lists:
        params[3].grad = None
    return lists


def check(ours, theirs, *args, **kwargs):
    norm, expected = clip_grad_norm_(ours, *args, **kwargs), torchs(theirs, *args, **kwargs)
    assert norm.dtype is expected.dtype and norm.shape == expected.shape and norm.device == expected.device
    rtol = max(RTOL[p.dtype] for p in ours)
    torch.testing.assert_close(norm, expected, rtol=rtol, atol=0, equal_nan=True)
    for p, q in zip(ours, theirs, strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            assert p.grad.dtype is q.grad.dtype and p.grad.stride() == q.grad.stride()
            torch.testing.assert_close(p.grad, q.grad, rtol=rtol, atol=1e-7 * rtol / 4e-3, equal_nan=True)
    return norm


@pytest.mark.parametrize("max_norm", [0.5, 1e9, 0.0, 3, -1.0])
@pytest.mark.parametrize("norm_type", [2, 2.0, "inf", math.inf, 1, 0.0, 3.5, -math.inf])
@pytest.mark.parametrize("dtypes", [*((d,) for d in DTYPES), (F32, BF16), (F16, BF16, F64)], ids=str)
def test_equals_torchs(dtypes, norm_type, max_norm):
    # torch's largest of nothing is an error; ours is 0, as with the other norms
    shapes = [s for s in SHAPES if s != (0,) or math.isfinite(float(norm_type))]
    check(*make(dtypes, 0.01 if norm_type == 1 else 1.0, shapes), max_norm, norm_type)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    check(*make((F32, BF16), layout=layout), 0.5)


@pytest.mark.parametrize("foreach", [True, False, None])
def test_foreach_is_accepted(foreach):
    check(*make((F32,)), 0.5, foreach=foreach)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
class TestNonfinite:
    def test_goes_on_as_torch_does(self, norm_type, bad):
        ours, theirs = make((F32, F64), shapes=SHAPES[3:] * 2)
        ours[4].grad.view(-1)[3] = theirs[4].grad.view(-1)[3] = bad
        check(ours, theirs, 1.0, norm_type)

    def test_raises_before_anything_is_written(self, norm_type, bad):
        ours, _ = make((F32, BF16))
        ours[4].grad.view(-1)[3] = bad
        before = [None if p.grad is None else p.grad.clone() for p in ours]
        with pytest.raises(RuntimeError, match=f"norm of order {norm_type:g} is .*error_if_nonfinite=False"):
            clip_grad_norm_(ours, 1.0, norm_type, error_if_nonfinite=True)
        assert all(p.grad is g or same_bits(p.grad, g) for p, g in zip(ours, before, strict=True))


class TestWhatMayBeGiven:
    def test_one_tensor(self):
        ours, theirs = make((F32,))
        check(ours[4:5], theirs[4:5], 0.5)
        ours, theirs = make((F32,))
        torch.testing.assert_close(clip_grad_norm_(ours[4], 0.5), torchs(theirs[4], 0.5))

    def test_a_generator(self):
        ours, theirs = make((F32,))
        norm = clip_grad_norm_((p for p in ours), 0.5)
        torch.testing.assert_close(norm, torchs(theirs, 0.5))
        torch.testing.assert_close(ours[4].grad, theirs[4].grad)

    def test_an_empty_generator_warns(self):
        with pytest.warns(UserWarning, match="no gradient is clipped") as caught:
            assert clip_grad_norm_((p for p in ()), 1.0) == 0
        assert caught[0].filename == __file__

    def test_a_module_without_gradients(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            norm = clip_grad_norm_(nn.Linear(2, 2).parameters(), 1.0)
            assert norm == 0 and norm.dtype is torchs(list(nn.Linear(2, 2).parameters()), 1.0).dtype
            assert clip_grad_norm_([], 1.0) == 0

    def test_complex_gradients(self):
        params = [nn.Parameter(torch.ones(3, dtype=torch.complex64)) for _ in range(2)]
        for p in params:
            p.grad = torch.full((3,), 3 + 4j, dtype=torch.complex64)
        torch.testing.assert_close(clip_grad_norm_(params[:1], 1.0), torchs(params[1:], 1.0))
        torch.testing.assert_close(params[0].grad, params[1].grad)

    @pytest.mark.parametrize("norm_type", [2.0, math.inf])
    def test_empty_gradients(self, norm_type):
        """torch finds no largest magnitude in nothing, and raises."""
        ours, theirs = make((F32,), shapes=((0,), (3, 5), (2, 0), (1,), (4,)))
        norm = clip_grad_norm_(ours, 0.5, norm_type)
        torch.testing.assert_close(norm, torchs([p for p in theirs if p.numel()], 0.5, norm_type))
        torch.testing.assert_close(ours[1].grad, theirs[1].grad)
        assert clip_grad_norm_(ours[:1], 0.5, norm_type) == 0

    def test_a_norm_that_fp16_cannot_hold(self):
        """torch's norm of these is infinite, and the gradients become 0."""
        param = nn.Parameter(torch.zeros(100, dtype=F16))
        param.grad = torch.full((100,), 30_000.0, dtype=F16)
        clip_grad_norm_([param], 10.0)
        torch.testing.assert_close(param.grad, torch.ones(100, dtype=F16))


def test_one_read_and_one_write(monkeypatch):
    calls = []
    for name in ("measure_gradients", "unscale_"):
        function = getattr(ops, name)
        monkeypatch.setattr(
            ops,
            name,
            lambda grads, *rest, name=name, f=function: (calls.append((name, len(grads))), f(grads, *rest))[1],
        )
    ours, _ = make((F32, BF16))
    clip_grad_norm_(ours, 0.5)
    assert calls == [("measure_gradients", 6), ("unscale_", 6)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_written_where_the_factor_is_1(dtype):
    ours, _ = make((dtype,))
    before = [(p.grad._version, p.grad.clone()) for p in ours if p.grad is not None]
    clip_grad_norm_(ours, 1e6)
    after = [p.grad for p in ours if p.grad is not None]
    assert all(g._version == version and same_bits(g, old) for g, (version, old) in zip(after, before, strict=True))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_several_devices():
    ours, theirs = make((F32, BF16))
    for params in (ours, theirs):
        for i in (1, 4):
            grad = params[i].grad
            params[i].grad = None
            params[i].data = params[i].data.cuda()
            params[i].grad = grad.cuda()
    check(ours, theirs, 0.5)
