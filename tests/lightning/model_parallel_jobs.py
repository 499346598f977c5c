"""What several processes do in test_model_parallel.py, and the same steps by hand in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from helpers import Net, batches, plugin, trainer
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from lightning_apex import LossScaleError

PER_RANK = 4  # rows of a batch
BAD = "net.4.weight"


def network(norm: str = "LayerNorm") -> nn.Sequential:
    """Shards of unequal size, one of which a process has nothing, and a norm that meets the fp32 input."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.LayerNorm(8),
        nn.Linear(8, 15, bias=False),
        getattr(nn, norm)(15),
        nn.Tanh(),
        nn.Linear(15, 4),
        nn.Linear(4, 1),
        nn.Linear(1, 4),
    )


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(value) for name, value in model.state_dict().items()}


class Sharded(Net):
    """A model that shards itself.

    Args:
        bad_steps: Batches after whose backward pass one process finds an infinity in its shard.
    """

    def __init__(self, optimizer: Any, norm: str = "LayerNorm", bad_steps: tuple[int, ...] = ()) -> None:
        super().__init__(optimizer)
        self.net = network(norm)
        self.bad_steps = bad_steps

    def configure_model(self) -> None:
        precision, mesh = self.trainer.precision_plugin, self.device_mesh["data_parallel"]
        precision.fully_shard(self.net[1], mesh=mesh)
        precision.fully_shard(self.net[4], mesh=mesh)
        precision.fully_shard(self.net, mesh=mesh)

    def on_after_backward(self) -> None:
        if self.seen - 1 in self.bad_steps and self.has_bad_shard():
            self.get_parameter(BAD).grad.to_local()[-1] = float("inf")

    def has_bad_shard(self) -> bool:
        return self.global_rank == self.trainer.world_size - 1


