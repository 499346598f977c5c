"""SyncBatchNorm on 2 and 4 ranks: equal to torch's BatchNorm on the batch put together."""

import copy
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from sync_support import BASE, LAYERS, batches, check_row, close, layer, run_on_ranks, run_row, witness
from torch import nn

from lightning_apex.parallel import SyncBatchNorm, _collectives, create_syncbn_process_group

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::DeprecationWarning:multiprocessing")]

TWO = {
    **LAYERS,
    "one_and_seven": BASE.but(sizes=(1, 7), steps=2),
    "one_and_seven_2d": BASE.but(sizes=(1, 7), shape=(5,)),
    "one_and_seven_z_relu": BASE.but(sizes=(1, 7), z=True, relu=True, memory="channels_last"),
    "seven_and_none": BASE.but(sizes=(7, 0), steps=2),
    "none_and_seven": BASE.but(sizes=(0, 7), z=True, relu=True),
    "none_and_seven_last": BASE.but(sizes=(0, 7), shape=(6, 5, 3), memory="last"),
    "none_and_seven_bf16": BASE.but(sizes=(0, 7), dtype=torch.bfloat16, memory="channels_last"),
    "one_and_one": BASE.but(sizes=(1, 1), shape=(5,), momentum=None, steps=2),
}
FOUR = {
    "even": BASE.but(sizes=(2, 2, 2, 2), steps=2),
    "uneven": BASE.but(sizes=(1, 0, 5, 2), z=True, relu=True),
    "uneven_last": BASE.but(sizes=(3, 1, 0, 2), shape=(6, 5, 3), memory="last"),
    "one_value_each": BASE.but(sizes=(1, 1, 1, 1), shape=(65,)),
    "far_from_zero": BASE.but(sizes=(20, 7, 1, 30), mean=1e4, std=1e-2),
    "cumulative": BASE.but(sizes=(1, 2, 3, 4), momentum=None, steps=3),
}
GROUPS = {"uneven": BASE.but(sizes=(1, 4), relu=True), "steps": BASE.but(sizes=(3, 3), steps=2)}


def counts_collectives(rank):
    """How many collectives each pass makes."""
    calls = []
    gather, reduce = _collectives._gather_flat, dist.all_reduce
    _collectives._gather_flat = lambda *a, **k: (calls.append("gather"), gather(*a, **k))[1]
    dist.all_reduce = lambda *a, **k: (calls.append("reduce"), reduce(*a, **k))[1]
    try:
        seen = {}
        module = SyncBatchNorm(3)
        for name, x in {"input": torch.randn(2, 3, 4, requires_grad=True), "no_input": torch.randn(2, 3, 4)}.items():
            out = module(x)
            forward, calls[:] = list(calls), []
            out.sum().backward()
            seen[name], calls[:] = (forward, list(calls)), []
        module.eval()(torch.randn(2, 3, 4, requires_grad=True)).sum().backward()
        SyncBatchNorm(3, track_running_stats=False).eval()(torch.randn(2, 3, 4))
        seen["eval"] = list(calls)
        return seen
    finally:
        _collectives._gather_flat, dist.all_reduce = gather, reduce


def evaluates_alone(rank):
    """Only rank 0 evaluates: nobody waits for anybody."""
    for module in (SyncBatchNorm(3), SyncBatchNorm(3, track_running_stats=False, fuse_relu=True)):
        module.eval()
        if rank == 0:
            module(torch.randn(1, 3, 4, 4, requires_grad=True)).sum().backward()
    return True


def refuses_one_value(rank, sizes, momentum=0.1):
    module = SyncBatchNorm(5, momentum=momentum)
    before = copy.deepcopy(module.state_dict())
    try:
        module(torch.randn(sizes[rank], 5))
    except ValueError as error:
        same = all(torch.equal(t, before[k]) for k, t in module.state_dict().items())
        return {"said": str(error), "unchanged": same}
    return {"said": "", "unchanged": False}


