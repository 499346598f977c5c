"""How the extension is built, and what the compiler made of the kernels."""

from __future__ import annotations

import importlib.util
import re
import runpy
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import setuptools
import torch

import lightning_apex
from lightning_apex import ops

ROOT = Path(__file__).parents[1]
ALL = "7.5;8.0;8.6;8.9;9.0;10.0;12.0+PTX"


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The names of setup.py, which builds nothing here."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setattr(sys, "argv", ["setup.py", "--version"])
    for name in ("CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST", "LIGHTNING_APEX_WERROR", "LIGHTNING_APEX_CUDA"):
        monkeypatch.delenv(name, raising=False)
    return SimpleNamespace(**runpy.run_path(str(ROOT / "setup.py")))


@pytest.fixture
def nvcc(setup: SimpleNamespace, tmp_path: Path) -> Callable[..., Any]:
    """Makes a compiler that knows so many architectures."""

    def make(*known: int, version: str = "13.0") -> Any:
        (tmp_path / "include").mkdir(exist_ok=True)
        (tmp_path / "include" / "cuda_runtime.h").touch()
        (tmp_path / "bin").mkdir(exist_ok=True)
        program = tmp_path / "bin" / "nvcc"
        listed = "\\n".join(f"compute_{number}" for number in known)
        answers = {"--version": f'echo "release {version}, V{version}"', "--list-gpu-arch": f'printf "{listed}\\n"'}
        cases = " ".join(f"{asked}) {answer};;" for asked, answer in answers.items())
        program.write_text(f'#!/bin/sh\ncase "$1" in {cases} esac\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        return setup.Nvcc(str(program))

    return make


def torch_with(*gpus: tuple[int, int]) -> Any:
    cuda = SimpleNamespace(device_count=lambda: len(gpus), get_device_capability=lambda i: gpus[i])
    return SimpleNamespace(cuda=cuda, version=SimpleNamespace(cuda="13.0"), __version__="2.14.1+cu130")


@pytest.mark.parametrize(
    ("known", "gpus", "asked", "built"),
    [
        ((75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121), (), "", ALL),
        ((50, 60, 70, 75, 80, 86, 89, 90), (), "", "7.5;8.0;8.6;8.9;9.0+PTX"),
        ((75, 80, 86, 89, 90, 100, 120), ((9, 0), (9, 0)), "", "9.0+PTX"),
        ((75, 80, 86, 89, 90, 100, 120), ((8, 6), (7, 5)), "native", "7.5;8.6+PTX"),
        ((75, 80, 86, 89, 90), ((12, 0),), "", "9.0+PTX"),
        ((75, 80, 86, 89, 90, 100, 120), ((9, 0),), "8.0 8.6+PTX", "8.0 8.6+PTX"),
    ],
    ids=["all", "an older nvcc", "this machine's", "two kinds", "a GPU newer than nvcc", "as asked"],
)
def test_architectures(
    setup: SimpleNamespace,
    nvcc: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    known: tuple[int, ...],
    gpus: tuple[tuple[int, int], ...],
    asked: str,
    built: str,
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", asked)
    assert setup.choose_archs(torch_with(*gpus), nvcc(*known)) == built
    assert setup.os.environ["TORCH_CUDA_ARCH_LIST"] == built, "what torch builds for is what build_info() tells"


def test_a_compiler_without_a_wanted_architecture_is_named(setup: SimpleNamespace, nvcc: Callable[..., Any]) -> None:
    with pytest.raises(
        SystemExit, match=r"bin/nvcc compiles for none of .*TORCH_CUDA_ARCH_LIST.*LIGHTNING_APEX_CUDA=0"
    ):
        setup.choose_archs(torch_with((6, 0)), nvcc(75, 80))


def test_warnings_are_errors_for_those_who_ask(setup: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = setup.compiler_flags(["/torch/include"])
    assert not any("-Werror" in flag for of_compiler in flags.values() for flag in of_compiler)
    for of_compiler in flags.values():
        assert of_compiler[-2:] == ["-isystem", "/torch/include"]
    monkeypatch.setenv("LIGHTNING_APEX_WERROR", "1")
    flags = setup.compiler_flags([], (13, 0))
    assert "-compress-mode=size" in flags["nvcc"]
    assert "-Werror" in flags["cxx"] and "-Werror=all-warnings" in flags["nvcc"]
    monkeypatch.setenv("LIGHTNING_APEX_WERROR", "yes")
    with pytest.raises(SystemExit, match="LIGHTNING_APEX_WERROR='yes' is neither 1 nor 0"):
        setup.compiler_flags([])


# ---- the compiler's report ----


@pytest.fixture(scope="module")
def kernel_report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_report", ROOT / "tools" / "kernel_report.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernel_report"] = module  # its dataclass looks there
    spec.loader.exec_module(module)
    return module


RESOURCES = """
Fatbin elf code:
================
arch = sm_90

Resource usage:
 Common:
  GLOBAL:28 CONSTANT[4]:224
 Function _Z3addPf:
  REG:40 STACK:8 SHARED:1056 LOCAL:0 CONSTANT[0]:704 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
SASS = """
arch = sm_90
		Function : _Z3addPf
        /*0010*/                   LDG.E.U16 R4, desc[UR6][R2.64] ;        /* 0x1 */
        /*0020*/              @!P0 LDG.E.128.CONSTANT R4, desc[UR6][R2.64] ;
        /*0030*/                   STG.E.64 desc[UR6][R2.64], R4 ;
        /*0040*/                   STL [R1], R4 ;
        /*0050*/                   LDL R4, [R1] ;
        /*0060*/                   LD.E.128 R4, [R2.64] ;
"""


def test_reads_what_cuobjdump_prints(kernel_report: ModuleType) -> None:
    (kernel,) = kernel_report._resources(RESOURCES.splitlines())
    kernel_report._accesses(SASS.splitlines(), {("sm_90", "_Z3addPf"): kernel})
    assert (kernel.arch, kernel.registers, kernel.shared_bytes, kernel.stack_bytes) == ("sm_90", 40, 1056, 8)
    assert kernel.parameter_bytes == 704 - 0x210
    assert (kernel.load_bytes, kernel.store_bytes, kernel.local_accesses) == (16, 8, 2)
    assert kernel_report._short(
        "void lightning_apex::(anonymous namespace)::f<c10::Half, (int)4>(g<int, (bool)1>)"
    ) == ("f<Half, 4>")
    assert [kernel_report._width(s) for s in (".E", ".E.U8", ".E.S16", ".E.64.STRONG.SYS", ".E.ENL2.256")] == [
        4, 1, 2, 8, 32
    ]  # fmt: skip


needs_build = pytest.mark.skipif(not ops.has_cuda(), reason="needs an extension built with CUDA")


@pytest.fixture(scope="module")
def library(kernel_report: ModuleType) -> Path:
    if kernel_report.find_cuobjdump() is None:
        pytest.skip("there is no cuobjdump")
    return Path(lightning_apex._extension._C.__file__)


@needs_build
def test_build_info_lists_the_architectures_that_there_are(kernel_report: ModuleType, library: Path) -> None:
    told = ops.build_info()["cuda_archs"]
    if re.search(r"[A-Z][a-z]", told):
        pytest.skip(f"{told} is a name that torch translates")
    numbers = [arch.replace(".", "") for arch in re.split("[; ]", told)]
    expected = {f"sm_{number.removesuffix('+PTX')}" for number in numbers}
    expected |= {f"compute_{number.removesuffix('+PTX')}" for number in numbers if number.endswith("+PTX")}
    cuobjdump = kernel_report.find_cuobjdump()
    assert kernel_report.architectures(library, cuobjdump) == expected


# Element by element, with nothing to add up: no block of these may wait for anything but memory.
ELEMENT_WISE = ("fused_step_kernel", "copy_scaled_kernel", "reconcile_kernel", "row_project_kernel", "row_grad_kernel")
ELEMENT_WISE += ("plane_project_kernel", "plane_grad_kernel")
READ_ONLY = ("measure_kernel", "tensor_norms_kernel", "row_moments_kernel", "plane_moments_kernel")
READ_ONLY += ("row_grad_sums_kernel", "plane_grad_sums_kernel")
# A few bytes of stack, by name, with the reason; a new one is to be looked at.
KNOWN_STACK: dict[str, str] = {}


@needs_build
@pytest.mark.slow
def test_what_the_compiler_made_of_the_kernels(kernel_report: ModuleType, library: Path) -> None:
    assert torch.version.cuda is not None
    arch = sorted(a for a in kernel_report.architectures(library, kernel_report.find_cuobjdump()) if "sm_" in a)[-1]
    kernels = kernel_report.report(library, arch)
    families = {k.family for k in kernels}
    assert {*ELEMENT_WISE, *READ_ONLY, "fused_norms_kernel"} <= families and len(kernels) > 250
    for k in kernels:
        assert k.shared_bytes <= 48 << 10 and 0 < k.parameter_bytes <= 4096, k
        assert k.stack_bytes == 0 or k.name in KNOWN_STACK, k
        single = k.name.endswith(" 1>")  # the kernels of one element at a time, for what is not aligned
        if single:
            continue
        if k.family in (*ELEMENT_WISE, *READ_ONLY, "fused_norms_kernel"):
            assert k.load_bytes == 16, k
        if k.family in ELEMENT_WISE:
            assert k.store_bytes == 16, k
    assert set(KNOWN_STACK) <= {k.name for k in kernels if k.stack_bytes}, "mended: take it off the list"
