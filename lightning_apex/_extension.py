"""Loads the compiled extension, the only place that does. Without it nothing works, and the error says what to type."""

from pathlib import Path
from types import ModuleType
from typing import Any

import torch

__all__ = ["build_info", "cpu_backend", "has_cuda", "optimizer_table", "set_cpu_backend"]


def _command() -> str:
    """What to type to build the extension again."""
    root = Path(__file__).resolve().parent.parent
    if (root / "setup.py").exists() and (root / "csrc").is_dir():
        return f"pip install --no-build-isolation -e {root}"
    return "pip install --no-build-isolation --no-deps --no-cache-dir --force-reinstall lightning-apex"


def _release(version: str) -> list[str]:
    """A torch extension fits one minor release: "2.14.1+cu130" gives ["2", "14"]."""
    return version.split(".")[:2]


def _load() -> ModuleType:
    try:
        # torch comes first (above): the extension finds torch's libraries in the process.
        from lightning_apex import _C
    except ImportError as error:
        if "undefined symbol" in str(error) or "cannot open shared object" in str(error):
            why = f"was built for another torch than {torch.__version__} ({error})"
        elif isinstance(error, ModuleNotFoundError) or "cannot import name" in str(error):
            why = "has not been built"
        else:
            why = f"cannot be loaded ({error})"
        raise ImportError(f"lightning_apex's compiled extension {why}; run `{_command()}`.") from error
    built_for = str(_C.build_info()["torch_version"])
    if _release(built_for) != _release(torch.__version__):
        raise ImportError(
            f"lightning_apex's compiled extension was built for torch {built_for} and this is torch "
            f"{torch.__version__}; run `{_command()}`."
        )
    return _C


_C = _load()


def build_info() -> dict[str, Any]:
    """Tells what the extension was built of.

    Returns:
        ``version``, ``torch_version``, ``compiler``, ``cuda_version`` (None without CUDA), ``cuda_archs`` and
        ``cpu_backends`` (those that this machine can run, best first).
    """
    return dict(_C.build_info())


def has_cuda() -> bool:
    """Tells whether the extension was built with CUDA kernels. Whether there is a GPU is torch's question."""
    return _C.build_info()["cuda_version"] is not None


def cpu_backend() -> str:
    """Tells which kernels run on this CPU: ``"avx512"``, ``"avx2"`` or ``"portable"``.

    The environment variable ``LIGHTNING_APEX_CPU_BACKEND`` chooses another one, for tests.
    """
    return str(_C.cpu_backend())


def set_cpu_backend(name: str) -> None:
    """Chooses the CPU kernels from now on. For tests: every backend gives the same bits, this one is the fastest."""
    _C.set_cpu_backend(name)


def optimizer_table() -> list[dict[str, Any]]:
    """Lists the fused optimizers, what they take in the order the kernels take it.

    Returns:
        Dicts of ``name``, ``states``, ``tensor_states`` (of one number a tensor), ``hypers`` and ``n_norms`` (how many
        norms of each tensor an update needs).
    """
    return list(_C.optimizer_table())
