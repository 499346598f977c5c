"""The stock LightningCLI: plugin and optimizers from arguments and YAML."""

import pytest
import torch
import yaml
from helpers import Net, all_fp32, batches
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import nn

from lightning_apex import ApexPrecision, FusedAdam, FusedSGD, LossScaleMonitor

pytest.importorskip("jsonargparse")
pytestmark = [
    pytest.mark.filterwarnings("ignore:LightningCLI's args parameter is intended to run from within Python"),
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),  # Lightning's calls
]


class CLINet(Net):
    def __init__(self, width: int = 16):
        super().__init__(width=width)
        self.make_optimizer = None  # the CLI's

    def configure_optimizers(self):
        return FusedAdam(self.parameters(), lr=1e-2)


class Bare(LightningModule):
    """Its configure_optimizers is the CLI's to add."""

    def __init__(self, width: int = 16):
        super().__init__()
        inner = Net(width=width)
        self.net, self.losses = inner.net, []

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss


QUIET = [
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.max_epochs=1",
    "--trainer.logger=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
]
O2 = ["--trainer.plugins+=lightning_apex.ApexPrecision", "--trainer.plugins.init_args.opt_level=O2"]
BF16 = ["--trainer.plugins.init_args.half_dtype=bfloat16"]


class Data(LightningDataModule):
    def train_dataloader(self):
        return batches(3)


def cli(*args, model=CLINet, **kwargs):
    return LightningCLI(model, Data, args=["fit", *QUIET, *args], save_config_callback=None, **kwargs)


def plugin_of(made):
    assert isinstance(made.trainer.precision_plugin, ApexPrecision)
    return made.trainer.precision_plugin


@pytest.mark.parametrize("name", ["lightning_apex.ApexPrecision", "ApexPrecision"])
def test_plugin_by_class_path_and_short_name(name):
    made = cli(f"--trainer.plugins+={name}", "--trainer.plugins.init_args.opt_level=O2", *BF16)
    assert plugin_of(made).level.name == "O2"
    assert all_fp32(made.model)
    assert len(made.model.losses) == 3


def test_every_argument_from_the_command_line():
    made = cli(
        "--trainer.plugins+=ApexPrecision",
        "--trainer.plugins.opt_level=O2",
        "--trainer.plugins.half_dtype=bfloat16",
        "--trainer.plugins.keep_batchnorm_fp32=false",
        "--trainer.plugins.master_weights=true",
        "--trainer.plugins.loss_scale=dynamic",
        "--trainer.plugins.init_scale=64",
        "--trainer.plugins.growth_factor=4.0",
        "--trainer.plugins.backoff_factor=0.25",
        "--trainer.plugins.growth_interval=2",
        "--trainer.plugins.hysteresis=2",
        "--trainer.plugins.min_loss_scale=0.5",
        "--trainer.plugins.max_loss_scale=128.0",
        "--trainer.plugins.keep_fp32=[net.3]",
        "--trainer.plugins.max_consecutive_skips=7",
    )
    plugin = plugin_of(made)
    assert plugin.keep_fp32 == ("net.3",)
    assert plugin.level.keep_batchnorm_fp32 is False
    assert plugin.scaler.max_consecutive_skips == 7
    assert plugin.scaler.get_scale() == 128.0  # grew once, to the ceiling


@pytest.mark.parametrize("value", ["128", "128.0", "dynamic"])
def test_loss_scale_is_a_number_or_dynamic(value):
    made = cli(
        "--trainer.plugins+=ApexPrecision", "--trainer.plugins.opt_level=O5", f"--trainer.plugins.loss_scale={value}"
    )
    assert plugin_of(made).level.loss_scale == ("dynamic" if value == "dynamic" else 128.0)


def test_yaml(tmp_path):
    config = {
        "trainer": {
            "plugins": [
                {
                    "class_path": "lightning_apex.ApexPrecision",
                    "init_args": {"opt_level": "O2", "half_dtype": "bfloat16", "keep_fp32": ["net.3"]},
                }
            ],
            "callbacks": [{"class_path": "lightning_apex.LossScaleMonitor", "init_args": {"prog_bar": False}}],
        },
        "optimizer": {"class_path": "lightning_apex.FusedAdam", "init_args": {"lr": 0.02, "betas": [0.8, 0.9]}},
        "lr_scheduler": {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 1}},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    made = cli("--config", str(tmp_path / "c.yaml"), model=Bare)
    assert plugin_of(made).level.name == "O2"
    optimizer = made.trainer.optimizers[0]
    assert type(optimizer) is FusedAdam
    assert tuple(optimizer.param_groups[0]["betas"]) == (0.8, 0.9)
    assert any(isinstance(c, LossScaleMonitor) for c in made.trainer.callbacks)