def refuses_other_channels(rank):
    """What a layer says to four channels that has three, on either rank alone: nobody has sent anything."""
    said = []
    for kwargs in ({"affine": False}, {"track_running_stats": False}):
        if rank == len(said):
            with pytest.raises(ValueError, match="channels") as caught:
                SyncBatchNorm(3, **kwargs)(torch.randn(2, 4, 5))
            said.append(str(caught.value))
        else:
            said.append("")
    return [said[rank]]  # a bare str is a traceback


def all_empty(rank):
    module = SyncBatchNorm(5)
    x = torch.zeros(0, 5, 3, requires_grad=True)
    out = module(x)
    out.sum().backward()
    return {"shape": tuple(out.shape), "grad": tuple(x.grad.shape), "state": module.state_dict()}


def groups_of_one(rank):
    module = SyncBatchNorm(3, process_group=create_syncbn_process_group(1))
    x = torch.randn(4, 3) + rank
    module(x)
    return module.running_mean, x.mean(0) * 0.1


def wrong_group_sizes(rank):
    said = []
    for size in (3, 5, -1):
        with pytest.raises(ValueError) as caught:
            create_syncbn_process_group(size)
        said.append(str(caught.value))
    return said, create_syncbn_process_group(0) is None


def shared_twice(rank):
    """One layer used twice in a forward pass, on each rank's half of a batch."""
    torch.manual_seed(0)
    module, x = SyncBatchNorm(3), torch.randn(8, 3, 5)
    mine = x[4 * rank : 4 * rank + 4].clone().requires_grad_()
    module(module(mine).sin() + mine).square().sum().backward()
    return {"dx": mine.grad, "dw": module.weight.grad, **module.state_dict()}


def compiled(rank):
    """torch.compile of a model that trains with SyncBatchNorm, in the batches of a row."""
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # the compiler's own
    module = layer(BASE)
    model = torch.compile(nn.Sequential(nn.Identity(), module, nn.Identity()), backend="aot_eager")
    (batch,) = batches(BASE)
    x, g = (batch[key][4 * rank : 4 * rank + 4].clone() for key in ("x", "g"))
    x.requires_grad_()
    model(x).backward(g)
    return {"dx": x.grad, **module.state_dict()}


def waits_in_vain(rank):
    """Rank 0 trains, rank 1 evaluates: reported once the group's timeout is over."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    module = SyncBatchNorm(3, process_group=group).train(rank == 0)
    start, said = time.monotonic(), ""
    try:
        module(torch.randn(4, 3))
    except RuntimeError as error:
        said = f"{error} / {type(error.__cause__).__name__}"
    return {"said": said, "seconds": time.monotonic() - start, "tracked": int(module.num_batches_tracked)}


JOBS = {
    "counts": (counts_collectives, {}),
    "evaluates_alone": (evaluates_alone, {}),
    "one_value": (refuses_one_value, {"sizes": (1, 0)}),
    "one_value_cumulative": (refuses_one_value, {"sizes": (0, 1), "momentum": None}),
    "other_channels": (refuses_other_channels, {}),
    "all_empty": (all_empty, {}),
    "shared_twice": (shared_twice, {}),
    "compiled": (compiled, {}),
    "waits_in_vain": (waits_in_vain, {}),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    jobs = {f"row {name}": (run_row, {"row": row}) for name, row in TWO.items()} | JOBS
    return run_on_ranks(2, tmp_path_factory.mktemp("two"), jobs)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    jobs = {f"row {name}": (run_row, {"row": row}) for name, row in FOUR.items()}
    jobs |= {f"group {name}": (run_row, {"row": row, "group_size": 2}) for name, row in GROUPS.items()}
    jobs |= {"groups_of_one": (groups_of_one, {}), "wrong_group_sizes": (wrong_group_sizes, {})}
    return run_on_ranks(4, tmp_path_factory.mktemp("four"), jobs)


def of(results, name):
    for rank, result in enumerate(results[name]):
        assert not isinstance(result, str), f"rank {rank}:\n{result}"
    return results[name]


@pytest.mark.parametrize("name", list(TWO))
def test_two_ranks(two, name):
    check_row(TWO[name], of(two, f"row {name}"))


@pytest.mark.parametrize("name", list(FOUR))
def test_four_ranks(four, name):
    check_row(FOUR[name], of(four, f"row {name}"))


@pytest.mark.parametrize("name", list(GROUPS))
def test_two_groups_of_two_ranks(four, name):
    results = of(four, f"group {name}")
    check_row(GROUPS[name], results[:2])
    check_row(GROUPS[name], results[2:])


def test_the_rows_can_fail(two):
    """The witness is not satisfied by statistics of a rank's own."""
    row = TWO["one_and_seven"]
    local = run_row(0, row.but(sizes=(8,)))
    check_row(row.but(sizes=(8,)), [local])
    wrong = copy.deepcopy(of(two, "row one_and_seven"))
    wrong[1]["state"]["running_var"] *= 1.001
    with pytest.raises(AssertionError, match="running_var"):
        check_row(row, wrong)


