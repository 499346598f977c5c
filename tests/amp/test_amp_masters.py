"""Masters as a user sees them: clipping, edits, and steps that go wrong."""

import pytest
import torch
from amp_support import (
    BF16,
    F16,
    LEVELS,
    OPTIMIZERS,
    HalfByHand,
    by_grad_scaler,
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_clipping_at_O1(optimizer, dtype):
    witness = by_grad_scaler(optimizer, DTYPES[dtype], [1.0] * 4, MAX_NORM)
    model, made = start("O1", optimizer, half_dtype=dtype)
    for index in range(4):
        backward(model, made, index)
        nn.utils.clip_grad_norm_(amp.master_params(made), MAX_NORM)
        made.step()
        assert same(fp32(model), witness[index][0])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("level", "dtype"), [("O2", "bfloat16"), ("O2", "float16"), ("O5", "bfloat16")])
def test_clipping_with_masters(level, dtype, optimizer):
    witness = HalfByHand(optimizer, DTYPES[dtype], 2.0**8 if level == "O2" else 1.0)
    model, made = start(level, optimizer, half_dtype=dtype)
    for index in range(4):
        witness.step(index, max_norm=MAX_NORM)
        backward(model, made, index)
        norm = nn.utils.clip_grad_norm_(amp.master_params(made), MAX_NORM)
        assert norm > MAX_NORM
        after = torch.stack([p.grad.norm() for p in amp.master_params(made)]).norm()
        assert after == pytest.approx(MAX_NORM, rel=1e-3)
        made.step()
    assert same(fp32(model), witness.fp32())


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_clipping_the_models_own_parameters_works_with_torchs_optimizers(optimizer):
    witness = HalfByHand(optimizer, BF16, 2.0**8)
    model, made = start("O2", optimizer, half_dtype="bfloat16")
    for index in range(3):
        witness.step(index, max_norm=MAX_NORM)
        backward(model, made, index)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        made.step()
    assert same(fp32(model), witness.fp32())


def test_changing_gradients_that_are_still_scaled_is_refused():
    model, made = start("O2", "fused_adam", half_dtype="bfloat16")
    step(model, made)
    before, state = fp32(model), state_of(made)
    backward(model, made)
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    with pytest.raises(RuntimeError, match=r"amp\.master_params\(optimizer\) instead"):
        made.step()
    weights = {k: v for k, v in fp32(model).items() if "running" not in k and "tracked" not in k}
    assert same(weights, {k: before[k] for k in weights}) and same(state_of(made), state)
    step(model, made, 1)  # and on


@pytest.mark.parametrize("level", LEVELS)
def test_master_params(level):
    model, made = start(level, "adamw", half_dtype=None)
    masters = list(amp.master_params(made))
    assert [m.shape for m in masters] == [p.shape for p in model.parameters()]
    if level == "O3":
        assert all(m is p for m, p in zip(masters, model.parameters(), strict=True))
    else:
        assert {m.dtype for m in masters} == {torch.float32}
    for master, param in zip(masters, model.parameters(), strict=True):
        assert (master is param) is (param.dtype is torch.float32 or level == "O3")
        assert torch.equal(master.to(param.dtype), param)
    backward(model, made)
    assert all(m.grad is not None and m.grad.dtype is m.dtype for m in amp.master_params(made))
    made.step()
    assert same(fp32(model)["0.weight"].float(), next(amp.master_params(made)).detach().float())


def test_of_an_optimizer_that_nobody_initialised():
    param = nn.Parameter(torch.ones(2))
    assert list(amp.master_params(torch.optim.SGD([param]))) == [param]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
class TestEdits:
    def test_a_gradient_set_to_none_makes_no_step(self, level, optimizer):
        def drop(masters):
            masters[0].grad = None

        model, made = start(level, optimizer, half_dtype=None)
        step(model, made)
        backward(model, made, 1)
        before = fp32(model)
        drop(list(amp.master_params(made)))
        made.step()
        after = fp32(model)
        assert same(after["0.weight"], before["0.weight"])
        assert not same(after["3.weight"], before["3.weight"])

    def test_a_gradient_that_is_replaced_is_used(self, level, optimizer):
        results = []
        for replace in (True, False):
            model, made = start(level, optimizer, half_dtype=None)
            backward(model, made)
            for master in amp.master_params(made):
                if replace:
                    master.grad = master.grad * 0.5
                else:
                    master.grad.mul_(0.5)
            made.step()
            results.append(fp32(model))
        assert same(*results)

    def test_zero_grad_after_looking(self, level, optimizer):
        model, made = start(level, optimizer, half_dtype=None)
        backward(model, made, factor=100.0)
        assert next(amp.master_params(made)).grad is not None
        made.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        before = fp32(model)
        made.step()  # of nothing
        assert same(fp32(model), before)

    def test_looking_twice_and_changing_nothing(self, level, optimizer):
        results = []
        for looks in (0, 1, 2):
            model, made = start(level, optimizer, half_dtype=None)
            for index in range(3):
                backward(model, made, index)
                for _ in range(looks):
                    list(amp.master_params(made))
                made.step()
            results.append((fp32(model), state_of(made)))
        assert same(results[0], results[1]) and same(results[0], results[2])


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
