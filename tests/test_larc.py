"""LARC against its formula, around fused and torch's optimizers."""

import pytest
import torch
from cases import BF16, F16, F64, same_bits
from larc_support import INNER, fill, inner, make_params
from torch import nn

from lightning_apex import LARC, FusedSGD


def scaled(p, g, lr, decay, trust, clip, eps=1e-8):
    """The gradient that the wrapped optimizer should get, in float64."""
    p, g = p.double(), g.double()
    ratio = 1.0
    if p.norm() > 0 and g.norm() > 0:
        ratio = trust * p.norm() / (g.norm() + decay * p.norm() + eps)
        if clip:
            ratio = min(ratio / lr, 1.0)
    return ratio * (g + decay * p)


@inner
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("trust", [0.02, 5.0])
@pytest.mark.parametrize("maximize", [False, True])
def test_equals_the_wrapped_optimizer_on_scaled_gradients(inner, clip, trust, maximize):
    params, twins = make_params(), make_params(F64)
    a = LARC(INNER[inner](params, maximize=maximize), trust_coefficient=trust, clip=clip)
    b = INNER[inner](twins, weight_decay=0.0, maximize=maximize)
    lr = b.param_groups[0]["lr"]
    for step in range(4):
        fill(step, params)
        for p, q in zip(params, twins, strict=True):
            sign = -1 if maximize else 1  # the decay shrinks whichever way the optimizer goes
            q.grad = sign * scaled(q, sign * p.grad, lr, 0.1, trust, clip)
        a.step()
        b.step()
        for p, q in zip(params, twins, strict=True):
            torch.testing.assert_close(p.double(), q, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [F16, BF16, F64])
def test_other_dtypes(dtype):
    params, twins = make_params(dtype), make_params(F64)
    for p, q in zip(params, twins, strict=True):
        q.data.copy_(p)
    a, b = LARC(FusedSGD(params, lr=0.1, weight_decay=0.1)), torch.optim.SGD(twins, lr=0.1)
    fill(0, params)
    for p, q in zip(params, twins, strict=True):
        q.grad = scaled(p, p.grad, 0.1, 0.1, 0.02, True)
    a.step()
    b.step()
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(
            p.double(), q, rtol={F64: 1e-12}.get(dtype, 1e-2), atol=1e-4 if dtype is not F64 else 1e-12
        )


@inner
class TestWhatStaysAsItWas:
    def test_gradients_and_weight_decay(self, inner):
        params = make_params()
        optimizer = LARC(INNER[inner]([{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.3}]))
        fill(0, params)
        grads = [(p.grad, p.grad.clone()) for p in params]
        optimizer.step()
        assert all(p.grad is g and same_bits(g, v) for p, (g, v) in zip(params, grads, strict=True))
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.3]

    @pytest.mark.parametrize("where", ["before", "in", "closure", "sparse"])
    def test_also_when_something_raises(self, inner, where):
        params = make_params()
        optimizer = LARC(INNER[inner](params))
        fill(0, params)
        if where == "sparse":
            params[3].grad = torch.eye(3, 5).to_sparse()
        grads = [p.grad for p in params]

        def fail(*_):
            raise KeyError("broken")

        if where == "before":
            optimizer.optim.register_step_pre_hook(fail)
        elif where == "in":
            optimizer.optim.register_step_post_hook(fail)
        with pytest.raises(RuntimeError if where == "sparse" else KeyError, match=r"broken|sparse=False"):
            optimizer.step(fail if where == "closure" else None)
        assert all(p.grad is g for p, g in zip(params, grads, strict=True))
        assert optimizer.param_groups[0]["weight_decay"] == 0.1

    def test_missing_gradients(self, inner):
        params = make_params()
        before = [p.detach().clone() for p in params]
        optimizer = LARC(INNER[inner](params))
        assert optimizer.step() is None
        assert all(map(same_bits, params, before))
        fill(0, params)
        params[3].grad = None
        optimizer.step()
        assert params[3].grad is None and same_bits(params[3], before[3]) and not same_bits(params[0], before[0])


class TestZeroNorms:
    @pytest.mark.parametrize("clip", [True, False])
    def test_the_decay_is_kept_where_the_gradient_is_zero(self, clip):
        param = nn.Parameter(torch.full((4,), 2.0))
        optimizer = LARC(torch.optim.SGD([param], lr=0.1, weight_decay=0.5), clip=clip)
        param.grad = torch.zeros(4)
        optimizer.step()
        torch.testing.assert_close(param.detach(), torch.full((4,), 2.0 - 0.1 * 0.5 * 2.0))

    def test_a_parameter_of_zeros_learns(self):
        param = nn.Parameter(torch.zeros(4))
        optimizer = LARC(torch.optim.SGD([param], lr=0.1, weight_decay=0.5))
        param.grad = torch.ones(4)
        optimizer.step()
        torch.testing.assert_close(param.detach(), torch.full((4,), -0.1))

    @pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)])
    def test_a_learning_rate_of_zero(self, lr):
        params = make_params()
        before = [p.detach().clone() for p in params]
        optimizer = LARC(FusedSGD(params, lr=lr))
        fill(0, params)
        optimizer.step()
        assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))


def test_a_tensor_learning_rate():
    a, b = make_params(), make_params()
    first, second = LARC(FusedSGD(a, lr=torch.tensor(0.01))), LARC(FusedSGD(b, lr=0.01))
    fill(0, a, b)
    first.step()
    second.step()
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"trust_coefficient": 0}, ValueError, "trust_coefficient=0"),
        ({"trust_coefficient": -1.0}, ValueError, r"trust_coefficient=-1\.0"),
        ({"eps": -1e-8}, ValueError, "eps=-1e-08"),
        ({"optimizer": [nn.Parameter(torch.ones(1))]}, TypeError, "wraps an optimizer.*list"),
    ],
)
def test_bad_arguments(arguments, error, match):
    with pytest.raises(error, match=match):
        LARC(**{"optimizer": torch.optim.SGD(make_params(), lr=0.1), **arguments})
