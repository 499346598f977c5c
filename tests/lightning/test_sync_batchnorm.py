"""ApexSyncBatchNorm and the apex_ddp strategies in two gloo processes: statistics of the whole batch at every level."""

import pytest
import torch
from helpers import LEVELS, Net, all_fp32, assert_close, batches, fit, plugin, trainer, weights
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from ranks import spawn
from test_ddp import shard
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_apex import ApexSyncBatchNorm

RANKS = 2


class Normed(Net):
    """BatchNorm of two kinds, one of them the user's own, and a parameter that no loss reaches where asked for."""

    def __init__(self, unused=False):
        super().__init__("fused_sgd")
        self.net[2] = nn.Sequential(Scaled(16), nn.ReLU())
        self.spare = nn.Linear(2, 2) if unused else None


class Scaled(nn.BatchNorm1d):
    def forward(self, input):
        return super().forward(input) * 1.5


def norms(model):
    return {type(m).__name__ for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}


class Classes(Callback):
    """The classes of the BatchNorm modules while training and testing."""

    def __init__(self):
        self.seen, self.tested, self.validated = set(), set(), 0

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.seen |= norms(pl_module)

    def on_test_batch_end(self, trainer, pl_module, *_):
        self.tested |= norms(pl_module)

    def on_validation_batch_end(self, *_):
        self.validated += 1


def train(rank, level="O0", layer_sync=None, strategy="apex_ddp", count=4, validate=False, model=None, **kwargs):
    model = Normed(**(model or {}))
    kinds = [type(m) for m in model.modules()]
    tensors = {name: id(t) for name, t in model.state_dict(keep_vars=True).items()}
    classes = Classes()
    made = trainer(
        plugin(level),
        devices=RANKS,
        strategy=strategy() if callable(strategy) else strategy,
        plugins=[] if layer_sync is None else [layer_sync],
        callbacks=[classes],
        use_distributed_sampler=False,
        **kwargs,
    )
    loaders = [shard(rank, count), *([shard(rank, 2)] if validate else [])]
    made.fit(model, *loaders)
    after = [type(m) for m in model.modules()]
    result = {"end": weights(model), "fp32": all_fp32(model), "seen": classes.seen, "validated": classes.validated}
    result |= {"same_classes": after == kinds, "losses": model.losses}
    result["same_tensors"] = tensors == {name: id(t) for name, t in model.state_dict(keep_vars=True).items()}
    made.test(model, shard(rank, 1), verbose=False)
    return result | {"tested": classes.tested}


def resumes(rank, folder):
    """2 epochs, save, 2 more in a new trainer; the file holds BatchNorm's keys."""
    path = f"{folder}/last.ckpt"
    model = Normed()
    made = trainer("O5", epochs=1, devices=RANKS, strategy="apex_ddp", use_distributed_sampler=False)
    made.fit(model, shard(rank, 3))
    made.save_checkpoint(path)
    again = Normed()
    made = trainer("O5", epochs=2, devices=RANKS, strategy="apex_ddp", use_distributed_sampler=False)
    made.fit(again, shard(rank, 3), ckpt_path=path)
    straight = Normed()
    made = trainer("O5", epochs=2, devices=RANKS, strategy="apex_ddp", use_distributed_sampler=False)
    made.fit(straight, shard(rank, 3))
    return {"keys": sorted(torch.load(path)["state_dict"]), "resumed": weights(again), "straight": weights(straight)}


def from_the_command_line(rank):
    from lightning.pytorch.cli import LightningCLI

    args = ["fit", "--trainer.strategy=apex_ddp", f"--trainer.devices={RANKS}", "--trainer.accelerator=cpu"]
    args += ["--trainer.max_epochs=1", "--trainer.logger=false", "--trainer.enable_checkpointing=false"]
    args += ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    args += ["--trainer.plugins+=ApexSyncBatchNorm", "--trainer.plugins.group_size=1"]
    args += ["--trainer.plugins+=ApexPrecision", "--trainer.plugins.opt_level=O5"]
    made = LightningCLI(CLINet, args=args, save_config_callback=None)
    strategy = made.trainer.strategy
    return type(strategy).__name__, strategy._layer_sync.group_size, made.trainer.global_step


class CLINet(Normed):
    def __init__(self, width: int = 16):
        super().__init__()
        self.make_optimizer = None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return batches(4)


