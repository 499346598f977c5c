"""What the SIMT machine notices, by kinds of fault: a kernel of simt/faults.cu that has it, who notices, what it says.

The machine alone notices in every test that runs on it. A sanitizer takes a run of its own: test_simt_sanitizers.py.
Faults in our own kernels, planted one by one: test_simt_mutants.py.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import simt_sanitizers
import torch
from kernels import Kernels
from test_simt_mutants import MUTANTS

FAULTS_CU = Path(__file__).parent / "simt" / "faults.cu"
PAST = "a write past the end of the shared array of 256 bytes"
HERE = r"faults\.cu:\d+"  # a line that ends in `// here`
RACE = rf"ThreadSanitizer: data race[\s\S]*{HERE}"


class Row(NamedTuple):
    """One planted fault."""

    kind: str
    kernel: str
    says: str  # a regular expression; "": the result is not a number
    noticed_by: str = "machine"


TABLE = [
    Row("out-of-bounds read", "read_past_tensor", rf"heap-buffer-overflow[\s\S]*READ of[\s\S]*{HERE}", "address"),
    Row("out-of-bounds read", "read_past_shared", rf"use-after-poison[\s\S]*READ of[\s\S]*{HERE}", "address"),
    Row("out-of-bounds write", "write_past_tensor", rf"heap-buffer-overflow[\s\S]*WRITE of[\s\S]*{HERE}", "address"),
    Row(
        "out-of-bounds write",
        "past_the_end",
        rf"a write past the end of the shared array of 256 bytes declared at {HERE}",
    ),
    Row("out-of-bounds write", "before_the_start", rf"a write before the shared array of 256 bytes declared at {HERE}"),
    Row("out-of-bounds write", "past_dynamic", PAST),
    Row("misaligned vector access", "misaligned_load", rf"misaligned vector access of 16 bytes at {HERE} by thread"),
    Row("misaligned vector access", "misaligned_store", rf"misaligned vector access of 8 bytes at {HERE} by thread"),
    Row("misaligned vector access", "misaligned_cast", rf"{HERE}:\d+: runtime error: .* misaligned address", "address"),
    Row("data race", "no_barrier_between", RACE, "thread"),
    Row("data race", "no_barrier_before_reuse", RACE, "thread"),
    Row("data race", "no_syncwarp", RACE, "thread"),
    Row("data race", "blocks_share_an_element", RACE, "thread"),
    Row("data race", "reads_a_neighbour", RACE, "thread"),
    Row("data race", "plain_counter", RACE, "thread"),
    Row("missing fence", "no_fence_before", rf"no fence before the arrival of thread \(0,0,0\) of block .* at {HERE}"),
    Row("missing fence", "no_fence_after", rf"no fence after the arrival of thread \(0,0,0\) of block .* at {HERE}"),
    Row("missing barrier", "missing_barrier", ""),
    Row("divergent barrier", "divergent_barrier", rf"divergent barrier: thread .* is at {HERE}, thread .* at {HERE}"),
    Row("divergent barrier", "early_return", rf"1 of 64 threads have returned, 63 wait for a block barrier at {HERE}"),
    Row(
        "divergent barrier",
        "barrier_or_warp",
        rf"48 wait for a block barrier at {HERE} .*16 wait for their warp at {HERE}",
    ),
    Row(
        "divergent shuffle",
        "divergent_shuffle",
        rf"divergent warp collective at {HERE}: thread .* is here, thread .* at {HERE}",
    ),
    Row("divergent shuffle", "partial_mask", rf"warp collective at {HERE}: thread .* names a partial mask"),
    Row("divergent shuffle", "exited_lane", rf"warp collective at {HERE}: thread \(33,0,0\) .* has returned"),
    Row("divergent shuffle", "partial_warp", rf"warp collective at {HERE}: the block is no whole number of warps"),
    Row("uninitialised shared memory", "uninitialised_shared", ""),
    Row("launch limits", "empty_grid", r"a grid of \(0,1,1\) blocks"),
    Row("launch limits", "grid_too_large", r"a grid of \(1,65536,1\) blocks"),
    Row("launch limits", "block_too_large", r"a block of \(2048,1,1\) threads"),
    Row("launch limits", "no_dynamic", rf"dynamic shared memory is used at {HERE}, but the launch asked for none"),
    Row("launch limits", "dynamic_too_large", r"1048576 bytes of shared memory"),
    Row("launch limits", "static_too_large", rf"more than 48 KB of static shared memory at {HERE}"),
    Row("launch limits", "too_many_parameters", r"4104 bytes of kernel parameters"),
    Row("index of 32 bits", "index_overflow", rf"{HERE}:\d+: runtime error: signed integer overflow", "address"),
]
# Faults that are planted in our own kernels, by test_simt_mutants.py: kind -> mutants.
IN_OUR_KERNELS = {
    "a write by a skipped step": [
        "an overflow is not looked at by the first pass",
        "an overflow is not looked at by the second pass",
    ],
    "index of 32 bits": [name for name in MUTANTS if "32 bits" in name],
    "missing barrier": [name for name in MUTANTS if name.startswith("no barrier")],
    "missing fence": [name for name in MUTANTS if name.startswith("no fence")],
}
BY_MACHINE = [row for row in TABLE if row.noticed_by == "machine"]
BY_SANITIZER = [row for row in TABLE if row.noticed_by != "machine"]


def marked_lines(kernel: str) -> set[int]:
    """The lines of a kernel that end in `// here`."""
    lines, marked, inside = FAULTS_CU.read_text().splitlines(), set(), False
    for number, line in enumerate(lines, start=1):
        inside = f"__global__ void {kernel}(" in line or (inside and line != "}")
        if inside and line.endswith("// here"):
            marked.add(number)
    return marked


@pytest.mark.parametrize("row", BY_MACHINE, ids=lambda row: row.kernel)
def test_the_machine_notices(simt: Kernels, row: Row) -> None:
    if not row.says:
        assert math.isnan(simt.namespace.fault(row.kernel))
        return
    with pytest.raises(RuntimeError, match=r"^simt: ") as caught:
        simt.namespace.fault(row.kernel)
    message = str(caught.value).splitlines()[0]
    assert re.search(row.says, message), message
    places = re.findall(r"faults\.cu:(\d+)", message.split("launched at")[0])
    named = [int(line) for line in places if int(line) in marked_lines(row.kernel)]
    assert len(named) == row.says.count(HERE)


@pytest.mark.slow
@pytest.mark.parametrize("row", BY_SANITIZER, ids=lambda row: row.kernel)
def test_a_sanitizer_notices(row: Row) -> None:
    assert row.noticed_by != "machine"
    outcome = simt_sanitizers.run_fault(row.noticed_by, row.kernel)
    assert outcome.status != 0, outcome.output
    assert re.search(row.says, outcome.report), outcome.output + outcome.report
    assert marked_lines(row.kernel) & {int(line) for line in re.findall(r"faults\.cu:(\d+)", outcome.report)}


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["plain", "address", "thread"])
def test_what_is_right_is_not_reported(variant: str) -> None:
    outcome = simt_sanitizers.run_fault(variant, "no_fault")
    assert (outcome.status, outcome.report) == (0, ""), outcome.report
    assert outcome.output == "no_fault: returned 3\n"


def test_what_takes_a_sanitizer_is_not_noticed_without(simt: Kernels) -> None:
    """Otherwise the sanitizers' rows would show nothing of the sanitizers."""
    for row in BY_SANITIZER:
        if "past" not in row.kernel:  # these would harm the process
            simt.namespace.fault(row.kernel)


def test_every_fault_is_in_the_table(simt: Kernels) -> None:
    assert all(len(names) > 1 and set(names) <= set(MUTANTS) for names in IN_OUR_KERNELS.values())
    assert sorted(simt.namespace.fault_names()) == sorted([*(row.kernel for row in TABLE), "no_fault"])


def test_the_machine_survives_a_fault(simt: Kernels) -> None:
    with pytest.raises(RuntimeError, match="stuck in block"):
        simt.namespace.fault("early_return")
    assert simt.measure_gradients([torch.ones(100)])[0].item() == 100
