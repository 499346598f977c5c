"""What the doctor says: pure functions of facts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_apex.cli.doctoring.facts import CpuFacts, CudaFacts, ExtensionFacts, PackageFacts

Status = Literal["ok", "warn", "bad"]
PAYS = 1.2  # times as fast as fp32: worth a level
HURTS = 0.8


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: What was looked at.
        status: ``"ok"``; ``"warn"``: works, but not as well as it could; ``"bad"``: something will fail.
        seen: What was seen, in a sentence.
        mend: The command that mends it, or what to do; None where there is nothing to mend.
    """

    check: str
    status: Status
    seen: str
    mend: str | None = None


# --- packages -------------------------------------------------------------------------------------------------------


def about_packages(packages: Sequence[PackageFacts], python: str) -> Iterator[Finding]:
    """Versions, and whether they are those that this package asks for."""
    yield Finding("python", "ok", f"Python {python}")
    for package in packages:
        asks = f"lightning-apex asks for {package.name}{package.wanted}"
        mend = f"pip install '{package.name}{package.wanted}'"
        if package.name == "torch":
            mend += ", then build the extension again"
        if package.version is None:
            yield Finding(package.name, "warn", f"{package.name} is not installed, {package.without}", mend)
        elif not package.fits:
            yield Finding(package.name, "bad", f"{package.name} {package.version} is installed, {asks}", mend)
        else:
            yield Finding(package.name, "ok", f"{package.name} {package.version}")


# --- the extension --------------------------------------------------------------------------------------------------


def about_extension(extension: ExtensionFacts, torch_version: str) -> Iterator[Finding]:
    """Whether the kernels load and fit the running torch."""
    check = "extension"
    if extension.error is not None:
        # The package's own message ends with the command.
        command = re.search(r"; run `(.+?)`", extension.error)
        seen = extension.error[: command.start()] if command else extension.error
        yield Finding(check, "bad", seen, command[1] if command else extension.command)
        return
    info = extension.info
    built = f"built with {info['compiler']} for torch {info['torch_version']}"
    if extension.older_than is not None:
        yield Finding(check, "warn", f"{built}, but {extension.older_than} has changed since", extension.command)
    elif extension.package_version not in (None, info["version"]):
        seen = f"of version {info['version']}, and the package is {extension.package_version}"
        yield Finding(check, "warn", seen, extension.command)
    elif info["torch_version"] != torch_version:
        yield Finding(check, "ok", f"{built}; it fits torch {torch_version} as well")
    else:
        yield Finding(check, "ok", built)


def about_cpu(cpu: CpuFacts) -> Iterator[Finding]:
    """Which CPU kernels run."""
    best = cpu.backends[0]
    if cpu.backend != best:
        seen = f"{cpu.backend} kernels run, though this CPU has {best}"
        yield Finding("cpu", "warn", seen, "unset LIGHTNING_APEX_CPU_BACKEND" if cpu.from_environment else None)
    else:
        others = ", ".join(cpu.backends[1:])
        yield Finding("cpu", "ok", f"{best} kernels run" + (f" ({others} would too)" if others else ""))
    if cpu.threads == 1 and cpu.cores >= 4:
        seen = f"torch uses 1 thread of {cpu.cores} cores"
        mend = "unset OMP_NUM_THREADS" if cpu.omp_num_threads else "torch.set_num_threads(...)"
        yield Finding("cpu", "warn", seen, mend)


def about_cuda(cuda: CudaFacts, extension: ExtensionFacts) -> Iterator[Finding]:
    """Whether torch, the driver, the GPUs and the extension's kernels fit each other."""
    if not cuda.devices:
        yield _without_gpu(cuda)
        return
    info = extension.info
    for index, gpu in enumerate(cuda.devices):
        major, minor = gpu.capability
        where = f"cuda:{index} {gpu.name} (sm_{major}{minor})"
        rebuild = f"TORCH_CUDA_ARCH_LIST={major}.{minor} LIGHTNING_APEX_CUDA=1 {extension.command}"
        if extension.error is not None:
            yield Finding("cuda", "warn", f"{where} is there; the extension is not")
        elif info["cuda_version"] is None:
            seen = f"{where} is there, but the extension has no CUDA kernels: fused optimizers will refuse its tensors"
            yield Finding("cuda", "bad", seen, rebuild)
        elif not runs_on(str(info["cuda_archs"]), gpu.capability):
            yield Finding("cuda", "bad", f"{where} is there, but the kernels are for {info['cuda_archs']}", rebuild)
        else:
            yield Finding("cuda", "ok", f"{where}; kernels built with CUDA {info['cuda_version']}")
    built = info.get("cuda_version")
    if built is not None and cuda.torch_cuda is not None and _major(built) != _major(cuda.torch_cuda):
        seen = f"the extension was built with CUDA {built} and torch with {cuda.torch_cuda}"
        yield Finding("cuda", "bad", seen, f"install nvcc {_major(cuda.torch_cuda)}, then {extension.command}")


