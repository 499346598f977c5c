"""FSDP2 under Fabric: two gloo processes equal one, overflows, and files."""

import os
import sys
from pathlib import Path

import pytest
import torch
from fabric_support import assert_close, assert_equal, batches, fabric_with, net, plugin, train
from torch.distributed.tensor import DTensor
from two_processes import RANKS, run_jobs

from lightning_apex import FusedAdamW, OptLevelError

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::DeprecationWarning:multiprocessing")]

OPTIMIZERS = {"fused": FusedAdamW, "torch": torch.optim.AdamW}
CASES = [(level, name) for level in ("O0", "O1", "O4", "O5") for name in OPTIMIZERS]


def whole(state):
    return {name: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for name, v in state.items()}


def made(rank, level, name, full=False, shard=None, seed=0, **options):
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.fabric.strategies import ModelParallelStrategy

    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(RANKS), "RANK": str(rank)}
    precision = plugin(level, **options)

    def spread(module, mesh):
        by = shard or precision.fully_shard
        by(module[0], mesh=mesh["data_parallel"])
        return by(module, mesh=mesh["data_parallel"])

    environment = LightningEnvironment()
    environment._global_rank, environment._world_size = rank, RANKS
    environment.__class__ = type("Started", (LightningEnvironment,), {"creates_processes_externally": True})
    strategy = ModelParallelStrategy(spread, RANKS, 1, save_distributed_checkpoint=not full)
    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=strategy, plugins=[precision, environment])
    fabric.launch()
    model = fabric.setup(net(seed))
    optimizer = fabric.setup_optimizers(OPTIMIZERS[name](model.parameters(), lr=0.01))
    return fabric, precision, {"model": model, "optimizer": optimizer, "amp": precision}


def data_of(rank, count=6):
    return [(x[rank::RANKS], y[rank::RANKS]) for x, y in batches(count)]


def outcome(state):
    precision = state["amp"]
    report = precision.last_overflow
    return {
        "weights": whole(state["model"].state_dict()),
        "dtypes": {p.dtype for p in state["model"].parameters()},
        "scale": precision.scaler.get_scale(),
        "skips": precision.scaler.skipped_steps,
        "overflow": report and report.parameters,
    }


def trained(rank, level, name, inf_at=-1, every=1):
    fabric, _, state = made(rank, level, name)
    data = data_of(rank)
    if inf_at >= 0 and rank == 1:
        data[inf_at] = (data[inf_at][0], data[inf_at][1] * float("inf"))
    train(fabric, state["model"], state["optimizer"], data, clip=0.5, every=every)
    return outcome(state)


def resumed(rank, level, name, folder, full):
    options = {"growth_interval": 2, "full": full}
    fabric, _, state = made(rank, level, name, **options)
    train(fabric, state["model"], state["optimizer"], data_of(rank))
    straight = outcome(state)
    fabric, _, state = made(rank, level, name, **options)
    train(fabric, state["model"], state["optimizer"], data_of(rank)[:3])
    path = Path(folder) / f"{level}{name}{full}"
    fabric.save(path, state)
    fabric.barrier()
    fabric, precision, state = made(rank, level, name, seed=5, **options)
    fabric.load(path, state)
    if not full:  # Fabric hands out what a folder holds beside models and optimizers
        precision.load_state_dict(state["amp"])
        state["amp"] = precision
    train(fabric, state["model"], state["optimizer"], data_of(rank)[3:])
    return straight, outcome(state)


def refused(rank, how):
    if how == "torchs":
        from torch.distributed.fsdp import fully_shard

        fabric, _, state = made(rank, "O5", "fused", shard=fully_shard)
        try:
            state["model"](torch.zeros(2, 8))
        except OptLevelError as error:
            return [str(error)]
    fabric, _, state = made(rank, "O5", "fused")
    old = fabric.setup_optimizers(torch.optim.SGD(net().parameters(), lr=0.1))
    try:
        train(fabric, state["model"], old, data_of(rank)[:1])
    except Exception as error:
        return [str(error)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    sys.path.insert(0, str(Path(__file__).parent))
    jobs = {f"{level}-{name}": (trained, {"level": level, "name": name}) for level, name in CASES}
    for name in OPTIMIZERS:
        jobs[f"accumulating {name}"] = (trained, {"level": "O0", "name": name, "every": 3})
        jobs[f"overflow {name}"] = (trained, {"level": "O2", "name": name, "inf_at": 2})
    for level, name, full in RESUMED:
        options = {"level": level, "name": name, "full": full, "folder": tmp_path_factory.mktemp("files")}
        jobs[f"resumed {level} {name} {full}"] = (resumed, options)
    for how in ("torchs", "old parameters"):
        jobs[how] = (refused, {"how": how})
    return run_jobs(tmp_path_factory.mktemp("fsdp"), jobs)


RESUMED = [("O2", "fused", False), ("O2", "torch", True), ("O5", "fused", True), ("O5", "torch", False)]


def both(results, name):
    for result in results[name]:
        assert not isinstance(result, str), result
    return results[name]


def one_process(level, name, every=1):
    precision, model = plugin(level), net()
    fabric = fabric_with(precision)
    optimizer = OPTIMIZERS[name](model.parameters(), lr=0.01)
    train(fabric, *fabric.setup(model, optimizer), batches(6), clip=0.5, every=every)
    return {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize(("level", "name"), CASES)
def test_processes_stay_equal_and_equal_one_process(results, level, name):
    first, second = both(results, f"{level}-{name}")
    assert_equal(first["weights"], second["weights"])
    assert first["dtypes"] == {torch.float32}
    assert_close(first["weights"], one_process(level, name), 1e-5 if level == "O0" else 5e-3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_accumulate_without_an_exchange(results, name):
    first, second = both(results, f"accumulating {name}")
    assert_equal(first["weights"], second["weights"])
    assert_close(first["weights"], one_process("O0", name, every=3), 1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_overflow_on_one_process_skips_the_step_of_both(results, name):
    first, second = both(results, f"overflow {name}")
    assert_equal(first["weights"], second["weights"])
    assert first["skips"] == second["skips"] == 1
    assert first["scale"] == second["scale"] == 2.0**15
    assert first["overflow"] == second["overflow"] and "0.weight" in first["overflow"]


@pytest.mark.parametrize(("level", "name", "full"), RESUMED)
def test_2n_steps_equal_n_save_load_n(results, level, name, full):
    for straight, rest in both(results, f"resumed {level} {name} {full}"):
        assert_equal(rest["weights"], straight["weights"])
        assert rest["scale"] == straight["scale"] == (2.0**19 if level == "O2" else 1.0)


def test_what_would_train_otherwise_or_not_at_all_is_refused(results):
    for (text,) in both(results, "torchs"):
        assert "'0.weight' would be computed in torch.float32" in text and "plugin.fully_shard" in text
    for (text,) in both(results, "old parameters"):
        assert "SGD holds none of the parameters that fully_shard has put into the model" in text
