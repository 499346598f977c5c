"""LossScaler in plain loops: the scale it keeps, and the steps it skips."""

import copy

import pytest
import torch
from cases import same_bits
from reference.scaling import LossScale
from scaler_support import OPTIMIZERS, loss_of, parameters, random_flags, state_of, train
from torch import nn

from lightning_apex import FusedAdam, FusedSGD, LossScaler


class TestTheScale:
    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_follows_grad_scaler(self, name, seed):
        pattern = random_flags(seed, 60, 0.3)
        rule = {"init_scale": 2.0**10, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 3}
        ours, theirs = parameters(), parameters()
        a, b = (
            LossScaler(**rule, min_loss_scale=2.0**-100, max_loss_scale=2.0**100),
            torch.amp.GradScaler("cpu", **rule),
        )
        witness = "torch_adamw" if "adam" in name else "torch_sgd"
        expected = train(b, OPTIMIZERS[witness](theirs), theirs, pattern)
        assert train(a, OPTIMIZERS[name](ours), ours, pattern) == expected
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        assert a.skipped_steps == sum(pattern)

    @pytest.mark.parametrize("hysteresis", [1, 2, 4])
    @pytest.mark.parametrize("seed", range(3))
    def test_follows_the_definition(self, hysteresis, seed):
        pattern = random_flags(seed, 80, 0.5)
        rule = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2, "hysteresis": hysteresis}
        scaler = LossScaler(
            init_scale=8.0, min_loss_scale=0.25, max_loss_scale=64.0, max_consecutive_skips=None, **rule
        )
        reference = LossScale(scale=8.0, low=0.25, high=64.0, **rule)
        params = parameters()
        expected = []
        for overflow in pattern:
            reference.see(overflow)
            expected.append(reference.scale)
        assert train(scaler, FusedAdam(params), params, pattern) == expected
        state = scaler.state_dict()
        keys = ("_growth_tracker", "_hysteresis_tracker", "consecutive_skips", "skipped_steps")
        assert [state[key] for key in keys] == reference.trackers

    def test_never_falls_below_its_floor_and_reaches_it(self):
        scaler = LossScaler(init_scale=1.0, min_loss_scale=2.0**-6, max_consecutive_skips=None)
        params = parameters()
        scales = train(scaler, FusedSGD(params), params, [True] * 200)
        assert scales[:7] == [2.0**-i for i in range(1, 7)] + [2.0**-6]
        assert set(scales[6:]) == {2.0**-6}

    def test_never_rises_above_its_ceiling(self):
        scaler = LossScaler(init_scale=4.0, growth_interval=1, max_loss_scale=20.0)
        params = parameters()
        assert train(scaler, FusedSGD(params, lr=0.0), params, [False] * 5) == [8.0, 16.0, 20.0, 20.0, 20.0]

    def test_the_first_scale_is_brought_within_bounds(self):
        assert LossScaler(init_scale=2.0**30).get_scale() == 2.0**24
        assert LossScaler(init_scale=2.0**-20).get_scale() == 2.0**-10

    def test_a_fixed_scale_stays_but_bad_steps_are_skipped(self):
        scaler = LossScaler(128.0, growth_interval=1)
        params = parameters()
        optimizer = FusedAdam(params)
        assert train(scaler, optimizer, params, [False, True, False, True]) == [128.0] * 4
        assert scaler.skipped_steps == 2 and optimizer.state[params[0]]["step"] == 2

    def test_a_scale_of_one_disables_everything(self):
        scaler = LossScaler(1.0)
        loss = torch.ones((), dtype=torch.float16)
        assert scaler.scale(loss) is loss
        assert not scaler.is_enabled() and scaler.state_dict() == {}
        params = parameters()
        optimizer = FusedSGD(params)
        train(scaler, optimizer, params, [False, True])
        assert optimizer.state[params[0]]["step"] == 2 and params[0].isnan().any()
        assert scaler.skipped_steps == 0

    def test_update_to_a_new_scale(self):
        scaler = LossScaler()
        scaler.update(8.0)
        assert scaler.get_scale() == 8.0
        scaler.update(torch.tensor([16.0]))
        assert scaler.get_scale() == 16.0
        scaler.update(2.0**30)
        assert scaler.get_scale() == 2.0**24
        fixed = LossScaler(4.0)
        fixed.update(8.0)
        params = parameters()
        assert train(fixed, FusedSGD(params), params, [False, True]) == [8.0, 8.0]
        disabled = LossScaler(1.0)
        disabled.update(8.0)
        assert disabled.get_scale() == 1.0

    @pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan"), 1e39])
    def test_update_to_no_scale(self, bad):
        scaler = LossScaler(init_scale=8.0)
        with pytest.raises(ValueError, match="new_scale="):
            scaler.update(bad)
        assert scaler.get_scale() == 8.0

    def test_update_without_a_step_changes_nothing(self):
        scaler = LossScaler(init_scale=8.0, growth_interval=1)
        scaler.update()
        params = parameters()
        scaler.step(FusedSGD(params))  # no gradients: nothing was looked at
        scaler.update()
        assert scaler.get_scale() == 8.0


