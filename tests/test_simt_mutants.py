"""Kernels with one thing wrong, to see that the tests of the kernels notice. Each is compiled and tested apart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
STEPS, LARGE = "fused_step_norms_f64.cu", "test_simt_large.py"


@dataclass
class Mutant:
    """A place, what stands there instead, and the tests that must fail; or crash, where memory is out of reach."""

    file: str
    old: str
    new: str
    tests: str = "float64 and (lamb or novograd)"
    affected: str = STEPS
    of: str = "test_simt_steps.py"


MUTANTS = {
    "nothing": Mutant("reduce.cuh", "if (threadIdx.x != 0) return;", "if (threadIdx.x != 0) return;"),
    "no barrier before warps are added up": Mutant(
        "reduce.cuh", "of_warps[warp] = value;\n  __syncthreads();", "of_warps[warp] = value;"
    ),
    "no barrier before shared memory is used again": Mutant(
        "reduce.cuh", "__syncthreads();  // an earlier call may still be reading of_warps", ""
    ),
    "no barrier before the constants are read": Mutant(
        "fused_step.cuh",
        "begin_update<Case>(table, chunk, arguments);\n  __syncthreads();",
        "begin_update<Case>(table, chunk, arguments);",
    ),
    "no fence before an arrival": Mutant("device.h", "__threadfence();\n  const bool last", "const bool last"),
    "no fence after an arrival": Mutant("device.h", "__threadfence();\n  return last;", "return last;"),
    "the first block finishes": Mutant(
        "reduce.cuh", "last = arrives_last(arrivals, uint32_t(chunk.of));", "last = chunk.index == 0;"
    ),
    "arrivals do not return to 0": Mutant("device.h", "atomicInc(arrivals, count - 1)", "atomicInc(arrivals, count)"),
    "the first block counts up the step": Mutant(
        "fused_step.cuh",
        "if (chunk.of == 1 || arrives_last(table.arrivals + chunk.tensor, uint32_t(chunk.of))) {",
        "if (chunk.index == 0) {",
    ),
    "an overflow is not looked at by the first pass": Mutant(
        "fused_norms.cuh", "if (is_skipped(arguments)) {", "if (false) {", "overflow and lamb"
    ),
    "an overflow is not looked at by the second pass": Mutant(
        "fused_step.cuh", "if (is_skipped(arguments)) return;", "", "overflow and novograd"
    ),
    "lists are told apart by their length alone": Mutant(
        "tables.cpp",
        "std::memcmp(content.data(), t.entries, content.size()) == 0",
        "true",
        "many_tensors and sgd",
        "tables.cpp",
    ),
    "alignment is not looked at": Mutant("fused_step.cuh", "elements.aligned()", "true"),
    "all tensors share the first partial sums": Mutant(
        "fused_norms.cuh", "int64_t(int(blockIdx.x) - chunk.index)", "int64_t(0)"
    ),
    "a chunk's index of 32 bits": Mutant(
        "multi_tensor.h", "int64_t(index) * chunk_size", "index * chunk_size", "copies", "elementwise.cu", LARGE
    ),
    "a step's index of 32 bits": Mutant(
        "multi_tensor.h", "int64_t(index) * chunk_size", "index * chunk_size", "adam", "fused_step_f16.cu", LARGE
    ),
    "a plane's index of 32 bits": Mutant(
        "batch_norm.cuh",
        "body((plane * split.shape.channels + channel) * split.shape.spatial",
        "body(int((plane * split.shape.channels + channel) * split.shape.spatial)",
        "batch_norm and planes",
        "batch_norm_elements.cu",
        LARGE,
    ),
    "an index of 32 bits in a plane": Mutant(
        "batch_norm.cuh",
        "for (int64_t u = first + threadIdx.x;",
        "for (int u = int(first + threadIdx.x);",
        "batch_norm and one",
        "batch_norm_elements.cu",
        LARGE,
    ),
    "a row's index of 32 bits": Mutant(
        "batch_norm.cuh",
        "body(r * split.shape.channels",
        "body(int(r * split.shape.channels)",
        "batch_norm and rows",
        "batch_norm_elements.cu",
        LARGE,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_noticed(name: str, simt_build: Any, tmp_path: Path) -> None:
    mutant = MUTANTS[name]
    library = simt_build.build_mutant(tmp_path, mutant.file, mutant.old, mutant.new, [mutant.affected])
    run = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/{mutant.of}"]
    done = subprocess.run(
        [*run, "-k", mutant.tests], env=os.environ | {"SIMT_LIBRARY": str(library)}, capture_output=True, text=True
    )
    expected = (0,) if name == "nothing" else (1, -signal.SIGSEGV)
    assert done.returncode in expected, done.stdout + done.stderr
