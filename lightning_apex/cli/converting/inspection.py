"""What a checkpoint holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_apex.cli.converting import parts as found
from lightning_apex.cli.converting.parts import Parts, label
from lightning_apex.cli.converting.reading import read
from lightning_apex.cli.errors import FINDING, OK, CommandError

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Sizes:
    """Tensors of one dtype.

    Attributes:
        tensors: How many there are; one that has two names counts once.
        elements: In all.
        bytes: In all.
    """

    tensors: int
    elements: int
    bytes: int


@dataclass(frozen=True)
class Weights:
    """One state dict of a module.

    Attributes:
        place: Its key; empty for the whole file.
        by_dtype: Sizes, by the name of the dtype.
        not_finite: Names that hold inf or NaN.
        beyond_fp16: Names that hold finite values which fp16 rounds to inf.
    """

    place: str
    by_dtype: Mapping[str, Sizes]
    not_finite: Sequence[str]
    beyond_fp16: Sequence[str]


@dataclass(frozen=True)
class OptimizerState:
    """One state dict of an optimizer.

    Attributes:
        place: Its key.
        looks_like: The algorithm that keeps such a state.
        layout: ``"torch"``, or ``"Apex"`` where steps are counted once a group.
        parameters: How many parameters the groups list.
        step: The largest step count; ``None`` where none is kept.
        by_dtype: Sizes of the moments.
        masters: fp32 masters beside it, as ``FP16_Optimizer`` keeps them.
    """

    place: str
    looks_like: str
    layout: str
    parameters: int
    step: float | None
    by_dtype: Mapping[str, Sizes]
    masters: int


@dataclass(frozen=True)
class Scale:
    """One loss scale.

    Attributes:
        place: Its key.
        value: The scale.
        good_steps: Since it last changed.
    """

    place: str
    value: float
    good_steps: int


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds, and what was made of it.

    Attributes:
        path: The file or folder.
        kind: Who wrote it: lightning-apex, Lightning, Apex, ...
        epoch: Of a Lightning checkpoint.
        global_step: Likewise.
        written_by: Lightning's version.
        weights: State dicts of modules.
        optimizers: State dicts of optimizers.
        scales: Loss scales.
        notes: What was noticed.
        written: The file that `convert_checkpoint` wrote.
    """

    path: Path
    kind: str
    epoch: int | None
    global_step: int | None
    written_by: str | None
    weights: Sequence[Weights]
    optimizers: Sequence[OptimizerState]
    scales: Sequence[Scale]
    notes: Sequence[str] = field(default=())
    written: Path | None = None

    @property
    def exit_code(self) -> int:
        """1 if weights are not finite."""
        return FINDING if any(weights.not_finite for weights in self.weights) else OK

    def as_json(self) -> Any:
        """All of it."""
        return self

    def show(self, console: Console) -> None:
        """Prints it."""
        from lightning_apex.cli.converting.table import show

        show(self, console)


def inspect_checkpoint(checkpoint: str | Path, unsafe: bool = False) -> Checkpoint:
    """What a checkpoint of Lightning, this package, Apex or a plain torch loop holds.

    Args:
        checkpoint: A file, or a folder of torch.distributed.checkpoint.
        unsafe: Whether reading it may run code that it holds.

    Returns:
        Weights, optimizers and loss scales in it.

    Raises:
        CommandError: If it cannot be read, or holds no weights.
    """
    return describe(Path(checkpoint), load_parts(Path(checkpoint), unsafe))


def load_parts(path: Path, unsafe: bool) -> Parts:
    """Reads a checkpoint and finds its parts.

    Raises:
        CommandError: If it cannot be read, or holds no weights.
    """
    held = read(path, unsafe)
    parts = found.find(held, path.is_dir()) if isinstance(held, Mapping) else None
    if parts is None:
        what = f"a {type(held).__name__}"
        if isinstance(held, Mapping):
            what = f"the keys {sorted(map(str, held))[:8]}"
        raise CommandError(f"checkpoint {str(path)!r} holds {what}, but no state dict of a module: give another file.")
    return parts


def describe(path: Path, parts: Parts) -> Checkpoint:
    """Counts what was found."""
    held = parts.held
    optimizers = [
        *(_optimizer(where, state, 0) for where, state in parts.optimizers.items()),
        *(
            _optimizer(where, state["optimizer_state_dict"], sum(map(len, state["fp32_from_fp16"])))
            for where, state in parts.fp16_optimizers.items()
        ),
    ]
    return Checkpoint(
        path,
        parts.kind,
        held.get("epoch") if isinstance(held.get("epoch"), int) else None,
        held.get("global_step") if isinstance(held.get("global_step"), int) else None,
        held.get("pytorch-lightning_version"),
        [_weights(where, state) for where, state in parts.weights.items()],
        optimizers,
        [_scale(where, state) for where, state in all_scales(parts).items()],
    )


