"""What the doctor says of which facts."""

from __future__ import annotations

from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

pytest.importorskip("rich")

from lightning_apex.cli.doctoring import findings
from lightning_apex.cli.doctoring.diagnosis import Diagnosis
from lightning_apex.cli.doctoring.facts import CpuFacts, CudaFacts, ExtensionFacts, GpuFacts, PackageFacts
from lightning_apex.cli.doctoring.findings import Finding, GroupResult, KernelResult, runs_on, times

INFO = {
    "version": "0.1.0",
    "torch_version": "2.14.1+cu130",
    "compiler": "gcc 12",
    "cuda_version": None,
    "cuda_archs": "",
    "cpu_backends": ["avx512", "portable"],
}
CUDA_INFO = INFO | {"cuda_version": "13.0", "cuda_archs": "8.0;9.0"}
WORKS = ExtensionFacts(None, INFO, "pip install it", "0.1.0")
BROKEN = ExtensionFacts(
    "lightning_apex's compiled extension was built for torch 2.13.0 and this is torch 2.14.1; run `pip build it`.",
    command="pip install it",
)
HOPPER = (GpuFacts("H100", (9, 0)),)


def only(found: Any) -> Finding:
    (finding,) = found
    return finding


@pytest.mark.parametrize(("facts", "status", "seen", "mend"), [
    (PackageFacts("torch", "2.14.1+cu130", ">=2.11,<2.16"), "ok", "torch 2.14.1+cu130", None),
    (PackageFacts("torch", "2.9.0", ">=2.11,<2.16", False), "bad", "asks for torch>=2.11,<2.16",
     "pip install 'torch>=2.11,<2.16', then build the extension again"),
    (PackageFacts("lightning", None, ">=2.6", False, "so the plugins are missing"), "warn",
     "lightning is not installed, so the plugins are missing", "pip install 'lightning>=2.6'"),
])  # fmt: skip
def test_packages(facts: PackageFacts, status: str, seen: str, mend: str | None) -> None:
    python, finding = findings.about_packages([facts], "3.11.7")
    assert python == Finding("python", "ok", "Python 3.11.7")
    assert finding.status == status and seen in finding.seen and finding.mend == mend


def test_versions_are_compared_as_pip_does() -> None:
    from lightning_apex.cli.doctoring.facts import _package

    for wanted, fits in ((">=2.11,<2.16", True), (">=99", False), ("", True)):
        assert _package("torch", SpecifierSet(wanted), "").fits is fits
    absent = _package("no-such-package-here", SpecifierSet(">=1"), "so what")
    assert (absent.version, absent.fits, absent.without) == (None, False, "so what")


@pytest.mark.parametrize(("facts", "status", "seen", "mend"), [
    (WORKS, "ok", "built with gcc 12 for torch 2.14.1+cu130", None),
    (BROKEN, "bad", "built for torch 2.13.0 and this is torch 2.14.1", "pip build it"),
    (ExtensionFacts("something else broke", command="pip install it"), "bad", "something else broke",
     "pip install it"),
    (ExtensionFacts(None, INFO, "pip install it", "0.1.0", "csrc/a.cpp"), "warn", "csrc/a.cpp has changed since",
     "pip install it"),
    (ExtensionFacts(None, INFO, "pip install it", "0.2.0"), "warn", "of version 0.1.0, and the package is 0.2.0",
     "pip install it"),
    (ExtensionFacts(None, INFO | {"torch_version": "2.14.0"}, "c"), "ok", "fits torch 2.14.1+cu130 as well", None),
])  # fmt: skip
def test_the_extension(facts: ExtensionFacts, status: str, seen: str, mend: str | None) -> None:
    finding = only(findings.about_extension(facts, "2.14.1+cu130"))
    assert finding.status == status and seen in finding.seen and finding.mend == mend
    assert "`" not in finding.seen


def test_the_cpu() -> None:
    usual = CpuFacts(("avx512", "portable"), "avx512", False, 8, 8, False)
    assert only(findings.about_cpu(usual)).status == "ok"
    chosen = CpuFacts(("avx512", "portable"), "portable", True, 8, 8, False)
    finding = only(findings.about_cpu(chosen))
    assert finding.status == "warn" and finding.mend == "unset LIGHTNING_APEX_CPU_BACKEND"
    _, threads = findings.about_cpu(CpuFacts(("avx2",), "avx2", False, 1, 16, True))
    assert threads.status == "warn" and "1 thread of 16" in threads.seen and threads.mend == "unset OMP_NUM_THREADS"


@pytest.mark.parametrize(("cuda", "extension", "status", "seen", "mend"), [
    (CudaFacts("13.0", None, False), WORKS, "ok", "no GPU here", None),
    (CudaFacts(None, None, True), WORKS, "warn", "torch is built for the CPU alone", "CUDA build of torch"),
    (CudaFacts("13.0", None, True), WORKS, "bad", "driver (libcuda.so.1) cannot be loaded", "nvidia-smi"),
    (CudaFacts("13.0", "12.4", True), WORKS, "bad", "driver: up to 12.4", "update the driver"),
    (CudaFacts("13.0", "13.1", True), WORKS, "bad", "torch cannot use it", "CUDA_VISIBLE_DEVICES"),
    (CudaFacts("13.0", "13.0", True, HOPPER), WORKS, "bad", "no CUDA kernels",
     "TORCH_CUDA_ARCH_LIST=9.0 LIGHTNING_APEX_CUDA=1 pip install it"),
    (CudaFacts("13.0", "13.0", True, HOPPER), BROKEN, "warn", "the extension is not", None),
    (CudaFacts("13.0", "13.0", True, HOPPER), ExtensionFacts(None, CUDA_INFO, "c"), "ok", "sm_90", None),
    (CudaFacts("13.0", "13.0", True, HOPPER), ExtensionFacts(None, CUDA_INFO | {"cuda_archs": "8.0"}, "c"), "bad",
     "the kernels are for 8.0", "TORCH_CUDA_ARCH_LIST=9.0"),
])  # fmt: skip
def test_cuda(cuda: CudaFacts, extension: ExtensionFacts, status: str, seen: str, mend: str | None) -> None:
    finding = only(findings.about_cuda(cuda, extension))
    assert finding.status == status and seen in finding.seen
    assert finding.mend is None if mend is None else mend in (finding.mend or "")


