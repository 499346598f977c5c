"""Functions that cast their arguments: for custom operators that ``torch.autocast`` does not know."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_apex.casting import map_tensors

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "_lightning_apex_original"


def half_function(function: F) -> F:
    """Makes a function get its floating-point tensors in the half type of the forward pass it is called in.

    Like all functions of this kind: tensors are found in positional and keyword arguments and in containers, and
    nothing is cast outside of forward passes at O1, O2, O4 and O5 and `autocast`.
    """
    return _casting(function, lambda tensors: torch.get_autocast_dtype(tensors[0].device.type))


def bfloat16_function(function: F) -> F:
    """Makes a function get its floating-point tensors in bfloat16; see `half_function`."""
    return _casting(function, lambda _: torch.bfloat16)


def float_function(function: F) -> F:
    """Makes a function get its floating-point tensors in fp32, with autocast off inside; see `half_function`."""
    return _casting(function, lambda _: torch.float32, autocast=False)


def promote_function(function: F) -> F:
    """Makes a function get its floating-point tensors in the widest type among them; see `half_function`."""
    return _casting(function, lambda tensors: functools.reduce(torch.promote_types, [t.dtype for t in tensors]))


def register_half_function(module: Any, function_name: str) -> None:
    """Replaces ``module.function_name`` by `half_function` of it.

    Args:
        module: A module, class or object; registering again replaces what was registered before.
        function_name: The name of a function there.

    Raises:
        ValueError: If there is no such function.
    """
    _register(module, function_name, half_function)


def register_bfloat16_function(module: Any, function_name: str) -> None:
    """Replaces ``module.function_name`` by `bfloat16_function` of it; see `register_half_function`."""
    _register(module, function_name, bfloat16_function)


def register_float_function(module: Any, function_name: str) -> None:
    """Replaces ``module.function_name`` by `float_function` of it; see `register_half_function`."""
    _register(module, function_name, float_function)


def register_promote_function(module: Any, function_name: str) -> None:
    """Replaces ``module.function_name`` by `promote_function` of it; see `register_half_function`."""
    _register(module, function_name, promote_function)


def _casting(function: F, choose: Callable[[list[Tensor]], torch.dtype], autocast: bool = True) -> F:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        tensors: list[Tensor] = []
        map_tensors((args, kwargs), lambda t: _keep(t, tensors))
        device = tensors[0].device.type if tensors else "cpu"
        if not tensors or not torch.is_autocast_enabled(device):
            return function(*args, **kwargs)
        dtype = choose(tensors)

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        args, kwargs = map_tensors(args, cast), map_tensors(kwargs, cast)
        if autocast:
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    setattr(wrapper, _MARK, function)
    return wrapper  # type: ignore[return-value]


def _keep(tensor: Tensor, found: list[Tensor]) -> Tensor:
    if tensor.is_floating_point():
        found.append(tensor)
    return tensor


def _register(module: Any, name: str, decorate: Callable[[Any], Any]) -> None:
    function = getattr(module, name, None)
    if not callable(function):
        where = getattr(module, "__name__", type(module).__name__)
        raise ValueError(f"{where} has no function {name!r}: give the module or class that holds it, and its name.")
    raw = inspect.getattr_static(module, name)
    bound = inspect.isclass(module) and (not inspect.isroutine(raw) or isinstance(raw, classmethod | staticmethod))
    original = getattr(function, _MARK, function)
    if inspect.ismethod(function) and original is not function:
        original = original.__get__(function.__self__)
    decorated = decorate(original)
    # What a class hands out bound already must not be bound once more.
    setattr(module, name, staticmethod(decorated) if bound else decorated)
