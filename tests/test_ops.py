"""The kernels on gradients, masters and the loss scale, against float64 references."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from itertools import product

import pytest
import torch
from cases import BF16, DTYPES, F16, F32, F64, LARGE, LAYOUTS, SHAPES, assert_close, combine, same_bits
from kernels import Kernels
from reference import LossScale, step_factors
from torch import Tensor

from lightning_apex import ops

LARGEST = {dtype: torch.finfo(dtype).max for dtype in DTYPES}
BAD = [math.inf, -math.inf, math.nan]


def gradients(backend: Kernels, dtype: torch.dtype, layout: str = "contiguous") -> list[Tensor]:
    shapes = SHAPES if backend.slow else [*SHAPES, LARGE]
    return [LAYOUTS[layout](torch.randn(shape).to(backend.device, dtype)) for shape in shapes]


def squares(tensors: list[Tensor]) -> float:
    return sum(t.double().square().sum().item() for t in tensors)


# ---- measure_gradients ----


@pytest.mark.parametrize("layout", LAYOUTS)
def test_measure_sums_the_squares_of_all_dtypes_at_once(backend: Kernels, layout: str) -> None:
    grads = [g for dtype in DTYPES for g in gradients(backend, dtype, layout)]
    total, flags = backend.measure_gradients(grads)
    assert total.shape == () and total.dtype == F64
    assert flags.tolist() == [0] * len(grads) and flags.dtype == torch.uint8
    assert total.item() == pytest.approx(squares(grads), rel=backend.sum_rtol)


@pytest.mark.parametrize(("dtype", "bad"), combine(DTYPES, BAD))
def test_measure_flags_the_tensors_that_are_not_finite(backend: Kernels, dtype: torch.dtype, bad: float) -> None:
    sizes = [40, 33, 64, 1, 32]
    places = {0: 0, 1: 32, 3: 0, 4: 31}  # first, in a tail, alone, last; tensor 2 stays finite
    grads = [torch.ones(size, dtype=dtype, device=backend.device) for size in sizes]
    for i, place in places.items():
        grads[i][place] = bad
    total, flags = backend.measure_gradients(grads)
    assert flags.tolist() == [1, 1, 0, 1, 1]
    assert not math.isfinite(total.item())


@pytest.mark.parametrize("dtype", DTYPES)
def test_measure_takes_the_largest_numbers_for_finite(backend: Kernels, dtype: torch.dtype) -> None:
    total, flags = backend.measure_gradients([torch.full((70,), LARGEST[dtype], dtype=dtype, device=backend.device)])
    assert flags.tolist() == [0]
    if dtype != F64:
        assert total.item() == pytest.approx(70 * LARGEST[dtype] ** 2, rel=backend.sum_rtol)


def test_measure_keeps_the_smallest_numbers(backend: Kernels) -> None:
    tiny = torch.full((50,), 1e-44, device=backend.device)  # subnormal; its square is far below float32
    assert backend.measure_gradients([tiny])[0].item() == pytest.approx(squares([tiny]), rel=backend.sum_rtol)


def test_measure_of_an_expanded_gradient(backend: Kernels) -> None:
    grad = torch.full((), 2.0, device=backend.device).expand(5, 7)
    assert backend.measure_gradients([grad])[0].item() == 4 * 35


def test_nothing_to_do(backend: Kernels) -> None:
    total, flags = backend.measure_gradients([])
    assert total.item() == 0 and flags.shape == (0,)
    assert backend.unscale_([], backend.scalar(2)).shape == (0,)
    assert backend.copy_scaled_([], []).shape == (0,)
    backend.reconcile_masters_([], [])
    backend.fused_step_("adam", [], [], [], [], [], [0.0] * 8)


# ---- step_factors, update_scale_ ----


@pytest.mark.parametrize(
    ("total", "scale", "max_norm"), combine([0.0, 4.0, 1e60], [None, 8.0, 2.0**-3], [-1.0, 0.5, 3.0])
)
def test_step_factors(backend: Kernels, total: float, scale: float | None, max_norm: float) -> None:
    found_inf = backend.scalar(0)
    flags = torch.zeros(3, dtype=torch.uint8, device=backend.device)
    given = None if scale is None else backend.scalar(scale)
    norm, multiplier = backend.step_factors(backend.scalar(total, F64), flags, given, max_norm, found_inf)
    expected_norm, expected = step_factors(total, scale or 1.0, max_norm)
    assert norm.dtype == multiplier.dtype == F32 and norm.shape == multiplier.shape == ()
    assert norm.item() == pytest.approx(expected_norm, rel=1e-6)
    assert multiplier.item() == pytest.approx(expected, rel=1e-6)
    assert found_inf.item() == 0


@pytest.mark.parametrize(("flags", "before", "after"), [([0, 0], 0, 0), ([0, 1], 0, 1), ([0, 0], 1, 1), ([], 0, 0)])
def test_step_factors_adds_to_found_inf(backend: Kernels, flags: list[int], before: int, after: int) -> None:
    found_inf = backend.scalar(before)
    marks = torch.tensor(flags, dtype=torch.uint8, device=backend.device)
    backend.step_factors(backend.scalar(1, F64), marks, None, 0.0, found_inf)
    assert found_inf.item() == after


def test_the_norm_of_nan_clips_nothing_away(backend: Kernels) -> None:
    marks = torch.ones(1, dtype=torch.uint8, device=backend.device)
    factors = backend.step_factors(backend.scalar(math.nan, F64), marks, None, 1.0, backend.scalar(0))
    assert all(math.isnan(factor.item()) for factor in factors)


@pytest.mark.parametrize("hysteresis", [1, 2])
@pytest.mark.parametrize("overflows", ["0000000", "1111111", "0110101100", "1000110001"])
def test_update_scale(backend: Kernels, hysteresis: int, overflows: str) -> None:
    rule = (2.0, 0.5, 2, hysteresis, 4.0, 64.0)
    expected = LossScale(16.0, *rule)
    scale = backend.scalar(16.0)
    trackers = torch.tensor(expected.trackers, dtype=torch.int32, device=backend.device)
    for overflow in overflows:
        backend.update_scale_(scale, trackers, backend.scalar(float(overflow)), *rule)
        expected.see(overflow == "1")
        assert (scale.item(), trackers.tolist()) == (expected.scale, expected.trackers)


# ---- unscale_, copy_scaled_ ----


@pytest.mark.parametrize(("dtype", "layout"), combine(DTYPES, LAYOUTS))
def test_unscale(backend: Kernels, dtype: torch.dtype, layout: str) -> None:
    grads = gradients(backend, dtype, layout)
    before, versions, found_inf = [g.clone() for g in grads], [g._version for g in grads], backend.scalar(0)
    flags = backend.unscale_(grads, backend.scalar(1 / 3), found_inf)
    assert flags.tolist() == [0] * len(grads) and found_inf.item() == 0
    factor = torch.tensor(1 / 3, dtype=F32).double()
    for old, new, version in zip(before, grads, versions, strict=True):
        assert_close(new, old.cpu().double() * factor)
        assert new._version > version


@pytest.mark.parametrize("dtype", DTYPES)
def test_unscale_by_one_does_not_write(backend: Kernels, dtype: torch.dtype) -> None:
    grads = [torch.tensor([1.0, math.nan], dtype=dtype, device=backend.device), *gradients(backend, dtype)]
    before, versions, found_inf = [g.clone() for g in grads], [g._version for g in grads], backend.scalar(0)
    flags = backend.unscale_(grads, backend.scalar(1), found_inf)
    assert all(map(same_bits, before, grads))
    if backend.device == "cpu" and backend.name != "simt":  # the GPU's host does not know the multiplier
        assert [g._version for g in grads] == versions
    assert flags.tolist() == [1] + [0] * (len(grads) - 1) and found_inf.item() == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_overflow_on_the_way_out_counts(backend: Kernels, dtype: torch.dtype) -> None:
    """A loss scale below 1 makes gradients larger: what counts is the value written."""
    grads = [torch.ones(35, dtype=dtype, device=backend.device) for _ in range(3)]
    grads[1][34] = LARGEST[dtype] / 2
    found_inf = backend.scalar(0)
    assert backend.unscale_(grads, backend.scalar(4), found_inf).tolist() == [0, 1, 0]
    assert found_inf.item() == 1 and grads[1][34].item() == math.inf


@pytest.mark.parametrize(("to", "of"), combine(DTYPES, DTYPES))
def test_copy_scaled_between_all_dtypes(backend: Kernels, to: torch.dtype, of: torch.dtype) -> None:
    layouts = list(LAYOUTS.values())
    src = gradients(backend, of)
    dst = [layouts[i % len(layouts)](torch.empty_like(s, dtype=to)) for i, s in enumerate(src)]
    found_inf = backend.scalar(0)
    assert backend.copy_scaled_(dst, src, backend.scalar(1.5), found_inf).tolist() == [0] * len(src)
    for new, old in zip(dst, src, strict=True):
        assert_close(new, old.cpu().double() * 1.5)
    src[-1].view(-1)[-1] = math.nan
    assert backend.copy_scaled_(dst, src, None, found_inf).tolist()[-1] == 1 and found_inf.item() == 1


@pytest.mark.parametrize(("to", "of"), combine((F16, BF16), (F32, F64)))
def test_rounding_is_torchs(backend: Kernels, to: torch.dtype, of: torch.dtype) -> None:
    """Ties, subnormals, overflow to infinity, both zeros and NaN, to the bit."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(to)
    every = every[:: 257 if backend.slow else 1]
    values = every[every.isfinite()].float().sort().values
    src = torch.cat([values, (values[1:] + values[:-1]) / 2, torch.tensor([-0.0, 1e38, -math.inf, 65519.9, 65520.0])])
    src = src.to(backend.device, of)
    dst = torch.empty_like(src, dtype=to)
    backend.copy_scaled_([dst], [src])
    assert same_bits(dst, src.to(to))
    backend.copy_scaled_([dst], [torch.full_like(src, math.nan)])
    assert dst.isnan().all()


