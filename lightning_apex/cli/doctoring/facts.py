"""What the doctor looks at, without judging it. Nothing here needs the compiled extension."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

_PACKAGE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class PackageFacts:
    """A package that this one asks for.

    Attributes:
        name: As pip knows it.
        version: None where it is not installed.
        wanted: The versions asked for, such as ``">=2.6,<2.8"``.
        fits: Whether it is one of those.
        without: What does not work without it.
    """

    name: str
    version: str | None
    wanted: str = ""
    fits: bool = True
    without: str = "nothing works without it"


@dataclass(frozen=True)
class ExtensionFacts:
    """The compiled extension.

    Attributes:
        error: Why the package cannot be imported, in one sentence; None where it can.
        info: `lightning_apex.build_info`; empty where there is an error.
        command: What builds it again.
        package_version: Of the installed package; None where it is not installed.
        older_than: The newest source file, where it is newer than the extension.
    """

    error: str | None
    info: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    package_version: str | None = None
    older_than: str | None = None


@dataclass(frozen=True)
class CpuFacts:
    """The CPU kernels.

    Attributes:
        backends: Those that run here, best first.
        backend: The one that does.
        from_environment: Whether a variable chose it.
        threads: That torch uses.
        cores: That this process may use.
        omp_num_threads: Whether a variable limits the threads.
    """

    backends: tuple[str, ...]
    backend: str
    from_environment: bool
    threads: int
    cores: int
    omp_num_threads: bool


@dataclass(frozen=True)
class GpuFacts:
    """One GPU that torch sees."""

    name: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class CudaFacts:
    """GPUs, their driver, and torch's CUDA.

    Attributes:
        torch_cuda: The CUDA version of torch; None for a torch without.
        driver_cuda: The newest CUDA version that the driver serves; None without a driver.
        gpu_present: Whether the system has an NVIDIA GPU, whether or not torch sees it.
        devices: What torch sees.
    """

    torch_cuda: str | None
    driver_cuda: str | None
    gpu_present: bool
    devices: tuple[GpuFacts, ...] = ()


def package_facts() -> list[PackageFacts]:
    """torch, Lightning, and the packages of the extra "cli"."""
    without = {
        "lightning": "so the plugins for Trainer and Fabric are missing",
        "matplotlib": "so reports have no pictures",
    }
    wanted = _requirements()
    names = ["torch", "lightning", "pytorch-lightning", "matplotlib"]
    facts = [
        _package(name, wanted.get(name, SpecifierSet()), without.get(name, PackageFacts.without)) for name in names
    ]
    return [fact for fact in facts if fact.version is not None or fact.name != "pytorch-lightning"]


def _package(name: str, wanted: SpecifierSet, without: str) -> PackageFacts:
    try:
        version = torch.__version__ if name == "torch" else metadata.version(name)
    except metadata.PackageNotFoundError:
        return PackageFacts(name, None, str(wanted), False, without)
    return PackageFacts(name, version, str(wanted), wanted.contains(version, prereleases=True), without)


def _requirements() -> dict[str, SpecifierSet]:
    """The versions that this package asks for, by name, extras left out; empty where it is not installed."""
    try:
        lines = metadata.requires("lightning-apex") or []
    except metadata.PackageNotFoundError:
        return {}
    return {r.name: r.specifier for r in map(Requirement, lines) if r.marker is None}


def extension_facts() -> ExtensionFacts:
    """Tries to import the package, which needs the extension."""
    command = rebuild_command()
    try:
        installed = metadata.version("lightning-apex")
    except metadata.PackageNotFoundError:
        installed = None
    try:
        import lightning_apex

        info = lightning_apex.build_info()
    except Exception as error:  # whatever it is, it is the finding
        text = " ".join(str(error).split()) or type(error).__name__
        return ExtensionFacts(text, command=command, package_version=installed)
    return ExtensionFacts(None, info, command, installed, _newer_source())


def rebuild_command() -> str:
    """What to type to build the extension again, in a checkout or an installation."""
    if _is_checkout():
        return f"pip install --no-build-isolation -e {_PACKAGE.parent}"
    return "pip install --no-build-isolation --no-deps --no-cache-dir --force-reinstall lightning-apex"


def _is_checkout() -> bool:
    return (_PACKAGE.parent / "setup.py").exists() and (_PACKAGE.parent / "csrc").is_dir()


def _newer_source() -> str | None:
    """In a checkout, a source that is younger than the extension."""
    built = max((path.stat().st_mtime for path in _extension_files()), default=None)
    if built is None or not _is_checkout():
        return None
    sources = [path for path in (_PACKAGE.parent / "csrc").rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh")]
    newest = max(sources, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None or newest.stat().st_mtime <= built:
        return None
    return str(newest.relative_to(_PACKAGE.parent))


def _extension_files() -> Iterator[Path]:
    yield from _PACKAGE.glob("_C*.so")
    yield from _PACKAGE.glob("_C*.pyd")


def cpu_facts() -> CpuFacts:
    """Needs the extension."""
    from lightning_apex import ops

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return CpuFacts(
        tuple(ops.build_info()["cpu_backends"]),
        ops.cpu_backend(),
        bool(os.environ.get("LIGHTNING_APEX_CPU_BACKEND")),
        torch.get_num_threads(),
        cores,
        bool(os.environ.get("OMP_NUM_THREADS")),
    )


def cuda_facts() -> CudaFacts:
    """Asks the driver itself, since torch says no more than whether it could start."""
    devices: tuple[GpuFacts, ...] = ()
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        devices = tuple(
            GpuFacts(torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in range(count)
        )
    present = bool(devices) or any(Path("/dev").glob("nvidia[0-9]*"))
    return CudaFacts(torch.version.cuda, _driver_cuda(), present, devices)


def _driver_cuda() -> str | None:
    number = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"
