"""LossScaler in plain loops: unscaling by hand, the losses it takes, and copies of it."""

import copy
import io
import pickle

import pytest
import torch
from cases import same_bits
from scaler_support import OPTIMIZERS, loss_of, parameters, train
from torch import nn

from lightning_apex import FusedSGD, LossScaler


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
    @pytest.mark.parametrize("shape", [(), (1,), (3,)])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_losses_are_scaled_in_fp32(self, dtype, shape):
        loss = torch.full(shape, 2.0, dtype=dtype, requires_grad=True)
        scaled = LossScaler(init_scale=2.0**16).scale(loss)
        assert scaled.dtype is torch.float32 and scaled.eq(2.0**17).all()

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


def test_a_second_step_without_an_update_is_refused():
    param = nn.Parameter(torch.ones(3))
    optimizer, scaler = torch.optim.SGD([param], lr=0.1), LossScaler()
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"called twice for one SGD: call scaler\.update\(\)"):
        scaler.step(optimizer)
    scaler.update()
    scaler.step(optimizer)


def test_disabled_by_a_flag():
    scaler = LossScaler(enabled=False)
    loss = torch.ones(())
    assert not scaler.is_enabled() and scaler.scale(loss) is loss and scaler.state_dict() == {}