@pytest.mark.parametrize(
    ("args", "kind"),
    [
        (["--optimizer=lightning_apex.FusedAdam", "--optimizer.lr=0.02"], FusedAdam),
        (["--optimizer=FusedSGD", "--optimizer.lr=0.02", "--optimizer.momentum=0.9"], FusedSGD),
        (
            ["--optimizer=FusedAdam", "--optimizer.lr=0.02", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=1"],
            FusedAdam,
        ),
        (["--optimizer=torch.optim.AdamW", "--optimizer.lr=0.02"], torch.optim.AdamW),
    ],
)
def test_optimizer_from_the_command_line(args, kind):
    made = cli(*O2, *BF16, *args, model=Bare)
    assert type(made.trainer.optimizers[0]) is kind
    assert made.trainer.optimizers[0].param_groups[0]["lr"] in (0.02, 0.002)
    assert all_fp32(made.model)


def test_the_clis_optimizer_is_reused_by_a_second_fit():
    made = cli(*O2, *BF16, "--optimizer=FusedAdam", "--optimizer.lr=0.01", model=Bare)
    before = made.model.net[0].weight.detach().clone()
    made.trainer.fit_loop.max_epochs = 2
    made.trainer.fit(made.model, made.datamodule)
    assert not torch.equal(made.model.net[0].weight, before)


def test_print_config_reloads(capsys, tmp_path):
    with pytest.raises(SystemExit) as caught:
        cli(*O2, *BF16, "--optimizer=FusedAdam", "--print_config", model=Bare)
    assert caught.value.code in (0, None)
    text = capsys.readouterr().out
    config = yaml.safe_load(text)
    (plugin,) = config["trainer"]["plugins"]
    assert plugin["class_path"] == "lightning_apex.ApexPrecision"
    assert plugin["init_args"]["opt_level"] == "O2"
    assert {"half_dtype", "loss_scale", "keep_fp32", "max_consecutive_skips"} <= set(plugin["init_args"])
    (tmp_path / "again.yaml").write_text(text)
    again = LightningCLI(Bare, Data, args=["fit", "--config", str(tmp_path / "again.yaml")], save_config_callback=None)
    assert plugin_of(again).level.name == "O2"


def test_help_of_the_plugin(capsys):
    with pytest.raises(SystemExit) as caught:
        cli("--trainer.plugins.help=lightning_apex.ApexPrecision")
    assert caught.value.code in (0, None)
    text = capsys.readouterr().out
    for argument in ("opt_level", "half_dtype", "loss_scale", "keep_fp32", "min_loss_scale", "max_consecutive_skips"):
        assert argument in text
    assert "so many skipped steps" in text  # the docstring


@pytest.mark.parametrize("level", ["01", "O9"])
def test_wrong_level_is_an_error(level, capsys):
    with pytest.raises(SystemExit) as caught:
        cli("--trainer.plugins+=ApexPrecision", f"--trainer.plugins.opt_level={level}")
    assert caught.value.code == 2
    assert level in capsys.readouterr().err


def test_saved_config_reloads(tmp_path):
    """What SaveConfigCallback writes beside a run starts that run again."""
    args = ["fit", *QUIET, f"--trainer.default_root_dir={tmp_path}", *O2, *BF16, "--optimizer=FusedAdam"]
    args = [a if not a.startswith("--trainer.logger") else "--trainer.logger=CSVLogger" for a in args]
    args.insert(8, f"--trainer.logger.save_dir={tmp_path}")
    LightningCLI(Bare, Data, args=args)
    (saved,) = tmp_path.rglob("config.yaml")
    text = yaml.safe_load(saved.read_text())
    text["trainer"]["logger"] = False
    saved.write_text(yaml.safe_dump(text))
    again = LightningCLI(Bare, Data, args=["fit", "--config", str(saved)], save_config_callback=None)
    assert plugin_of(again).level.name == "O2"


def test_strategy_with_the_plugin():
    made = cli(
        "--trainer.strategy=SingleDeviceStrategy",
        "--trainer.strategy.device=cpu",
        "--trainer.strategy.precision_plugin=lightning_apex.ApexPrecision",
        "--trainer.strategy.precision_plugin.opt_level=O5",
    )
    assert plugin_of(made).level.name == "O5"


@pytest.mark.filterwarnings("ignore:(?s).*Unable to serialize instance")  # jsonargparse's; a class_path dict has none
@pytest.mark.parametrize("instance", [True, False])
def test_trainer_defaults(instance):
    described = {"class_path": "lightning_apex.ApexPrecision", "init_args": {"opt_level": "O5"}}
    made = cli(trainer_defaults={"plugins": [ApexPrecision("O5") if instance else described]})
    assert plugin_of(made).level.name == "O5"
