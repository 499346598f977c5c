"""What happens around a forward pass of an initialised model: hooks on the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_apex import passes
from lightning_apex.casting import cast_tree
from lightning_apex.contexts import convert_input, forward_context
from lightning_apex.levels import OptLevel

if TYPE_CHECKING:
    from lightning_apex.amp.context import Context

_casts_disabled: ContextVar[bool] = ContextVar("casts_disabled", default=False)


class ForwardHooks:
    """The hooks around one model's forward pass.

    Copies of the model, made by ``deepcopy`` or ``pickle``, compute as it does, but belong to nobody.
    """

    def __init__(self, level: OptLevel, cast_outputs: torch.dtype | None, context: Context) -> None:
        self._level = level
        self._cast_outputs = cast_outputs
        self._context: ref[Context] | None = ref(context)
        self._owner: Context | None = None  # keeps alive what no optimizer does
        self._begin()

    def _begin(self) -> None:
        self._agreed: ref[nn.Module] | None = None
        self.local = False  # whether gradients of the last forward pass stay on this rank for now

    def attach(self, module: nn.Module) -> list[RemovableHandle]:
        """Registers the hooks, the outermost of a model."""
        return [
            module.register_forward_pre_hook(self.enter, with_kwargs=True, prepend=True),
            module.register_forward_hook(self.leave, with_kwargs=True, always_call=True),
        ]

    @property
    def context(self) -> Context | None:
        """Whom the model belongs to; ``None`` in a copy."""
        return self._context() if self._context is not None else None

    def keep(self, context: Context) -> None:
        """Lets the context live as long as the model."""
        self._owner = context

    # torch.compile cannot trace a context that one function enters and another leaves. Not torch.compiler.disable,
    # which would import the compiler here and now.
    @_disable_dynamo
    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The forward pre-hook."""
        context = self.context
        if context is not None:
            context.heal_steps()
            self._look_at_ddp(context)
        device = next((p.device.type for p in module.parameters()), "cpu")
        casts = self._level.autocasts and (self._level.casts_weights or not _casts_disabled.get())
        passes.enter(self, forward_context(self._level, device) if casts else None)
        return convert_input(self._level, args), convert_input(self._level, kwargs)

    @_disable_dynamo
    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """The forward hook, also after an error."""
        entered, _ = passes.leave(self)
        return output if self._cast_outputs is None or not entered else cast_tree(output, self._cast_outputs)

    def _look_at_ddp(self, context: Context) -> None:
        """In the first forward pass inside DDP, which has made the half weights the same, masters follow."""
        ddp = DistributedDataParallel._get_active_ddp_module()
        if torch.is_grad_enabled():
            self.local = ddp is not None and not ddp.require_backward_grad_sync
        if ddp is None or (self._agreed is not None and self._agreed() is ddp):
            return
        self._agreed = ref(ddp)
        context.engine.agree_across_ranks(ddp.process_group)

    def __getstate__(self) -> dict[str, Any]:
        return {"_level": self._level, "_cast_outputs": self._cast_outputs, "_context": None, "_owner": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()


def hooks_of(module: nn.Module) -> ForwardHooks | None:
    """The hooks that initialize() left on a model, if any; also through DDP and torch.compile."""
    for candidate in (module, *(getattr(module, name, None) for name in ("module", "_orig_mod"))):
        for hook in getattr(candidate, "_forward_pre_hooks", {}).values():
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, ForwardHooks):
                return owner
    return None


@contextmanager
def disable_casts() -> Iterator[None]:
    """Inside, nothing is cast: ``torch.autocast`` is off, and models with fp32 weights compute in fp32.

    May be nested. Models with half weights (O2, O3, O5) go on as before.
    """
    passes.heal()
    token = _casts_disabled.set(True)
    devices = ["cpu", *([torch.accelerator.current_accelerator().type] if torch.accelerator.is_available() else [])]  # type: ignore[union-attr]
    contexts = [torch.autocast(device, enabled=False) for device in devices]
    for context in contexts:
        context.__enter__()
    try:
        yield
    finally:
        for context in reversed(contexts):
            context.__exit__(None, None, None)
        _casts_disabled.reset(token)