def all_scales(parts: Parts) -> dict[found.Path, Mapping[str, Any]]:
    """The loss scales, those in ``FP16_Optimizer``'s states included."""
    scales = dict(parts.scales)
    for where, state in parts.fp16_optimizers.items():
        inner = found.plain(state.get("loss_scaler"))
        inner = dict(inner) if isinstance(inner, Mapping) else {}
        if "scale" not in inner:
            value = inner.get("loss_scale", inner.get("cur_scale", state.get("loss_scale", 1.0)))
            inner = {"loss_scale": float(value), "unskipped": int(inner.get("unskipped", 0))}
        scales[(*where, "loss_scaler")] = inner
    return scales


def sizes(tensors: Iterable[Any]) -> dict[str, Sizes]:
    """Sizes by dtype."""
    totals: dict[str, list[int]] = {}
    seen: set[tuple[Any, ...]] = set()
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            continue
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if memory in seen and tensor.numel():
            continue
        seen.add(memory)
        total = totals.setdefault(str(tensor.dtype).removeprefix("torch."), [0, 0, 0])
        for index, more in enumerate((1, tensor.numel(), tensor.numel() * tensor.element_size())):
            total[index] += more
    return {dtype: Sizes(*total) for dtype, total in sorted(totals.items())}


def _weights(where: found.Path, state: Mapping[str, Any]) -> Weights:
    not_finite, beyond = [], []
    limit = 65520.0  # the smallest magnitude that fp16 rounds to inf
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or not tensor.numel():
            continue
        low, high = torch.aminmax(tensor.detach() if tensor.element_size() > 1 else tensor.detach().float())
        largest = float(torch.maximum(-low, high))  # NaN where there is one
        if not math.isfinite(largest):
            not_finite.append(name)
        elif largest >= limit:
            beyond.append(name)
    return Weights(label(where), sizes(state.values()), not_finite, beyond)


def _optimizer(where: found.Path, state: Mapping[str, Any], masters: int) -> OptimizerState:
    groups = state["param_groups"]
    groups = list(groups.values()) if isinstance(groups, Mapping) else groups
    groups = [group for group in groups if isinstance(group, Mapping)]
    moments = [m for m in state["state"].values() if isinstance(m, Mapping)]
    steps = [float(s["step"]) for s in (*moments, *groups) if isinstance(s.get("step"), int | float | Tensor)]
    tensors = [value for m in moments for name, value in m.items() if name != "step"]
    return OptimizerState(
        label(where),
        algorithm(groups, moments),
        "Apex" if is_apexs(groups, moments) else "torch",
        sum(len(group.get("params", ())) for group in groups) or len(moments),
        max(steps, default=None),
        sizes(tensors),
        masters,
    )


def is_apexs(groups: Sequence[Mapping[str, Any]], moments: Sequence[Mapping[str, Any]]) -> bool:
    """Whether steps, or NovoGrad's second moments, are kept once a group."""
    counted = any("step" in m for m in moments)
    return any(("step" in group and not counted) or "exp_avg_sq" in group for group in groups)


def algorithm(groups: Sequence[Mapping[str, Any]], moments: Sequence[Mapping[str, Any]]) -> str:
    """The optimizer that keeps such a state."""
    states = {name for m in moments for name, value in m.items() if value is not None}
    settings = {name for group in groups for name in group}
    if "init_zero" in settings or "reg_inside_moment" in settings:
        return "NovoGrad"
    if "exp_avg_sq" in states:
        if settings & {"max_grad_norm", "use_nvlamb"}:
            return "LAMB"
        decoupled = any(group.get("adam_w_mode") or group.get("decoupled_weight_decay") for group in groups)
        return "AdamW" if decoupled else "Adam or AdamW"
    if "momentum_buffer" in states or "momentum" in settings:
        return "LARS" if settings & {"trust_coefficient", "trust_coef"} else "SGD"
    for name, kept in (("Adagrad", "sum"), ("RMSprop", "square_avg"), ("Lion", "exp_avg")):
        if kept in states:
            return name
    return "an unknown optimizer" if states - {"step"} else "an optimizer without a state"


def _scale(where: found.Path, state: Mapping[str, Any]) -> Scale:
    value = state.get("scale", state.get("loss_scale"))
    good = state.get("_growth_tracker", state.get("unskipped", 0))
    return Scale(label(where), float(value or 0.0), int(good))