class Hybrid(Sharded):
    """Spread over two processes, and the same on the other two."""

    def configure_model(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        self.trainer.precision_plugin.fully_shard(self.net[1], mesh=mesh)
        self.trainer.precision_plugin.fully_shard(self.net, mesh=mesh)

    def has_bad_shard(self) -> bool:
        return self.global_rank % 2 == 1  # gradients have been averaged over the processes that hold the same


class TensorParallel(Sharded):
    """A layer is cut by columns over two processes, and all layers over the other two."""

    def configure_model(self) -> None:
        cut = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(self.net[4], self.device_mesh["tensor_parallel"], cut)
        mesh = self.device_mesh["data_parallel"]
        self.trainer.precision_plugin.fully_shard(self.net[4], mesh=mesh)
        self.trainer.precision_plugin.fully_shard(self.net, mesh=mesh)


class Clipped(Sharded):
    """By hand, in manual optimization."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.1, "norm")
        optimizer.step()


def strategy(ranks: int, full: bool = False, tensor: int = 1) -> ModelParallelStrategy:
    return ModelParallelStrategy(
        data_parallel_size=ranks // tensor,
        tensor_parallel_size=tensor,
        save_distributed_checkpoint=not full,
        process_group_backend="gloo",
    )


def rows_of(rank: int, ranks: int, count: int, per_rank: int = PER_RANK) -> DataLoader[Any]:
    """Rank r gets rows r, r + ranks, ... of each whole batch."""
    x, y = batches(count, per_rank * ranks).dataset.tensors
    return DataLoader(TensorDataset(x[rank::ranks], y[rank::ranks]), per_rank)


def made_trainer(level, ranks=2, full=False, precision=None, tensor=1, **kwargs):
    return trainer(
        plugin(level, **(precision or {})),
        devices=ranks,
        strategy=strategy(ranks, full, tensor),
        use_distributed_sampler=False,
        **kwargs,
    )


def outcome(made, model: LightningModule) -> dict[str, Any]:
    report = made.precision_plugin.last_overflow
    return {
        "end": whole_weights(model),
        "dtypes": {p.dtype for p in model.parameters()},
        "scale": made.scaler.get_scale(),
        "skipped": made.scaler.skipped_steps,
        "overflow": report and report.parameters,
        "losses": model.losses,
    }


def train(rank, level, ranks=2, count=4, optimizer="torch_sgd", model=None, kind="Sharded", **kwargs):
    kinds = {"Sharded": Sharded, "Clipped": Clipped, "Hybrid": Hybrid, "TensorParallel": TensorParallel}
    net = kinds[kind](optimizer, **(model or {}))
    tensor = 2 if kind == "TensorParallel" else 1
    made = made_trainer(level, ranks, tensor=tensor, **kwargs)
    made.fit(net, rows_of(rank // tensor, ranks // tensor, count))
    return outcome(made, net)


def hopeless(rank, optimizer):
    net = Sharded(optimizer, bad_steps=tuple(range(8)))
    made = made_trainer("O1", precision={"max_consecutive_skips": 3})
    try:
        made.fit(net, rows_of(rank, 2, 8))
    except LossScaleError as error:
        return {"error": [str(error)], "batches": net.seen}
    return {"error": [], "batches": net.seen}


def stages(rank, level):
    """Everything a Trainer does with one model, evaluation before training first; in inference mode as under NCCL."""
    with mock.patch("lightning.pytorch.loops.utilities._distributed_is_initialized", lambda: False):
        return _stages(rank, level)


def _stages(rank, level):
    model = Sharded("fused_adam")
    made = made_trainer(level, epochs=2)
    loader = rows_of(rank, 2, 3)
    losses = {}
    (losses["before"],) = made.validate(model, loader, verbose=False)
    made.fit(model, loader, loader)  # with a sanity check
    (losses["after"],) = made.validate(model, loader, verbose=False)
    (losses["test"],) = made.test(model, loader, verbose=False)
    (predicted, *_) = made.predict(model, loader)
    again = made_trainer(level, epochs=2)
    before = whole_weights(model)
    again.fit(model, loader, loader)
    after = whole_weights(model)
    return {
        "losses": losses,
        "predicted": predicted.dtype,
        "moved": max((after[name] - before[name]).abs().max().item() for name in before),
        "hooks": sum(len(m._forward_pre_hooks) for m in model.modules() if isinstance(m, nn.LayerNorm)),
    }


# --- by hand --------------------------------------------------------------------------------------------------------


def by_hand(
    level: str,
    make_optimizer: Any,
    ranks: int = 2,
    count: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    scale: float = 1.0,
    clip: float = 0.0,
    accumulate: int = 1,
    norm: str = "LayerNorm",
    skip: tuple[int, ...] = (),
) -> dict[str, Tensor]:
    """The weights after steps in one process, in the arithmetic that is promised of several."""
    net = network(norm)
    optimizer = make_optimizer(net.parameters())
    half_weights = level in ("O2", "O5")
    halves = {
        name
        for name, _ in net.named_parameters()
        if half_weights and not (norm == "BatchNorm1d" and name.startswith("2."))
    }
    data = [iter(rows_of(rank, ranks, count)) for rank in range(ranks)]
    for step in range(count // accumulate):
        total = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
        for _ in range(accumulate):
            of_ranks = []
            buffers = {name: b.clone() for name, b in net.named_buffers()}
            for loader in data:
                used = {
                    name: p.detach().to(dtype if name in halves else p.dtype).requires_grad_()
                    for name, p in net.named_parameters()
                }
                x, y = next(loader)
                with torch.autocast("cpu", dtype, enabled=level != "O0"):
                    inputs = x.to(dtype) if half_weights else x
                    out = torch.func.functional_call(net, used | {n: b.clone() for n, b in buffers.items()}, inputs)
                    loss = nn.functional.cross_entropy(out.float(), y) / accumulate
                of_ranks.append(torch.autograd.grad(loss * scale, list(used.values())))
            for name, grads in zip(total, zip(*of_ranks, strict=True), strict=True):
                total[name] += (sum(grads[1:], grads[0]) / ranks).float()  # in the dtype they are exchanged in
        for (name, p), grad in zip(net.named_parameters(), total.values(), strict=True):
            assert grad.abs().max() > 0, name
            p.grad = grad / scale
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        if step not in skip:
            optimizer.step()
    return {f"net.{name}": p.detach().clone() for name, p in net.named_parameters()}


# --- checkpoints ----------------------------------------------------------------------------------------------------

STEPS = 3
SCALE = {"init_scale": 256.0, "growth_interval": 2}


def state_of(made, model: LightningModule) -> dict[str, Any]:
    """Weights, moments and the loss scale, whole."""
    (optimizer,) = made.strategy.optimizers
    names = {p: name for name, p in model.named_parameters()}
    return {
        "weights": whole_weights(model),
        "moments": {
            f"{names[p]} {key}": whole(value) for p, state in optimizer.state.items() for key, value in state.items()
        },
        "scale": made.scaler.state_dict(),
    }


class Remembers(Callback):
    """The state at the end of a fit, while the model is still there."""

    def on_train_end(self, trainer, pl_module) -> None:
        self.state = state_of(trainer, pl_module)


def fitted(rank, level, ranks, epochs, ckpt_path=None, optimizer="fused_adam", full=False, moved=0.0):
    """A fit until the end of an epoch; ``moved`` makes its weights others than those of the file it resumes."""
    model, remembers = Sharded(optimizer), Remembers()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(moved)
    precision = SCALE if level in ("O1", "O2") else {}
    made = made_trainer(level, ranks, full, precision, epochs=epochs, callbacks=[remembers])
    # as many rows of a batch in all, however many ranks there are
    made.fit(model, rows_of(rank, ranks, STEPS, 8 // ranks), ckpt_path=ckpt_path, weights_only=False)
    return made, model, remembers.state


def saved(rank, level, folder, full, optimizer="fused_adam", ranks=2):
    """Two epochs; and one, a file, and one more from there."""
    options = {"optimizer": optimizer, "full": full}
    _, _, straight = fitted(rank, level, ranks, 2, **options)
    made, _, half = fitted(rank, level, ranks, 1, **options)
    path = file_of(folder, level, full, optimizer)
    made.save_checkpoint(path)
    made.strategy.barrier()
    _, _, rest = fitted(rank, level, ranks, 2, path, moved=1.0, **options)
    return {"straight": straight, "half": half, "rest": rest}


def loaded(rank, level, path, full, optimizer="fused_adam", ranks=2):
    """One epoch more from a file."""
    _, model, state = fitted(rank, level, ranks, 2, path, optimizer, full, moved=1.0)
    return {"state": state, "loss": model.losses[0]}


def file_of(folder, level, full, optimizer) -> str:
    return str(Path(folder) / f"{level}_{optimizer}{'.ckpt' if full else ''}")
