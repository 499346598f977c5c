"""The parts of an optimizer step, as profilers see them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import record_function

P = ParamSpec("P")
R = TypeVar("R")
_NOTHING = nullcontext()


class Sections:
    """Tells profilers which part of a step is under way: ``measure`` or ``update``.

    torch's profiler sees ranges ``lightning_apex.measure`` and ``lightning_apex.update``. Sections do not nest: the
    outermost counts.

    Attributes:
        profile: Makes a section of another profiler, by its name.
    """

    def __init__(self) -> None:
        self.profile: Callable[[str], AbstractContextManager[Any]] | None = None
        self._open = False

    def __call__(self, name: str) -> AbstractContextManager[Any]:
        """What a part of a step runs in; next to nothing where nobody profiles."""
        if self._open or (self.profile is None and not _profiler_enabled()):
            return _NOTHING
        return self._section(name)

    @contextmanager
    def _section(self, name: str) -> Iterator[None]:
        self._open = True
        try:
            with record_function(f"lightning_apex.{name}"), self.profile(name) if self.profile else _NOTHING:
                yield
        finally:
            self._open = False


class _HasSections(Protocol):
    @property
    def sections(self) -> Sections: ...


S = TypeVar("S", bound=_HasSections)


def measuring(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Makes a method that reads or unscales gradients the section ``measure``."""

    @wraps(method)
    def in_section(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.sections("measure"):
            return method(self, *args, **kwargs)

    return in_section
