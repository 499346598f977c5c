"""Autocast that one forward hook enters and another leaves, also where torch calls no hook: after an interrupt."""

from __future__ import annotations

import sys
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import nn

_CALL = nn.Module._call_impl.__code__
_LOCAL = "called_always_called_hooks"  # a set in the frame of a module's call, whatever the module


class _Token:
    """Dies with the frame of a module's call."""

    def __del__(self) -> None:
        heal()


@dataclass
class _Pass:
    """A forward pass under way.

    Attributes:
        owner: Whose hooks entered it.
        extra: What they keep for its end.
        inside: What it runs in.
        depth: How deep autocast was nested then.
        call: The ``id`` of the frame of the call. Only a token keeps it from being another's, so that the frame can go.
        alive: The token, or the frame itself where there is none, as under torch.compile.
    """

    owner: object
    extra: Any
    inside: AbstractContextManager[Any] | None
    depth: int
    call: int
    alive: ref[_Token] | FrameType

    def runs(self) -> bool:
        """Whether the call is under way; it is a few frames up the stack then."""
        if isinstance(self.alive, ref) and self.alive() is None:
            return False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and id(frame) != self.call:
            frame = frame.f_back
        return frame is not None


class _UnderWay(threading.local):
    def __init__(self) -> None:
        self.passes: list[_Pass] = []  # the innermost last


_here = _UnderWay()


def enter(owner: object, inside: AbstractContextManager[Any] | None, extra: Any = None) -> None:
    """In a forward pre-hook: enters ``inside`` until `leave`, or until the call ends in any other way."""
    heal()
    call = _call()
    depth = 0
    if inside is not None:
        inside.__enter__()
        depth = _depth()
    alive: ref[_Token] | FrameType = call
    tokens = call.f_locals.get(_LOCAL) if call.f_code is _CALL else None
    if isinstance(tokens, set):
        token = _Token()
        tokens.add(token)
        alive = ref(token)
    _here.passes.append(_Pass(owner, extra, inside, depth, id(call), alive))


def leave(owner: object) -> tuple[bool, Any]:
    """In a forward hook that is always called: whether there was an `enter`, and its ``extra``."""
    passes = _here.passes
    if passes and passes[-1].owner is not owner:
        heal()
    if not passes or passes[-1].owner is not owner:  # the call failed before
        return False, None
    ended = passes.pop()
    if ended.inside is not None:
        ended.inside.__exit__(None, None, None)
    return True, ended.extra


def heal() -> None:
    """Ends what was interrupted in this thread: torch calls no forward hook after a KeyboardInterrupt."""
    passes = _here.passes
    while passes and not passes[-1].runs():
        _leave_late(passes.pop())


def _leave_late(ended: _Pass) -> None:
    if ended.inside is None:
        return
    if _depth() >= ended.depth:
        ended.inside.__exit__(None, None, None)
    elif torch.autocast_decrement_nesting() == 0:  # an autocast around it was left before, and has set things right
        torch.clear_autocast_cache()


def _depth() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _call() -> FrameType:
    """The frame of the module's call that a hook is run in."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code is not _CALL and _is_between(frame):
        frame = frame.f_back
    return frame


def _is_between(frame: FrameType) -> bool:
    """Whether a frame is between a hook and the call: its own, the compiler's, torch's ``inner``."""
    code = frame.f_code
    return "torch/_dynamo" in code.co_filename or code.co_name in ("enter", "inner")