def fails(rank):
    """An exception in the middle of a fit: the user's classes come back all the same."""
    model = Failing()
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer("O2", devices=RANKS, strategy="apex_ddp", use_distributed_sampler=False).fit(model, shard(rank, 2))
    return norms(model)


class Failing(Normed):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        raise RuntimeError("on purpose")


def unsynced(rank):
    return train(rank, strategy=gloo)


def gloo(**kwargs):
    return DDPStrategy(process_group_backend="gloo", **kwargs)


CASES = {
    **{level: {"level": level} for level in LEVELS},
    "O2_accumulate": {"level": "O2", "accumulate_grad_batches": 2},
    "O0_accumulate": {"accumulate_grad_batches": 2},
    "O0_validate": {"validate": True},
    "O5_validate": {"level": "O5", "validate": True},
    "plugin": {"layer_sync": ApexSyncBatchNorm(), "strategy": gloo},
    "plugin_and_flag": {"layer_sync": ApexSyncBatchNorm(), "strategy": gloo, "sync_batchnorm": True},
    "flag": {"sync_batchnorm": True},
    "unused": {"strategy": "apex_ddp_find_unused_parameters_true", "model": {"unused": True}},
}
OTHERS = {"unsynced": (unsynced, {}), "cli": (from_the_command_line, {}), "fails": (fails, {})}
OTHERS["groups_of_one"] = (train, {"layer_sync": ApexSyncBatchNorm(group_size=1), "strategy": gloo})


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sync")
    jobs = [(name, train, kwargs) for name, kwargs in CASES.items()]
    jobs += [(name, function, kwargs) for name, (function, kwargs) in OTHERS.items()]
    return spawn(folder, [*jobs, ("resumes", resumes, {"folder": str(folder)})])


def on_two_ranks(test):
    """Marks a test of what two processes did."""
    quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning:multiprocessing")
    return pytest.mark.distributed(quiet(test))


def whole(level="O0", model=None, **kwargs):
    """One process with plain BatchNorm on the whole batches."""
    reference = Normed(**(model or {}))
    x, y = batches(4, 8).dataset.tensors
    kwargs = {k: v for k, v in kwargs.items() if k == "accumulate_grad_batches"}
    fit(reference, plugin(level), DataLoader(TensorDataset(x, y), 8), **kwargs)
    return reference


@on_two_ranks
@pytest.mark.parametrize("name", list(CASES))
def test_equals_one_process_on_the_whole_batch(runs, name):
    first, second = runs[name]
    level = CASES[name].get("level", "O0")
    expected = weights(whole(**CASES[name]))
    for key in expected:
        assert torch.equal(first["end"][key], second["end"][key]), f"{key} differs between ranks"
    assert_close(first["end"], expected, atol=2e-5 if level == "O0" else 5e-2)
    for result in runs[name]:
        assert result["seen"] == {"SyncBatchNorm", "SyncScaled"}
        assert result["tested"] == {"BatchNorm1d", "Scaled"}
        assert result["same_classes"] and result["same_tensors"] and result["fp32"]
        assert result["validated"] == (4 if "validate" in name else 0)  # the sanity check's, too
    assert first["losses"] != second["losses"]


@on_two_ranks
@pytest.mark.parametrize("name", ["unsynced", "groups_of_one"])
def test_without_synchronisation_the_result_is_another(runs, name):
    first, _ = runs[name]
    expected = weights(whole())
    assert (first["end"]["net.1.running_var"] - expected["net.1.running_var"]).abs().max() > 1e-2
    assert first["same_classes"]


@on_two_ranks
def test_checkpoints_have_batchnorms_keys_and_resume_bit_for_bit(runs):
    for result in runs["resumes"]:
        assert result["keys"] == sorted(Normed().state_dict())
        for key, value in result["straight"].items():
            assert torch.equal(result["resumed"][key], value), key
    Normed().load_state_dict(runs["resumes"][0]["resumed"], strict=True)


@on_two_ranks
def test_from_the_command_line(runs):
    assert runs["cli"] == [("ApexDDPStrategy", 1, 2)] * 2


@on_two_ranks
def test_an_exception_brings_the_users_classes_back(runs):
    assert runs["fails"] == [{"BatchNorm1d", "Scaled"}] * 2
