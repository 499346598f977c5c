"""The traffic of roofline.cpp on a GPU: one Triton kernel a tensor list, laid out in one block of memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _traffic(p, g, m, v, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    grad = tl.load(g + i, inside)
    tl.store(m + i, tl.load(m + i, inside) * 0.9 + grad, inside)
    tl.store(v + i, tl.load(v + i, inside) * 0.999 + grad * grad, inside)
    tl.store(p + i, tl.load(p + i, inside) * 0.9999 + grad, inside)


class FlatTraffic:
    """Reads four fp32 streams of so many elements and writes three of them."""

    def __init__(self, elements: int, device: str = "cuda", block: int = 1024) -> None:
        self.p, self.g, self.m, self.v = (torch.full((elements,), 1e-3, device=device) for _ in range(4))
        self.elements, self.block = elements, block

    def __call__(self) -> None:
        grid = (triton.cdiv(self.elements, self.block),)
        _traffic[grid](self.p, self.g, self.m, self.v, self.elements, BLOCK=self.block)
