"""How many bytes autograd holds for backward passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor


class SavedBytes:
    """Adds up the memory that is saved for backward: ``with SavedBytes(model_tensors) as saved: ...; saved.peak``.

    A piece of memory counts once however many views of it are saved, and no longer once the graph lets go of it. What a
    checkpointed block computes again counts as little as it lives.

    Args:
        apart: Tensors that are not counted, such as parameters.

    Attributes:
        peak: The most bytes at one time.
    """

    def __init__(self, apart: Iterable[Tensor]) -> None:
        self._apart = {_address(tensor) for tensor in apart}
        self._holders: Counter[int] = Counter()
        self._now = 0
        self.peak = 0
        self._hooks: Any = None

    def __enter__(self) -> SavedBytes:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _pack(self, tensor: Tensor) -> _Saved:
        return _Saved(tensor, self)

    def hold(self, tensor: Tensor) -> int | None:
        """Counts a tensor's memory; returns what to `release`."""
        address = _address(tensor)
        if address in self._apart or not address:
            return None
        self._holders[address] += 1
        if self._holders[address] == 1:
            self._now += tensor.untyped_storage().nbytes()
            self.peak = max(self.peak, self._now)
        return address

    def release(self, address: int, nbytes: int) -> None:
        """One that held this memory has gone."""
        self._holders[address] -= 1
        if not self._holders[address]:
            self._now -= nbytes


class _Saved:
    """Stands for a tensor in the graph, and goes when the graph does."""

    def __init__(self, tensor: Tensor, counter: SavedBytes) -> None:
        self.tensor, self._counter = tensor, counter
        self._address = counter.hold(tensor)

    def __del__(self) -> None:
        if self._address is not None:
            self._counter.release(self._address, self.tensor.untyped_storage().nbytes())


def _unpack(saved: _Saved) -> Tensor:
    return saved.tensor


def _address(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()
