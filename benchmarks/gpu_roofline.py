"""The traffic of roofline.cpp on a GPU: one Triton kernel over a tensor list laid out in one block of memory.

And a plain copy, the bandwidth that everybody knows of a device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

COPY, COPY_BYTES = "copy", 8  # of an fp32 element: one read, one write


def copy(elements: int, device: str = "cuda") -> Callable[[], object]:
    """Copies so many fp32 elements."""
    source = torch.full((elements,), 1e-3, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def traffic(elements: int, device: str = "cuda", block: int = 1024) -> Callable[[], object]:
    """Reads four fp32 streams of so many elements and writes three of them."""
    p, g, m, v = (torch.full((elements,), 1e-3, device=device) for _ in range(4))
    if device != "cuda":  # only to show that everything runs
        return lambda: [t.add_(g) for t in (p, m, v)]
    from benchmarks.gpu_triton import traffic_kernel

    blocks = (elements + block - 1) // block
    return lambda: traffic_kernel[(blocks,)](p, g, m, v, elements, BLOCK=block)
