"""Two gloo processes: DDP around an initialised model, and initialised models sent to other processes."""

import multiprocessing
import os
import socket
import sys
import traceback
import warnings
from pathlib import Path

import pytest
import torch
from amp_support import LEVELS, OPTIMIZERS, fp32, net, same
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_apex import amp

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::DeprecationWarning:multiprocessing")]
RANKS = 2
STEPS = 4


def make(seed):
    model = net(seed)
    model[1] = nn.LayerNorm(8)  # BatchNorm's statistics are a rank's own
    return model


def whole_batch(index):
    generator = torch.Generator().manual_seed(100 + index)
    return torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def train(rank, level, optimizer, seeds=(2, 2), accumulate=False, overflow_on=None, **kwargs):
    model = make(seeds[rank])
    made = OPTIMIZERS[optimizer](model.parameters())
    model, made = amp.initialize(model, made, opt_level=level, init_scale=256.0, verbosity=0, **kwargs)
    if accumulate == "losses":
        states = amp.state_dict(made)
        states["loss_scaler1"] |= {"scale": 1024.0}
        amp.load_state_dict(states, made)
    parallel = DistributedDataParallel(model)
    trace = []
    for index in range(STEPS):
        made.zero_grad()
        x, y = (t[rank::RANKS] for t in whole_batch(index))
        if accumulate:
            with parallel.no_sync():
                loss = nn.functional.cross_entropy(parallel(x[:2]), y[:2]) / 2
                with amp.scale_loss(loss, made, delay_unscale=accumulate == "delayed") as scaled_loss:
                    scaled_loss.backward()
                if accumulate == "looking":
                    assert all(m.grad.abs().max() < 10 for m in amp.master_params(made))
            loss = nn.functional.cross_entropy(parallel(x[2:]), y[2:]) / 2
        else:
            loss = nn.functional.cross_entropy(parallel(x), y)
        if overflow_on == rank and index == 1:
            loss = loss * float("inf")
        with amp.scale_loss(loss, made, loss_id=1 if accumulate == "losses" else 0) as scaled_loss:
            scaled_loss.backward()
        nn.utils.clip_grad_norm_(amp.master_params(made), 1.0)
        made.step()
        trace.append(fp32(model))
    return trace, amp.state_dict(made)["loss_scaler0"]["loss_scale"]


def jobs():
    for number, level in enumerate(LEVELS):
        optimizer = ("sgd", "fused_adam")[number % 2]
        yield f"{level} {optimizer}", (level, optimizer), {}
    for level in ("O1", "O2"):
        yield f"{level} overflow", (level, "fused_adam"), {"overflow_on": 1}
        yield f"{level} overflow torch", (level, "sgd"), {"overflow_on": 1}
        yield f"{level} no_sync", (level, "fused_sgd"), {"accumulate": True}
        yield f"{level} no_sync torch", (level, "sgd"), {"accumulate": True}
        yield f"{level} no_sync delayed", (level, "sgd"), {"accumulate": "delayed"}
        yield f"{level} no_sync looking", (level, "fused_sgd"), {"accumulate": "looking"}
        yield f"{level} no_sync losses", (level, "sgd"), {"accumulate": "losses", "num_losses": 2}
    for level in ("O2", "O5"):
        yield f"{level} seeds", (level, "sgd"), {"seeds": (2, 7)}
        yield f"{level} seeds fused", (level, "fused_adam"), {"seeds": (2, 7)}


def rank_main(rank, port, folder):
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group("gloo", rank=rank, world_size=RANKS)
    results = {}
    try:
        for name, args, kwargs in jobs():
            results[name] = train(rank, *args, **kwargs)
    except BaseException:
        results["error"] = traceback.format_exc()
    torch.save(results, Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    multiprocessing.set_forkserver_preload(["lightning_apex"])
    torch.multiprocessing.start_processes(rank_main, (port, str(folder)), nprocs=RANKS, start_method="forkserver")
    both = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]
    for result in both:
        assert "error" not in result, result["error"]
    return both


@pytest.mark.parametrize("name", [name for name, _, _ in jobs()])
def test_ranks_are_the_same_after_each_step(results, name):
    first, second = (result[name] for result in results)
    assert same(first, second)


def by_hand(optimizer, skipped=()):
    model = make(2)
    made = OPTIMIZERS[optimizer](model.parameters())
    for index in range(STEPS):
        if index in skipped:
            continue
        made.zero_grad()
        x, y = whole_batch(index)
        nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        made.step()
    return fp32(model)


@pytest.mark.parametrize("name", [name for name, _, _ in jobs() if "seeds" not in name])
def test_as_one_process_with_the_whole_batch(results, name):
    _, (level, optimizer), kwargs = next(job for job in jobs() if job[0] == name)
    expected = by_hand(optimizer, [1] if "overflow_on" in kwargs else [])
    trace, scale = results[0][name]
    for key, value in expected.items():
        tolerance = 1e-5 if level == "O0" else 4e-2
        assert (trace[-1][key].float() - value).abs().max() <= tolerance, key
    if "overflow_on" in kwargs:
        assert scale == 128.0
        assert same(trace[1], trace[0])


def child(rank, model, folder):
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    from amp_support import OPTIMIZERS, loss_of, step

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    weights, output = fp32(model), model.eval()(whole_batch(0)[0]).detach()
    model, made = amp.initialize(
        model.train(), OPTIMIZERS["sgd"](model.parameters()), opt_level="O2", half_dtype="bfloat16", verbosity=0
    )
    step(model, made)
    torch.save((weights, output, fp32(model), loss_of(model).item()), Path(folder) / f"{rank}.pt")


def test_processes_started_after_initialize(tmp_path):
    model = make(2)
    model, made = amp.initialize(
        model, OPTIMIZERS["sgd"](model.parameters()), opt_level="O2", half_dtype="bfloat16", verbosity=0
    )
    weights, output = fp32(model), model(whole_batch(0)[0]).detach()
    multiprocessing.set_forkserver_preload(["lightning_apex"])
    torch.multiprocessing.start_processes(child, (model, str(tmp_path)), nprocs=1, start_method="forkserver")
    theirs, their_output, trained, _ = torch.load(tmp_path / "0.pt", weights_only=False)
    assert same(theirs, weights) and torch.equal(their_output, output)
    assert not same(trained, weights) and made is not None
