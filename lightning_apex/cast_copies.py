"""Deep copies and unpickled copies of cast modules, which hold fp32 values of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from lightning_apex.boundaries import is_boundary_hook
from lightning_apex.cast_module import fp32_face
from lightning_apex.masters import set_data

_FORWARD = (
    ("_forward_pre_hooks", ("_forward_pre_hooks_with_kwargs",)),
    ("_forward_hooks", ("_forward_hooks_with_kwargs", "_forward_hooks_always_called")),
)


def is_cast_copy(root: nn.Module) -> bool:
    """Whether a module, or a part of it, is cast, or a copy of a cast module."""
    return any(True for module in root.modules() for _ in _faces(module))


def restore_copy(root: nn.Module, *own_hooks: type) -> None:
    """Gives a copy of a cast module its fp32 values, and removes the hooks that came with it.

    Args:
        root: The copy; any other module stays as it is.
        *own_hooks: Classes whose bound methods are forward hooks that go, too.
    """
    for module in reversed(list(root.modules())):  # the face of the root knows least
        for face in list(_faces(module)):
            for _, half in list(face.tensors(module)):
                set_data(half, face.value(half))
    for module in root.modules():
        for hooks in (module._state_dict_hooks, module._load_state_dict_pre_hooks):
            for key in [key for key, hook in hooks.items() if fp32_face(hook) is not None]:
                del hooks[key]
        for name, flags in _FORWARD:
            hooks = getattr(module, name)
            for key in [k for k, h in hooks.items() if is_boundary_hook(h) or _is_method_of(h, own_hooks)]:
                del hooks[key]
                for flag in flags:
                    getattr(module, flag).pop(key, None)


def _faces(module: nn.Module) -> Iterator[Any]:
    for hook in module._state_dict_hooks.values():
        face = fp32_face(hook)
        if face is not None:
            yield face


def _is_method_of(hook: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(getattr(hook, "__self__", None), kinds)
