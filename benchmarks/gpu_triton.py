"""The Triton kernel of gpu_roofline.py, in a module of its own: Triton is not everywhere."""

import triton
import triton.language as tl


@triton.jit
def traffic_kernel(p, g, m, v, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    grad = tl.load(g + i, inside)
    tl.store(m + i, tl.load(m + i, inside) * 0.9 + grad, inside)
    tl.store(v + i, tl.load(v + i, inside) * 0.999 + grad * grad, inside)
    tl.store(p + i, tl.load(p + i, inside) * 0.9999 + grad, inside)
