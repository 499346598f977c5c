"""ApexCLI: LightningCLI with --opt_level and --sync_bn, and nothing else."""

import pytest
import torch
import yaml
from cli_model import Classifier, Noise
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins import Precision

from lightning_apex import ApexCLI, ApexPrecision, ApexSyncBatchNorm, FusedAdam

pytest.importorskip("jsonargparse")
pytestmark = [
    pytest.mark.filterwarnings("ignore:LightningCLI's args parameter is intended to run from within Python"),
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),  # Lightning's calls
    pytest.mark.filterwarnings("ignore:ApexPrecision.* uses bfloat16 instead of float16 on a CPU"),
]
QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class OwnArguments(ApexCLI):
    """A user's subclass, which forgets to call ours."""

    def add_arguments_to_parser(self, parser):
        parser.add_argument("--note", default="")


def cli(*args, run=True, kind=ApexCLI, trainer=None, **kwargs):
    return kind(
        Classifier,
        Noise,
        args=[*(["fit"] if run else []), *args],
        run=run,
        trainer_defaults={**QUIET, **(trainer or {})},
        save_config_callback=kwargs.pop("save_config_callback", None),
        **kwargs,
    )


def sync_of(made):
    return made.trainer._accelerator_connector._layer_sync


def refused(capsys, *args, **kwargs):
    with pytest.raises(SystemExit) as caught:
        cli(*args, **kwargs)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert "DATA ASKED FOR" not in out
    return err.splitlines()[-1]


@pytest.mark.parametrize("kind", [ApexCLI, OwnArguments])
def test_both_flags(kind):
    made = cli("--opt_level", "O2", "--sync_bn", "--optimizer=FusedAdam", kind=kind)
    assert made.trainer.precision_plugin.level.name == "O2"
    assert type(sync_of(made)) is ApexSyncBatchNorm
    assert type(made.trainer.optimizers[0]) is FusedAdam
    assert made.trainer.global_step == 3


def test_without_flags_nothing_is_added():
    made = cli(run=False)
    assert type(made.trainer.precision_plugin) is Precision
    assert sync_of(made) is None


@pytest.mark.parametrize("plugins", [["--trainer.plugins+=ApexSyncBatchNorm"], ["--trainer.plugins=ApexSyncBatchNorm"]])
def test_a_flag_beside_other_plugins(plugins):
    made = cli("--opt_level=O5", *plugins, "--trainer.plugins.channel_last=true", run=False)
    assert made.trainer.precision_plugin.level.name == "O5"
    assert sync_of(made).channel_last


def test_a_flag_beside_plugins_of_trainer_defaults():
    made = cli("--sync_bn", run=False, trainer={"plugins": [{"class_path": "lightning_apex.ApexPrecision"}]})
    assert isinstance(made.trainer.precision_plugin, ApexPrecision)
    assert type(sync_of(made)) is ApexSyncBatchNorm


@pytest.mark.parametrize(("flag", "kind"), [("--sync_bn=true", ApexSyncBatchNorm), ("--sync_bn=false", type(None))])
def test_a_flag_with_a_value(flag, kind):
    assert type(sync_of(cli(flag, run=False))) is kind


def test_the_trainers_own_sync_batchnorm_beside_the_flag():
    made = cli("--sync_bn", "--trainer.sync_batchnorm=true", run=False)
    assert type(sync_of(made)) is ApexSyncBatchNorm


def test_yaml_and_what_overrides_it(tmp_path):
    (tmp_path / "c.yaml").write_text("opt_level: O5\nsync_bn: true\n")
    made = cli("--config=c.yaml", run=False)
    assert (made.trainer.precision_plugin.level.name, type(sync_of(made))) == ("O5", ApexSyncBatchNorm)
    made = cli("--config=c.yaml", "--opt_level=O4", "--no_sync_bn", run=False)
    assert (made.trainer.precision_plugin.level.name, sync_of(made)) == ("O4", None)
    made = cli("--config=c.yaml", "--opt_level=null", run=False)
    assert type(made.trainer.precision_plugin) is Precision


def test_print_config_reloads(capsys, tmp_path):
    with pytest.raises(SystemExit):
        cli("--opt_level=O5", "--sync_bn", "--print_config")
    text = capsys.readouterr().out
    config = yaml.safe_load(text)
    assert (config["opt_level"], config["sync_bn"]) == ("O5", True)
    assert config["trainer"]["plugins"] is None  # else the flags and the plugins would both be given on reload
    (tmp_path / "c.yaml").write_text(text)
    made = cli("--config=c.yaml", "--optimizer=FusedAdam")
    assert made.trainer.precision_plugin.level.name == "O5"


def test_print_config_without_flags_reloads(capsys, tmp_path):
    with pytest.raises(SystemExit):
        cli("--print_config", run=False)
    (tmp_path / "c.yaml").write_text(capsys.readouterr().out)
    assert type(cli("--config=c.yaml", run=False).trainer.precision_plugin) is Precision


