"""DDP's options under two gloo processes: static graphs, bucket views, unused parameters, hooks on the exchange."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import Net, assert_close, batches, fit, plugin, trainer, weights
from lightning.pytorch.strategies import DDPStrategy
from ranks import RANKS, spawn
from test_ddp import Plain, shard
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from lightning_apex import ApexDDPStrategy

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:multiprocessing"),
]
LEVELS = ("O1", "O2", "O5")
COUNT = 4


class Unused(Plain):
    """The last batch of two does not reach a layer."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.extra = nn.Linear(8, 4)

    def forward(self, x):
        out = super().forward(x)
        return out + 0.1 * self.extra(x) if self.seen % 2 == 0 else out


class Hooked(DDPStrategy):
    """With the hook that Lightning registers on a GPU."""

    def __init__(self, hook, **kwargs):
        super().__init__(process_group_backend="gloo", **kwargs)
        self.hook, self.state = hook

    def _register_ddp_hooks(self):
        self.model.register_comm_hook(self.state, self.hook)


def look(seen, bucket):
    seen.append((bucket.buffer().dtype, bucket.buffer().numel()))
    return default_hooks.allreduce_hook(None, bucket)


def power_sgd():
    return powerSGD_hook.powerSGD_hook, powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)


HOOKS = {
    "bf16_compress": lambda: (default_hooks.bf16_compress_hook, None),
    "fp16_compress": lambda: (default_hooks.fp16_compress_hook, None),
    "power_sgd": power_sgd,
}


def train(rank, level, optimizer="fused_adam", kind="Plain", strategy=None, hook=None, sync=False, **kwargs):
    model = {"Plain": Plain, "Net": Net, "Unused": Unused}[kind](optimizer)
    if not torch.distributed.is_initialized():  # PowerSGD's state asks for it
        torch.distributed.init_process_group("gloo")
    seen = []
    if hook == "look":
        made_strategy = Hooked((look, seen), **(strategy or {}))
    elif hook is not None:
        made_strategy = Hooked(HOOKS[hook](), **(strategy or {}))
    else:
        made_strategy = (ApexDDPStrategy if sync else DDPStrategy)(process_group_backend="gloo", **(strategy or {}))
    made = trainer(plugin(level), devices=RANKS, strategy=made_strategy, use_distributed_sampler=False, **kwargs)
    made.fit(model, shard(rank, COUNT))
    return {"end": weights(model), "losses": model.losses, "wire": seen, "skipped": made.scaler.skipped_steps}


STATIC, VIEW, FIND = {"static_graph": True}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}
CASES = {
    **{
        f"{level} {optimizer} view accumulate": {
            "level": level,
            "optimizer": optimizer,
            "strategy": VIEW,
            "accumulate_grad_batches": 2,
        }
        for level in LEVELS
        for optimizer in ("fused_adam", "torch_adamw")
    },
    **{
        f"{level} static view clip": {"level": level, "strategy": STATIC | VIEW, "gradient_clip_val": 0.1}
        for level in ("O1", "O5")
    },
    **{f"{level} unused": {"level": level, "kind": "Unused", "strategy": FIND} for level in LEVELS},
    **{
        f"{level} {hook}": {"level": level, "hook": hook}
        for level in ("O1", "O5")
        for hook in ("bf16_compress", "fp16_compress", "power_sgd")
    },
    "O2 bf16_compress accumulate": {"level": "O2", "hook": "bf16_compress", "accumulate_grad_batches": 2},
    **{
        f"{level} sync static view": {"level": level, "kind": "Net", "strategy": STATIC | VIEW, "sync": True}
        for level in LEVELS
    },
    **{f"{level} wire": {"level": level, "kind": "Net", "hook": "look"} for level in ("O0", "O1", "O2", "O4", "O5")},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return spawn(tmp_path_factory.mktemp("ddp"), [(name, train, kwargs) for name, kwargs in CASES.items()])


@pytest.mark.parametrize("name", CASES)
def test_ranks_end_with_the_same_weights(runs, name):
    first, second = runs[name]
    for key, value in first["end"].items():
        assert ("running" in key and "sync" not in name) or torch.equal(value, second["end"][key]), key
    assert first["skipped"] == second["skipped"] == 0


@pytest.mark.parametrize("name", [name for name in CASES if "power" not in name and "wire" not in name])
def test_equals_one_process_on_the_whole_batch(runs, name):
    kwargs = dict(CASES[name])
    kind = {"Plain": Plain, "Net": Net, "Unused": Unused}[kwargs.pop("kind", "Plain")]
    level, optimizer = kwargs.pop("level"), kwargs.pop("optimizer", "fused_adam")
    for key in ("strategy", "hook", "sync"):
        kwargs.pop(key, None)
    model = kind(optimizer)
    fit(model, plugin(level), batches(COUNT, 8), **kwargs)
    actual, expected = runs[name][0]["end"], weights(model)
    assert_close(actual, expected, atol=3e-2)
    assert max((actual[n] - t).float().abs().mean() for n, t in expected.items()) < 6e-3


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_powersgd_trains(runs, level):
    for result in runs[f"{level} power_sgd"]:
        assert all(torch.isfinite(value).all() for value in result["end"].values())
        moved = max((result["end"][n] - t).abs().max() for n, t in weights(Plain()).items())
        assert moved > 1e-2


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_gradients_are_exchanged_in_their_parameters_dtype(runs, level):
    """At O2 and O5 in the half type, but BatchNorm's in fp32; half the bytes."""
    model = Net()
    sizes = {"norm": 2 * 16, "rest": sum(p.numel() for p in model.parameters()) - 2 * 16}
    for result in runs[f"{level} wire"]:
        exchanged = {}
        for dtype, numel in result["wire"]:
            exchanged[dtype] = exchanged.get(dtype, 0) + numel
        if level in ("O2", "O5"):
            assert exchanged == {torch.bfloat16: COUNT * sizes["rest"], torch.float32: COUNT * sizes["norm"]}
        else:
            assert exchanged == {torch.float32: COUNT * sum(sizes.values())}


SCRIPT = """
import sys
import torch
from helpers import Net, batches, plugin, trainer

made = trainer(plugin(sys.argv[2]), strategy="apex_ddp", devices=2)
model = Net()
made.fit(model, batches(4))
assert made.world_size == 2
torch.save(model.state_dict(), f"{sys.argv[1]}/{made.global_rank}.pt")
"""


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_a_script_that_torchrun_starts(tmp_path, level):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    paths = [str(Path(__file__).parent), os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
    root = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, str(root)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run([*command, str(script), str(tmp_path), level], env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    before = weights(Net())
    for name, value in first.items():
        assert value.dtype is not torch.bfloat16
        assert torch.equal(value, second[name]), name
    assert (first["net.0.weight"] - before["net.0.weight"]).abs().max() > 1e-3