def test_a_cuda_of_another_major_version() -> None:
    old = ExtensionFacts(None, CUDA_INFO | {"cuda_version": "12.8"}, "c")
    found = list(findings.about_cuda(CudaFacts("13.0", "13.0", True, HOPPER), old))
    assert found[-1].status == "bad" and "CUDA 12.8 and torch with 13.0" in found[-1].seen
    minor = ExtensionFacts(None, CUDA_INFO | {"cuda_version": "13.2"}, "c")
    assert len(list(findings.about_cuda(CudaFacts("13.0", "13.0", True, HOPPER), minor))) == 1


@pytest.mark.parametrize(("archs", "capability", "runs"), [
    ("9.0", (9, 0), True),
    ("8.0", (8, 6), True),  # a later one of the same family
    ("8.6", (8, 0), False),
    ("8.0", (9, 0), False),
    ("8.0+PTX", (9, 0), True),
    ("9.0a", (9, 0), True),
    ("9.0+PTX", (8, 0), False),
    ("7.5;8.0;9.0;10.0+PTX", (12, 0), True),
    ("Hopper", (9, 0), True),  # says nothing that can be compared
])  # fmt: skip
def test_which_kernels_run_on_which_gpu(archs: str, capability: tuple[int, int], runs: bool) -> None:
    assert runs_on(archs, capability) is runs


def test_kernels() -> None:
    right = KernelResult("unscale_", "cpu (avx2)", 1e-7)
    wrong = KernelResult("fused_step_ adam", "cuda:0", 0.25)
    failed = KernelResult("tensor_norms", "cuda:0", None, "RuntimeError: no kernel image")
    cpu, cuda = findings.about_kernels([right, wrong, failed], "pip install it")
    assert cpu.status == "ok" and "1 kernels agree" in cpu.seen
    assert cuda.status == "bad" and cuda.mend == "pip install it"
    assert "2 of 2 wrong: fused_step_ adam (differs by 0.25); tensor_norms (RuntimeError: no kernel image)" in cuda.seen
    assert not KernelResult("a", "b", float("inf")).right and not KernelResult("a", "b", float("nan")).right


def rates(bf16: tuple[float, float], fp16: tuple[float, float]) -> dict[tuple[str, str], float]:
    ops = ("matrix products", "convolutions")
    rows = {"float32": (100.0, 50.0), "bfloat16": bf16, "float16": fp16}
    return {(op, dtype): row[i] for dtype, row in rows.items() for i, op in enumerate(ops)}


@pytest.mark.parametrize(("bf16", "fp16", "said"), [
    ((310, 100), (10, 0.25), ["O4 and O5 in bf16 pay: matrix products 3.1x, convolutions 2x",
                              "O1 and O2 in fp16 do not pay: matrix products 10 times slower, convolutions 200 times"]),
    ((310, 50), (310, 10), ["bf16 pay in part", "fp16 may pay or not"]),
    ((50, 20), (50, 20), ["bf16 do not pay", "fp16 do not pay", "no half type is faster"]),
])  # fmt: skip
def test_speed(bf16: tuple[float, float], fp16: tuple[float, float], said: list[str]) -> None:
    found = list(findings.about_speed("cpu", rates(bf16, fp16)))
    assert len(found) == len(said)
    for finding, words in zip(found, said, strict=True):
        assert words in finding.seen and finding.status == ("warn" if "no half" in words else "ok")


def test_types_that_torch_cannot_do_are_passed_over() -> None:
    some = {key: rate for key, rate in rates((300, 100), (1, 1)).items() if key[1] != "float16"}
    assert "O4 and O5 in bf16 pay" in only(findings.about_speed("cpu", some)).seen
    assert list(findings.about_speed("cpu", {})) == []


@pytest.mark.parametrize(("ratio", "said"), [
    (3.14, "3.1x"), (1.0, "1x"), (0.5, "2 times slower"), (0.0051, "196 times slower"),
])  # fmt: skip
def test_times(ratio: float, said: str) -> None:
    assert times(ratio) == said


def test_groups() -> None:
    fine, broken = findings.about_groups([GroupResult("gloo", 2, 3.0), GroupResult("nccl", 1, None, "no route")])
    assert fine.status == "ok" and "2 processes summed a tensor (3.0 s" in fine.seen
    assert broken.status == "bad" and "1 process could not sum a tensor: no route" in broken.seen
    assert "NCCL_DEBUG" in (broken.mend or "")


@pytest.mark.parametrize(("statuses", "status", "code"), [
    (["ok"], "ok", 0), (["ok", "warn"], "warn", 0), (["warn", "bad", "ok"], "bad", 1), ([], "ok", 0),
])  # fmt: skip
def test_the_verdict(statuses: Any, status: str, code: int) -> None:
    diagnosis = Diagnosis([Finding("x", s, "seen") for s in statuses])
    assert diagnosis.exit_code == code and diagnosis.status == status
