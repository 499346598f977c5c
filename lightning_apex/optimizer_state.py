"""The state of optimizers that know nothing of half parameters."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_apex.casting import HALF


def match_state(optimizer: Optimizer) -> None:
    """Gives an optimizer's state its parameters' dtype, which torch's optimizers demand, after a cast."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.is_floating_point() and name != "step":
                    state[name] = value.to(param.dtype)


class FP32StateKeeper:
    """Keeps the fp32 state of an optimizer of half parameters fp32 while it is loaded.

    ``Optimizer.load_state_dict`` casts floating-point state to the parameter's dtype; 1e-9 becomes 0 in fp16.
    """

    def __init__(self) -> None:
        self._saved: dict[str, Any] | None = None

    def attach(self, optimizer: Optimizer) -> list[RemovableHandle]:
        """Registers the hooks; on the inner optimizer of a wrapper that has none itself."""
        if not hasattr(optimizer, "_optimizer_load_state_dict_pre_hooks"):
            optimizer = getattr(optimizer, "optimizer", optimizer)
        if not hasattr(optimizer, "_optimizer_load_state_dict_pre_hooks"):
            return []
        return [
            optimizer.register_load_state_dict_pre_hook(self.before),
            optimizer.register_load_state_dict_post_hook(self.after),
        ]

    def before(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Remembers what is about to be loaded."""
        self._saved = state_dict

    def after(self, optimizer: Optimizer) -> None:
        """Takes the fp32 values from there again."""
        saved, self._saved = self._saved, None
        if saved is None:
            return
        for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            for param, index in zip(group["params"], saved_group["params"], strict=True):
                if param.dtype not in HALF:
                    continue
                for name, value in saved["state"].get(index, {}).items():
                    if name != "step" and isinstance(value, Tensor) and value.is_floating_point():
                        fp32 = value.detach().to(device=param.device, dtype=torch.float32, copy=True)
                        optimizer.state[param][name] = fp32


def warn_of_vanishing_eps(optimizer: Optimizer) -> None:
    """Warns of an optimizer that would divide by an eps that its half state rounds to 0."""
    for group in optimizer.param_groups:
        eps = group.get("eps")
        if (
            isinstance(eps, float)
            and eps > 0
            and any(p.dtype is torch.float16 and torch.tensor(eps, dtype=p.dtype) == 0 for p in group["params"])
        ):
            warnings.warn(
                f"{type(optimizer).__name__} with eps={eps:g} keeps its state in float16, where eps is 0, and will "
                "divide by zero: use a fused optimizer of lightning_apex, whose state is fp32, or eps=1e-4.",
                stacklevel=2,
            )
            return
