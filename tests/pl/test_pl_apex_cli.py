"""ApexCLI, ApexModelSummary and the profiler's sections for code that imports pytorch_lightning."""

import logging

import pytest
from pl_support import OldNet, batches
from pytorch_lightning import LightningDataModule, LightningModule
from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.profilers import SimpleProfiler

import lightning_apex.pl
from lightning_apex import FusedAdam
from lightning_apex.pl import ApexCLI

pytest.importorskip("jsonargparse")
pytestmark = [
    pytest.mark.filterwarnings("ignore:LightningCLI's args parameter is intended to run from within Python"),
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
]
QUIET = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False}
QUIET |= dict.fromkeys(("enable_checkpointing", "enable_progress_bar"), False)


class Bare(OldNet):
    """Its configure_optimizers is the CLI's to add."""

    configure_optimizers = LightningModule.configure_optimizers

    def __init__(self):
        super().__init__()


class Data(LightningDataModule):
    def train_dataloader(self):
        return batches()


def cli(*words):
    return ApexCLI(Bare, Data, args=["fit", *words], trainer_defaults=QUIET, save_config_callback=None)


def test_flags_summary_and_profiler(caplog):
    logging.getLogger("pytorch_lightning").setLevel(logging.INFO)
    logging.getLogger("lightning_fabric").setLevel(logging.INFO)
    with caplog.at_level(logging.INFO):
        made = cli(
            "--opt_level=O5",
            "--sync_bn",
            "--optimizer=FusedAdam",
            "--trainer.profiler=simple",
            "--trainer.callbacks=ApexModelSummary",
            "--trainer.callbacks.rich=false",
        )
    assert isinstance(made, LightningCLI)
    assert type(made.trainer.precision_plugin) is lightning_apex.pl.ApexPrecision
    assert type(made.trainer._accelerator_connector._layer_sync) is lightning_apex.pl.ApexSyncBatchNorm
    assert type(made.trainer.optimizers[0]) is FusedAdam
    assert isinstance(made.trainer.profiler, SimpleProfiler)
    assert len(made.trainer.profiler.recorded_durations["[ApexPrecision]update"]) == len(made.model.losses)
    assert "| Dtype " in caplog.text and "float32 master weights" in caplog.text


def test_a_flag_beside_what_it_is_short_for(capsys):
    with pytest.raises(SystemExit) as caught:
        cli("--opt_level=O5", "--trainer.precision=16-mixed")
    assert caught.value.code == 2
    assert "--opt_level=O5 and --trainer.precision=16-mixed are both given" in capsys.readouterr().err
