"""What the pages' code runs in: a folder of its own, quiet and short Trainers, Lightning's own warnings ignored."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
LIGHTNINGS_OWN = (
    "ignore:`training_step` returned `None`",
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
    "ignore:.*is deprecated and will be removed.*:DeprecationWarning:lightning",
    "ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning",
    # Our own, right on a CPU: pages are written for a GPU.
    "ignore:.*uses bfloat16 instead of float16 on a CPU",
)
# Lightning reads arguments that a Trainer was not given from here: no page needs to say that it is run by a test.
SHORT = {
    "ACCELERATOR": "cpu",
    "MAX_EPOCHS": "1",
    "LIMIT_TRAIN_BATCHES": "2",
    "LIMIT_VAL_BATCHES": "1",
    "ENABLE_PROGRESS_BAR": "False",
    "ENABLE_MODEL_SUMMARY": "False",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            for line in LIGHTNINGS_OWN:
                item.add_marker(pytest.mark.filterwarnings(line))


@pytest.fixture
def quiet_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, value in SHORT.items():
        monkeypatch.setenv(f"PL_TRAINER_{name}", value)
    levels = {name: logging.getLogger(name).level for name in ("lightning.pytorch", "lightning.fabric")}
    for name in levels:
        logging.getLogger(name).setLevel(logging.ERROR)
    yield tmp_path
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    torch.set_num_threads(threads)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
