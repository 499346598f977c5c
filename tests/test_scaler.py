"""LossScaler in plain loops: the scale it keeps, the steps it skips, and the losses it scales."""

import copy
import io
import pickle
import random

import pytest
import torch
from cases import same_bits
from reference.scaling import LossScale
from torch import nn

from lightning_apex import FusedAdam, FusedSGD, LossScaler

OPTIMIZERS = {
    "fused_adam": lambda params: FusedAdam(params, lr=0.1),
    "fused_sgd": lambda params: FusedSGD(params, lr=0.1, momentum=0.9),
    "torch_adamw": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.0),
    "torch_sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


def random_flags(seed: int, count: int, probability: float) -> list[bool]:
    numbers = random.Random(seed)
    return [numbers.random() < probability for _ in range(count)]


def loss_of(params, overflow: bool = False) -> torch.Tensor:
    loss = sum((p.float() ** 2).sum() for p in params)
    return loss * torch.inf if overflow else loss


def train(scaler, optimizer, params, pattern) -> list[float]:
    """One step for each flag; returns the scale after each."""
    scales = []
    for overflow in pattern:
        optimizer.zero_grad()
        scaler.scale(loss_of(params, overflow)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.linspace(-1, 1, n)) for n in (5, 1)]


def state_of(optimizer, params) -> list[torch.Tensor]:
    """Copies of everything a step could change."""
    states = [v for p in params for v in optimizer.state[p].values() if isinstance(v, torch.Tensor)]
    return [t.detach().clone() for t in (*params, *states)]


class TestTheScale:
    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_follows_grad_scaler(self, name, seed):
        pattern = random_flags(seed, 60, 0.3)
        rule = {"init_scale": 2.0**10, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 3}
        ours, theirs = parameters(), parameters()
        a, b = LossScaler(**rule, min_loss_scale=2.0**-100, max_loss_scale=2.0**100), torch.amp.GradScaler("cpu", **rule)
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
        scaler = LossScaler(init_scale=8.0, min_loss_scale=0.25, max_loss_scale=64.0, max_consecutive_skips=None, **rule)
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
        optimizer, plain = torch.optim.SparseAdam(embedding.parameters()), torch.optim.SparseAdam(reference.parameters())
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


class TestUnscale:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_then_clip_by_hand_then_step(self, name):
        params, plain = parameters(), parameters()
        scaled, reference = OPTIMIZERS[name](params), OPTIMIZERS[name](plain)
        scaler = LossScaler(init_scale=2.0**10)
        for _ in range(4):
            scaled.zero_grad()
            scaler.scale(loss_of(params)).backward()
            scaler.unscale_(scaled)
            norm = nn.utils.clip_grad_norm_(params, 0.5)
            scaler.step(scaled)
            scaler.update()
            reference.zero_grad()
            loss_of(plain).backward()
            assert same_bits(nn.utils.clip_grad_norm_(plain, 0.5), norm)
            reference.step()
        assert all(map(same_bits, params, plain))

    def test_twice_divides_once(self):
        params = parameters()
        optimizer = FusedSGD(params)
        scaler = LossScaler(init_scale=4.0)
        scaler.scale(loss_of(params)).backward()
        scaler.unscale_(optimizer)
        scaler.unscale_(optimizer)
        assert same_bits(params[0].grad, 2 * params[0].detach())

    @pytest.mark.parametrize("overflow", [False, True])
    def test_then_no_step_counts_once_and_is_over(self, overflow):
        params = parameters()
        optimizer = FusedSGD(params, lr=0.1)
        scaler = LossScaler(init_scale=4.0, growth_interval=1)
        scaler.scale(loss_of(params, overflow)).backward()
        scaler.unscale_(optimizer)
        scaler.update()
        assert scaler.get_scale() == (2.0 if overflow else 8.0)
        optimizer.zero_grad()
        scaler.scale(loss_of(params)).backward()
        scaler.step(optimizer)
        assert same_bits(params[0], parameters()[0] - 0.1 * 2 * parameters()[0])

    def test_a_closure_is_refused(self):
        params = parameters()
        scaler = LossScaler(init_scale=4.0)
        for optimizer in (FusedSGD(params), torch.optim.SGD(params, lr=0.1)):
            with pytest.raises(RuntimeError, match="call the closure first"):
                scaler.step(optimizer, lambda: None)
            with pytest.raises(RuntimeError, match="call the closure first"):
                scaler.step(optimizer, closure=lambda: None)
        assert LossScaler(1.0).step(FusedSGD(params), lambda: "loss") == "loss"


class TestLosses:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_losses_are_scaled_in_fp32(self, dtype):
        loss = torch.tensor(2.0, dtype=dtype, requires_grad=True)
        scaled = LossScaler(init_scale=2.0**16).scale(loss)
        assert scaled.dtype is torch.float32 and scaled.item() == 2.0**17

    def test_fp64_stays(self):
        assert LossScaler(init_scale=8.0).scale(torch.tensor(1.0, dtype=torch.float64)).dtype is torch.float64

    def test_containers_keep_their_kind(self):
        loss = torch.tensor(1.0)
        scaled = LossScaler(init_scale=8.0).scale({"a": [loss, (loss,)], "n": torch.tensor(3), "text": "t"})
        assert scaled == {"a": [8.0, (8.0,)], "n": 3, "text": "t"}
        assert isinstance(scaled["a"][1], tuple)

    def test_a_scale_that_moves_before_backward_is_noticed_or_harmless(self):
        params = parameters()
        scaler = LossScaler(init_scale=8.0)
        scaled = scaler.scale(loss_of(params))
        optimizer = FusedSGD(params)
        params[0].grad = torch.full_like(params[0], torch.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        try:
            scaled.backward()
        except RuntimeError:
            return
        assert same_bits(params[0].grad, 2 * params[0].detach() * scaler.get_scale()) or same_bits(
            params[0].grad, 2 * params[0].detach() * 8.0
        )


def test_pickle_and_deepcopy_keep_the_state():
    scaler = LossScaler(init_scale=8.0, hysteresis=2, growth_interval=3, max_consecutive_skips=7)
    params = parameters()
    train(scaler, FusedSGD(params), params, [False, True, True, False])
    file = io.BytesIO()
    torch.save(scaler, file)
    file.seek(0)
    for twin in (pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler), torch.load(file, weights_only=False)):
        assert twin.state_dict() == scaler.state_dict()
        assert twin.max_consecutive_skips == 7
        train(twin, FusedSGD(params), params, [True])
        assert twin.state_dict() != scaler.state_dict()
