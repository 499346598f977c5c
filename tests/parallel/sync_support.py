"""Rows of SyncBatchNorm cases, run on every rank, and what torch's BatchNorm makes of the whole batch."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_apex.parallel import SyncBatchNorm

Jobs = dict[str, tuple[Callable[..., Any], dict[str, Any]]]
# Of fp32 arithmetic and of one rounding to the output's type.
TOLERANCE = {
    torch.float64: (1e-10, 1e-10),
    torch.float32: (2e-5, 1e-4),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1.6e-2, 1.6e-2),
}


# --- processes ------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _rank_main(rank: int, world: int, port: int, folder: str, jobs: Jobs) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "RANK": str(rank)}
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    dist.init_process_group("gloo")
    results = {}
    for name, (function, kwargs) in jobs.items():
        try:
            torch.manual_seed(0)
            results[name] = function(rank, **kwargs)
        except BaseException:
            results[name] = traceback.format_exc()
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_on_ranks(world: int, folder: Path, jobs: Jobs) -> dict[str, list[Any]]:
    """Runs jobs one after the other in ``world`` processes; a result that is a str is a traceback."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightning_apex"])
    here = str(Path(__file__).parent)
    if here not in sys.path:
        sys.path.insert(0, here)
    arguments = (world, free_port(), str(folder), jobs)
    torch.multiprocessing.start_processes(_rank_main, arguments, nprocs=world, start_method="forkserver")
    ranks = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]
    return {name: [results[name] for results in ranks] for name in jobs}


# --- rows -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One layer and its batches; ``sizes`` are each rank's samples."""

    sizes: tuple[int, ...] = (4, 4)
    shape: tuple[int, ...] = (3, 5, 3)  # C and the rest
    dtype: torch.dtype = torch.float32
    params: torch.dtype | None = None
    memory: str = "contiguous"  # | "channels_last" | "strided" | "last" (the shape)
    grad_memory: str | None = None
    z: bool = False
    relu: bool = False
    affine: bool = True
    track: bool = True
    momentum: float | None = 0.1
    steps: int = 1
    mean: float = 0.5
    std: float = 2.0
    frozen: bool = False
    input_grad: bool = True
    z_memory: str | None = None

    def but(self, **changes: Any) -> Row:
        return replace(self, **changes)


def batches(row: Row) -> list[dict[str, Tensor]]:
    """x, z and grad_out of each step: whole batches of ``[N, C, *]``."""
    generator = torch.Generator().manual_seed(11)
    shape = (sum(row.sizes), *row.shape)

    def draw(mean: float, std: float) -> Tensor:
        # In the row's type, so that the witness sees the numbers that the layer sees
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * std + mean).to(row.dtype)

    return [{"x": draw(row.mean, row.std), "z": draw(0, 1), "g": draw(0.1, 1)} for _ in range(row.steps)]


def parameters(row: Row) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    channels = row.shape[0]
    values = (torch.rand(channels, generator=generator) + 0.5, torch.randn(channels, generator=generator))
    return tuple(v.to(row.params or torch.float32) for v in values)  # type: ignore[return-value]


def in_memory(tensor: Tensor, memory: str) -> Tensor:
    """The same numbers laid out otherwise."""
    if memory == "channels_last":
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        if tensor.dim() in formats:
            return tensor.contiguous(memory_format=formats[tensor.dim()])
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1)
    if memory == "strided":
        wide = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])
        wide[..., ::2] = tensor
        return wide[..., ::2]
    if memory == "last":
        return tensor.movedim(1, -1).contiguous()
    return tensor.contiguous()


def layer(row: Row, process_group: Any = None) -> SyncBatchNorm:
    made = SyncBatchNorm(
        row.shape[0],
        momentum=row.momentum,
        affine=row.affine,
        track_running_stats=row.track,
        process_group=process_group,
        channel_last=row.memory == "last",
        fuse_relu=row.relu,
        dtype=row.params,
    )
    if row.affine:
        with torch.no_grad():
            for param, value in zip((made.weight, made.bias), parameters(row), strict=True):
                param.copy_(value)
                param.requires_grad_(not row.frozen)
    return made


