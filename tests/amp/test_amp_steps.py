"""Steps out of the ordinary: closures, wrappers, hooks, subclasses, and steps that raise."""

import pytest
import torch
from amp_support import (
    BF16,
    F16,
    LEVELS,
    OPTIMIZERS,
    fp32,
    loss_of,
    net,
    same,
    start,
    state_of,
    step,
)
from torch import nn

from lightning_apex import FusedAdam, amp

DTYPES = {"bfloat16": BF16, "float16": F16}
MAX_NORM = 0.05


def backward(model, made, index=0, factor=1.0):
    made.zero_grad()
    with amp.scale_loss(loss_of(model, index) * factor, made) as scaled_loss:
        scaled_loss.backward()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_step_that_raises_leaves_everything_as_it_was(level):
    class Fragile(torch.optim.SGD):
        broken = False

        def step(self, closure=None):
            loss = closure() if closure is not None else None
            if self.broken:
                raise ArithmeticError("in the middle")
            super().step()
            return loss

    runs = []
    for breaks in (True, False):
        model = net()
        made = Fragile(model.parameters(), lr=0.1, momentum=0.9)
        model, made = amp.initialize(model, made, opt_level=level, half_dtype="bfloat16", verbosity=0)
        step(model, made, 0)
        backward(model, made, 1)
        if breaks:
            made.broken = True

            def closure(model=model):
                return loss_of(model.eval())

            for given in (None, closure):
                with pytest.raises(ArithmeticError):
                    made.step(given)
            model.train()
            assert [id(p) for p in made.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
            assert set(made.state) == set(model.parameters())
            made.broken = False
        made.step()
        step(model, made, 2)
        runs.append((fp32(model), state_of(made)))
    assert same(*runs)


class Wrapper(torch.optim.Optimizer):
    """Around an optimizer, whose groups and state it shares."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups, self.state = inner.param_groups, inner.state
        self.broken = False

    def step(self, closure=None):
        if self.broken:
            raise ArithmeticError
        return self.inner.step(closure)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_wrapped_optimizers(level):
    runs = []
    for wrapped in (True, False):
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        made = Wrapper(inner) if wrapped else inner
        model, made = amp.initialize(model, made, opt_level=level, half_dtype=None, verbosity=0)
        step(model, made, 0)
        if wrapped:
            backward(model, made, 1)
            made.broken = True
            with pytest.raises(ArithmeticError):
                made.step()
            made.broken = False
        step(model, made, 2, factor=float("inf") if level != "O5" else 1.0)
        step(model, made, 3)
        assert [id(p) for p in made.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
        weights = {k: v for k, v in fp32(model).items() if "running" not in k and "tracked" not in k}
        runs.append((weights, state_of(inner)))
    assert same(*runs)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
class TestClosures:
    @pytest.mark.parametrize("as_keyword", [True, False])
    def test_equal_the_ordinary_loop(self, level, optimizer, as_keyword):
        runs = []
        for with_closure in (True, False):
            model, made = start(level, optimizer)
            losses = []
            for index in range(4):
                factor = float("inf") if index == 1 and level in ("O1", "O2") else 1.0

                def closure(model=model, made=made, index=index, factor=factor):
                    made.zero_grad()
                    loss = loss_of(model, index) * factor
                    with amp.scale_loss(loss, made) as scaled_loss:
                        scaled_loss.backward()
                    return loss

                if not with_closure:
                    losses.append(step(model, made, index, factor))
                else:
                    losses.append((made.step(closure=closure) if as_keyword else made.step(closure)).item())
            runs.append((fp32(model), state_of(made), losses))
        assert same(*runs)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_clipping_in_a_closure(level, optimizer):
    runs = []
    for with_closure in (True, False):
        model, made = start(level, optimizer, half_dtype=None)
        for index in range(3):

            def closure(model=model, made=made, index=index):
                backward(model, made, index)
                return nn.utils.clip_grad_norm_(amp.master_params(made), MAX_NORM)

            if with_closure:
                assert made.step(closure) > MAX_NORM
            else:
                closure()
                made.step()
            assert [id(p) for p in made.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
        runs.append((fp32(model), state_of(made)))
    assert same(*runs)


@pytest.mark.parametrize("level", LEVELS)
def test_a_closure_that_is_called_again(level):
    class Twice(torch.optim.SGD):
        """Half a step with each of two gradients."""

        @torch.no_grad()
        def step(self, closure=None):
            for _ in range(2):
                with torch.enable_grad():
                    loss = closure()
                for group in self.param_groups:
                    for p in group["params"]:
                        p.sub_(p.grad, alpha=0.05)
            return loss

    def run(twice):
        model = net()
        made = (Twice if twice else torch.optim.SGD)(model.parameters(), lr=0.05)
        model, made = amp.initialize(model, made, opt_level=level, verbosity=0, half_dtype=None)

        def closure():
            made.zero_grad()
            loss = loss_of(model)
            with amp.scale_loss(loss, made) as scaled_loss:
                scaled_loss.backward()
            return loss

        for _ in range(2 if twice else 4):
            made.step(closure)
        return fp32(model)

    assert same(run(True), run(False))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_hooks_of_the_user_meet_unscaled_gradients_and_updated_parameters(level):
    for optimizer in ("sgd", "fused_adam"):
        seen = {}
        model, made = start(level, optimizer, half_dtype=None)

        def before(o, *_, seen=seen):
            seen["grad"] = o.param_groups[0]["params"][0].grad.clone()

        def after(o, *_, seen=seen):
            seen["weight"] = o.param_groups[0]["params"][0].detach().clone()

        made.register_step_pre_hook(before)
        made.register_step_post_hook(after)
        backward(model, made)
        inside = next(amp.master_params(made)).grad.clone()
        backward(model, made)
        made.step()
        assert torch.equal(seen["grad"].float(), inside)
        weight = seen["weight"]
        backward(model, made, factor=float("inf"))
        made.step()  # skipped, but the hooks run
        assert not seen["grad"].isfinite().all()
        assert torch.equal(seen["weight"], weight)
        assert torch.equal(seen["weight"], model[0].weight) and seen["weight"].dtype is model[0].weight.dtype


def test_a_fused_optimizer_of_a_subclass_with_a_step_of_its_own():
    class Noted(FusedAdam):
        def step(self, closure=None):
            self.noted = True
            return super().step(closure)

    FusedAdam(nn.Linear(1, 1).parameters())
    runs = []
    for kind in (Noted, FusedAdam):
        model = net()
        model, made = amp.initialize(
            model, kind(model.parameters(), lr=1e-2), opt_level="O2", half_dtype="bfloat16", verbosity=0
        )
        for index, factor in enumerate([1.0, float("inf"), 1.0]):
            step(model, made, index, factor)
        runs.append((fp32(model), state_of(made)["state"]))
    assert same(*runs)
