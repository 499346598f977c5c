"""The host side of the CUDA build, on a machine without a GPU: the compiled extension and torch's own CUDA half run on
the runtime of tests/cuda_stub, which has two devices in host memory, runs no kernel and writes down what it is asked.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import cuda_stub_support as support
import pytest
import torch

from lightning_apex import ops

ROWS = Path(__file__).parent / "cuda_stub" / "host_rows.py"


@pytest.mark.skipif(not ops.has_cuda(), reason="needs an extension built with CUDA")
@pytest.mark.skipif((torch.version.cuda or "").partition(".")[0] != "13", reason="the stub is that of CUDA 13")
def test_all_rows_pass_under_the_stub() -> None:
    include = support.headers()
    if include is None:
        pytest.skip("there are no CUDA headers")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(ROWS)]
    done = subprocess.run(
        command, env=os.environ | {"LD_PRELOAD": str(support.build(include))}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) > 100, done.stdout
