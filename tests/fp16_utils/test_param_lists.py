"""The manual loop of masters: against the same loop written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_apex.fp16_utils import (
    master_params_to_model_params,
    model_grads_to_master_grads,
    prep_param_lists,
    to_python_float,
)

HALVES = [torch.float16, torch.bfloat16]


def model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)
    net[0].bias.requires_grad_(False)
    return net


def batch(i: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(i)
    return torch.randn(6, 4, generator=generator), torch.randn(6, 2, generator=generator)


def loss_of(net: nn.Module, i: int, dtype: torch.dtype) -> Tensor:
    x, y = batch(i)
    return (net(x.to(dtype)).float() - y).square().mean()


def by_hand(dtype: torch.dtype, steps: int, lr: float) -> list[Tensor]:
    """SGD on fp32 values, at the gradients of the rounded ones."""
    net = model(dtype)
    trained = [p for p in net.parameters() if p.requires_grad]
    masters = [p.detach().float() for p in trained]
    for i in range(steps):
        grads = torch.autograd.grad(loss_of(net, i, dtype), trained)
        for param, master, grad in zip(trained, masters, grads, strict=True):
            master -= lr * grad.float()
            param.data = master.to(dtype)
    return masters


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_the_loop_equals_the_same_by_hand(dtype: torch.dtype, flat: bool) -> None:
    net = model(dtype)
    params, masters = prep_param_lists(net, flat_master=flat)
    assert params == [p for p in net.parameters() if p.requires_grad] and len(masters) == (1 if flat else 3)
    assert all(m.dtype is torch.float32 and m.requires_grad and m.is_leaf for m in masters)
    optimizer = torch.optim.SGD(masters, lr=1e-3)
    for i in range(5):
        net.zero_grad()
        loss_of(net, i, dtype).backward()
        model_grads_to_master_grads(params, masters, flat_master=flat)
        optimizer.step()
        master_params_to_model_params(params, masters, flat_master=flat)
    expected = by_hand(dtype, 5, 1e-3)
    found = masters[0].split([p.numel() for p in params]) if flat else masters
    for master, want, param in zip(found, expected, params, strict=True):
        torch.testing.assert_close(master.view_as(want).detach(), want)
        assert torch.equal(param.detach(), master.detach().view_as(param).to(dtype))
    assert not torch.equal(expected[0], expected[0].to(dtype).float())  # there was something for masters to keep


def test_masters_of_an_fp32_parameter_are_copies() -> None:
    net = nn.Linear(2, 2)
    _, masters = prep_param_lists(net)
    with torch.no_grad():
        masters[0].zero_()
    assert net.weight.abs().sum() > 0


@pytest.mark.parametrize("flat", [False, True])
def test_a_missing_gradient_is_none_or_zero(flat: bool) -> None:
    net = model(torch.float16)
    params, masters = prep_param_lists(net, flat)
    for param in params:
        param.grad = torch.ones_like(param)
    model_grads_to_master_grads(params, masters, flat)
    params[0].grad = None
    model_grads_to_master_grads(params, masters, flat)
    if flat:
        assert masters[0].grad.tolist() == [0.0] * 32 + [1.0] * 18
    else:
        assert masters[0].grad is None and masters[1].grad.sum() == 16


def test_a_flat_master_may_come_from_parameters_of_several_dtypes() -> None:
    net = nn.Sequential(nn.Linear(2, 2).half(), nn.Linear(2, 2))
    params, (flat,) = prep_param_lists(net, flat_master=True)
    assert flat.dtype is torch.float32 and flat.numel() == 12
    with torch.no_grad():
        flat.fill_(0.5)
    master_params_to_model_params(params, [flat], flat_master=True)
    assert all((p == 0.5).all() for p in net.parameters()) and net[0].weight.dtype is torch.float16


def test_wrong_lists_are_named() -> None:
    params, masters = prep_param_lists(model(torch.float16))
    for wrong, flat in ((masters[:-1], False), (masters, True), (masters[::-1], False)):
        with pytest.raises(ValueError, match=r"master_params.*prep_param_lists"):
            model_grads_to_master_grads(params, wrong, flat)
        with pytest.raises(ValueError, match=r"master_params.*prep_param_lists"):
            master_params_to_model_params(params, wrong, flat)
    with pytest.raises(ValueError, match="requires_grad"):
        prep_param_lists(nn.Linear(1, 1).requires_grad_(False))


def test_to_python_float() -> None:
    assert to_python_float(torch.tensor([1.5])) == 1.5 and to_python_float([2]) == 2.0
