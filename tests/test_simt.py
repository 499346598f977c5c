"""The CUDA kernels on the SIMT machine of tests/simt: in every order of threads and blocks, over several launches and
blocks, equal to the CPU kernels.

test_simt_steps.py has the optimizers, test_simt_shapes.py blocks and grids of other sizes, test_simt_faults.py what the
machine must notice. The rows of test_ops.py and test_fused_step.py run on it too, as the backend
"simt", in one order and on small tensors.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import BF16, DTYPES, F16, F32, F64, same_bits
from kernels import Kernels
from simt_support import CPU, ORDERS, both, counters, exact, many
from torch import Tensor

# ---- the operators ----


def test_measure(simt: Kernels) -> None:
    grads = [*many(F32, 190, 140_000), *many(F16, 3, 9), *many(F64, 3, 5), *many(BF16, 3, 66_000)]
    grads[5][1], grads[7][0] = 1e30, 1e-30  # their squares leave float32
    total, flags = simt.measure_gradients(grads)
    assert counters(simt).launches == 4 + 1  # one a type; the last adds up
    assert flags.tolist() == [0] * len(grads)
    assert total.item() == pytest.approx(sum(g.double().square().sum().item() for g in grads), rel=1e-7)

    for i, bad in ((0, math.inf), (95, -math.inf), (100, math.nan), (192, math.nan)):
        if grads[i].numel() == 0:
            grads[i] = torch.zeros(1)
        grads[i].view(-1)[-1] = bad
    total, flags = simt.measure_gradients(grads)
    assert flags.nonzero().flatten().tolist() == [0, 95, 100, 192]
    assert not math.isfinite(total.item())


def test_a_sum_has_the_same_bits_in_every_order(simt_namespace: Any) -> None:
    grads, totals = [torch.randn(140_001), torch.randn(777).half()], set()
    for order in ORDERS:
        simt_namespace.set_order(*order)
        totals.add(simt_namespace.measure_gradients(grads)[0].item())
    assert len(totals) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensor_norms(simt: Kernels, dtype: torch.dtype) -> None:
    tensors = [*many(dtype, 170, 140_000), exact(torch.randn(65_537).to(dtype), 1)]
    tensors[1][0] = torch.finfo(dtype).max if dtype != F64 else 1e150  # its square leaves the dtype
    for ord in (2.0, math.inf):
        norms, before = simt.tensor_norms(tensors, ord), counters(simt).launches
        expected = torch.stack([(t.double().square().sum() if ord == 2 else t.double().abs().amax()) if t.numel() else
                                torch.tensor(0.0, dtype=F64) for t in tensors])  # fmt: skip
        torch.testing.assert_close(norms, expected, rtol=1e-14, atol=0)
        assert before == (1 if ord == 2 else 2)
    for i, bad in ((2, math.nan), (85, -math.inf), (170, math.nan)):
        tensors[i].view(-1)[-2] = bad
    assert simt.tensor_norms(tensors, 2.0)[[2, 85, 170]].isfinite().sum() == 0
    assert str(simt.tensor_norms(tensors, math.inf)[[2, 85, 170]].tolist()) == "[nan, inf, nan]"


def test_step_factors_and_update_scale(simt: Kernels) -> None:
    flags = torch.zeros(1000, dtype=torch.uint8)
    for i in (None, 0, 999):
        if i is not None:
            flags[i] = 1
        found = [torch.zeros(()), torch.zeros(())]
        ours, theirs = (
            k.step_factors(torch.tensor(9.0, dtype=F64), flags, torch.tensor(4.0), 0.5, f)
            for k, f in zip((simt, CPU), found, strict=True)
        )
        assert all(map(same_bits, ours, theirs)) and found[0].item() == found[1].item() == (i is not None)

    def update(kernels: Kernels, lists: list[list[Tensor]]) -> list[Tensor]:
        kernels.update_scale_(*lists[0], 2.0, 0.5, 3, 2, 1.0, 100.0)
        return []

    for overflow in (0.0, 1.0):
        state = [torch.tensor(64.0), torch.tensor([2, 1, 0, 0], dtype=torch.int32), torch.tensor(overflow)]
        both(simt, update, [state])


@pytest.mark.parametrize("dtype", DTYPES)
def test_unscale(simt: Kernels, dtype: torch.dtype) -> None:
    def unscale(kernels: Kernels, lists: list[list[Tensor]]) -> list[Tensor]:
        return [kernels.unscale_(lists[0], *lists[1])]

    grads = many(dtype, 140, 40_000)
    both(simt, unscale, [grads, [torch.tensor(1 / 3), torch.zeros(())]])
    blocks = sum(g.numel() > 0 for g in grads) + 2  # three for the large one
    assert (counters(simt).launches, counters(simt).blocks) == (1, blocks)
    grads[3][0] = math.nan
    both(simt, unscale, [grads, [torch.tensor(1.0), torch.zeros(())]])


@pytest.mark.parametrize(("to", "of"), [(F32, F16), (BF16, F32), (F16, F64), (F64, BF16), (BF16, F16)])
def test_copy_scaled(simt: Kernels, to: torch.dtype, of: torch.dtype) -> None:
    src = many(of, 20, 20_000)
    src[1][0] = math.inf
    dst = [exact(torch.full_like(s, math.nan, dtype=to), i % 3) for i, s in enumerate(src)]

    def copy(kernels: Kernels, lists: list[list[Tensor]]) -> list[Tensor]:
        return [kernels.copy_scaled_(lists[0], lists[1], *lists[2])]

    both(simt, copy, [dst, src, [torch.tensor(0.3), torch.zeros(())]])


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_reconcile(simt: Kernels, dtype: torch.dtype) -> None:
    masters = many(F32, 20, 20_000)
    params = [exact(m.to(dtype), i % 3) for i, m in enumerate(masters)]
    for p in params[::3]:
        p.mul_(2)

    def reconcile(kernels: Kernels, lists: list[list[Tensor]]) -> list[Tensor]:
        kernels.reconcile_masters_(*lists)
        return []

    both(simt, reconcile, [masters, params])
