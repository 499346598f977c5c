"""A sharded checkpoint, whole again, as one process would have written it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_OPTIMIZER = re.compile(r"optimizer_(\d+)")  # as Lightning's strategies name them


def as_one_file(held: Mapping[str, Any]) -> dict[str, Any]:
    """Optimizer states by the parameters' places instead of their names; Lightning's under ``optimizer_states``."""
    whole = {key: _by_place(value) for key, value in held.items()}
    if "pytorch-lightning_version" not in whole:
        return whole
    states = {int(found[1]): key for key in whole if (found := _OPTIMIZER.fullmatch(key))}
    if states and "optimizer_states" not in whole:
        whole["optimizer_states"] = [whole.pop(states[index]) for index in sorted(states)]
    return whole


def _by_place(value: Any) -> Any:
    """An optimizer's state with parameters counted through the groups, as ``torch.optim`` does it."""
    if not (isinstance(value, Mapping) and isinstance(value.get("state"), Mapping)):
        return value
    groups: Any = value.get("param_groups")
    names = [name for group in groups for name in group.get("params", ())] if isinstance(groups, list) else []
    if not names or not all(isinstance(name, str) for name in names):
        return value
    places = {name: place for place, name in enumerate(names)}
    return {
        **value,
        "state": {places.get(name, name): moments for name, moments in value["state"].items()},
        "param_groups": [{**group, "params": [places[name] for name in group["params"]]} for group in groups],
    }
