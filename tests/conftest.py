"""Fixtures that all tests share."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cases
import pytest
import simt_support
import torch
from kernels import Kernels

from lightning_apex import ops


@pytest.fixture(scope="session")
def simt_build() -> Any:
    """The module that compiles the emulated kernels."""
    path = Path(__file__).parent / "simt" / "build.py"
    if not path.exists():
        pytest.skip("there is no emulation of the CUDA kernels")
    spec = importlib.util.spec_from_file_location("simt_build", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def simt_namespace(simt_build: Any) -> Any:
    namespace = simt_build.load()
    ops._register_fakes("lightning_apex_simt")
    return namespace


@pytest.fixture(params=simt_support.ORDERS, ids=lambda order: "".join(map(str, order)))
def simt(request: pytest.FixtureRequest, simt_namespace: Any) -> Iterator[Kernels]:
    """The emulated kernels, in every order of threads and blocks, on memory that is NaN until somebody writes it."""
    torch.use_deterministic_algorithms(True)
    simt_namespace.set_order(*request.param)
    yield Kernels("simt", simt_namespace, "cpu")
    simt_namespace.set_order("forward", 0)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=cases.BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    name: str = request.param
    if name == "simt":
        yield Kernels(name, request.getfixturevalue("simt_namespace"), "cpu")
    elif name == "cuda":
        if not (ops.has_cuda() and torch.cuda.is_available()):
            pytest.skip("needs a GPU and an extension built with CUDA")
        yield Kernels(name, torch.ops.lightning_apex, "cuda")
    else:
        isa, before = name.removeprefix("cpu-"), ops.cpu_backend()
        if isa not in ops.build_info()["cpu_backends"]:
            pytest.skip(f"this CPU has no {isa}")
        ops.set_cpu_backend(isa)
        yield Kernels(name, torch.ops.lightning_apex, "cpu")
        ops.set_cpu_backend(before)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """A Trainer that prepares for several processes leaves its port and rank behind, for the next test's children."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before) - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update((name, value) for name, value in before.items() if name != "PYTEST_CURRENT_TEST")
