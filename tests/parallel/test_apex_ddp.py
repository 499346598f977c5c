"""DistributedDataParallel with Apex's arguments: two ranks against one process on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddp_support import RANKS, on_two_ranks
from torch import Tensor, nn

from lightning_apex.parallel import DistributedDataParallel

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::DeprecationWarning:multiprocessing")]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.unused = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)))


def net(dtype: torch.dtype = torch.float32, unused: bool = False) -> Net:
    torch.manual_seed(0)
    made = Net()
    if not unused:
        del made.unused
    return made.to(dtype)


def batch(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 + rank)).to(dtype)


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def whole(dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    """What each rank computes by itself."""
    parts = []
    for rank in range(RANKS):
        module = net(dtype)
        module(batch(rank, dtype)).sum().backward()
        parts.append(gradients(module))
    return parts


def reduced(rank: int, unused: bool = False, dtype: torch.dtype = torch.float32, **arguments: Any) -> list[Tensor]:
    model = DistributedDataParallel(net(dtype, unused), **arguments)
    for _ in range(2):  # buckets are rebuilt after the first pass
        model.zero_grad()
        model(batch(rank, dtype)).sum().backward()
    return gradients(model)


def gathered(rank: int) -> list[list[Tensor]]:
    model = DistributedDataParallel(net())
    model.disable_allreduce()
    model(batch(rank)).sum().backward()
    alone = gradients(model)
    model.enable_allreduce()
    model(batch(rank)).sum().backward()
    return [alone, gradients(model)]


def two_forwards(rank: int) -> list[Tensor]:
    """A discriminator's shape: two forward passes, then one backward; BatchNorm's statistics are each rank's own."""
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    with torch.no_grad():
        module[1].running_mean.fill_(rank + 1.0)
    model = DistributedDataParallel(module)
    start = module[1].running_mean.clone()
    (model(batch(rank)) - model(batch(rank) + 1)).sum().backward()
    return [start, module[1].running_mean.clone(), module[0].weight.grad.clone(), module[0].weight.detach().clone()]


def after_initialize(rank: int) -> list[Any]:
    """Ranks whose weights differ before DDP is made."""
    from lightning_apex import amp
    from lightning_apex.optimizers import FusedAdam

    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    module, optimizer = amp.initialize(module, FusedAdam(module.parameters(), lr=0.01), opt_level="O5", verbosity=0)
    model = DistributedDataParallel(module)
    for _ in range(3):
        optimizer.zero_grad()
        with amp.scale_loss(model(batch(rank)).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    return [[p.detach().clone() for p in amp.master_params(optimizer)], module[0].weight.dtype]


def settings(rank: int) -> list[Any]:
    model = DistributedDataParallel(net(), message_size=2**20)
    other = DistributedDataParallel(net(torch.bfloat16), 2**20, True, broadcast_buffers=True, bucket_cap_mb=7)
    return [
        model.bucket_bytes_cap,
        model.broadcast_buffers,
        model.find_unused_parameters,
        other.bucket_bytes_cap,
        other.broadcast_buffers,
        other.find_unused_parameters,
        isinstance(model, nn.parallel.DistributedDataParallel),
        next(iter(model.state_dict())),
    ]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    half = {"dtype": torch.bfloat16}
    jobs = [
        ("plain", reduced, {}),
        ("small messages", reduced, {"message_size": 8}),
        ("delayed", reduced, {"delay_allreduce": True, "unused": True}),
        ("sum", reduced, {"gradient_average": False}),
        ("predivided", reduced, {"gradient_predivide_factor": 4.0}),
        ("predivided sum", reduced, {"gradient_predivide_factor": 4.0, "gradient_average": False}),
        ("former name", reduced, {"gradient_average_split_factor": 4.0, "gradient_average": False}),
        ("in fp32", reduced, {"allreduce_always_fp32": True, **half}),
        ("without effect", reduced, {"num_allreduce_streams": 2, "allreduce_communicators": (), "prof": True}),
        ("gathered", gathered, {}),
        ("two forwards", two_forwards, {}),
        ("after initialize", after_initialize, {}),
        ("settings", settings, {}),
    ]
    return on_two_ranks(tmp_path_factory.mktemp("ranks"), jobs)


FACTORS = {
    "plain": 0.5,
    "small messages": 0.5,
    "delayed": 0.5,
    "sum": 1.0,
    "predivided": 0.5,
    "predivided sum": 0.25,
    "former name": 0.25,
    "without effect": 0.5,
}


@pytest.mark.parametrize("name", FACTORS)
def test_gradients_are_the_whole_batchs(name: str, results: dict[str, list[Any]]) -> None:
    first, second = whole()
    for rank in range(RANKS):
        found = results[name][rank]
        assert len(found) == len(first)
        for grad, a, b in zip(found, first, second, strict=True):
            torch.testing.assert_close(grad, (a + b) * FACTORS[name])


def test_half_gradients_can_be_summed_in_fp32(results: dict[str, list[Any]]) -> None:
    first, second = whole(torch.bfloat16)
    for found in results["in fp32"]:
        for grad, a, b in zip(found, first, second, strict=True):
            assert torch.equal(grad, ((a.float() + b.float()) / 2).bfloat16())


def test_reducing_can_be_put_off(results: dict[str, list[Any]]) -> None:
    parts = whole()
    for rank, (alone, together) in enumerate(results["gathered"]):
        assert all(map(torch.equal, alone, parts[rank]))
        for grad, a, b in zip(together, *parts, strict=True):
            torch.testing.assert_close(grad, a + b)  # two passes, averaged over two ranks


def test_buffers_start_equal_and_are_left_alone(results: dict[str, list[Any]]) -> None:
    (start, after, grad, weight), (start_1, after_1, grad_1, weight_1) = results["two forwards"]
    assert torch.equal(start, torch.full((8,), 1.0)) and torch.equal(start, start_1) and torch.equal(weight, weight_1)
    assert not torch.equal(after, after_1)
    torch.testing.assert_close(grad, grad_1)


def test_masters_are_rank_0s_on_every_rank(results: dict[str, list[Any]]) -> None:
    (masters, dtype), (masters_1, _) = results["after initialize"]
    assert dtype is torch.bfloat16 and {m.dtype for m in masters} == {torch.float32}
    assert len(masters) == 6 and all(map(torch.equal, masters, masters_1))


def test_what_torch_is_told(results: dict[str, list[Any]]) -> None:
    for found in results["settings"]:
        assert found == [4 * 2**20, False, False, 7 * 2**20, True, True, True, "module.one.weight"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"message_size": [0]}, r"message_size=\[0\].*device_ids"),
        ({"message_size": 0}, "message_size=0"),
        ({"shared_param": True}, "shared_param=True is gone"),
        ({"retain_allreduce_buffers": True}, "gradient_as_bucket_view"),
        ({"gradient_predivide_factor": 0.0}, "gradient_predivide_factor=0.0"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DistributedDataParallel(net(), **arguments)
