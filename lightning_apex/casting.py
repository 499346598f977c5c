"""Which tensors of a module are cast, and casts of nested batches that keep their containers."""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.loss import _Loss
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.rnn import PackedSequence

HALF = (torch.float16, torch.bfloat16)


def has_running_statistics(module: nn.Module) -> bool:
    """Whether a module is a BatchNorm of any kind, or another module that keeps running statistics."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return True
    if isinstance(module, _NormBase):  # InstanceNorm: only where statistics are tracked
        return bool(module.track_running_stats)
    return isinstance(getattr(module, "running_mean", None), Tensor) and isinstance(
        getattr(module, "running_var", None), Tensor
    )


def needs_fp32(module: nn.Module) -> bool:
    """Whether torch itself cannot compute a module with half weights, on some device."""
    if isinstance(module, nn.AdaptiveLogSoftmaxWithLoss):
        return True
    # The map of parametrizations.orthogonal: a matrix exponential, which is NaN in half on a CPU.
    return is_parametrized(module) and any(
        type(function).__name__ == "_Orthogonal"
        for functions in module.parametrizations.values()  # type: ignore[operator]
        for function in functions
    )


def kept_modules(root: nn.Module | Sequence[nn.Module], keep: Sequence[str | type]) -> list[nn.Module]:
    """The outermost modules that ``keep`` names.

    Args:
        root: The module whose submodules are searched, or several; an entry need match in one of them only.
        keep: Shell-style patterns of module names (``"encoder.*.norm"``), or module classes.

    Raises:
        ValueError: If an entry is neither, or matches no module.
    """
    roots = [root] if isinstance(root, nn.Module) else root
    found: dict[nn.Module, str] = {}
    for entry in keep:
        if not isinstance(entry, str | type):
            raise ValueError(f"keep_fp32 holds {entry!r}: give module name patterns (str) or module classes.")
        matches = {
            module: name
            for start in roots
            for name, module in start.named_modules()
            if (fnmatch.fnmatchcase(name, entry) if isinstance(entry, str) else isinstance(module, entry))
        }
        if not matches:
            shown = entry if isinstance(entry, str) else entry.__name__
            raise ValueError(
                f"keep_fp32={shown!r} matches no module of {' and '.join(type(r).__name__ for r in roots)}: "
                "compare it with the names in model.named_modules()."
            )
        found.update(matches)
    inner = {child for module in found for child in module.modules() if child is not module}
    return [module for module in found if module not in inner]


def castable_tensors(
    root: nn.Module, keep: Iterable[nn.Module], keep_batchnorm: bool
) -> list[tuple[nn.Module, list[str]]]:
    """The modules that own tensors which a casting level turns into its half type, with the tensors' names.

    fp32 tensors are cast, unless a module that stays in fp32 holds them as well.
    """
    stays = {child for module in keep for child in module.modules()}
    stays |= {
        module
        for module in root.modules()
        if isinstance(module, _Loss) or (keep_batchnorm and has_running_statistics(module))
    }
    tied = {tensor for module in stays for _, tensor in own_tensors(module)}
    owners = []
    for module in root.modules():
        if module in stays:
            continue
        names = [n for n, t in own_tensors(module) if t.dtype is torch.float32 and t not in tied]
        if names:
            owners.append((module, names))
    return owners


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers that a module holds itself."""
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if tensor is not None:
                yield name, tensor


def check_castable(root: nn.Module, casts_weights: bool = True, known: Container[Tensor] = ()) -> None:
    """Refuses a model that cannot be trained at an opt level.

    Args:
        root: The model.
        casts_weights: Whether the level casts weights.
        known: Parameters that were cast before, with another model that shares them.

    Raises:
        ValueError: If a trainable parameter is 16-bit already, a parameter has no values yet, or a module is scripted.
    """
    for name, module in root.named_modules():
        if casts_weights and isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"Module {name!r} is a torch.jit.ScriptModule, whose weights cannot be cast in place: use O1 or O4, or "
                "give the module before it was scripted."
            )
    for name, param in root.named_parameters():
        if casts_weights and is_lazy(param):
            raise ValueError(
                f"Parameter {name!r} belongs to a lazy module and has no values to cast: run one batch through the "
                "model before training, so that it knows its shape."
            )
        if param.is_meta:
            raise ValueError(
                f"Parameter {name!r} is on the meta device and has no values to cast: "
                "materialise the model (to_empty() and load its weights) before training."
            )
        if param.requires_grad and param.dtype in HALF and param not in known:
            raise ValueError(
                f"Parameter {name!r} is {param.dtype} already: give the opt level an fp32 model "
                "(remove .half(), .bfloat16() or .to(dtype) from it); the level does the casting."
            )


def cast_tree(tree: Any, dtype: torch.dtype) -> Any:
    """Casts the floating-point tensors in nested containers, and keeps everything else and every container's type.

    Integer, bool and complex tensors pass through; so do objects that are no known container.

    Args:
        tree: A tensor, or lists, tuples, namedtuples, mappings, sets and dataclasses of trees.
        dtype: The floating-point type to cast to.
    """
    return map_tensors(tree, lambda t: t.to(dtype) if t.is_floating_point() else t)


def map_tensors(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Applies a function to each tensor of a tree; see `cast_tree`."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, PackedSequence):
        return tree._replace(data=function(tree.data))
    if isinstance(tree, Mapping):
        return _map_mapping(tree, function)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(item, function) for item in tree))
    if isinstance(tree, list | tuple | set | frozenset):
        items = [map_tensors(item, function) for item in tree]
        try:
            return type(tree)(items)
        except TypeError:  # a subclass with a constructor of its own
            return tree
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        result = copy.copy(tree)
        for field in dataclasses.fields(tree):
            # not setattr: a frozen dataclass would refuse
            object.__setattr__(result, field.name, map_tensors(getattr(tree, field.name), function))
        return result
    return tree


def _map_mapping(tree: Mapping[Any, Any], function: Callable[[Tensor], Tensor]) -> Any:
    items = {key: map_tensors(value, function) for key, value in tree.items()}
    if type(tree) is dict:
        return items
    try:
        # A copy first: a dict subclass (a tokenizer's batch, a defaultdict) may carry more than its items.
        result: Any = copy.copy(tree)
        for key, value in items.items():
            result[key] = value
    except TypeError:  # an immutable mapping
        return tree
    return result
