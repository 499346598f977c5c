"""pytorch_lightning's LightningCLI and lightning_fabric's Fabric take the plugins as those of lightning do."""

import lightning.fabric
import lightning_fabric
import pytest
import torch
import yaml
from pl_support import LEVELS, OldNet, assert_same, batches, plugin, weights
from pytorch_lightning import LightningDataModule, LightningModule
from pytorch_lightning.cli import LightningCLI

import lightning_apex.fabric
import lightning_apex.pl
import lightning_apex.pl.fabric
from lightning_apex import FusedAdam

pytest.importorskip("jsonargparse")
pytestmark = [
    pytest.mark.filterwarnings("ignore:LightningCLI's args parameter is intended to run from within Python"),
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
]
QUIET = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.max_epochs=1", "--trainer.logger=false"]
QUIET += ["--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false"]
QUIET += ["--trainer.enable_model_summary=false"]


class CLINet(OldNet):
    def __init__(self, lr: float = 0.05):
        super().__init__(lr, FusedAdam)


class Bare(OldNet):
    """Its configure_optimizers is the CLI's to add."""

    configure_optimizers = LightningModule.configure_optimizers

    def __init__(self):
        super().__init__()


class Data(LightningDataModule):
    def train_dataloader(self):
        return batches()


def cli(*words, model=CLINet):
    return LightningCLI(model, Data, args=["fit", *QUIET, *words], save_config_callback=None)


@pytest.mark.parametrize("name", ["lightning_apex.pl.ApexPrecision", "ApexPrecision"])
def test_plugin_by_class_path_and_short_name(name):
    made = cli(f"--trainer.plugins+={name}", "--trainer.plugins.opt_level=O2", "--trainer.plugins.half_dtype=bfloat16")
    assert type(made.trainer.precision_plugin) is lightning_apex.pl.ApexPrecision
    assert made.trainer.precision_plugin.level.name == "O2"
    assert len(made.model.losses) == 4


def test_yaml(tmp_path):
    init = {"opt_level": "O5", "loss_scale": "dynamic", "keep_fp32": ["net.0"]}
    config = {
        "trainer": {
            "plugins": [
                {"class_path": "lightning_apex.pl.ApexSyncBatchNorm"},
                {"class_path": "lightning_apex.pl.ApexPrecision", "init_args": init},
            ],
            "callbacks": [{"class_path": "lightning_apex.pl.LossScaleMonitor", "init_args": {"prog_bar": False}}],
        },
        "optimizer": {"class_path": "lightning_apex.FusedAdam", "init_args": {"lr": 0.02}},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    made = cli("--config", "c.yaml", model=Bare)
    assert made.trainer.precision_plugin.keep_fp32 == ("net.0",)
    assert made.trainer.callback_metrics["loss_scale"] == 2.0**16
    assert type(made.trainer.optimizers[0]) is FusedAdam
    assert made.trainer.optimizers[0].param_groups[0]["lr"] == 0.02


@pytest.mark.parametrize("strategy", ["apex_ddp", "lightning_apex.pl.ApexDDPStrategy"])
def test_strategy(strategy):
    words = [f"--trainer.strategy={strategy}"]
    if strategy != "apex_ddp":
        words += ["--trainer.strategy.channel_last=false", "--trainer.strategy.find_unused_parameters=true"]
    parsed = LightningCLI(CLINet, Data, args=[*QUIET, *words], save_config_callback=None, run=False)
    assert type(parsed.trainer.strategy) is lightning_apex.pl.ApexDDPStrategy
    assert parsed.trainer.strategy._ddp_kwargs.get("find_unused_parameters", False) is (strategy != "apex_ddp")


def test_the_other_packages_plugin_is_refused_with_a_name(capsys):
    with pytest.raises(SystemExit):
        cli("--trainer.plugins+=lightning_apex.ApexPrecision")
    assert "lightning_apex.ApexPrecision" in capsys.readouterr().err


def test_help_has_types_defaults_and_texts(capsys):
    with pytest.raises(SystemExit) as ended:
        LightningCLI(CLINet, Data, args=["fit", "--trainer.plugins.help=lightning_apex.pl.ApexPrecision"])
    assert not ended.value.code
    words = " ".join(capsys.readouterr().out.split())
    assert "Steps without overflow before the scale grows. (type: int, default: 2000)" in words


FABRICS = {
    "lightning": (lightning.fabric.Fabric, lightning_apex.fabric),
    "pytorch_lightning": (lightning_fabric.Fabric, lightning_apex.pl.fabric),
}


@pytest.mark.parametrize("level", LEVELS)
def test_fabric_of_both_packages_trains_alike(level):
    ends = []
    for fabric_of, ours in FABRICS.values():
        model = OldNet().net
        fabric = fabric_of(accelerator="cpu", devices=1, plugins=[plugin(ours, level)])
        before = weights(model)
        wrapped, optimizer = fabric.setup(model, FusedAdam(model.parameters(), lr=0.01))
        for x, y in batches():
            fabric.backward(torch.nn.functional.mse_loss(wrapped(x), y))
            fabric.clip_gradients(wrapped, optimizer, max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()
        assert not torch.equal(before["0.weight"], weights(model)["0.weight"])
        ends.append(weights(model))
    assert_same(*ends)
