"""These tests run where pytorch_lightning is installed beside lightning."""

import importlib.util
import logging
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("pytorch_lightning") is None:
    collect_ignore_glob = ["test_*.py"]

HERE = Path(__file__).parent
LIGHTNINGS_OWN = (
    "ignore:The '.*_dataloader' does not have many workers",
    "ignore:The number of training batches .* is smaller than the logging interval",
    "ignore:.*LeafSpec.*is deprecated:FutureWarning",
    "ignore:Checkpoint directory .* exists and is not empty",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            for line in LIGHTNINGS_OWN:
                item.add_marker(pytest.mark.filterwarnings(line))


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    names = ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric")
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
