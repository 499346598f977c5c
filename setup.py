"""Builds lightning_apex._C, with CUDA kernels where torch and nvcc allow it. What there is to set:

LIGHTNING_APEX_CUDA   auto (default): with CUDA if torch has it and nvcc is found; 1: an error where not; 0: without
TORCH_CUDA_ARCH_LIST  the GPU architectures, as for any torch extension
CUDA_HOME, MAX_JOBS   likewise
LIGHTNING_APEX_WERROR 1: a warning about our own files is an error, for those who change them. Never a user's concern:
                      another compiler may warn of something new
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
DEFAULT_ARCHS = {(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)}
WITHOUT_CUDA = "set LIGHTNING_APEX_CUDA=0 to build without CUDA"


def fail(sentence: str) -> NoReturn:
    """Ends the build with one sentence."""
    raise SystemExit(f"lightning_apex: {sentence}.")


def note(sentence: str) -> None:
    print(f"lightning_apex: {sentence}.", file=sys.stderr)


def version() -> str:
    """The version in pyproject.toml, the only place that has it."""
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None, "pyproject.toml has no version"
    return found[1]


def output_of(*command: str) -> str:
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except OSError:
        return ""
    return run.stdout + run.stderr


class Nvcc:
    """The CUDA compiler: its version, and the toolkit folder that it belongs to."""

    def __init__(self, path: str) -> None:
        text = output_of(path, "--version")
        found = re.search(r"release (\d+)\.(\d+)", text)
        if found is None:
            fail(f"{path} --version does not name a CUDA release; repair it, or {WITHOUT_CUDA}")
        self.path = path
        self.version = (int(found[1]), int(found[2]))
        self.home = self._home()

    @classmethod
    def find(cls) -> Nvcc | None:
        home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
        candidates = [str(Path(home, "bin", "nvcc"))] if home else []
        path = next(filter(shutil.which, [*candidates, "nvcc", "/usr/local/cuda/bin/nvcc"]), None)
        return None if path is None else cls(str(shutil.which(path)))

    def _home(self) -> Path:
        """Follows links first; where nvcc is a wrapper script, asks it what it would run."""
        homes = [Path(self.path).parent.parent, Path(self.path).resolve().parent.parent]
        top = re.search(r"TOP=(\S+)", output_of(self.path, "--dryrun", "-x", "cu", os.devnull))
        if top is not None:
            homes.append(Path(top[1]).resolve())
        for home in homes:
            if (home / "include" / "cuda_runtime.h").exists():
                return home
        fail(
            f"{self.path} belongs to no CUDA toolkit with headers (looked in {', '.join(map(str, homes))}); "
            f"set CUDA_HOME to the toolkit's folder, or {WITHOUT_CUDA}"
        )

    def archs(self, capabilities: set[tuple[int, int]]) -> str:
        """For these GPUs, or else the default architectures, as far as this compiler knows them.

        The last comes with PTX, for later ones.
        """
        numbers = {int(number) for number in re.findall(r"compute_(\d+)", output_of(self.path, "--list-gpu-arch"))}
        known = sorted((number // 10, number % 10) for number in numbers)
        wanted = {max((k for k in known if k <= gpu), default=gpu) for gpu in capabilities} or DEFAULT_ARCHS
        archs = [f"{major}.{minor}" for major, minor in sorted(wanted) if (major, minor) in known]
        if not archs:
            fail(
                f"{self.path} compiles for none of the architectures {sorted(wanted)}; set TORCH_CUDA_ARCH_LIST, or "
                f"{WITHOUT_CUDA}"
            )
        return ";".join(archs) + "+PTX"


def choose_cuda(torch: Any) -> Nvcc | None:
    """The compiler to build CUDA kernels with, or None to build without."""
    asked = os.environ.get("LIGHTNING_APEX_CUDA", "auto")
    if asked not in ("auto", "1", "0"):
        fail(f"LIGHTNING_APEX_CUDA={asked!r} is none of auto, 1 and 0")
    if asked == "0":
        return None
    if torch.version.cuda is None:
        if asked == "1":
            fail(
                f"LIGHTNING_APEX_CUDA=1, but torch {torch.__version__} was built without CUDA; install a torch with "
                f"CUDA, or {WITHOUT_CUDA}"
            )
        return None
    nvcc = Nvcc.find()
    if nvcc is None:
        sentence = f"no nvcc in CUDA_HOME or PATH for torch {torch.__version__}"
        if asked == "1":
            fail(
                f"LIGHTNING_APEX_CUDA=1, but there is {sentence}; install CUDA {torch.version.cuda}, or {WITHOUT_CUDA}"
            )
        note(f"there is {sentence}: building without CUDA")
        return None
    check_versions(torch, nvcc)
    return nvcc


def check_versions(torch: Any, nvcc: Nvcc) -> None:
    major, minor = (int(part) for part in torch.version.cuda.split(".")[:2])
    ours = ".".join(map(str, nvcc.version))
    if nvcc.version[0] != major:
        fail(
            f"nvcc {ours} ({nvcc.path}) cannot build for torch {torch.__version__}, which needs CUDA {major}; put a "
            f"CUDA {torch.version.cuda} toolkit in CUDA_HOME, or {WITHOUT_CUDA}"
        )
    if nvcc.version[1] != minor:
        note(f"nvcc is {ours} and torch was built with CUDA {torch.version.cuda}: the major agrees, which is enough")


def sources(*patterns: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern))


def headers() -> list[str]:
    """A change in one of them rebuilds everything, whatever ninja remembers."""
    return sources("csrc/**/*.h", "csrc/**/*.cuh")


def warnings_are_errors() -> bool:
    asked = os.environ.get("LIGHTNING_APEX_WERROR", "0")
    if asked not in ("1", "0"):
        fail(f"LIGHTNING_APEX_WERROR={asked!r} is neither 1 nor 0")
    return asked == "1"


def compiler_flags(system_headers: list[str], nvcc_version: tuple[int, int] = (0, 0)) -> dict[str, list[str]]:
    """For g++ and for nvcc. Of headers that are found as the system's, such as torch's, no compiler warns."""
    system = [flag for folder in system_headers for flag in ("-isystem", folder)]
    # Plain IEEE arithmetic: every CPU backend gives the same bits. OpenMP's symbols come with torch: linking a libgomp
    # of our own could load a second runtime.
    cxx = ["-O3", "-g0", "-fvisibility=hidden", "-ffp-contract=off", "-fopenmp", "-Wall", "-Wextra"]
    nvcc = ["-O3", "-lineinfo", "-Xcompiler=-Wall,-Wextra"]
    if nvcc_version >= (13, 0):  # a third of the size; every driver of CUDA 13 reads it
        nvcc.append("-compress-mode=size")
    if warnings_are_errors():
        cxx.append("-Werror")
        nvcc.append("-Werror=all-warnings")
    return {"cxx": cxx + system, "nvcc": nvcc + system}


def choose_archs(torch: Any, nvcc: Nvcc) -> str:
    """For which GPUs to build: those that were asked for, else those in this machine, else the default ones."""
    asked = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    if asked in ("", "native"):
        gpus = range(torch.cuda.device_count())
        asked = nvcc.archs({torch.cuda.get_device_capability(gpu) for gpu in gpus})
        os.environ["TORCH_CUDA_ARCH_LIST"] = asked
    return asked


def extension(torch: Any, nvcc: Nvcc | None) -> Any:
    from torch.utils import cpp_extension

    macros: list[tuple[str, str | None]] = [
        ("LIGHTNING_APEX_VERSION", f'"{version()}"'),
        ("LIGHTNING_APEX_TORCH_VERSION", f'"{torch.__version__}"'),
    ]
    files = sources("csrc/*.cpp", "csrc/cpu/*.cpp")
    system_headers = cpp_extension.include_paths()
    if nvcc is None:
        make = cpp_extension.CppExtension
    else:
        os.environ["CUDA_HOME"] = cpp_extension.CUDA_HOME = str(nvcc.home)
        macros += [
            ("LIGHTNING_APEX_WITH_CUDA", None),
            ("LIGHTNING_APEX_CUDA_VERSION", '"{}.{}"'.format(*nvcc.version)),
            ("LIGHTNING_APEX_CUDA_ARCHS", f'"{choose_archs(torch, nvcc)}"'),
        ]
        system_headers.append(str(nvcc.home / "include"))
        files += sources("csrc/cuda/*.cpp", "csrc/cuda/*.cu")
        make = cpp_extension.CUDAExtension
    return make(
        "lightning_apex._C",
        files,
        depends=headers(),
        define_macros=macros,
        extra_compile_args=compiler_flags(system_headers, (0, 0) if nvcc is None else nvcc.version),
        language="c++",
    )


def build_command() -> Any:
    from torch.utils.cpp_extension import BuildExtension

    class Build(BuildExtension):
        """Keeps object files in the source tree, so that an editable install recompiles only what changed."""

        def finalize_options(self) -> None:
            super().finalize_options()
            self.build_temp = str(ROOT / "build" / "temp")

    return Build


def compiles() -> bool:
    """Metadata and source distributions are made without torch."""
    return not {"sdist", "egg_info", "dist_info", "clean", "--version", "--help"} & set(sys.argv[1:])


def extension_arguments() -> dict[str, Any]:
    if not compiles():
        return {}
    try:
        import torch
    except ImportError:
        fail(
            "building needs the torch that will load the extension, and it cannot be imported here; install torch "
            "first, then run pip install with --no-build-isolation"
        )
    return {"ext_modules": [extension(torch, choose_cuda(torch))], "cmdclass": {"build_ext": build_command()}}


setup(
    packages=find_packages(include=["lightning_apex", "lightning_apex.*"]),
    py_modules=["lightning_apex_program"],
    package_data={"lightning_apex": ["py.typed", "*.pyi"], "lightning_apex.cli.benching": ["*.cpp"]},
    **extension_arguments(),
)
