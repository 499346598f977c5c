"""SyncBatchNorm beside what else changes or copies a model: weight averaging, the compiler, manual optimization."""

import warnings

import pytest
import torch
from helpers import Net, all_fp32, plugin, trainer, weights
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from ranks import spawn
from test_ddp import shard
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::DeprecationWarning:multiprocessing")]


class Sgd(Net):
    def __init__(self):
        super().__init__("fused_sgd")


class Manual(Sgd):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Recomputing(Sgd):
    def forward(self, x):
        return checkpoint(self.net, x, use_reentrant=False)


class Frozen(Sgd):
    """Its BatchNorm is in evaluation mode, with frozen weights: Lightning keeps the modes it finds."""

    def __init__(self):
        super().__init__()
        self.net[1].eval().requires_grad_(False)


def run(rank, level, kind="Sgd", callback=None, epochs=1, compiled=False):
    warnings.simplefilter("ignore")
    model = {"Sgd": Sgd, "Manual": Manual, "Recomputing": Recomputing, "Frozen": Frozen}[kind]()
    callbacks = {
        "swa": lambda: StochasticWeightAveraging(0.05, 0.5, 1),
        "ema": lambda: EMAWeightAveraging(decay=0.5),
        None: lambda: None,
    }[callback]()
    if compiled:
        model.compile(backend="aot_eager")
    made = trainer(
        plugin(level),
        epochs,
        devices=2,
        strategy="apex_ddp",
        use_distributed_sampler=False,
        callbacks=[] if callbacks is None else [callbacks],
    )
    made.fit(model, shard(rank, 4), shard(rank, 1))
    return {"end": weights(model), "kind": type(model.net[1]), "fp32": all_fp32(model), "losses": model.losses}


CASES = {
    "swa": {"level": "O0", "callback": "swa", "epochs": 3},
    "swa_O5": {"level": "O5", "callback": "swa", "epochs": 3},
    "ema": {"level": "O0", "callback": "ema"},
    "ema_O5": {"level": "O5", "callback": "ema"},
    "compiled": {"level": "O0", "compiled": True},
    "compiled_O5": {"level": "O5", "compiled": True},
    "manual": {"level": "O2", "kind": "Manual"},
    "recomputing": {"level": "O0", "kind": "Recomputing"},
    "recomputing_O5": {"level": "O5", "kind": "Recomputing"},
    "frozen": {"level": "O5", "kind": "Frozen"},
    "plain": {"level": "O0"},
    "plain_O5": {"level": "O5"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return spawn(tmp_path_factory.mktemp("beside"), [(name, run, kwargs) for name, kwargs in CASES.items()])


@pytest.mark.parametrize("name", list(CASES))
def test_ranks_agree_and_the_users_classes_come_back(runs, name):
    first, second = runs[name]
    for key, value in first["end"].items():
        assert torch.equal(value, second["end"][key]), key
    for result in runs[name]:
        assert result["kind"] is nn.BatchNorm1d and result["fp32"]
    assert first["losses"] != second["losses"]


@pytest.mark.parametrize(("name", "plain"), [("compiled", "plain"), ("compiled_O5", "plain_O5")])
def test_compiled_as_not_compiled(runs, name, plain):
    for key, value in runs[plain][0]["end"].items():
        # The compiler keeps intermediate results of half operations in fp32.
        atol = 1e-5 if name == "compiled" else 3e-2
        torch.testing.assert_close(runs[name][0]["end"][key], value, atol=atol, rtol=0, msg=key)


@pytest.mark.parametrize(("name", "plain"), [("recomputing", "plain"), ("recomputing_O5", "plain_O5")])
def test_recomputed_activations_change_the_statistics_only(runs, name, plain):
    """As with torch's BatchNorm, a recomputed layer has seen each batch twice."""
    for key, value in runs[plain][0]["end"].items():
        if "num_batches" in key:
            assert runs[name][0]["end"][key] == 2 * value
        elif "running" not in key:
            torch.testing.assert_close(runs[name][0]["end"][key], value, atol=1e-6, rtol=0, msg=key)


def test_a_frozen_layer_stays(runs):
    end, start = runs["frozen"][0]["end"], Sgd().state_dict()
    for key in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(end[f"net.1.{key}"], start[f"net.1.{key}"]), key
    assert not torch.equal(end["net.0.weight"], start["net.0.weight"])
