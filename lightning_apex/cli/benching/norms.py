"""BatchNorm layers, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lightning_apex.cli.benching.families import ROOF
from lightning_apex.cli.benching.race import Contender
from lightning_apex.cli.benching.roofline import Stream, traffic

TORCH = "torch"
ROOF_PART = 4
ROOF_BYTES = 28  # an element of the roofline's loop: three fp32 numbers read and written, one read
Shape = tuple[int, ...]


class Layers:
    """A BatchNorm with its tensors for every shape (N, C, ...): input, addend, gradient."""

    def __init__(
        self, shapes: Sequence[Shape], dtype: torch.dtype, memory: Sequence[torch.memory_format], device: str = "cpu"
    ) -> None:
        def tensors() -> list[Tensor]:
            made = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
            return [x.contiguous(memory_format=layout) for x, layout in zip(made, memory, strict=True)]

        self.channels = [shape[1] for shape in shapes]
        self.inputs = [x.requires_grad_() for x in tensors()]
        self.grads = tensors()
        self.addends: list[Tensor] = []
        self._tensors = tensors

    def with_addends(self) -> Layers:
        """Adds a tensor to add to each output."""
        self.addends = [z.requires_grad_() for z in self._tensors()]
        return self

    def contender(
        self, name: str, make: Callable[[int], nn.Module], call: Callable[..., Tensor] | None = None
    ) -> Contender:
        """Goes forward and back through one layer after another; gradients are made and dropped, as in training."""
        modules = [make(channels).to(self.inputs[0].device) for channels in self.channels]

        def run() -> None:
            for i, module in enumerate(modules):
                leaves = [self.inputs[i], *module.parameters(), *self.addends[i : i + 1]]
                out = module(self.inputs[i]) if call is None else call(module, self.inputs[i], self.addends[i])
                torch.autograd.grad(out, leaves, self.grads[i])

        return Contender(name, run)

    def roofline(self, threads: int) -> Contender:
        """The optimizers' roofline, on a part of as many elements, which are far more than caches hold."""
        sizes = [max(1, x.numel() // ROOF_PART) for x in self.inputs]
        self._flat = [[torch.zeros(size) for size in sizes] for _ in range(4)]  # kept: only addresses go on
        param, grad, *moments = self._flat
        sweep = [Stream(param, written=True), Stream(grad), *(Stream(moment, written=True) for moment in moments)]
        return Contender(ROOF, traffic([sweep], threads))