def test_a_saved_config_reloads(tmp_path):
    from lightning.pytorch.cli import SaveConfigCallback

    cli("--opt_level=O2", "--sync_bn", "--optimizer=FusedAdam", save_config_callback=SaveConfigCallback)
    made = cli("--config=config.yaml")
    assert made.trainer.precision_plugin.level.name == "O2"
    assert type(sync_of(made)) is ApexSyncBatchNorm


def test_environment_variables(monkeypatch):
    monkeypatch.setenv("PL_FIT__OPT_LEVEL", "O4")
    monkeypatch.setenv("PL_FIT__SYNC_BN", "true")
    parser_kwargs = {"default_env": True, "fit": {"default_env": True}}
    made = cli("--optimizer=FusedAdam", parser_kwargs=parser_kwargs)
    assert made.trainer.precision_plugin.level.name == "O4"
    assert type(sync_of(made)) is ApexSyncBatchNorm


@pytest.mark.parametrize(
    ("args", "trainer", "says"),
    [
        (["--opt_level=O1", "--trainer.precision=16-mixed"], {}, "--opt_level=O1 and --trainer.precision=16-mixed"),
        (["--opt_level=O1"], {"precision": "bf16-true"}, "--opt_level=O1 and --trainer.precision=bf16-true"),
        (
            ["--opt_level=O1", "--trainer.plugins=ApexPrecision"],
            {},
            "--opt_level=O1 and ApexPrecision in --trainer.plu",
        ),
        (
            ["--opt_level=O1", "--trainer.plugins+=HalfPrecision"],
            {},
            "--opt_level=O1 and HalfPrecision in --trainer.plug",
        ),
        (
            ["--sync_bn", "--trainer.plugins+=ApexSyncBatchNorm"],
            {},
            "--sync_bn and ApexSyncBatchNorm in --trainer.plug",
        ),
    ],
)
def test_a_flag_beside_what_it_is_short_for(args, trainer, says, capsys):
    line = refused(capsys, *args, trainer=trainer)
    assert line.startswith(f"error: {says}")
    assert line.endswith(" are both given: leave one of them out.")


@pytest.mark.parametrize("value", ["O9", "01", "o1"])
def test_a_wrong_level(value, capsys):
    with pytest.raises(SystemExit) as caught:
        cli(f"--opt_level={value}")
    out, err = capsys.readouterr()
    assert caught.value.code == 2
    assert "DATA ASKED FOR" not in out
    assert "'O4', 'O5']" in err
    assert f"Given value: {value}" in err


def test_errors_are_raised_where_the_parser_raises(capsys):
    with pytest.raises(Exception, match="are both given"):
        cli("--opt_level=O1", "--trainer.precision=16-mixed", run=False, parser_kwargs={"exit_on_error": False})


def test_help(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        cli("--help", run=False)
    text = " ".join(capsys.readouterr().out.split())
    what = "Train at this opt level, with the plugin lightning_apex.ApexPrecision."
    assert f"--opt_level {{O0,O1,O2,O3,O4,O5,null}} {what}" in text
    assert "--no_sync_bn [{true,yes,false,no}] Synchronise BatchNorm while fitting" in text


def test_nothing_else_is_added():
    keys = [
        set(kind(Classifier, Noise, args=[], run=False, trainer_defaults=QUIET).config.keys())
        for kind in (ApexCLI, LightningCLI)
    ]
    assert keys[0] - keys[1] == {"opt_level", "sync_bn"}
    assert keys[1] <= keys[0]


@pytest.mark.parametrize("subcommand", ["validate", "test", "predict"])
def test_other_subcommands_have_the_flags(subcommand):
    ran = []

    class Noted(ApexCLI):
        def _run_subcommand(self, name):
            ran.append(name)

    made = Noted(Classifier, Noise, args=[subcommand, "--opt_level=O5"], trainer_defaults=QUIET)
    assert ran == [subcommand]
    assert made.trainer.precision_plugin.level.name == "O5"


def test_a_trainer_class_of_ones_own():
    class Quick(Trainer):
        pass

    made = cli("--opt_level=O5", run=False, trainer_class=Quick)
    assert type(made.trainer) is Quick
    assert made.trainer.precision_plugin.level.name == "O5"


def test_the_classifier_trains_as_without_the_cli():
    torch.manual_seed(0)
    made = cli("--opt_level=O5", "--seed_everything=3", "--optimizer=FusedAdam", "--optimizer.lr=0.1")
    by_flag = made.model.net[0].weight.detach().clone()
    made = cli(
        "--trainer.plugins=ApexPrecision",
        "--trainer.plugins.opt_level=O5",
        "--seed_everything=3",
        "--optimizer=FusedAdam",
        "--optimizer.lr=0.1",
    )
    assert torch.equal(made.model.net[0].weight, by_flag)
