"""Lists of tensors for optimizer steps on the emulated CUDA kernels, and the calls."""

from __future__ import annotations

from collections.abc import Callable

import torch
from cases import F32, F64, same_bits
from kernels import Kernels
from problems import TABLE
from simt_support import exact
from torch import Tensor

WITH_NORMS = [name for name, row in TABLE.items() if row["n_norms"] > 0]
Lists = list[list[Tensor]]  # parameters, gradients, masters, states, steps


def step_lists(name: str, params: list[Tensor], grad: torch.dtype, state: torch.dtype, masters: bool) -> Lists:
    """Each of them with its own offset into its storage."""
    wide = [exact(p.float(), 1) for p in params] if masters else []
    n_state = len(TABLE[name]["states"])
    states = [exact(torch.rand(p.shape).to(state), (i + k) % 4) for k in range(n_state) for i, p in enumerate(params)]
    for _ in TABLE[name]["tensor_states"]:
        states += [torch.rand((), dtype=F64 if p.dtype == F64 else F32) for p in params]
    steps = [torch.tensor(float(i % 3)) for i in range(len(params))]
    return [params, [exact(torch.randn(p.shape).to(grad), 2) for p in params], wide, states, steps]


def copies(lists: Lists) -> Lists:
    return [[exact(t, t.storage_offset()) for t in members] for members in lists]


def assert_same(got: Lists, expected: Lists) -> None:
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert all(map(same_bits, a, b)), f"list {i}"


def make_step(
    name: str, hypers: dict[str, float], *controls: Tensor | None
) -> Callable[[Kernels, Lists], list[Tensor]]:
    values = [hypers[key] for key in TABLE[name]["hypers"]]

    def step(kernels: Kernels, lists: Lists) -> list[Tensor]:
        kernels.fused_step_(name, *lists, values, *controls)
        return []

    return step


def measure(kernels: Kernels, name: str, lists: Lists, hypers: dict[str, float], *controls: Tensor | None) -> Tensor:
    norms: Tensor = kernels.fused_norms_(name, *lists, [hypers[key] for key in TABLE[name]["hypers"]], *controls)
    return norms


def odd_lists(
    name: str, param: torch.dtype, grad: torch.dtype, state: torch.dtype, masters: bool, size: int = 17_003
) -> Lists:
    """Several chunks, a tail, nothing, a number; most of it misaligned, and a parameter that somebody else wrote."""
    shapes_and_offsets = [((size,), 0), ((33,), 1), ((0,), 0), ((), 0), ((4, 8), 0)]
    params = [exact(torch.randn(shape).to(param), offset) for shape, offset in shapes_and_offsets]
    lists = step_lists(name, params, grad, state, masters)
    if masters:
        lists[0][1] += 1
    return lists
