"""Steps that overflow change nothing but the loss scale, whoever's gradients they were."""

import pytest
import torch
from amp_support import OPTIMIZERS, SCALED, fp32, loss_of, net, same, scale_of, start, state_of, step
from torch import nn

from lightning_apex import LossScaleError, amp

INF = float("inf")


def forget_statistics(weights):
    """Without what a forward pass writes."""
    return {name: value for name, value in weights.items() if "running" not in name and "tracked" not in name}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("level", "dtype"), SCALED)
class TestSkippedSteps:
    def test_change_nothing(self, level, dtype, optimizer):
        model, made = start(level, optimizer, half_dtype=dtype)
        step(model, made)
        weights, state = forget_statistics(fp32(model)), state_of(made)
        for _ in range(2):
            step(model, made, factor=INF)
            assert same(forget_statistics(fp32(model)), weights)
            assert same(state_of(made), state)
        assert scale_of(made) == 2.0**6
        step(model, made)
        assert not same(forget_statistics(fp32(model)), weights)

    def test_at_the_very_first_step(self, level, dtype, optimizer):
        runs = []
        for first in (True, False):
            model, made = start(level, optimizer, half_dtype=dtype, loss_scale=64.0)
            statistics = model[1].state_dict()
            if first:
                step(model, made, factor=INF)
                model[1].load_state_dict({k: v.clone() for k, v in net()[1].state_dict().items()} | {})
            assert statistics is not None
            for index in range(3):
                step(model, made, index)
            runs.append((forget_statistics(fp32(model)), state_of(made)["state"]))
        assert same(*runs)

    @pytest.mark.parametrize("set_to_none", [True, False])
    def test_do_not_happen_for_gradients_that_were_dropped(self, level, dtype, optimizer, set_to_none):
        model, made = start(level, optimizer, half_dtype=dtype)
        with amp.scale_loss(loss_of(model) * INF, made) as scaled_loss:
            scaled_loss.backward()
        made.zero_grad(set_to_none=set_to_none)
        before = forget_statistics(fp32(model))
        with amp.scale_loss(loss_of(model), made) as scaled_loss:
            scaled_loss.backward()
        made.step()
        assert not same(forget_statistics(fp32(model)), before)
        assert scale_of(made) == 2.0**7  # it counted for the scale

    def test_leave_the_gradients_where_they_are(self, level, dtype, optimizer):
        model, made = start(level, optimizer, half_dtype=dtype)
        step(model, made, factor=INF)
        assert all(p.grad is not None and p.grad.dtype is p.dtype for p in model.parameters())
        assert not all(p.grad.isfinite().all() for p in model.parameters())
        before = forget_statistics(fp32(model))
        with amp.scale_loss(loss_of(model), made) as scaled_loss:  # no zero_grad(): added to what is there
            scaled_loss.backward()
        made.step()
        assert same(forget_statistics(fp32(model)), before)
        assert scale_of(made) == 2.0**7  # the second loss is not to blame
        step(model, made)
        assert all(value.isfinite().all() for value in fp32(model).values())
        assert not same(forget_statistics(fp32(model)), before)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_run_ends_when_nothing_helps(optimizer):
    model, made = start("O2", optimizer, half_dtype="bfloat16", max_consecutive_skips=4, min_loss_scale=2.0**6)
    before = forget_statistics(fp32(model))
    with pytest.raises(LossScaleError, match=r"4 steps in a row.*3\.weight"):
        for _ in range(10):
            step(model, made, factor=INF)
    assert scale_of(made) == 2.0**6
    assert same(forget_statistics(fp32(model)), before)


@pytest.mark.parametrize("floor", [2.0**-6, 1.0])
def test_the_floor_is_reached_and_kept(floor):
    model, made = start("O1", half_dtype="bfloat16", min_loss_scale=floor, init_scale=2.0, max_consecutive_skips=None)
    for _ in range(20):
        step(model, made, factor=INF)
    assert scale_of(made) == floor


def test_the_ceiling_is_kept():
    model, made = start("O1", half_dtype="bfloat16", max_loss_scale=2.0**9, growth_interval=1)
    for _ in range(4):
        step(model, made)
    assert scale_of(made) == 2.0**9


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_overflow_that_clipping_hides(optimizer):
    model, made = start("O2", optimizer, half_dtype="float16")
    before = forget_statistics(fp32(model))
    with amp.scale_loss(loss_of(model) * INF, made) as scaled_loss:
        scaled_loss.backward()
    for master in amp.master_params(made):
        master.grad.nan_to_num_(0.0, 0.0, 0.0)
    made.step()
    assert same(forget_statistics(fp32(model)), before)


def test_a_fixed_scale_skips_and_stays():
    model, made = start("O1", "adamw", half_dtype="bfloat16", loss_scale="128.0")
    before = forget_statistics(fp32(model))
    step(model, made, factor=INF)
    assert same(forget_statistics(fp32(model)), before) and scale_of(made) == 128.0


def test_optimizers_that_count_steps_in_their_groups_or_themselves():
    class Counting(torch.optim.SGD):
        calls = 0

        def step(self, closure=None):
            self.calls += 1
            for group in self.param_groups:
                group["step"] = group.get("step", 0) + 1
                group["count"].add_(1)
            return super().step(closure)

    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # whose step() has hooks, too
    for level in ("O1", "O2"):
        model = net()
        made = Counting([{"params": list(model.parameters()), "count": torch.zeros(())}], lr=0.1)
        model, made = amp.initialize(model, made, opt_level=level, half_dtype="bfloat16", verbosity=0)
        for factor in (1.0, INF, 1.0):
            step(model, made, factor=factor)
        assert made.param_groups[0]["step"] == 2 and made.param_groups[0]["count"] == 2
        assert made.calls == 2


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_optimizer_that_goes_on_after_the_step_it_inherits(level):
    class DecaysAfterwards(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            loss = super().step(closure)
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.mul_(0.5)
            return loss

    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # whose step() has hooks, too
    model = net()
    made = DecaysAfterwards(model.parameters(), lr=0.0)
    model, made = amp.initialize(model, made, opt_level=level, half_dtype="bfloat16", verbosity=0)
    before = forget_statistics(fp32(model))
    step(model, made, factor=INF)
    assert same(forget_statistics(fp32(model)), before)
    step(model, made)
    assert same(forget_statistics(fp32(model)), {name: value * 0.5 for name, value in before.items()})


def test_it_is_said(capsys):
    model, made = start("O2", "fused_adam", half_dtype="bfloat16", verbosity=1)
    assert "O2: bfloat16 weights, BatchNorm in float32, float32 masters, loss scale dynamic" in capsys.readouterr().out
    step(model, made, factor=INF)
    assert "step skipped, loss scale 256 -> 128" in capsys.readouterr().out
    model, made = start("O2", "fused_adam", half_dtype="bfloat16", verbosity=0)
    step(model, made, factor=INF)
    assert capsys.readouterr().out == ""
