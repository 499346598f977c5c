"""The rows of `lightning-apex bench`: who takes part, and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_apex import SyncBatchNorm
from lightning_apex.cli.benching.benchmark import Line, lines_of
from lightning_apex.cli.benching.buffers import Buffers
from lightning_apex.cli.benching.families import FAMILIES, ROOF, Family, our_optimizer, roofline, sweeps_of
from lightning_apex.cli.benching.norms import ROOF_BYTES, ROOF_PART, TORCH, Layers
from lightning_apex.cli.benching.race import OURS, Contender, race
from lightning_apex.cli.benching.roofline import RooflineError, bytes_of
from lightning_apex.cli.benching.shapes import Shapes
from lightning_apex.cli.benching.subjects import NormInput

_NORMS: dict[int, Callable[[int], nn.Module]] = {
    2: nn.BatchNorm1d,
    3: nn.BatchNorm1d,
    4: nn.BatchNorm2d,
    5: nn.BatchNorm3d,
}


def optimizer_row(name: str, shapes: Shapes, rounds: int, device: torch.device) -> tuple[list[Line], list[str]]:
    """One of ours beside its peers, on fp32 parameters of these shapes; lines and notes."""
    family, buffers = FAMILIES[name], Buffers(shapes, str(device), moments=False)
    optimizer = our_optimizer(family, buffers.params)
    optimizer.step()
    notes: list[str] = []
    contenders = [Contender(OURS, optimizer.step)]
    for peer, how in family.peers.items():
        theirs, why = how.first_step(buffers.params)
        if theirs is None:
            notes.append(f"{name}: without {peer} ({why}).")
        else:
            contenders.append(Contender(peer, theirs.step))
    roof, factor = _roofline(family, optimizer, buffers, device, notes)
    result = race([*contenders, *roof], rounds, sync=_sync(device))
    return lines_of(f"{name} fp32", result, ROOF if roof else None, factor), notes


def _roofline(
    family: Family, optimizer: torch.optim.Optimizer, buffers: Buffers, device: torch.device, notes: list[str]
) -> tuple[list[Contender], float]:
    """What only moves the memory, if it can be measured, and how much more ours moves."""
    if device.type != "cpu":
        copied = _Copies(sum(p.numel() for p in buffers.params), device)
        return [Contender(ROOF, copied)], bytes_of(sweeps_of(family, optimizer, [buffers.params])) / copied.BYTES
    try:
        return [roofline(family, optimizer, [buffers.params], torch.get_num_threads())[0]], 1.0
    except RooflineError as error:
        notes.append(f"without the roofline: {error}.")
        return [], 1.0


class _Copies:
    """Copies within a GPU's memory: one fp32 number read and one written, an element."""

    BYTES = 8

    def __init__(self, elements: int, device: torch.device) -> None:
        self._from, self._to = (torch.zeros(elements, device=device) for _ in range(2))

    def __call__(self) -> None:
        self._to.copy_(self._from)


def norm_rows(
    inputs: Sequence[NormInput], dtype: torch.dtype, rounds: int, device: torch.device
) -> tuple[list[Line], list[str]]:
    """All BatchNorms of a model, forward and backward, ours and torch's; lines and notes."""
    layers = Layers([shape for shape, _ in inputs], dtype, [layout for _, layout in inputs], str(device))
    dims = iter([len(shape) for shape, _ in inputs])
    contenders = [
        layers.contender(OURS, SyncBatchNorm),
        layers.contender(TORCH, lambda channels: _NORMS[next(dims)](channels)),
    ]
    notes: list[str] = []
    moved = 8 if any(layout is torch.channels_last for _, layout in inputs) else 5  # elements, forward and backward
    factor = ROOF_PART * moved * dtype.itemsize / ROOF_BYTES
    roof: list[Contender] = []
    if device.type == "cpu":
        try:
            roof = [layers.roofline(torch.get_num_threads())]
        except RooflineError as error:
            notes.append(f"without the roofline: {error}.")
    result = race([*contenders, *roof], rounds, sync=_sync(device))
    name = f"{len(inputs)} BatchNorms, {str(dtype).removeprefix('torch.')}"
    return lines_of(name, result, ROOF if roof else None, factor), notes


def _sync(device: torch.device) -> Callable[[], Any]:
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
