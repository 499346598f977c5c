"""Parameters spread over two gloo processes (DTensor, FSDP2's fully_shard), and ZeroRedundancyOptimizer."""

import pytest
import sharded_jobs as jobs
from optimizer_support import KINDS, takes
from two_processes import run_jobs

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:multiprocessing"),
]
INF, NAN = float("inf"), float("nan")


def hypers(kind, **more):
    # eps is not tiny, so that steps of near-zero gradients do not hang on their last bits
    return {"lr": 0.05, "weight_decay": 0.1, **takes(kind, momentum=0.9, eps=1e-3, trust_coefficient=0.5), **more}


JOBS = {
    **{f"fsdp {kind.__name__}": (jobs.fsdp, {"kind": kind.__name__, "hypers": hypers(kind)}) for kind in KINDS},
    "fsdp novograd inf": (jobs.fsdp, {"kind": "FusedNovoGrad", "hypers": {"lr": 0.05, "norm_type": 0}}),
    "fsdp lamb clips": (
        jobs.fsdp,
        {"kind": "FusedLAMB", "hypers": {"lr": 0.05, "eps": 0.1, "max_grad_norm": 0.1, "use_nvlamb": True}},
    ),
    "larc fused": (jobs.larc, {"inner": "FusedSGD", "hypers": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}}),
    "larc torch": (jobs.larc, {"inner": "SGD", "hypers": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}}),
    "scaling lamb": (jobs.loss_scaling, {"kind": "FusedLAMB", "unscales": False}),
    "scaling adam unscaled": (jobs.loss_scaling, {"kind": "FusedAdam", "unscales": True}),
    "masters": (jobs.masters_of_its_own, {}),
    **{
        f"clip {norm_type} {max_norm} {bad}": (
            jobs.clip,
            {"norm_type": norm_type, "max_norm": max_norm, "bad": bad},
        )
        for norm_type in (2.0, INF, 3.0)
        for max_norm, bad in ((0.1, None), (1e6, None), (0.1, INF), (0.1, NAN))
    },
    **{
        f"checkpoint {kind.__name__} full={full}": (
            jobs.checkpoints,
            {"kind": kind.__name__, "hypers": hypers(kind), "full": full},
        )
        for kind in KINDS
        for full in (False, True)
    },
    **{
        f"placements {kind.__name__}": (jobs.placements, {"kind": kind.__name__, "hypers": hypers(kind)})
        for kind in KINDS
    },
    **{
        f"zero {kind.__name__}": (
            jobs.zero,
            {
                "kind": kind.__name__,
                "hypers": hypers(kind, **takes(kind, max_grad_norm=None)),
                "bucket_view": i % 2 == 0,
            },
        )
        for i, kind in enumerate(KINDS)
    },
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_jobs(tmp_path_factory.mktemp("sharded"), JOBS)


@pytest.mark.parametrize("name", JOBS)
def test_equals_one_process(results, name):
    for rank, result in enumerate(results[name]):
        assert not isinstance(result, str), f"rank {rank}:\n{result}"