def test_one_collective_a_pass_and_none_in_eval(two):
    for seen in of(two, "counts"):
        assert seen == {"input": (["gather"], ["reduce"]), "no_input": (["gather"], []), "eval": []}


def test_eval_waits_for_nobody(two):
    assert of(two, "evaluates_alone") == [True, True]


@pytest.mark.parametrize("name", ["one_value", "one_value_cumulative"])
def test_one_value_over_all_ranks_is_an_error_on_each_before_anything_changes(two, name):
    for result in of(two, name):
        assert "more than 1 value per channel" in result["said"] and "all 2 ranks" in result["said"]
        assert result["unchanged"]


def test_other_channels_are_an_error_before_anything_is_sent(two):
    for (said,) in of(two, "other_channels"):
        assert "[2, 4, 5] has 4 channels, and this layer 3" in said


def test_all_ranks_empty(two):
    for result in of(two, "all_empty"):
        assert result["shape"] == result["grad"] == (0, 5, 3)
        assert torch.equal(result["state"]["running_mean"], torch.zeros(5))
        assert torch.equal(result["state"]["running_var"], torch.ones(5))
        assert result["state"]["num_batches_tracked"] == 1


def test_a_layer_used_twice(two):
    torch.manual_seed(0)
    module, x = nn.BatchNorm1d(3).double(), torch.randn(8, 3, 5).double().requires_grad_()
    module(module(x).sin() + x).square().sum().backward()
    first, second = of(two, "shared_twice")
    close(torch.cat((first["dx"], second["dx"])), x.grad, 1e-4, 1e-4, "dx")
    close(first["dw"] + second["dw"], module.weight.grad, 1e-3, 1e-4, "dw")
    for key, value in module.state_dict().items():
        close(first[key], value, 1e-5, 1e-5, key)


def test_a_compiled_model_trains(two):
    expected = witness(BASE)
    results = of(two, "compiled")
    close(torch.cat([r["dx"] for r in results]), expected["steps"][0]["dx"], 1e-4, 1e-4, "dx")
    for key, value in expected["state"].items():
        close(results[0][key], value, 1e-5, 1e-5, key)


def test_a_rank_in_eval_is_reported_within_the_timeout(two):
    trained, evaluated = of(two, "waits_in_vain")
    assert "SyncBatchNorm" in trained["said"] and "eval()" in trained["said"] and "rank 0" in trained["said"]
    assert trained["seconds"] < 20
    assert trained["tracked"] == 0
    assert evaluated["said"] == ""


def test_groups_of_one_rank_share_nothing(four):
    for mean, expected in of(four, "groups_of_one"):
        close(mean, expected, 1e-6, 1e-6, "running_mean")


def test_wrong_group_sizes_are_named(four):
    for said, whole in of(four, "wrong_group_sizes"):
        assert whole
        for size, text in zip((3, 5, -1), said, strict=True):
            assert f"group_size={size}" in text and "4 rank" in text


def test_groups_need_a_running_job(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    assert create_syncbn_process_group(0) is None
    with pytest.raises(RuntimeError, match="init_process_group"):
        create_syncbn_process_group(2)
