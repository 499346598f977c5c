"""Arguments that cannot work are refused when they are given, with their name and value."""

import re

import pytest
import torch
from optimizer_support import KINDS, make_params, takes
from torch import nn

from lightning_apex import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedLARS,
    FusedLion,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)

NAN, INF = float("nan"), float("inf")
NUMBERS = {
    FusedAdam: {
        "lr": (-1e-3, NAN, INF, "x", None),
        "eps": (-1e-8, NAN, INF, "x", None),
        "weight_decay": (-0.1, NAN, INF, "x", None),
    },
    FusedSGD: {
        "lr": (-1e-3, NAN, INF, "x", None, True),
        "momentum": (-0.1, NAN, INF, "x", None),
        "weight_decay": (-0.1, NAN, INF, "x", None),
        "dampening": (NAN, INF, -INF, "x", None),
    },
}
BAD = [(kind, name, value) for kind, table in NUMBERS.items() for name, values in table.items() for value in values]
BAD += [
    (kind, name, value)
    for kind in KINDS
    for name in takes(kind, lr=0, eps=0, weight_decay=0, trust_coefficient=0, initial_accumulator_value=0, momentum=0)
    if name not in NUMBERS.get(kind, {})
    for value in (-1e-3, NAN, INF, "x", None)
]
BAD += [(kind, "max_grad_norm", value) for kind in (FusedLAMB, FusedMixedPrecisionLamb) for value in (-1.0, NAN, "x")]
BAD += [(FusedNovoGrad, "norm_type", value) for value in (1, 3.0, "inf", None)]
BAD += [(FusedNovoGrad, "amsgrad", True), (FusedLAMB, "amsgrad", True), (FusedAdagrad, "lr_decay", 0.1)]
BAD += [(kind, "betas", value) for kind in (FusedLAMB, FusedNovoGrad, FusedLion) for value in (0.9, (0.9, 1.0, 1.0))]
BAD += [(FusedAdam, "betas", value) for value in (0.9, (0.9,), (0.9, 0.99, 0.999), None, "ab")]
BAD += [
    (kind, "state_dtype", value) for kind in KINDS for value in (torch.float16, torch.float64, "bfloat16", torch.int8)
]


@pytest.mark.parametrize(("kind", "name", "value"), BAD)
class TestBadValues:
    def test_in_the_constructor(self, kind, name, value):
        with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}")):
            kind(make_params(), **{name: value})

    def test_in_a_group(self, kind, name, value):
        with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}")):
            kind([{"params": make_params(), name: value}])

    def test_in_add_param_group(self, kind, name, value):
        optimizer = kind(make_params())
        with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}")):
            optimizer.add_param_group({"params": make_params(), name: value})
        assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("betas", "shown"),
    [
        ((1.0, 0.9), "betas[0]=1.0"),
        ((0.9, 1.0), "betas[1]=1.0"),
        ((-0.1, 0.9), "betas[0]=-0.1"),
        ((0.9, NAN), "betas[1]=nan"),
    ],
)
def test_a_bad_beta_is_named_by_its_place(betas, shown):
    with pytest.raises(ValueError, match=re.escape(shown)):
        FusedAdam(make_params(), betas=betas)


@pytest.mark.parametrize("kind", [FusedSGD, FusedLARS])
@pytest.mark.parametrize(("momentum", "dampening"), [(0.0, 0.0), (0.9, 0.1)])
def test_nesterov_needs_momentum_and_no_dampening(kind, momentum, dampening):
    with pytest.raises(ValueError, match=rf"nesterov=True with momentum={momentum} and dampening={dampening}"):
        kind(make_params(), momentum=momentum, dampening=dampening, nesterov=True)


@pytest.mark.parametrize("kind", KINDS)
class TestLearningRates:
    @pytest.mark.parametrize(
        "value", [0, 0.0, 1, 1e-3, torch.tensor(0.1), torch.tensor([0.1]), torch.tensor(0.1, dtype=torch.float64)]
    )
    def test_good_ones(self, kind, value):
        kind(make_params(), lr=value)

    def test_numpy_numbers(self, kind):
        np = pytest.importorskip("numpy")
        for number in (np.float32(0.1), np.float64(0.1)):
            kind(make_params(), lr=number, weight_decay=number)

    def test_a_tensor_of_several_elements(self, kind):
        with pytest.raises(ValueError, match=r"lr=.*2 elements"):
            kind(make_params(), lr=torch.tensor([0.1, 0.2]))

    @pytest.mark.parametrize("value", [NAN, INF, -1.0])
    def test_a_tensor_is_looked_into(self, kind, value):
        with pytest.raises(ValueError, match="lr="):
            kind(make_params(), lr=torch.tensor(value))


@pytest.mark.parametrize("kind", KINDS)
class TestParameters:
    def test_none_at_all(self, kind):
        with pytest.raises(ValueError, match="empty parameter list"):
            kind([])

    def test_in_two_groups(self, kind):
        params = make_params()
        with pytest.raises(ValueError, match="more than one parameter group"):
            kind([{"params": params}, {"params": params[:1]}])
        optimizer = kind(params)
        with pytest.raises(ValueError, match="more than one parameter group"):
            optimizer.add_param_group({"params": params[0]})

    @pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool])
    def test_of_a_type_that_has_no_kernel(self, kind, dtype):
        with pytest.raises((ValueError, TypeError), match=str(dtype)):
            kind([nn.Parameter(torch.ones(2).to(dtype), requires_grad=False)])

    def test_on_meta(self, kind):
        """An optimizer may be built before its model has values, but not step."""
        param = nn.Parameter(torch.ones(2, device="meta"))
        optimizer = kind([param])
        param.grad = torch.ones_like(param)
        with pytest.raises(RuntimeError, match=f"{kind.__name__}.*meta device.*to_empty"):
            optimizer.step()

    def test_that_are_no_tensors(self, kind):
        with pytest.raises(TypeError):
            kind([1.0])

    def test_that_are_no_leaves(self, kind):
        with pytest.raises(ValueError, match="non-leaf"):
            kind([torch.ones(2, requires_grad=True) * 2])
