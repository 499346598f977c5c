"""Checkpoints of a model that FSDP2 spreads: sharded and whole ones, of any level, read by any number of processes."""

import model_parallel_jobs as jobs
import pytest
import torch
from helpers import assert_same
from ranks import spawn
from torch.distributed.checkpoint import FileSystemReader

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:multiprocessing"),
]

CASES = [
    *((level, full, "fused_adam") for level in ("O0", "O1", "O2", "O5") for full in (False, True)),
    ("O4", False, "fused_adam"),
    ("O2", False, "torch_adamw"),
    ("O5", True, "torch_adamw"),
    ("O5", False, "fused_sgd"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def runs(folder, tmp_path_factory):
    to_do = [
        (
            f"{level} {full} {optimizer}",
            jobs.saved,
            {"level": level, "folder": folder, "full": full, "optimizer": optimizer},
        )
        for level, full, optimizer in CASES
    ]
    for level, into in (("O0", "O5"), ("O2", "O1"), ("O5", "O0")):
        for full in (False, True):
            path = jobs.file_of(folder, level, full, "fused_adam")
            to_do.append((f"{level} {full} into {into}", jobs.loaded, {"level": into, "path": path, "full": full}))
    return spawn(tmp_path_factory.mktemp("two"), to_do)


@pytest.mark.parametrize(("level", "full", "optimizer"), CASES)
def test_2n_steps_equal_n_save_load_n(runs, level, full, optimizer):
    for rank, result in enumerate(runs[f"{level} {full} {optimizer}"]):
        assert_same(result["rest"], result["straight"], f"rank {rank}")
        assert all(value.dtype is torch.float32 for value in result["straight"]["moments"].values())
        if level in ("O1", "O2"):
            assert result["straight"]["scale"]["scale"] == 256.0 * 2**3


def test_files_hold_fp32_weights_and_moments(runs, folder):
    for level, full, optimizer in CASES:
        path = jobs.file_of(folder, level, full, optimizer)
        half = runs[f"{level} {full} {optimizer}"][0]["half"]
        if full:
            file = torch.load(path, weights_only=False)
            assert_same(dict(file["state_dict"]), half["weights"], path)
            assert all(
                v.dtype is torch.float32 for s in file["optimizer_states"][0]["state"].values() for v in s.values()
            )
            continue
        metadata = FileSystemReader(path).read_metadata().state_dict_metadata
        tensors = {name: entry for name, entry in metadata.items() if hasattr(entry, "properties")}
        assert {f"state_dict.{name}" for name in half["weights"]} <= set(tensors)
        assert all(entry.properties.dtype is torch.float32 for entry in tensors.values())


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("level", "into"), [("O0", "O5"), ("O2", "O1"), ("O5", "O0")])
def test_any_level_goes_on_with_what_any_level_saved(runs, level, into, full):
    half = runs[f"{level} {full} fused_adam"][0]["half"]
    first, second = runs[f"{level} {full} into {into}"]
    assert_same(first["state"], second["state"])
    for name, moment in first["state"]["moments"].items():
        if name.endswith("step"):
            assert moment == 2 * jobs.STEPS
        else:  # three steps away
            assert (moment - half["moments"][name]).abs().max() < 0.2, name
    for name, value in first["state"]["weights"].items():
        torch.testing.assert_close(value, half["weights"][name], rtol=0, atol=0.05)
