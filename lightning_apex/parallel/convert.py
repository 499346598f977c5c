"""BatchNorm modules of a model become SyncBatchNorm in place, and what they were again."""

from __future__ import annotations

import inspect
import warnings
from functools import cache
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_apex.parallel.sync_batchnorm import SyncBatchNorm

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_SETTINGS = ("process_group", "channel_last", "fuse_relu", "_reverts_to", "_displaced")


def convert_syncbn_model(module: ModuleT, process_group: Any | None = None, channel_last: bool = False) -> ModuleT:
    """Turns every BatchNorm in a model into a `SyncBatchNorm`, in place.

    Modules keep their identity, and with it their parameters, buffers, hooks, flags and every place that shares them:
    an optimizer made before goes on to train the model, and a state dict has the same keys. BatchNorm1d, 2d, 3d and
    torch's SyncBatchNorm become `SyncBatchNorm`; a subclass or a lazy module becomes a subclass of both, which keeps
    its own methods. InstanceNorm stays what it is, and so do a `SyncBatchNorm` that is there already and, with a
    warning, a subclass whose ``forward`` does not call ``super().forward``.

    Args:
        module: The model; one that is a BatchNorm itself, too.
        process_group: The ranks that share statistics; None for all, or for the group that torch's SyncBatchNorm has.
        channel_last: See `SyncBatchNorm`.

    Returns:
        ``module``.
    """
    for child in module.modules():
        if isinstance(child, _BatchNorm) and not isinstance(child, SyncBatchNorm) and _follows_us(child):
            _convert(child, process_group, channel_last)
    return module


def revert_syncbn_model(module: ModuleT) -> ModuleT:
    """Undoes `convert_syncbn_model`: modules have the classes and attributes they had, and the state they have now.

    Args:
        module: A converted model; a `SyncBatchNorm` that was not made by `convert_syncbn_model` stays.

    Returns:
        ``module``.
    """
    for child in module.modules():
        if isinstance(child, SyncBatchNorm) and child._reverts_to is not None:
            _revert(child)
    return module


def _convert(module: _BatchNorm, process_group: Any | None, channel_last: bool) -> None:
    before: Any = type(module)
    displaced = {name: module.__dict__[name] for name in _SETTINGS if name in module.__dict__}
    if process_group is None and before is nn.SyncBatchNorm:
        process_group = displaced.get("process_group")
    module.__class__ = synced_class(before)
    settings = (process_group, channel_last, False, before, displaced)
    module.__dict__.update(zip(_SETTINGS, settings, strict=True))


def _revert(module: SyncBatchNorm) -> None:
    before: Any = module._reverts_to
    made = synced_class(before)
    if issubclass(before, nn.modules.lazy.LazyModuleMixin) and type(module) is made.cls_to_become:
        before, made = before.cls_to_become, made.cls_to_become
    if type(module) is not made:
        warnings.warn(
            f"A {type(module).__name__} that was a {before.__name__} stays what it is: its class was changed "
            "after convert_syncbn_model, by a parametrization for example. Undo that first.",
            stacklevel=3,
        )
        return
    displaced = module.__dict__["_displaced"]
    for name in _SETTINGS:
        module.__dict__.pop(name, None)
    module.__dict__.update(displaced)
    module.__class__ = before


def _follows_us(module: _BatchNorm) -> bool:
    """Whether ``forward`` of a synchronised class would reach `SyncBatchNorm.forward`."""
    kind = type(module)
    if kind in _PLAIN:
        own = module.__dict__.get("forward")
    elif issubclass(kind, nn.SyncBatchNorm):
        return False  # somebody's own way to synchronise
    else:
        own = module.__dict__.get("forward") or (kind.forward if kind.forward is not _BatchNorm.forward else None)
    if own is None:
        return True
    code = getattr(inspect.unwrap(own), "__code__", None)
    if "forward" not in module.__dict__ and code is not None and "__class__" in code.co_freevars:  # super()
        return True
    warnings.warn(
        f"{kind.__name__} is not synchronised: it has a forward() of its own that does not call super().forward().",
        stacklevel=3,
    )
    return False


@cache
def synced_class(kind: Any) -> Any:
    """The class of a module that was a ``kind`` before `convert_syncbn_model`."""
    if kind in _PLAIN:
        return SyncBatchNorm
    namespace: dict[str, Any] = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__reduce_ex__": _reduce}
    if issubclass(kind, nn.modules.lazy.LazyModuleMixin) and kind.cls_to_become is not None:
        namespace["cls_to_become"] = synced_class(kind.cls_to_become)
        namespace["initialize_parameters"] = _initialize_lazy
    return type(f"Sync{kind.__name__}", (kind, SyncBatchNorm), namespace)


def _initialize_lazy(self: Any, input: Any, z: Any = None) -> None:
    """A lazy module's own, where the channels may lie last."""
    last = self.channel_last and input.dim() > 2
    self._reverts_to.initialize_parameters(self, input.movedim(-1, 1) if last else input)


def _reduce(self: SyncBatchNorm, protocol: int) -> Any:
    return _new, (self._reverts_to,), self.__getstate__()


def _new(kind: Any) -> Any:
    made = synced_class(kind)
    return made.__new__(made)
