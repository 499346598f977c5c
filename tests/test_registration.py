"""The operators as torch sees them, and the process that they run in."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product

import pytest
import torch
from cases import DTYPES, F64, LARGE, SHAPES
from kernels import Kernels

from lightning_apex import ops


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
        "fused_step_": ("adam", half, wide, [wide[0] * 2], states, [zero.clone()], hypers, one, one, zero, None),
        "fused_norms_": ("lamb", half, wide, [wide[0] * 2], states, [zero], [*hypers, 0.0, 0.0], one, one, zero),
        "tensor_norms": (half, 2.0),
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
