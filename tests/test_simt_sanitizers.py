"""Our kernels under the sanitizers: nothing is reported, and a fault planted in one of them is.

By hand: python tests/simt_sanitizers.py address|thread
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import simt_sanitizers
from simt import build

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("variant", ["address", "thread"])
def test_nothing_is_reported(variant: str) -> None:
    outcome = simt_sanitizers.run_rows(variant, [])
    assert (outcome.status, outcome.report) == (0, ""), outcome.output[-2000:] + outcome.report
    assert re.search(r"\d\d passed", outcome.output)


class Mutant(NamedTuple):
    """A place in csrc/cuda, what stands there instead, where it is compiled, rows that show it, what is reported."""

    variant: str
    file: str
    old: str
    new: str
    affected: str
    rows: str
    says: str


MUTANTS = {
    "elements past the end": Mutant(
        "address",
        "multi_tensor.h",
        "vectors ? size / N * N : 0;",
        "vectors ? (size + N - 1) / N * N : 0;",
        "elementwise.cu",
        "test_reconcile",
        r"AddressSanitizer: heap-buffer-overflow[\s\S]*device\.h",
    ),
    "alignment is not looked at": Mutant(
        "address",
        "elementwise.cu",
        "is_aligned<kWidth>(master) && is_aligned<kWidth>(param)",
        "true",
        "elementwise.cu",
        "test_reconcile",
        "",  # the machine itself ends the test
    ),
    "no barrier before shared memory is used again": Mutant(
        "thread",
        "reduce.cuh",
        "__syncthreads();  // an earlier call may still be reading of_warps",
        "",
        "batch_norm_sums.cu",
        "test_batch_norm and float32",
        r"ThreadSanitizer: data race[\s\S]*reduce\.cuh",
    ),
    "no barrier before rows are joined": Mutant(
        "thread",
        "batch_norm_sums.cu",
        "    __syncthreads();\n    if (row < half)",
        "    if (row < half)",
        "batch_norm_sums.cu",
        "test_batch_norm and float32",
        r"ThreadSanitizer: data race[\s\S]*batch_norm_sums\.cu",
    ),
    "arrivals are counted without an atomic": Mutant(
        "thread",
        "device.h",
        "const bool last = atomicInc(arrivals, count - 1) == count - 1;",
        "const bool last = *arrivals == count - 1; *arrivals = last ? 0 : *arrivals + 1;",
        "measure.cu",
        "test_tensor_norms and float32",
        r"ThreadSanitizer: data race[\s\S]*(device\.h|reduce\.cuh)",
    ),
    "blocks share their partial sums": Mutant(
        "thread",
        "measure.cu",
        "if (threadIdx.x == 0) partials[blockIdx.x] = sum;",
        "if (threadIdx.x == 0) partials[blockIdx.x / 2] = sum;",
        "measure.cu",
        "test_measure",
        r"ThreadSanitizer: data race[\s\S]*measure\.cu",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_reported(name: str, tmp_path: Path) -> None:
    mutant = MUTANTS[name]
    variant = build.VARIANTS[mutant.variant]
    library = build.build_mutant(tmp_path, mutant.file, mutant.old, mutant.new, [mutant.affected], variant)
    outcome = simt_sanitizers.run_rows(mutant.variant, ["-k", f"64x1024-random and {mutant.rows}"], library)
    assert outcome.status != 0, outcome.output
    assert re.search(mutant.says, outcome.report), outcome.output[-2000:] + outcome.report
