"""What people type at a stock LightningCLI whose script imports nothing of lightning_apex."""

import pytest
import yaml
from command_lines import Command, run

pytest.importorskip("jsonargparse")

STOCK = """
from cli_model import Classifier, Noise, tell
from lightning.pytorch.cli import LightningCLI

if __name__ == "__main__":
    tell(LightningCLI(Classifier, Noise))
"""
SUBCLASSES = STOCK.replace("LightningCLI(Classifier, Noise)", "LightningCLI(subclass_mode_model=True)")
FROM_ENVIRONMENT = STOCK.replace("Noise)", "Noise, parser_kwargs={'default_env': True, 'fit': {'default_env': True}})")
NO_RUN = STOCK.replace("Noise)", "Noise, run=False)")
ON_DEMAND = """
import sys

for name in [name for name in sys.modules if name.startswith(("jsonargparse", "lightning.pytorch.cli"))]:
    del sys.modules[name]
import lightning_apex

assert "jsonargparse" not in sys.modules
from lightning_apex import ApexCLI

assert ApexCLI.__name__ == "ApexCLI" and "jsonargparse" in sys.modules
"""
IMPORTED = "import lightning_apex\n" + STOCK

QUIET = [
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.max_epochs=1",
    "--trainer.logger=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
]
ADAM = ["--optimizer=lightning_apex.FusedAdam", "--optimizer.lr=0.02"]
O2 = ["--trainer.plugins+=lightning_apex.ApexPrecision", "--trainer.plugins.opt_level=O2"]
CONFIG = {
    "trainer": {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [
            {"class_path": "lightning_apex.LossScaleMonitor", "init_args": {"prog_bar": False}},
            {"class_path": "lightning_apex.ApexModelSummary"},
        ],
        "plugins": [
            {"class_path": "lightning_apex.ApexSyncBatchNorm", "init_args": {"group_size": 0}},
            {
                "class_path": "lightning_apex.ApexPrecision",
                "init_args": {"opt_level": "O2", "half_dtype": "bfloat16", "keep_fp32": ["net.3", "torch.nn.ReLU"]},
            },
        ],
    },
    "optimizer": {"class_path": "lightning_apex.FusedLAMB", "init_args": {"lr": 0.02, "betas": [0.8, 0.9]}},
    "lr_scheduler": {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 1, "gamma": 0.5}},
}
PLUGINS_AS_JSON = '[{"class_path": "lightning_apex.ApexPrecision", "init_args": {"opt_level": "O4"}}]'


def fit(*args, script=STOCK, environ=None, optimizer=ADAM):
    return Command(script, ["fit", *QUIET, *args, *optimizer], environ or {})


PRECISION = "--trainer.plugins=lightning_apex.ApexPrecision"
REFUSED = {
    # what is typed -> what the error says, and the exit status: 2 while parsing, 1 from a constructor
    "level": ([PRECISION, "--trainer.plugins.opt_level=O9"], "'O4', 'O5']. Got value: O9", 2),
    "key": ([PRECISION, "--trainer.plugins.opt_lvl=O1"], "Option 'opt_lvl' is not accepted", 2),
    "scale": ([PRECISION, "--trainer.plugins.loss_scale=-1"], "loss_scale=-1.0 is invalid: use a finite number", 1),
    "both": ([PRECISION, "--trainer.precision=16-mixed"], "`precision=16-mixed` and `plugins=ApexPrecision('O1')", 1),
    "lr": (["--optimizer.lr=-1"], "lr=-1.0 is invalid: it must be a finite number", 1),
}