def run_row(rank: int, row: Row, group_size: int | None = None, device: str = "cpu") -> dict[str, Any]:
    """This rank's share of a row: what it sees, and what remains."""
    from lightning_apex.parallel import create_syncbn_process_group

    group = create_syncbn_process_group(group_size) if group_size else None
    if group_size:
        rank %= group_size
    module = layer(row, group).to(device)
    start, count = sum(row.sizes[:rank]), row.sizes[rank]
    steps = []
    for batch in batches(row):
        module.zero_grad()
        # A copy: the rows of a batch are not to be a view of it
        x, z, g = (batch[key][start : start + count].to(device, copy=True) for key in ("x", "z", "g"))
        x = in_memory(x, row.memory).requires_grad_(row.input_grad)
        z = in_memory(z, row.z_memory or row.memory).requires_grad_() if row.z else None
        out = module(x, z) if row.z else module(x)
        if out.requires_grad:
            out.backward(in_memory(g, row.grad_memory or row.memory))
        back = -1 if row.memory == "last" else 1
        seen = {
            "out": out.detach().movedim(back, 1),
            "dx": None if x.grad is None else x.grad.movedim(back, 1),
            "dz": None if z is None or z.grad is None else z.grad.movedim(back, 1),
            "dw": module.weight.grad if row.affine else None,
            "db": module.bias.grad if row.affine else None,
        }
        same = out.is_contiguous() if row.memory == "last" else out.stride() == torch.empty_like(x).stride()
        steps.append({k: None if v is None else v.cpu().clone() for k, v in seen.items()} | {"keeps_memory": same})
    return {"steps": steps, "state": {k: v.cpu().clone() for k, v in module.state_dict().items()}}


def witness(row: Row, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """torch's BatchNorm on the whole batch, in fp64 from the numbers that the layer sees."""
    kinds: dict[int, Any] = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d, 4: nn.BatchNorm3d}
    module = kinds[len(row.shape)](
        row.shape[0], momentum=row.momentum, affine=row.affine, track_running_stats=row.track, dtype=dtype
    )
    if row.affine:
        with torch.no_grad():
            for param, value in zip((module.weight, module.bias), parameters(row), strict=True):
                param.copy_(value)
                param.requires_grad_(not row.frozen)
    steps = []
    for batch in batches(row):
        module.zero_grad()
        x, z, g = (batch[key].to(dtype) for key in ("x", "z", "g"))
        x.requires_grad_(row.input_grad)
        z.requires_grad_(row.z)
        out = module(x) + z if row.z else module(x)
        out = F.relu(out) if row.relu else out
        if out.requires_grad:
            out.backward(g)
        weights = (module.weight.grad, module.bias.grad) if row.affine else (None, None)
        seen = {"out": out.detach(), "dx": x.grad, "dz": z.grad, "dw": weights[0], "db": weights[1]}
        steps.append({k: None if v is None else v.clone() for k, v in seen.items()})
    return {"steps": steps, "state": module.state_dict()}


def check_row(row: Row, ranks: Sequence[dict[str, Any]]) -> None:
    """The ranks' shares, put together, are the witness's batch."""
    expected = witness(row)
    atol, rtol = TOLERANCE[row.dtype]
    for number, step in enumerate(expected["steps"]):
        shares = [rank["steps"][number] for rank in ranks]
        assert all(s["keeps_memory"] for s, n in zip(shares, row.sizes, strict=True) if n), "the memory format changed"
        for key in ("out", "dx", "dz"):
            if step[key] is None:
                assert all(s[key] is None for s in shares), key
                continue
            parts = [s[key] for s in shares]
            assert all(p.dtype is row.dtype for p in parts), f"{key} is {parts[0].dtype}"
            close(torch.cat(parts), step[key], atol, rtol, f"{key} of step {number}")
        for key in ("dw", "db"):
            if step[key] is None:
                assert all(s[key] is None for s in shares), key
                continue
            parts = [s[key] for s in shares]
            wide = max(atol, TOLERANCE[parts[0].dtype][0]) * 10 * max(1.0, step[key].abs().max().item())
            close(torch.stack(parts).double().sum(0), step[key], wide, 0, f"{key} of step {number}")
    for rank in ranks:
        assert set(rank["state"]) == set(expected["state"])
        for key, value in expected["state"].items():
            wide = TOLERANCE[rank["state"][key].dtype] if value.is_floating_point() else (0, 0)
            close(rank["state"][key], value, *wide, key)
            assert torch.equal(rank["state"][key], ranks[0]["state"][key]), f"{key} differs between ranks"


