"""SyncBatchNorm in a model under torch's DDP: two ranks equal one process with BatchNorm on the whole batch."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from sync_support import close, run_on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_apex import FusedSGD, convert_syncbn_model

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::DeprecationWarning:multiprocessing")]
STEPS, BATCH = 4, 6


class Net(nn.Module):
    """Convolutions with BatchNorm: shared, frozen, and recomputed in the backward pass where asked for."""

    def __init__(self, recompute=None, unused=False):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.shared = nn.BatchNorm2d(4)
        self.frozen = nn.BatchNorm2d(4).requires_grad_(False)
        self.head = nn.Linear(4, 3)
        self.spare = nn.Linear(4, 3) if unused else None
        self.recompute = recompute

    def middle(self, x):
        return self.frozen(self.shared(self.shared(x).sin() + x))

    def forward(self, x):
        x = self.first(x)
        if self.recompute is None:
            x = self.middle(x)
        else:
            x = checkpoint(self.middle, x, use_reentrant=self.recompute)
        return self.head(x.mean((2, 3)))


def data():
    generator = torch.Generator().manual_seed(4)
    return torch.randn(STEPS, BATCH, 2, 7, 7, generator=generator), torch.randn(STEPS, BATCH, 3, generator=generator)


def train(model, optimizer, x, y, accumulate=1, no_sync=nullcontext):
    for step in range(STEPS):
        last = step % accumulate == accumulate - 1
        with nullcontext() if last else no_sync():
            (model(x[step]) - y[step]).square().mean().div(accumulate).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


def on_rank(rank, accumulate=1, recompute=None, unused=False, **ddp):
    torch.manual_seed(0)
    model = convert_syncbn_model(Net(recompute, unused))
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")  # in favour of a name that torch 2.13 lacks
    parallel = DistributedDataParallel(model, **ddp)
    optimizer = FusedSGD(model.parameters(), lr=0.2, momentum=0.9)
    x, y = data()
    half = slice(rank * BATCH // 2, (rank + 1) * BATCH // 2)
    train(parallel, optimizer, x[:, half], y[:, half], accumulate, parallel.no_sync)
    return {name: t.clone() for name, t in model.state_dict().items()}


CASES = {
    "plain": {},
    "accumulate": {"accumulate": 2},
    "accumulate_all": {"accumulate": 4},
    "reentrant": {"recompute": True},
    "not_reentrant": {"recompute": False},
    "unused": {"unused": True, "find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "static_reentrant": {"static_graph": True, "recompute": True},
    "no_broadcast": {"broadcast_buffers": False},
    "bucket_view": {"gradient_as_bucket_view": True},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    jobs = {name: (on_rank, kwargs) for name, kwargs in CASES.items()}
    return run_on_ranks(2, tmp_path_factory.mktemp("ddp"), jobs)


@pytest.mark.parametrize("name", list(CASES))
def test_two_ranks_equal_one_process_on_the_whole_batch(runs, name):
    for rank, result in enumerate(runs[name]):
        assert not isinstance(result, str), f"rank {rank}:\n{result}"
    torch.manual_seed(0)
    kwargs = CASES[name]
    model = Net(kwargs.get("recompute"), kwargs.get("unused", False))
    start = {key: value.clone() for key, value in model.state_dict().items()}
    train(model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), *data(), kwargs.get("accumulate", 1))
    first, second = runs[name]
    for key, value in model.state_dict().items():
        assert torch.equal(first[key], second[key]), f"{key} differs between ranks"
        close(first[key], value, 2e-5, 1e-4, key)
    assert not torch.equal(first["shared.weight"], start["shared.weight"])
    assert torch.equal(first["frozen.weight"], start["frozen.weight"])
