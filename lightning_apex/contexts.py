"""What a forward pass at an opt level runs in, and what it is given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from lightning_apex.casting import cast_tree
from lightning_apex.half_convolutions import HalfBackward, HalfConvolutions
from lightning_apex.levels import OptLevel


def forward_context(level: OptLevel, device_type: str) -> AbstractContextManager[Any]:
    """What a forward pass at a level runs in."""
    context: AbstractContextManager[Any] = nullcontext()
    if level.autocasts:
        # No weight cache: a weight cast under no_grad would be found again, without its graph, by a later forward.
        context = torch.autocast(device_type, dtype=level.half_dtype, cache_enabled=False)
    if _half_on_cpu(level, device_type):
        return _both(context, HalfConvolutions())
    return context


def backward_context(level: OptLevel, device_type: str) -> AbstractContextManager[Any]:
    """What a backward pass at a level runs in: re-entrant checkpointing repeats parts of the forward pass there."""
    return HalfBackward() if _half_on_cpu(level, device_type) else nullcontext()  # type: ignore[no-untyped-call]


def _half_on_cpu(level: OptLevel, device_type: str) -> bool:
    return device_type == "cpu" and level.half_dtype is torch.float16


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def convert_input(level: OptLevel, data: Any) -> Any:
    """Casts a batch where a level does so."""
    if level.casts_inputs and level.half_dtype is not None:
        return cast_tree(data, level.half_dtype)
    return data