COMMANDS = {
    "issue": fit(*O2),
    "two": fit("--trainer.plugins+=lightning_apex.ApexSyncBatchNorm", *O2),
    "values": fit(
        *O2,
        "--trainer.plugins.half_dtype=torch.bfloat16",
        "--trainer.plugins.keep_fp32=[torch.nn.Linear,net.0]",
        optimizer=[*ADAM, "--optimizer.state_dtype=torch.bfloat16"],
    ),
    "apex_ddp": fit(*O2, "--trainer.strategy=apex_ddp"),
    "strategy": fit("--trainer.strategy.class_path=lightning_apex.ApexDDPStrategy", *O2),
    "strategy_args": fit("--trainer.strategy=lightning_apex.ApexDDPStrategy", "--trainer.strategy.group_size=1"),
    "imported": fit(
        "--trainer.strategy=apex_ddp",
        "--trainer.plugins+=ApexPrecision",
        "--trainer.callbacks+=LossScaleMonitor",
        "--trainer.callbacks+=ApexModelSummary",
        script=IMPORTED,
        optimizer=["--optimizer=FusedSGD", "--optimizer.lr=0.1", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=1"],
    ),
    "subclasses": fit(*O2, "--model=cli_model.Classifier", "--data=cli_model.Noise", script=SUBCLASSES),
    "environment": fit(script=FROM_ENVIRONMENT, environ={"PL_FIT__TRAINER__PLUGINS": PLUGINS_AS_JSON}),
    "validate": Command(STOCK, ["validate", *QUIET, *O2]),
    "no_run": Command(NO_RUN, [*QUIET, *O2, *ADAM]),
    "on_demand": Command(ON_DEMAND, []),
    "yaml": Command(STOCK, ["fit", "--config=../run.yaml"]),
    "yaml_saved": Command(STOCK, ["fit", "--config=../yaml/config.yaml", "--trainer.max_epochs=2"]),
    "yaml_over": Command(STOCK, ["fit", "--config=../run.yaml", "--trainer.plugins.init_args.opt_level=O3"]),
    **{name: fit(*args, optimizer=[]) for name, (args, _, _) in REFUSED.items() if name != "lr"},
    "lr": fit(*O2, optimizer=[*ADAM, *REFUSED["lr"][0]]),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lines")
    (folder / "run.yaml").write_text(yaml.safe_dump(CONFIG))
    return run(COMMANDS, folder)


def adam(outcome):
    ((name, lr, defaults),) = outcome.told["optimizers"]
    assert (name, lr) == ("FusedAdam", 0.02)
    return dict(defaults)


@pytest.mark.parametrize(
    ("name", "level"),
    [("issue", "O2"), ("environment", "O4")],
)
def test_the_plugin_and_an_optimizer(outcomes, name, level):
    told = outcomes[name].told
    assert told["plugin"].startswith("lightning_apex.") and told["plugin"].endswith(".ApexPrecision")
    assert told["level"] == level
    assert told["steps"] == 3
    adam(outcomes[name])
    assert "DATA ASKED FOR" in outcomes[name].out


def test_two_plugins(outcomes):
    told = outcomes["two"].told
    assert told["level"] == "O2"
    assert told["layer_sync"].startswith("ApexSyncBatchNorm(group_size=0, channel_last=False)")


def test_dtypes_and_classes_by_name(outcomes):
    told = outcomes["values"].told
    assert told["half_dtype"] == "torch.bfloat16"
    assert told["keep_fp32"] == ["Linear", "net.0"]
    assert adam(outcomes["values"])["state_dtype"] == "torch.bfloat16"


@pytest.mark.parametrize("name", ["apex_ddp", "strategy", "strategy_args", "imported"])
def test_the_strategy(outcomes, name):
    told = outcomes[name].told
    assert told["strategy"] == "ApexDDPStrategy"
    size = 1 if name == "strategy_args" else 0
    assert told["strategy_sync"].startswith(f"ApexSyncBatchNorm(group_size={size}")
    assert told["steps"] == 3


def test_short_names_once_the_package_is_imported(outcomes):
    told = outcomes["imported"].told
    assert told["level"] == "O1"
    assert {"LossScaleMonitor", "ApexModelSummary"} <= set(told["callbacks"])
    assert told["optimizers"][0][0] == "FusedSGD"
    assert told["schedulers"] == ["StepLR"]


def test_subclass_mode(outcomes):
    assert outcomes["subclasses"].told["level"] == "O2"


def test_validate_has_no_use_for_an_optimizer(outcomes):
    told = outcomes["validate"].told
    assert (told["level"], told["optimizers"]) == ("O2", [])


def test_without_a_run(outcomes):
    told = outcomes["no_run"].told
    assert (told["level"], told["steps"]) == ("O2", 0)
    assert "DATA ASKED FOR" not in outcomes["no_run"].out


@pytest.mark.parametrize(
    ("name", "level", "steps"), [("yaml", "O2", 3), ("yaml_saved", "O2", 6), ("yaml_over", "O3", 3)]
)
def test_yaml(outcomes, name, level, steps):
    told = outcomes[name].told
    assert (told["level"], told["half_dtype"], told["steps"]) == (level, "torch.bfloat16", steps)
    assert told["keep_fp32"] == ["net.3", "ReLU"]
    assert told["layer_sync"].startswith("ApexSyncBatchNorm(")
    assert {"LossScaleMonitor", "ApexModelSummary"} <= set(told["callbacks"])
    assert told["optimizers"][0][0] == "FusedLAMB"
    assert told["optimizers"][0][1] == pytest.approx(0.02 * 0.5 ** (steps // 3))
    assert told["schedulers"] == ["StepLR"]


def test_apex_cli_is_imported_on_demand(outcomes):
    assert outcomes["on_demand"].code == 0, outcomes["on_demand"].err


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_values_are_refused_before_data_is_asked_for(outcomes, name):
    _, sentence, code = REFUSED[name]
    assert sentence in outcomes[name].err
    assert outcomes[name].code == code
    assert "DATA ASKED FOR" not in outcomes[name].out