def close(actual: Tensor, expected: Tensor, atol: float, rtol: float, what: str) -> None:
    torch.testing.assert_close(
        actual.double(), expected.double(), atol=atol, rtol=rtol, msg=lambda text: f"{what}: {text}"
    )


# --- the rows that several worlds share -----------------------------------------------------------------------------

BASE = Row()
LAYERS = {
    "2d": BASE.but(shape=(5,)),
    "3d": BASE.but(shape=(5, 7)),
    "4d": BASE,
    "5d": BASE.but(shape=(3, 2, 3, 5)),
    **{f"C{c}": BASE.but(shape=(c, 3, 3)) for c in (1, 64, 65, 130)},
    "C2048": BASE.but(shape=(2048, 1, 1)),
    "channels_last": BASE.but(shape=(6, 5, 3), memory="channels_last"),
    "channels_last_3d": BASE.but(shape=(6, 2, 3, 3), memory="channels_last"),
    "strided": BASE.but(memory="strided"),
    "last_3d": BASE.but(shape=(5, 7), memory="last"),
    "last_4d": BASE.but(shape=(6, 5, 3), memory="last"),
    "last_5d": BASE.but(shape=(6, 2, 3, 3), memory="last"),
    "grad_channels_last": BASE.but(grad_memory="channels_last"),
    "grad_contiguous": BASE.but(memory="channels_last", grad_memory="contiguous"),
    "grad_strided": BASE.but(memory="channels_last", grad_memory="strided"),
    "fp64": BASE.but(dtype=torch.float64),
    "fp64_params": BASE.but(dtype=torch.float64, params=torch.float64),
    "fp16": BASE.but(dtype=torch.float16),
    "bf16": BASE.but(dtype=torch.bfloat16),
    "bf16_channels_last": BASE.but(dtype=torch.bfloat16, memory="channels_last"),
    "fp16_params": BASE.but(dtype=torch.float16, params=torch.float16),
    "bf16_params": BASE.but(dtype=torch.bfloat16, params=torch.bfloat16),
    "relu": BASE.but(relu=True),
    "relu_channels_last": BASE.but(relu=True, memory="channels_last"),
    "relu_last": BASE.but(relu=True, memory="last", shape=(6, 5, 3)),
    "relu_2d": BASE.but(relu=True, shape=(5,)),
    "z": BASE.but(z=True),
    "z_relu": BASE.but(z=True, relu=True),
    "z_relu_bf16": BASE.but(z=True, relu=True, dtype=torch.bfloat16),
    "z_relu_last": BASE.but(z=True, relu=True, memory="last", shape=(6, 5, 3)),
    "z_relu_other_memory": BASE.but(z=True, relu=True, memory="channels_last", z_memory="contiguous"),
    "z_2d": BASE.but(z=True, relu=True, shape=(5,)),
    "z_input_frozen": BASE.but(z=True, relu=True, input_grad=False),
    "z_input_frozen_no_relu": BASE.but(z=True, input_grad=False),
    "input_frozen": BASE.but(input_grad=False),
    "weights_frozen": BASE.but(frozen=True),
    "all_frozen": BASE.but(frozen=True, input_grad=False),
    "not_affine": BASE.but(affine=False),
    "not_affine_relu": BASE.but(affine=False, relu=True),
    "not_tracked": BASE.but(track=False, steps=2),
    "steps": BASE.but(steps=3),
    "cumulative": BASE.but(steps=3, momentum=None),
    "cumulative_not_tracked": BASE.but(steps=2, momentum=None, track=False),
    "momentum_0": BASE.but(momentum=0.0),
    "momentum_1": BASE.but(momentum=1.0),
    "far_from_zero": BASE.but(mean=1e4, std=1e-2, sizes=(40, 40)),
    "far_from_zero_channels_last": BASE.but(mean=1e4, std=1e-2, sizes=(40, 40), memory="channels_last"),
}