class TestSkippedSteps:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    @pytest.mark.parametrize("unscale_first", [False, True])
    def test_change_nothing_bit_for_bit(self, name, unscale_first):
        params = parameters()
        optimizer = OPTIMIZERS[name](params)
        scaler = LossScaler(init_scale=4.0)
        train(scaler, optimizer, params, [False, False])
        before = state_of(optimizer, params)
        for bad in (torch.inf, -torch.inf, torch.nan):
            optimizer.zero_grad()
            scaler.scale(loss_of(params)).backward()
            params[1].grad.fill_(bad)
            if unscale_first:
                scaler.unscale_(optimizer)
            assert scaler.step(optimizer) is None
            scaler.update()
            assert all(map(same_bits, state_of(optimizer, params), before))
        assert scaler.skipped_steps == 3

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_on_the_very_first_step(self, name):
        params, fresh = parameters(), parameters()
        train(LossScaler(init_scale=4.0), OPTIMIZERS[name](params), params, [True, False, False])
        train(LossScaler(init_scale=2.0), OPTIMIZERS[name](fresh), fresh, [False, False])
        assert all(map(same_bits, params, fresh))

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_an_overflow_of_the_unscaling_itself_counts(self, name):
        """Below a scale of 1 a finite fp16 gradient may be infinite once unscaled."""
        param = nn.Parameter(torch.ones(2, dtype=torch.float16))
        scaler = LossScaler(init_scale=2.0**-4)
        optimizer = OPTIMIZERS[name]([param])
        param.grad = torch.full_like(param, 30000.0)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.skipped_steps == 1 and param.eq(1).all()

    def test_a_fused_step_that_need_not_write_gradients_is_made(self):
        param = nn.Parameter(torch.ones(2, dtype=torch.float16))
        scaler = LossScaler(init_scale=2.0**-4)
        optimizer = FusedAdam([param], lr=0.5)
        param.grad = torch.full_like(param, 30000.0)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.skipped_steps == 0 and param.eq(0.5).all()

    def test_of_one_optimizer_do_not_touch_another_but_move_the_one_scale(self):
        a, b = parameters(), parameters()
        first, second = FusedAdam(a, lr=0.1), torch.optim.SGD(b, lr=0.1)
        scaler = LossScaler(init_scale=4.0)
        scaler.scale(loss_of(a)).backward()
        scaler.scale(loss_of(b, overflow=True)).backward()
        scaler.step(first)
        scaler.step(second)
        scaler.update()
        assert first.state[a[0]]["step"] == 1
        assert all(map(same_bits, b, parameters()))
        assert scaler.get_scale() == 2.0 and scaler.skipped_steps == 1

    def test_an_inf_in_one_batch_of_an_accumulation_window_skips_the_step(self):
        params = parameters()
        optimizer = FusedAdam(params)
        scaler = LossScaler(init_scale=4.0)
        for overflow in (False, True, False):
            scaler.scale(loss_of(params, overflow)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.skipped_steps == 1 and scaler.get_scale() == 2.0

    def test_through_sparse_gradients(self):
        embedding = nn.Embedding(6, 3, sparse=True)
        reference = copy.deepcopy(embedding)
        optimizer, plain = (
            torch.optim.SparseAdam(embedding.parameters()),
            torch.optim.SparseAdam(reference.parameters()),
        )
        scaler = LossScaler(init_scale=4.0)
        for rows, factor in (([1, 1, 4], 1.0), ([0, 1], torch.inf), ([2, 4], 2.0)):
            optimizer.zero_grad()
            scaler.scale(embedding(torch.tensor(rows)).square().sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            if factor is not torch.inf:
                plain.zero_grad()
                (reference(torch.tensor(rows)).square().sum() * factor).backward()
                plain.step()
        assert scaler.skipped_steps == 1
        torch.testing.assert_close(embedding.weight, reference.weight)

    def test_sparse_duplicates_that_overflow_together(self):
        param = nn.Parameter(torch.zeros(3, 1))
        indices, big = torch.tensor([[1, 1]]), torch.full((2, 1), 3e38)
        param.grad = torch.sparse_coo_tensor(indices, big, (3, 1), check_invariants=False)
        scaler = LossScaler(init_scale=4.0)
        scaler.step(torch.optim.SparseAdam([param]))
        scaler.update()
        assert scaler.skipped_steps == 1
