"""A fused optimizer remembers which tensors it updates: whatever changes between two steps must be noticed."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_apex import FusedAdam
from lightning_apex.masters import MasterWeights
from lightning_apex.optimizers._base import StepInputs


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in ((3, 4), (5,), (), (2, 2))]


def set_gradients(params: list[nn.Parameter], step: int, without: int | None = None) -> None:
    generator = torch.Generator().manual_seed(step)
    for i, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator)
        param.grad = None if i == without else grad.to(param.dtype)


def move_state(optimizer: FusedAdam, params: list[nn.Parameter]) -> None:
    """As Lightning moves state between devices: every dictionary and every tensor is another one."""
    for param, state in optimizer.state.items():
        optimizer.state[param] = {name: value.clone() for name, value in state.items()}


def replace_moments(optimizer: FusedAdam, params: list[nn.Parameter]) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].clone()


def reload(optimizer: FusedAdam, params: list[nn.Parameter]) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.parametrize("change", [move_state, replace_moments, reload])
def test_replaced_state_is_the_state_that_is_updated(change: Callable[[FusedAdam, list[nn.Parameter]], None]) -> None:
    ours, theirs = parameters(), parameters()
    fused, witness = FusedAdam(ours), torch.optim.AdamW(theirs, weight_decay=0.0, foreach=False)
    for step in range(6):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        fused.step()
        witness.step()
        change(fused, ours)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
        assert float(fused.state[mine]["step"]) == 6
        torch.testing.assert_close(fused.state[mine]["exp_avg"], witness.state[other]["exp_avg"], rtol=1e-5, atol=1e-7)


def test_gradients_that_come_and_go() -> None:
    ours, theirs = parameters(), parameters()
    fused, witness = FusedAdam(ours), torch.optim.AdamW(theirs, weight_decay=0.0, foreach=False)
    for step, without in enumerate((None, 1, 1, None, 0, 3, None)):
        set_gradients(ours, step, without)
        set_gradients(theirs, step, without)
        fused.step()
        witness.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
        assert float(fused.state[mine]["step"]) == float(witness.state[other]["step"])


def test_parameters_joining_a_group() -> None:
    ours = parameters()
    fused = FusedAdam(ours[:2])
    set_gradients(ours, 0)
    fused.step()
    before = ours[3].detach().clone()
    fused.param_groups[0]["params"] += ours[2:]
    set_gradients(ours, 1)
    fused.step()
    assert not torch.equal(ours[3], before)
    assert [float(fused.state[p]["step"]) for p in ours] == [2, 2, 1, 1]


@pytest.mark.parametrize("forget", [lambda o: o.state.clear(), lambda o: [s.clear() for s in o.state.values()]])
def test_cleared_state_starts_again(forget: Callable[[FusedAdam], object]) -> None:
    ours, fresh = parameters(), parameters()
    fused = FusedAdam(ours)
    set_gradients(ours, 0)
    fused.step()
    forget(fused)
    for mine, new in zip(ours, fresh, strict=True):
        new.data.copy_(mine)
    again = FusedAdam(fresh)
    set_gradients(ours, 1)
    set_gradients(fresh, 1)
    fused.step()
    again.step()
    assert all(torch.equal(mine, new) for mine, new in zip(ours, fresh, strict=True))


def test_a_cast_in_place_and_back() -> None:
    ours = parameters()
    fused = FusedAdam(ours, lr=0.1)
    set_gradients(ours, 0)
    fused.step()
    masters = MasterWeights()
    for param in ours:
        param.grad = None
        master: Tensor = param.data
        param.data = master.bfloat16()
        masters.put(param, master)
    set_gradients(ours, 1)
    with fused.handed(StepInputs(masters)):
        fused.step()
    assert all(torch.equal(param, masters.of(param).bfloat16()) for param in ours)
    before = [param.detach().clone() for param in ours]
    masters.clear()  # from here on the half values are all there is
    set_gradients(ours, 2)
    with fused.handed(StepInputs(masters)):
        fused.step()
    assert all(not torch.equal(param, old) for param, old in zip(ours, before, strict=True))
    assert all(torch.equal(param, masters.of(param).bfloat16()) for param in ours)
    assert all(state["exp_avg"].dtype is torch.float32 for state in fused.state.values())


def test_a_gradient_that_turns_sparse_is_refused_before_another_group_is_updated() -> None:
    params = parameters()
    fused = FusedAdam([{"params": params[1:]}, {"params": params[:1]}])
    set_gradients(params, 0)
    fused.step()
    before = [param.detach().clone() for param in params]
    params[0].grad = torch.eye(3, 4).to_sparse()
    with pytest.raises(RuntimeError, match="FusedAdam does not support sparse gradients"):
        fused.step()
    for param, value in zip(params, before, strict=True):
        assert torch.equal(param, value)


def test_a_subclass_has_the_gradient_it_says() -> None:
    class Doubled(nn.Parameter):
        @property
        def grad(self) -> Tensor | None:  # type: ignore[override]
            return torch.full_like(self.detach(), 2.0)

    param = Doubled(torch.zeros(3))
    FusedAdam([param], lr=1.0, betas=(0.0, 0.0)).step()
    torch.testing.assert_close(param.detach(), -torch.ones(3))
