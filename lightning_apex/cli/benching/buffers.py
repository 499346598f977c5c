"""Tensors that the contenders of a row share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_apex.cli.benching.shapes import Shapes


class Buffers:
    """fp32 parameters, gradients and two moments (if they have some), shared by every contender of a row.

    Sharing saves memory, and gives everybody the same pages.
    """

    def __init__(
        self,
        shapes: Shapes,
        device: str = "cpu",
        channels_last: bool = False,
        grad_scale: float = 1.0,
        moments: bool = True,
    ) -> None:
        torch.manual_seed(0)
        self.params = [nn.Parameter(_random(shape, 0.1, device, channels_last)) for shape in shapes]
        self.grads = [_random(shape, 1e-3 * grad_scale, device, channels_last) for shape in shapes]
        lends = self.params if moments else []
        self.first = [torch.zeros_like(p, requires_grad=False) for p in lends]
        self.second = [torch.full_like(p, 1e-6, requires_grad=False) for p in lends]
        self.hand_out(self.grads)

    @property
    def moments(self) -> tuple[list[Tensor], list[Tensor]]:
        """The first and second moments."""
        return self.first, self.second

    def hand_out(self, grads: Sequence[Tensor]) -> None:
        """Gives each parameter its gradient."""
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad

    def lend_moments(self, optimizer: Optimizer, params: Sequence[Tensor], host_steps: bool = False) -> Optimizer:
        """Makes the moments an Adam's state, with step counts on the host where its own would be."""
        for param, first, second in zip(params, self.first, self.second, strict=True):
            step = torch.tensor(10.0, device="cpu" if host_steps else param.device)
            optimizer.state[param] = {"step": step, "exp_avg": first, "exp_avg_sq": second}
        return optimizer


def _random(shape: tuple[int, ...], scale: float, device: str, channels_last: bool) -> Tensor:
    values = torch.randn(shape, device=device).mul_(scale)
    return values.to(memory_format=torch.channels_last) if channels_last and values.dim() == 4 else values
