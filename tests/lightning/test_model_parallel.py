"""FSDP2 through Lightning's ModelParallelStrategy: gloo processes equal the same steps by hand in one process."""

import model_parallel_jobs as jobs
import pytest
import torch
from helpers import OPTIMIZERS
from ranks import RANKS, spawn

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::DeprecationWarning:multiprocessing")]

F16 = {"half_dtype": "float16", "init_scale": 256.0}
# what the processes do, and what is done by hand
CASES = {
    **{level: ({"level": level}, {"level": level}) for level in ("O0", "O1", "O2", "O4", "O5")},
    **{
        f"{level}_{optimizer}": ({"level": level, "optimizer": optimizer}, {"level": level, "optimizer": optimizer})
        for level in ("O4", "O5")
        for optimizer in ("fused_adam", "fused_sgd", "torch_adamw")
    },
    **{
        f"{level}_float16_clip_accumulate_{optimizer}": (
            {
                "level": level,
                "optimizer": optimizer,
                "precision": F16,
                "gradient_clip_val": 0.05,
                "accumulate_grad_batches": 2,
            },
            {
                "level": level,
                "optimizer": optimizer,
                "dtype": torch.float16,
                "scale": 256.0,
                "clip": 0.05,
                "accumulate": 2,
            },
        )
        for level in ("O1", "O2")
        for optimizer in ("fused_sgd", "torch_sgd")
    },
    "O5_clip_accumulate": (
        {"level": "O5", "gradient_clip_val": 0.05, "accumulate_grad_batches": 2},
        {"level": "O5", "clip": 0.05, "accumulate": 2},
    ),
    "O5_batchnorm": (
        {"level": "O5", "model": {"norm": "BatchNorm1d"}},
        {"level": "O5", "norm": "BatchNorm1d"},
    ),
    "O2_manual": ({"level": "O2", "kind": "Clipped"}, {"level": "O2", "clip": 0.1}),
    **{
        f"{level}_bad_shard_{optimizer}": (
            {"level": level, "optimizer": optimizer, "model": {"bad_steps": (1,)}},
            {"level": level, "optimizer": optimizer, "skip": (1,)},
        )
        for level in ("O1", "O2")
        for optimizer in ("fused_sgd", "torch_sgd")
    },
}

STAGES = ("O0", "O1", "O5")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    to_do = [(name, jobs.train, kwargs) for name, (kwargs, _) in CASES.items()]
    to_do += [(f"hopeless_{o}", jobs.hopeless, {"optimizer": o}) for o in ("fused_sgd", "torch_sgd")]
    to_do += [(f"stages_{level}", jobs.stages, {"level": level}) for level in STAGES]
    return spawn(tmp_path_factory.mktemp("model_parallel"), to_do)


def assert_trained_as(result, expected, atol=1e-6):
    for name, value in expected.items():
        torch.testing.assert_close(result["end"][name], value, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", CASES)
def test_equals_the_same_steps_in_one_process(runs, name):
    first, second = runs[name]
    for key, value in first["end"].items():
        assert "running" in key or torch.equal(value, second["end"][key]), key
    assert first["dtypes"] == {torch.float32}
    kwargs = dict(CASES[name][1])
    optimizer = kwargs.pop("optimizer", "torch_sgd").replace("fused", "torch")
    # torch's optimizers, not fused
    make = {
        "torch_adam": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.01, foreach=False),
        "torch_adamw": OPTIMIZERS["torch_adamw"],
        "torch_sgd": OPTIMIZERS["torch_sgd"],
    }[optimizer]
    if CASES[name][1].get("optimizer") == "fused_sgd":
        make = lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)  # noqa: E731
    assert_trained_as(first, jobs.by_hand(make_optimizer=make, **kwargs))


@pytest.mark.parametrize("name", [name for name in CASES if "bad_shard" in name])
def test_an_infinity_in_one_shard_skips_the_step_of_all(runs, name):
    for result in runs[name]:
        assert result["skipped"] == 1
        assert result["scale"] == 2.0**15
        assert result["overflow"] == (jobs.BAD,)


@pytest.mark.parametrize("optimizer", ["fused_sgd", "torch_sgd"])
def test_too_many_skips_end_the_run_of_all(runs, optimizer):
    results = runs[f"hopeless_{optimizer}"]
    assert len(results) == RANKS
    for result in results:
        assert "3 steps in a row" in result["error"][0] and jobs.BAD in result["error"][0]
        assert result["batches"] == 3


@pytest.mark.parametrize("level", STAGES)
def test_a_model_is_evaluated_and_trained_again(runs, level):
    for result in runs[f"stages_{level}"]:
        losses = {key: next(iter(value.values())) for key, value in result["losses"].items()}
        assert losses["after"] < losses["before"]
        assert losses["test"] == losses["after"]
        assert result["predicted"] is (torch.float32 if level == "O0" else torch.bfloat16)
        assert result["moved"] > 1e-3
        assert result["hooks"] == 0
