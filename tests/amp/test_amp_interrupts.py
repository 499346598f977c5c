"""An interrupt in the middle of things: nothing that was entered stays entered."""

from __future__ import annotations

import contextlib
import sys
import threading

import pytest
import torch
from amp_support import LEVELS, batch, fp32, loss_of, net, same, start, step
from torch import nn

from lightning_apex import amp


class Interrupting(nn.Module):
    """Raises once, or as often as it is told to."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error, self.times = error, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.times:
            self.times -= 1
            raise self.error
        return x


def interrupted(level: str, error: type[BaseException], **kwargs):
    """An initialised model whose forward pass has just been interrupted."""
    part = Interrupting(error)
    model, optimizer = start(level, model=nn.Sequential(*net()[:2], part, *net()[2:]), **kwargs)
    part.times = 1
    return model, optimizer


def autocast_state() -> tuple[object, ...]:
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return enabled, dtype, torch.is_autocast_cache_enabled(), depth


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
@pytest.mark.parametrize("level", LEVELS)
def test_autocast_is_off_after_an_interrupt(level: str, error: type[BaseException]) -> None:
    before = autocast_state()
    model, _ = interrupted(level, error)
    with pytest.raises(error):
        model(batch()[0])
    assert autocast_state() == before
    model(batch()[0])
    assert autocast_state() == before


@pytest.mark.parametrize("keep_fp32", [(), (nn.Linear, Interrupting)], ids=["", "islands"])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_autocast_of_the_users_around_it(level: str, keep_fp32: tuple[type, ...]) -> None:
    before = autocast_state()
    model, _ = interrupted(level, KeyboardInterrupt, keep_fp32=keep_fp32)
    with pytest.raises(KeyboardInterrupt), torch.autocast("cpu", dtype=torch.float16):
        model(batch()[0])
    assert autocast_state() == before


def enter_disable_casts() -> None:
    with amp.disable_casts():
        pass


MENDING = {
    "forward": lambda model, _: model(batch()[0]),
    "loop": lambda model, optimizer: step(model, optimizer),
    "step": lambda _, optimizer: optimizer.step(),
    "disable_casts": lambda *_: enter_disable_casts(),
}


@pytest.mark.parametrize("mending", MENDING)
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_the_next_call_mends_it_where_the_traceback_is_kept(level: str, mending: str) -> None:
    """As notebooks and debuggers do; the frames of the interrupted pass live on in it."""
    before = autocast_state()
    model, optimizer = interrupted(level, KeyboardInterrupt)
    try:
        model(batch()[0])
    except KeyboardInterrupt:
        kept = sys.exc_info()
    assert autocast_state() != before
    MENDING[mending](model, optimizer)
    assert autocast_state() == before
    del kept


def test_a_kept_fp32_module_that_was_interrupted() -> None:
    before = autocast_state()
    model, _ = interrupted("O2", KeyboardInterrupt, keep_fp32=[Interrupting, nn.Linear])
    want = None
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            model(batch()[0])
        assert autocast_state() == before
        out = model.eval()(batch()[0])
        assert want is None or torch.equal(out, want)
        want = out
        model[2].times = 1


def test_one_that_is_caught_inside_another_pass() -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.last = inner, nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with contextlib.suppress(KeyboardInterrupt):
                self.inner(x)
            assert torch.is_autocast_enabled("cpu")
            return self.last(x)

    inner, _ = interrupted("O4", KeyboardInterrupt)
    model = amp.initialize(Outer(inner), opt_level="O4", cast_model_outputs=torch.bfloat16, verbosity=0)
    before = autocast_state()
    assert model(batch()[0]).dtype is torch.bfloat16
    assert autocast_state() == before


def test_threads_do_not_end_the_passes_of_others() -> None:
    seen = []

    class Waiting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            thread = threading.Thread(target=lambda: seen.append(other(x).dtype))
            thread.start()
            thread.join()
            seen.append(torch.is_autocast_enabled("cpu"))
            return x

    other, _ = start("O1", model=nn.Linear(6, 2))
    model, _ = start("O1", model=nn.Sequential(nn.Linear(6, 6), Waiting()))
    model(batch()[0])
    assert seen == [torch.float32, True]


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_training_goes_on_as_if_nothing_had_been(level: str) -> None:
    model, optimizer = interrupted(level, KeyboardInterrupt)
    model[2].times = 0
    other, other_optimizer = interrupted(level, KeyboardInterrupt)
    other[2].times = 0
    for index in range(3):
        step(model, optimizer, index)
        if index == 1:  # before the running statistics move, so that nothing of it is left
            model.eval()
            model[2].times = 1
            with pytest.raises(KeyboardInterrupt):
                loss_of(model)
            model.train()
        step(other, other_optimizer, index)
    assert same(fp32(model), fp32(other))