def _without_gpu(cuda: CudaFacts) -> Finding:
    if not cuda.gpu_present:
        return Finding("cuda", "ok", "no GPU here: everything runs on the CPU")
    if cuda.torch_cuda is None:
        seen = "there is a GPU, and this torch is built for the CPU alone"
        mend = "install a CUDA build of torch (pytorch.org/get-started), then build the extension again"
        return Finding("cuda", "warn", seen, mend)
    if cuda.driver_cuda is None:
        seen = "there is a GPU, and its driver (libcuda.so.1) cannot be loaded"
        return Finding("cuda", "bad", seen, "nvidia-smi  # says why; in a container: docker run --gpus all")
    seen = f"there is a GPU, and torch cannot use it (torch: CUDA {cuda.torch_cuda}, driver: up to {cuda.driver_cuda})"
    if _major(cuda.driver_cuda) < _major(cuda.torch_cuda):
        return Finding("cuda", "bad", seen, f"update the driver, or install a torch for CUDA {cuda.driver_cuda}")
    return Finding("cuda", "bad", seen, "nvidia-smi  # and look at CUDA_VISIBLE_DEVICES")


def _major(version: str) -> int:
    return int(version.split(".")[0])


def runs_on(archs: str, capability: tuple[int, int]) -> bool:
    """Whether kernels for architectures such as ``"8.0;9.0+PTX"`` run on a GPU; True where the names say nothing."""
    found = re.findall(r"(\d+)\.(\d+)[af]?(\+PTX)?", archs)
    if not found:
        return True
    major, minor = capability
    return any((int(a) == major and int(b) <= minor) or (ptx and (int(a), int(b)) <= capability) for a, b, ptx in found)


# --- what was run ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelResult:
    """One kernel run once.

    Attributes:
        name: The operator, and the optimizer where it is one's.
        where: ``"cpu (avx512)"``, ``"cuda:0"``, ...
        error: The largest difference from float64, of the largest value; None where it could not be run.
        failure: Why it could not.
        tolerance: What is right.
    """

    name: str
    where: str
    error: float | None
    failure: str | None = None
    tolerance: float = 1e-5

    @property
    def right(self) -> bool:
        """Whether it agrees with float64."""
        return self.error is not None and self.error <= self.tolerance


def about_kernels(results: Sequence[KernelResult], command: str) -> Iterator[Finding]:
    """One finding a place where kernels run."""
    for where in dict.fromkeys(result.where for result in results):
        here = [result for result in results if result.where == where]
        wrong = [result for result in here if not result.right]
        if wrong:
            shown = "; ".join(_wrong(result) for result in wrong[:3])
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            yield Finding("kernels", "bad", f"{where}: {len(wrong)} of {len(here)} wrong: {shown}{more}", command)
        else:
            largest = max(result.error or 0.0 for result in here)
            seen = f"{where}: {len(here)} kernels agree with float64 (largest difference {largest:.1g})"
            yield Finding("kernels", "ok", seen)


def _wrong(result: KernelResult) -> str:
    return f"{result.name} ({result.failure or f'differs by {result.error:.2g}'})"


Rates = Mapping[tuple[str, str], float]  # floating-point operations a second of ("matrix products", "bfloat16"), ...


def about_speed(where: str, rates: Rates) -> Iterator[Finding]:
    """What each half type does for matrix products and convolutions, against fp32."""
    helps = False
    for dtype, levels in (("bfloat16", "O4 and O5 in bf16"), ("float16", "O1 and O2 in fp16")):
        ratios = {op: rate / rates[op, "float32"] for (op, kind), rate in rates.items() if kind == dtype}
        if not ratios:
            continue
        slowest, fastest = min(ratios.values()), max(ratios.values())
        if slowest >= PAYS:
            verdict = "pay"
        elif fastest < PAYS:
            verdict = "do not pay"
        else:
            verdict = "pay in part" if slowest >= HURTS else "may pay or not, it depends on the model"
        helps = helps or fastest >= PAYS
        said = ", ".join(f"{op} {times(ratio)}" for op, ratio in ratios.items())
        yield Finding("speed", "ok", f"{where}: {levels} {verdict}: {said}")
    if rates and not helps:
        seen = f"{where}: no half type is faster than fp32: train at O0, or take a level for its memory alone"
        yield Finding("speed", "warn", seen)


def times(ratio: float) -> str:
    """``3.1x``, or ``200 times slower``."""
    if ratio >= 0.95:
        return f"{ratio:.2g}x"
    slower = 1 / ratio
    return f"{slower:.2g} times slower" if slower < 10 else f"{slower:.0f} times slower"


@dataclass(frozen=True)
class GroupResult:
    """One try of processes that sum a tensor.

    Attributes:
        backend: ``"gloo"`` or ``"nccl"``.
        processes: How many.
        seconds: How long it took; None where it failed.
        failure: Why it failed.
    """

    backend: str
    processes: int
    seconds: float | None
    failure: str | None = None


def about_groups(results: Sequence[GroupResult]) -> Iterator[Finding]:
    """Whether processes reach each other."""
    mends = {
        "gloo": "GLOO_SOCKET_IFNAME=lo lightning-apex doctor  # then set it for training on one machine",
        "nccl": "NCCL_DEBUG=INFO lightning-apex doctor --checks processes  # says what NCCL cannot reach",
    }
    for result in results:
        plural = "es" if result.processes > 1 else ""
        if result.seconds is None:
            seen = f"{result.backend}: {result.processes} process{plural} could not sum a tensor: {result.failure}"
            yield Finding("processes", "bad", seen, mends[result.backend])
        else:
            seen = f"{result.backend}: {result.processes} process{plural} summed a tensor"
            yield Finding("processes", "ok", f"{seen} ({result.seconds:.1f} s with their start)")
