"""Finds weights, optimizers and loss scales in what a checkpoint holds, whatever the keys are called."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from lightning_apex.cli.converting.reading import ApexScaler

Kind = Literal[
    "lightning-apex", "Lightning", "Lightning with Apex", "Apex", "Apex FP16_Optimizer", "torch loop", "state dict",
    "Lightning, sharded", "sharded",
]  # fmt: skip
Path = tuple[str | int, ...]

_APEX_SCALE = re.compile(r"loss_scaler\d+")
_DEPTH = 3  # a state dict lies deeper in no checkpoint that is known


@dataclass
class Parts:
    """Where the parts of a checkpoint lie.

    Attributes:
        held: The whole object.
        kind: Who wrote it.
        weights: State dicts of modules, by their place.
        optimizers: State dicts of optimizers, in torch's or Apex's layout.
        fp16_optimizers: State dicts of Apex's (or our) ``FP16_Optimizer``, which hold masters and an optimizer's.
        scales: State dicts of loss scales.
    """

    held: Any
    kind: Kind
    weights: dict[Path, Mapping[str, Any]] = field(default_factory=dict)
    optimizers: dict[Path, Mapping[str, Any]] = field(default_factory=dict)
    fp16_optimizers: dict[Path, Mapping[str, Any]] = field(default_factory=dict)
    scales: dict[Path, Mapping[str, Any]] = field(default_factory=dict)


def find(held: Any, sharded: bool) -> Parts | None:
    """The parts of a checkpoint; ``None`` if it has no weights."""
    parts = Parts(held, "state dict")
    for path, value in _walk(held, ()):
        if _is_weights(value):
            parts.weights[path] = value
        elif _is_fp16_optimizer(value):
            parts.fp16_optimizers[path] = value
        elif _is_optimizer(value):
            parts.optimizers[path] = value
        elif _is_scale(value):
            parts.scales[path] = value
    if not parts.weights:
        return None
    parts.kind = _kind(parts, sharded)
    return parts


def label(path: Path) -> str:
    """A place for people: ``optimizer_states[0]``, ``model``; nothing for the whole file."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")


def plain(value: Any) -> Any:
    """An Apex object as a dictionary of its attributes."""
    return {name.lstrip("_"): v for name, v in vars(value).items()} if isinstance(value, ApexScaler) else value


def _walk(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    value = plain(value)
    if isinstance(value, Mapping):
        yield path, value
        if len(path) < _DEPTH and not (_is_weights(value) or _is_optimizer(value) or _is_fp16_optimizer(value)):
            for key, inner in value.items():
                if path or key not in ("loops", "callbacks", "hyper_parameters", "datamodule_hyper_parameters"):
                    yield from _walk(inner, (*path, key))
    elif isinstance(value, list) and len(path) == 1:
        for index, inner in enumerate(value):
            yield from _walk(inner, (*path, index))


def _is_weights(value: Mapping[Any, Any]) -> bool:
    tensors = [item for item in value.values() if isinstance(item, Tensor)]
    named = all(isinstance(key, str) for key in value)
    # Extra states of modules may be anything.
    foreign = [key for key, item in value.items() if not isinstance(item, Tensor)]
    known = all(str(key).endswith("_extra_state") for key in foreign)
    return named and known and any(tensor.dim() for tensor in tensors)  # a few 0-dim numbers are no model


def _is_optimizer(value: Mapping[Any, Any]) -> bool:
    return isinstance(value.get("state"), Mapping) and isinstance(value.get("param_groups"), list | Mapping)


def _is_fp16_optimizer(value: Mapping[Any, Any]) -> bool:
    return "optimizer_state_dict" in value and "fp32_from_fp16" in value


def _is_scale(value: Mapping[Any, Any]) -> bool:
    return ("scale" in value and "_growth_tracker" in value) or ("loss_scale" in value and "unskipped" in value)


def _kind(parts: Parts, sharded: bool) -> Kind:
    held = parts.held
    if "pytorch-lightning_version" in held:
        if sharded:
            return "Lightning, sharded"
        if any("max_loss_scale" in scale for scale in parts.scales.values()):
            return "lightning-apex"
        return "Lightning with Apex" if "amp_scaling_state" in held else "Lightning"
    if sharded:
        return "sharded"
    if parts.fp16_optimizers:
        return "Apex FP16_Optimizer"
    if any(_APEX_SCALE.fullmatch(str(path[-1])) for path in parts.scales if path):
        return "Apex"
    return "torch loop" if list(parts.weights) != [()] else "state dict"
