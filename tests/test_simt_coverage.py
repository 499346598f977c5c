"""Every line of csrc/cuda that the SIMT machine compiles is executed by the rows of test_simt_shapes.py."""

from __future__ import annotations

import pytest
import simt_coverage

# Lines that these rows need not execute: (file, text) and why.
EXCEPTIONS = {
    ("batch_norm_ops.cpp", "}"): "the end of project() where its launch throws",
    (
        "ops.cpp",
        "arguments.hypers[0] = call.lr->item<double>();",
    ): "the rate is beside the GPU, and here is one memory",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_line_is_executed(capsys: pytest.CaptureFixture[str]) -> None:
    counts = simt_coverage.measure()
    with capsys.disabled():
        print("\n" + simt_coverage.report(counts))
    kernels = [row for row in simt_coverage.table(counts) if row[1].endswith("_kernel")]
    sources = {k for file in simt_coverage.CUDA.iterdir() for k in simt_coverage.kernels_of(file)}
    assert {kernel for _, kernel, _, _ in kernels} == sources
    assert all(done == all_ > 0 for _, _, done, all_ in kernels)
    assert set(simt_coverage.missed(counts)) == set(EXCEPTIONS)
