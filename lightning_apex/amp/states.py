"""Loss scales in checkpoints: Apex's keys beside ours."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_apex.scaler import LossScaler

_KEY = re.compile(r"loss_scaler(\d+)")


def scaler_state(scaler: LossScaler) -> dict[str, Any]:
    """The state of one scale; a disabled one says that it is a fixed 1."""
    state = scaler.state_dict() or {"scale": 1.0, "_growth_tracker": 0, "dynamic": False}
    return {"loss_scale": state["scale"], "unskipped": state["_growth_tracker"], **state}


def checked_states(state_dict: Any, scalers: Sequence[LossScaler]) -> list[dict[str, Any]]:
    """The states in the order of the scalers, once each is known to load.

    Raises:
        ValueError: If a key or a state is not known, or there are too few or too many.
    """
    if not isinstance(state_dict, Mapping):
        raise ValueError(
            f"amp.load_state_dict() got a {type(state_dict).__name__}: give what amp.state_dict() returned."
        )
    unknown = [key for key in state_dict if not _KEY.fullmatch(str(key))]
    if unknown:
        raise ValueError(
            f"The amp state holds the key {unknown[0]!r}: give what amp.state_dict() returned, "
            "{'loss_scaler0': {...}, ...}."
        )
    expected = [f"loss_scaler{i}" for i in range(len(scalers))]
    if set(state_dict) != set(expected):
        raise ValueError(
            f"The amp state holds {len(state_dict)} loss scales ({', '.join(sorted(state_dict)) or 'none'}), but "
            f"amp.initialize() was called with num_losses={len(scalers)}: call it with num_losses={len(state_dict)}."
        )
    for key, scaler in zip(expected, scalers, strict=True):
        if not isinstance(state_dict[key], Mapping):
            raise ValueError(f"The amp state holds {state_dict[key]!r} under {key!r}: it must be a dictionary.")
        copy.deepcopy(scaler).load_state_dict(dict(state_dict[key]))
    return [dict(state_dict[key]) for key in expected]
