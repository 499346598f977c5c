"""Turns the parts of a checkpoint into those of another level, or of plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_apex.casting import HALF
from lightning_apex.cli.converting.inspection import algorithm, all_scales, is_apexs
from lightning_apex.cli.converting.parts import Parts, Path, label
from lightning_apex.levels import OptLevel
from lightning_apex.scaler import LossScaler

_PLUGIN = "ApexPrecision"  # under which Lightning keeps the plugin's state
_GONE = object()


def for_level(parts: Parts, level: OptLevel) -> tuple[Any, list[str]]:
    """The checkpoint as a run at ``level`` would have written it, and notes.

    A checkpoint of any level holds fp32 weights (masters where there are some), fp32 moments, and a loss scale where
    the level has one.
    """
    changed, notes = with_torch_optimizers(parts)
    scales = all_scales(parts)
    for path, state in weights_in_fp32(parts, notes).items():
        changed[path] = state
    if parts.kind.startswith("Lightning") or parts.kind == "lightning-apex":
        changed |= _plugin_state(scales, level, notes)
    elif parts.kind != "state dict":
        changed |= _amp_state(parts, scales, level)
    return replaced(parts.held, changed), notes


def weights_in_fp32(parts: Parts, notes: list[str]) -> dict[Path, dict[str, Any]]:
    """The state dicts of modules in fp32, from masters where ``FP16_Optimizer`` kept some."""
    result = {path: dict(state) for path, state in parts.weights.items()}
    for where, state in parts.fp16_optimizers.items():
        masters = [master for group in state["fp32_from_fp16"] for master in group]
        taken = sum(_merge_masters(weights, masters) for weights in result.values())
        notes.append(
            f"{taken} of {taken + len(masters)} fp32 masters of {label(where) or 'the optimizer'} became weights."
        )
    cast = _Cast()
    return {path: {name: cast(value) for name, value in state.items()} for path, state in result.items()}


def with_torch_optimizers(parts: Parts) -> tuple[dict[Path, Any], list[str]]:
    """What takes the place of Apex's optimizer states, and notes."""
    states = dict(parts.optimizers)
    states |= {path: state["optimizer_state_dict"] for path, state in parts.fp16_optimizers.items()}
    changed: dict[Path, Any] = {}
    notes: list[str] = []
    for path, state in states.items():
        kept = [m for m in state["state"].values() if isinstance(m, Mapping)]
        groups = state["param_groups"]
        if isinstance(groups, Mapping) or algorithm(groups, kept) == "NovoGrad":
            if not isinstance(groups, Mapping):
                notes.append(f"{label(path)} is NovoGrad's, which torch has not: FusedNovoGrad takes it as it is.")
            changed[path] = state
            continue
        changed[path] = torch_optimizer(state)
        if is_apexs(groups, kept):
            notes.append(f"{label(path)}: step counts are kept for each parameter now.")
        if any(group.get("bias_correction") in (False, 0) for group in groups):
            notes.append(f"{label(path)} was trained without bias correction, which torch's Adam always makes.")
    return changed, notes


def torch_optimizer(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state as ``torch.optim`` lays it out: fp32 moments, a step count for each parameter."""
    cast = _Cast()
    counts = {
        index: group["step"] for group in state["param_groups"] if "step" in group for index in group.get("params", ())
    }
    states: dict[Any, Any] = {}
    for index, moments in state["state"].items():
        kept = {name: cast(value) for name, value in moments.items() if value is not None}
        if index in counts and "step" not in kept and "exp_avg" in kept:
            kept = {"step": torch.tensor(float(counts[index])), **kept}
        states[index] = kept
    groups = [{name: v for name, v in group.items() if name != "step"} for group in state["param_groups"]]
    return {**state, "state": states, "param_groups": groups}


def replaced(held: Any, changed: Mapping[Path, Any]) -> Any:
    """A copy of nested dictionaries and lists with other values at some places; the rest is shared."""
    if () in changed:
        return changed[()]
    result = held
    for path, value in changed.items():
        result = _with(result, path, value)
    return result


def _with(held: Any, path: Path, value: Any) -> Any:
    step, *rest = path
    if isinstance(held, list):
        copied: Any = list(held)
    else:
        copied = dict(held) if isinstance(held, Mapping) else {}
    if not rest and value is _GONE:
        copied.pop(step, None)
    else:
        inner = copied.get(step, {}) if isinstance(copied, dict) else copied[step]
        copied[step] = _with(inner, tuple(rest), value) if rest else value
    return copied


def _plugin_state(scales: Mapping[Path, Any], level: OptLevel, notes: list[str]) -> dict[Path, Any]:
    own = {path: state for path, state in scales.items() if len(path) == 1 or path[0] == "amp_scaling_state"}
    changed: dict[Path, Any] = {(path[0],): _GONE for path in own}
    if len(own) > 1:
        notes.append(f"of {len(own)} loss scales the first was taken: ApexPrecision has one.")
    state = scale_state(level, next(iter(own.values()), None))
    if state:
        changed[(_PLUGIN,)] = state
    return changed


def _amp_state(parts: Parts, scales: Mapping[Path, Any], level: OptLevel) -> dict[Path, Any]:
    """Under ``amp``, as `lightning_apex.amp.load_state_dict` takes it; every scale that was there, or one."""
    from lightning_apex.amp.states import scaler_state

    changed: dict[Path, Any] = dict.fromkeys(parts.scales, _GONE)
    for path in parts.scales:
        if len(path) > 1:
            changed[path[:-1]] = _GONE
    states = list(scales.values()) or [None]
    amp = {f"loss_scaler{index}": scaler_state(_scaler(level, state)) for index, state in enumerate(states)}
    return {path: value for path, value in changed.items() if path[0] != "amp"} | {("amp",): amp}


def scale_state(level: OptLevel, old: Mapping[str, Any] | None) -> dict[str, Any]:
    """The loss scale's state at a level, from that of another run where there is one; empty where nothing is scaled."""
    return _scaler(level, old).state_dict()


def _scaler(level: OptLevel, old: Mapping[str, Any] | None) -> LossScaler:
    scaler = LossScaler(level.loss_scale, enabled=level.loss_scale != 1.0)
    if old:
        scaler.load_state_dict(dict(old))
    return scaler


def _merge_masters(weights: dict[str, Any], masters: list[Tensor]) -> int:
    """Puts each master where its rounded value stands, and takes it off the list; in order, for equal weights."""
    taken = 0
    for name, value in weights.items():
        if not isinstance(value, Tensor) or value.dtype not in HALF:
            continue
        for index, master in enumerate(masters):
            if master.shape == value.shape and torch.equal(master.to(value.dtype), value):
                weights[name] = masters.pop(index)
                taken += 1
                break
    return taken


class _Cast:
    """Casts half tensors to fp32; tensors that were one before are one afterwards."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Tensor] = {}

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype not in HALF:
            return value
        memory = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if not value.numel() or memory not in self._made:
            self._made[memory] = value.detach().float()
        return self._made[memory]
