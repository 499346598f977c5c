"""LossScaleMonitor in the loggers and the progress bars that people use."""

import csv
import io
import math
import re
import sys

import pytest
from helpers import Net, batches, fit, plugin
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_apex import LossScaleMonitor

COLUMNS = {
    "loss_scale": [64.0, 32.0, 16.0, 16.0],
    "skipped_steps": [0.0, 1.0, 2.0, 2.0],
}


def run(**kwargs):
    """Four steps, of which the second and the third are skipped."""
    kwargs = {"callbacks": [LossScaleMonitor()], "log_every_n_steps": 1, **kwargs}
    return fit(Net(overflow_at=[1, 2]), plugin("O2", init_scale=64.0), batches(4), **kwargs)


def rows_of(path):
    with open(path, newline="") as file:
        return [row for row in csv.DictReader(file) if row["loss_scale"]]


def assert_csv(logger):
    logger.save()
    rows = rows_of(logger.experiment.metrics_file_path)
    for name, expected in COLUMNS.items():
        assert [float(row[name]) for row in rows] == expected
    norms = [float(row["grad_norm"]) for row in rows]
    assert [math.isfinite(norm) for norm in norms] == [True, False, False, True]
    assert [int(row["step"]) for row in rows] == [0, 1, 2, 3]


def assert_tensorboard(logger):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger.finalize("success")
    events = accumulators.EventAccumulator(logger.log_dir).Reload()
    assert {*COLUMNS, "grad_norm"} <= set(events.Tags()["scalars"])
    for name, expected in COLUMNS.items():
        assert [event.value for event in events.Scalars(name)] == expected
        assert [event.step for event in events.Scalars(name)] == [0, 1, 2, 3]


def test_csv(tmp_path):
    logger = CSVLogger(tmp_path)
    run(logger=logger)
    assert_csv(logger)


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    logger = TensorBoardLogger(tmp_path)
    run(logger=logger)
    assert_tensorboard(logger)


def test_several_loggers(tmp_path):
    pytest.importorskip("tensorboard")
    loggers = [CSVLogger(tmp_path / "csv"), TensorBoardLogger(tmp_path / "tensorboard")]
    run(logger=loggers)
    assert_csv(loggers[0])
    assert_tensorboard(loggers[1])


def test_no_logger():
    made = run(logger=False)
    assert float(made.callback_metrics["loss_scale"]) == 16.0


def test_every_so_many_steps(tmp_path):
    logger = CSVLogger(tmp_path)
    run(logger=logger, log_every_n_steps=2)
    logger.save()
    rows = rows_of(logger.experiment.metrics_file_path)
    assert [float(row["loss_scale"]) for row in rows] == [32.0, 16.0]


@pytest.mark.parametrize("prog_bar", [True, False])
def test_tqdm_bar(prog_bar, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    run(callbacks=[TQDMProgressBar(refresh_rate=1), LossScaleMonitor(prog_bar)], enable_progress_bar=True)
    last = screen.getvalue().split("\r")[-1]
    assert bool(re.search(r"loss_scale=16\.\d*, skipped_steps=2\.\d*", last)) is prog_bar
    assert ("grad_norm=" in last) is prog_bar


@pytest.mark.parametrize("prog_bar", [True, False])
def test_rich_bar(prog_bar):
    rich = pytest.importorskip("rich")
    screen = io.StringIO()
    console = rich.get_console()
    before = console.file, console.width
    console.file, console.width = screen, 200
    try:
        run(
            callbacks=[
                RichProgressBar(console_kwargs={"file": screen, "width": 200, "force_terminal": True}),
                LossScaleMonitor(prog_bar),
            ],
            enable_progress_bar=True,
        )
    finally:
        console.file, console.width = before
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert bool(re.search(r"loss_scale: 16\.\d+", shown)) is prog_bar
    assert bool(re.search(r"skipped_steps:\s+2\.\d+", shown)) is prog_bar
