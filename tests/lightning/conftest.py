"""What the tests of this folder share: seeds, threads, quiet logs, and the warnings that Lightning cannot avoid."""

import logging
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent

# Warnings are errors in this repository; these come from Lightning itself, for tiny runs like ours.
LIGHTNINGS_OWN = (
    "ignore:The '.*_dataloader' does not have many workers",  # worker processes would only slow these tests down
    "ignore:The number of training batches .* is smaller than the logging interval",  # few batches, on purpose
    "ignore:.*is deprecated and will be removed.*:DeprecationWarning:lightning",  # what torch deprecates under it
    "ignore:.*LeafSpec.*is deprecated:FutureWarning",  # torch.utils._pytree, called by Lightning
    "ignore:`training_step` returned `None`",  # on purpose
    "ignore:You defined a `validation_step` but have no `val_dataloader`",  # most tests only train
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            for line in LIGHTNINGS_OWN:
                item.add_marker(pytest.mark.filterwarnings(line))


@pytest.fixture(autouse=True)
def quiet_and_seeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)  # Lightning writes checkpoints and logs to the working directory
    levels = {name: logging.getLogger(name).level for name in ("lightning.pytorch", "lightning.fabric")}
    for name in levels:
        logging.getLogger(name).setLevel(logging.ERROR)
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    torch.set_num_threads(threads)
    if torch.distributed.is_initialized():  # a refused strategy may leave one behind for later tests to average over
        torch.distributed.destroy_process_group()
