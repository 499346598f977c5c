"""Two gloo processes on the CPU: ranks stay equal, and equal to one process on the whole batch."""

import pytest
import torch
from helpers import LEVELS, SCALED, Net, all_fp32, assert_close, batches, fit, plugin, trainer, weights
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from ranks import RANKS, spawn
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::DeprecationWarning:multiprocessing")]


class Plain(Net):
    """Without BatchNorm, whose statistics are a rank's own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.net[1] = nn.LayerNorm(16)


class InfOnOneRank(Plain):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 1 and self.global_rank == 1 else loss


def shard(rank, count, size=4):
    """Rank r gets rows r, r + 2, ... of each whole batch."""
    x, y = batches(count, size * RANKS).dataset.tensors
    return DataLoader(TensorDataset(x[rank::RANKS], y[rank::RANKS]), size)


class Masters(Callback):
    """The fp32 weights after each batch."""

    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx % trainer.accumulate_grad_batches == trainer.accumulate_grad_batches - 1:
            self.steps.append(weights(pl_module))


def train(rank, level, optimizer="fused_adam", count=4, kind="Plain", seed=None, strategy=None, check=False, **kwargs):
    model = {"Plain": Plain, "InfOnOneRank": InfOnOneRank, "Net": Net}[kind](optimizer)
    if seed is not None:  # every rank its own start
        for p in model.parameters():
            p.data.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed + rank)) * 0.1)
    precision = kwargs.pop("precision", {})
    masters = Masters()
    made = trainer(
        plugin(level, **precision),
        devices=RANKS,
        strategy=DDPStrategy(process_group_backend="gloo", **(strategy or {})),
        use_distributed_sampler=False,
        callbacks=[masters],
        **kwargs,
    )
    made.fit(model, shard(rank, count))
    return {
        "steps": masters.steps,
        "end": weights(model),
        "fp32": all_fp32(model),
        "scale": made.scaler.get_scale(),
        "skipped": made.scaler.skipped_steps,
        "losses": model.losses,
    }


def identical(results):
    first, second = results
    assert len(first["steps"]) == len(second["steps"]) > 0
    for i, (a, b) in enumerate(zip(first["steps"], second["steps"], strict=True)):
        for name, tensor in a.items():
            if "running" not in name:
                assert torch.equal(tensor, b[name]), f"ranks differ in {name} after step {i}"
    assert first["fp32"]
    assert second["fp32"]
    assert first["scale"] == second["scale"]
    assert first["skipped"] == second["skipped"]


CASES = {
    **{f"{level}": (level, {}) for level in LEVELS},
    "O2_torch": ("O2", {"optimizer": "torch_adamw"}),
    "O2_accumulate": ("O2", {"accumulate_grad_batches": 2}),
    "O5_accumulate_torch": ("O5", {"accumulate_grad_batches": 2, "optimizer": "torch_adamw"}),
    "O1_accumulate": ("O1", {"accumulate_grad_batches": 2}),
    "O2_clip": ("O2", {"gradient_clip_val": 0.2}),
    "O2_bucket_view": ("O2", {"strategy": {"gradient_as_bucket_view": True}, "gradient_clip_val": 0.2}),
    "O5_bucket_view_torch": ("O5", {"strategy": {"gradient_as_bucket_view": True}, "optimizer": "torch_adamw"}),
    "O2_unused": ("O2", {"strategy": {"find_unused_parameters": True}}),
    "O5_static": ("O5", {"strategy": {"static_graph": True}}),
    "O2_batchnorm": ("O2", {"kind": "Net"}),
    "O2_inf": ("O2", {"kind": "InfOnOneRank", "precision": {"init_scale": 256.0}}),
    "O1_inf": ("O1", {"kind": "InfOnOneRank", "precision": {"init_scale": 256.0}, "optimizer": "torch_adamw"}),
    "O2_inf_accumulate": (
        "O2",
        {"kind": "InfOnOneRank", "precision": {"init_scale": 256.0}, "accumulate_grad_batches": 2},
    ),
    "O0_seeds": ("O0", {"seed": 5}),
    "O2_seeds": ("O2", {"seed": 5}),
    "O5_seeds_torch": ("O5", {"seed": 5, "optimizer": "torch_adamw"}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    jobs = [(name, train, {"level": level, **kwargs}) for name, (level, kwargs) in CASES.items()]
    return spawn(tmp_path_factory.mktemp("ddp"), jobs)


@pytest.mark.parametrize("name", list(CASES))
def test_ranks_hold_identical_masters_after_each_step(runs, name):
    identical(runs[name])


@pytest.mark.parametrize("name", [n for n, (_, k) in CASES.items() if "seed" not in k and "kind" not in k])
def test_equals_one_process_on_the_whole_batch(runs, name):
    level, kwargs = CASES[name]
    kwargs = {k: v for k, v in kwargs.items() if k != "strategy"}
    model = Plain(kwargs.pop("optimizer", "fused_adam"))
    x, y = batches(4, 8).dataset.tensors
    # rank by rank, as the shards are cut
    rows = torch.cat([torch.arange(i * 8, i * 8 + 8) for i in range(4)])
    fit(model, plugin(level), DataLoader(TensorDataset(x[rows], y[rows]), 8), **kwargs)
    tolerance = 1e-5 if level == "O0" else 3e-2
    assert_close(runs[name][0]["end"], weights(model), atol=tolerance)
    error = max((runs[name][0]["end"][n] - t).abs().mean() for n, t in weights(model).items())
    assert error < tolerance / 5


@pytest.mark.parametrize("name", ["O2_inf", "O1_inf", "O2_inf_accumulate"])
def test_an_inf_on_one_rank_skips_on_both(runs, name):
    for result in runs[name]:
        assert result["skipped"] == 1
        assert result["scale"] == 128.0
        assert all(torch.isfinite(t).all() for t in result["end"].values())
    steps = runs[name][0]["steps"]
    if name != "O2_inf_accumulate":
        assert all(torch.equal(steps[0][n], t) for n, t in steps[1].items())


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
@pytest.mark.filterwarnings("ignore")
def test_ddp_spawn(level):
    """Lightning starts the processes: plugin and model are pickled, fp32 weights come back."""
    model = Spawned()
    made = trainer(plugin(level), devices=RANKS, strategy="ddp_spawn")
    before = weights(model)
    made.fit(model, batches(4))
    assert all_fp32(model)
    assert (model.net[0].weight - before["net.0.weight"]).abs().max() > 1e-3
    assert level in (*SCALED, "O0", "O5")


class Spawned(Plain):  # picklable: no lambda
    def __init__(self):
        super().__init__()
        self.make_optimizer = None

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)
