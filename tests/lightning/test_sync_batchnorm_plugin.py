"""The plugin ApexSyncBatchNorm and the names apex_ddp*, in one process."""

import pickle

import pytest
import torch
from helpers import assert_close, batches, fit, trainer, weights
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, StrategyRegistry
from test_sync_batchnorm import CLINet, Normed
from torch import nn

from lightning_apex import ApexSyncBatchNorm, SyncBatchNorm
from lightning_apex.plugins import ApexDDPStrategy
from lightning_apex.plugins.layer_sync import warn_where_ignored

NAMES = ["apex_ddp", "apex_ddp_spawn", "apex_ddp_fork", "apex_ddp_notebook"]


@pytest.mark.parametrize("name", NAMES)
def test_names_are_registered(name):
    start = {"apex_ddp": "popen", "apex_ddp_spawn": "spawn"}.get(name, "fork")
    for ending, expected in (
        ("", None),
        ("_find_unused_parameters_false", False),
        ("_find_unused_parameters_true", True),
    ):
        strategy = StrategyRegistry.get(name + ending)
        assert type(strategy) is ApexDDPStrategy
        assert strategy._start_method == start
        assert strategy._ddp_kwargs.get("find_unused_parameters") is expected
        assert type(strategy._layer_sync) is ApexSyncBatchNorm


def test_names_are_registered_once_more_without_an_error():
    before = {name: dict(entry) for name, entry in StrategyRegistry.items()}
    ApexDDPStrategy.register_strategies(StrategyRegistry)
    assert {name: dict(entry) for name, entry in StrategyRegistry.items()} == before
    assert StrategyRegistry["ddp"]["strategy"] is DDPStrategy


def test_a_layer_sync_of_the_users_own_wins():
    class Own(LayerSync):
        def apply(self, model):
            return model

        revert = apply

    own = Own()
    assert trainer(plugins=[own], strategy="apex_ddp")._accelerator_connector.strategy._layer_sync is own
    ours = ApexSyncBatchNorm(channel_last=True)
    assert trainer(plugins=[ours], strategy="apex_ddp", sync_batchnorm=True).strategy._layer_sync is ours
    assert type(trainer(strategy="apex_ddp", sync_batchnorm=True).strategy._layer_sync) is ApexSyncBatchNorm
    assert ApexDDPStrategy(group_size=2, channel_last=True)._layer_sync.group_size == 2


def test_the_plugin_is_torchs_and_exact_both_ways():
    sync, model = ApexSyncBatchNorm(channel_last=True), Normed()
    assert isinstance(sync, TorchSyncBatchNorm)
    kinds = [type(m) for m in model.modules()]
    assert sync.apply(model) is model
    assert isinstance(model.net[1], SyncBatchNorm) and model.net[1].channel_last
    assert sync.revert(model) is model
    assert [type(m) for m in model.modules()] == kinds
    twin = pickle.loads(pickle.dumps(sync))
    assert twin.channel_last and repr(twin) == repr(sync)


@pytest.mark.parametrize(
    ("kwargs", "said"), [({"group_size": -2}, "group_size=-2"), ({"group_size": 2, "process_group": 1}, "Both")]
)
def test_wrong_arguments_are_named(kwargs, said):
    with pytest.raises(ValueError, match=said):
        ApexSyncBatchNorm(**kwargs)


def test_a_strategy_that_ignores_it_is_warned_of():
    class State:
        fn = "fit"

    class Fitting:
        state, strategy, world_size = State, ModelParallelStrategy(), 2
        _accelerator_connector = type("", (), {"_layer_sync": ApexSyncBatchNorm()})

    with pytest.warns(UserWarning, match="ModelParallelStrategy ignores ApexSyncBatchNorm.*apex_ddp"):
        warn_where_ignored(Fitting)


def test_on_one_device_there_is_nothing_to_synchronise_and_nothing_to_warn_of():
    model = Normed()
    fit(model, "O0", batches(1), plugins=[ApexSyncBatchNorm()])
    assert type(model.net[1]) is nn.BatchNorm1d


def test_one_process_under_apex_ddp_is_plain_batchnorm():
    model, expected = Normed(), Normed()
    fit(expected, "O0", batches(2))
    fit(model, "O0", batches(2), strategy="apex_ddp", use_distributed_sampler=False)
    torch.distributed.destroy_process_group()  # Lightning leaves it
    assert_close(weights(model), weights(expected), atol=1e-5)
    assert type(model.net[1]) is nn.BatchNorm1d


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
@pytest.mark.parametrize("name", ["ApexDDPStrategy", "lightning_apex.plugins.ApexDDPStrategy"])
def test_the_strategy_class_from_the_command_line(name):
    args = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false", f"--trainer.strategy={name}"]
    args += ["--trainer.strategy.group_size=2", "--trainer.strategy.find_unused_parameters=true"]
    made = LightningCLI(CLINet, args=args, save_config_callback=None, run=False)
    assert type(made.trainer.strategy) is ApexDDPStrategy
    assert made.trainer.strategy._layer_sync.group_size == 2
    assert made.trainer.strategy._ddp_kwargs["find_unused_parameters"] is True


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_a_saved_config_reloads(tmp_path, capsys):
    args = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false", "--trainer.strategy=apex_ddp"]
    args += ["--trainer.plugins+=ApexSyncBatchNorm", "--trainer.plugins.channel_last=true"]
    with pytest.raises(SystemExit):
        LightningCLI(CLINet, args=[*args, "--print_config"], save_config_callback=None, run=False)
    (tmp_path / "c.yaml").write_text(capsys.readouterr().out)
    made = LightningCLI(CLINet, args=["--config", str(tmp_path / "c.yaml")], save_config_callback=None, run=False)
    assert made.trainer.strategy._layer_sync.channel_last