# ---- reconcile_masters_ ----


@pytest.mark.parametrize(("dtype", "layout"), combine((F16, BF16), LAYOUTS))
def test_a_master_counts_where_its_parameter_is_its_rounding(backend: Kernels, dtype: torch.dtype, layout: str) -> None:
    masters = [LAYOUTS[layout](m) for m in gradients(backend, F32)]
    params = [m.to(dtype) for m in masters]
    expected = [m.clone() for m in masters]
    backend.reconcile_masters_(masters, params)
    assert all(map(same_bits, masters, expected))
    for p, e in zip(params, expected, strict=True):
        written = torch.rand_like(e) < 0.3
        p.copy_(torch.where(written, p + 1, p))
        e.copy_(torch.where(written, p.float(), e))
    backend.reconcile_masters_(masters, params)
    assert all(map(same_bits, masters, expected))


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_a_master_and_a_parameter_that_is_special(backend: Kernels, dtype: torch.dtype) -> None:
    nan, inf = math.nan, math.inf
    rows = [  # parameter, master, master afterwards
        (0.0, -0.0, -0.0), (-0.0, 1e-44, 1e-44), (nan, 1.0, nan), (1.0, nan, 1.0), (nan, nan, nan),
        (inf, 3.4e38, 3.4e38), (inf, 1.0, inf), (1.0, inf, 1.0), (0.0, 1e-3, 0.0),
    ]  # fmt: skip
    param, master, expected = (torch.tensor(column, device=backend.device) for column in zip(*rows, strict=True))
    backend.reconcile_masters_([master], [param.to(dtype)])
    torch.testing.assert_close(master, expected, rtol=0, atol=0, equal_nan=True)


