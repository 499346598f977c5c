"""Forward hooks where fp32 meets a half type inside a model, for modules that torch.autocast does not serve."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from lightning_apex import passes
from lightning_apex.casting import HALF, cast_tree, map_tensors

# What these compute is on no autocast list, at least on one device, and they refuse an fp32 input beside half weights.
_UNSERVED = (
    nn.RNNBase,
    nn.RNNCellBase,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.PReLU,
    nn.Bilinear,
    nn.EmbeddingBag,
    nn.modules.instancenorm._InstanceNorm,
)


def fp32_islands(modules: Iterable[nn.Module]) -> list[RemovableHandle]:
    """Makes modules compute in fp32: inputs are cast to fp32, autocast is off, half inputs give half outputs."""
    handles = []
    for module in modules:
        island = _Island()
        handles.append(module.register_forward_pre_hook(island.enter, with_kwargs=True))
        handles.append(module.register_forward_hook(island.leave, with_kwargs=True, always_call=True))
    return handles


def matched_inputs(root: nn.Module, *, cast_later: bool = False) -> list[RemovableHandle]:
    """Makes modules outside autocast's lists take fp32 inputs although their weights are half.

    Args:
        root: The model.
        cast_later: Whether the weights are not half yet, but may be while a module is called.
    """
    return [
        module.register_forward_pre_hook(_match_inputs, with_kwargs=True)
        for module in root.modules()
        if isinstance(module, _UNSERVED)
        and any(cast_later or p.dtype in HALF for p in module.parameters(recurse=False))
    ]


def is_boundary_hook(hook: Any) -> bool:
    """Whether a forward hook is one of these; they travel with copies of their module."""
    return hook is _match_inputs or isinstance(getattr(hook, "__self__", None), _Island)


def _match_inputs(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    dtype = next(p.dtype for p in module.parameters(recurse=False))
    if dtype not in HALF:  # the module was restored
        return args, kwargs
    return cast_tree(args, dtype), cast_tree(kwargs, dtype)


def widened(tensor: Tensor) -> Tensor:
    """A half tensor in fp32; others as they are."""
    return tensor.float() if tensor.dtype in HALF else tensor


class _Island:
    """The hooks around one module that computes in fp32; calls may nest."""

    # torch.compile cannot trace a context that one function enters and another leaves. Not torch.compiler.disable,
    # which would import the compiler here and now.
    @_disable_dynamo
    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        seen: list[Tensor] = []
        map_tensors((args, kwargs), lambda t: seen.append(t) or t)  # type: ignore[func-returns-value]
        half = next((t.dtype for t in seen if t.dtype in HALF), None)
        device = next((t.device for t in (*seen, *module.parameters())), torch.device("cpu"))
        passes.enter(self, torch.autocast(device.type, enabled=False), half)
        return map_tensors(args, widened), map_tensors(kwargs, widened)

    @_disable_dynamo
    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        _, half = passes.leave(self)
        return output if half is None else cast_tree(output, half)
