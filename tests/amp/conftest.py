"""What the tests of this folder share."""

import pytest
import torch

from lightning_apex.amp import context


@pytest.fixture(autouse=True)
def one_thread_and_no_leftovers():
    """Contexts that a test leaves behind would be chosen among in the next."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for left in list(context._alive):
        left.release()
    assert not torch.is_autocast_enabled("cpu")