# ---- what holds for all ----


def test_opcheck(backend: Kernels) -> None:
    half = [torch.randn(5, device=backend.device).half()]
    wide, one, zero = [torch.randn(5, device=backend.device)], backend.scalar(1.5), backend.scalar(0)
    flags = torch.zeros(1, dtype=torch.uint8, device=backend.device)
    trackers = torch.zeros(4, dtype=torch.int32, device=backend.device)
    states = [torch.zeros(5, device=backend.device) for _ in range(2)]
    hypers = [0.1, 0.9, 0.99, 1e-8, 0.0, 1.0, 1.0, 0.0]
    calls = {
        "measure_gradients": (half,),
        "step_factors": (backend.scalar(1, F64), flags, one, 1.0, zero),
        "unscale_": (half, one, zero),
        "copy_scaled_": (wide, half, one, zero),
        "reconcile_masters_": (wide, half),
        "fused_step_": ("adam", half, wide, [wide[0] * 2], states, [zero.clone()], hypers, one, one, zero),
        "update_scale_": (one, trackers, zero, 2.0, 0.5, 10, 1, 1.0, 1e9),
    }  # fmt: skip
    ours = {name for name in ops.__all__ if hasattr(torch.ops.lightning_apex, name)}
    assert set(calls) == {name for name in ours if not name.startswith("batch_norm_")}
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    for name, arguments in calls.items():
        torch.library.opcheck(getattr(backend.namespace, name).default, arguments, test_utils=tests)


@pytest.fixture
def threads() -> None:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_the_bits_of_a_sum_do_not_depend_on_threads_or_backend(threads) -> None:
    grads = [torch.randn(shape).to(dtype) for dtype in DTYPES for shape in (*SHAPES, LARGE, (200_003,))]
    before, totals = ops.cpu_backend(), set()
    for name, n in product(ops.build_info()["cpu_backends"], (1, 2, 3)):
        ops.set_cpu_backend(name)
        threads(n)
        totals.add(ops.measure_gradients(grads)[0].item())
    ops.set_cpu_backend(before)
    assert len(totals) == 1


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a new process that has `torch` and the bare extension as `_C`."""
    path = sys.modules["lightning_apex._C"].__file__
    load = f"""
import importlib.util
import torch
spec = importlib.util.spec_from_file_location("_C", {path!r})
_C = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_C)
"""
    command = [sys.executable, "-c", load + code]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize("name", ["portable", "none-such"])
def test_the_environment_chooses_the_backend(name: str) -> None:
    run = run_python("print(_C.cpu_backend())", LIGHTNING_APEX_CPU_BACKEND=name)
    if name == "portable":
        assert run.stdout.strip() == "portable", run.stderr
    else:
        assert 'asks for "none-such"' in run.stderr and "portable" in run.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_one_openmp_runtime_and_no_cuda_context() -> None:
    run = run_python("""
torch.ops.lightning_apex.measure_gradients([torch.ones(10**6)])
print(torch.cuda.is_initialized())
maps = open("/proc/self/maps").read().split()
print(len({word for word in maps if any(name in word for name in ("libgomp", "libiomp", "libomp"))}))
""")
    assert run.stdout.split() == ["False", "1"], run.stderr
