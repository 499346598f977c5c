"""Fabric under DDP: two gloo processes on the CPU stay equal, and equal to one process on the whole batch."""

import os
import sys
from pathlib import Path

import pytest
import torch
from fabric_support import assert_close, assert_equal, batches, fabric_with, net, plugin, train, weights
from two_processes import RANKS, run_jobs

from lightning_apex import FusedAdamW

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::DeprecationWarning:multiprocessing")]

OPTIMIZERS = {"fused": FusedAdamW, "torch": torch.optim.AdamW}
CASES = [(level, name) for level in ("O0", "O2", "O4", "O5") for name in OPTIMIZERS]


def one_process(level, name, data, every=1):
    precision, model = plugin(level), net()
    fabric = fabric_with(precision)
    train(fabric, *fabric.setup(model, OPTIMIZERS[name](model.parameters(), lr=0.01)), data, clip=0.5, every=every)
    return weights(model)


def rank_main(rank, level, name, inf_at=-1, every=1):
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import LightningEnvironment

    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(RANKS), "RANK": str(rank)}
    precision = plugin(level)
    environment = LightningEnvironment()
    environment._global_rank, environment._world_size = rank, RANKS
    environment.__class__ = type("Started", (LightningEnvironment,), {"creates_processes_externally": True})
    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp", plugins=[precision, environment])
    fabric.launch()
    model = net(seed=rank * 7)  # DDP gives all ranks the weights of rank 0
    data = [(x[rank::RANKS], y[rank::RANKS]) for x, y in batches(6)]
    if inf_at >= 0 and rank == 1:
        data[inf_at] = (data[inf_at][0], data[inf_at][1] * float("inf"))
    optimizer = OPTIMIZERS[name](model.parameters(), lr=0.01)
    train(fabric, *fabric.setup(model, optimizer), data, clip=0.5, every=every)
    return {"weights": weights(model), "scale": precision.scaler.get_scale(), "skips": precision.scaler.skipped_steps}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    sys.path.insert(0, str(Path(__file__).parent))
    jobs = {f"{level}-{name}": (rank_main, {"level": level, "name": name}) for level, name in CASES}
    jobs["accumulating"] = (rank_main, {"level": "O0", "name": "fused", "every": 3})
    jobs["overflow"] = (rank_main, {"level": "O2", "name": "fused", "inf_at": 2})
    return run_jobs(tmp_path_factory.mktemp("ddp"), jobs)


def both(results, name):
    for result in results[name]:
        assert not isinstance(result, str), result
    return results[name]


@pytest.mark.parametrize(("level", "name"), CASES)
def test_ranks_stay_equal_and_equal_one_process(results, level, name):
    first, second = both(results, f"{level}-{name}")
    assert_equal(first["weights"], second["weights"])
    # half gradients of half a batch each are rounded before they are averaged
    assert_close(first["weights"], one_process(level, name, batches(6)), 1e-5 if level == "O0" else 5e-3)


def test_gradients_accumulate_without_an_exchange(results):
    first, second = both(results, "accumulating")
    assert_equal(first["weights"], second["weights"])
    assert_close(first["weights"], one_process("O0", "fused", batches(6), every=3), 1e-5)


def test_an_overflow_on_one_rank_skips_the_step_on_both(results):
    first, second = both(results, "overflow")
    assert_equal(first["weights"], second["weights"])
    assert first["skips"] == second["skips"] == 1
    assert first["scale"] == second["scale"] == 2.0**15
