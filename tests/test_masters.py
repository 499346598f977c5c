"""The fp32 masters of half tensors: what they are, when they give way to the model, and how optimizers get at them."""

import pytest
import torch
from cases import same_bits
from torch import nn

from lightning_apex.masters import MasterWeights

HALVES = [torch.float16, torch.bfloat16]


def half_param(value: torch.Tensor, dtype: torch.dtype) -> tuple[MasterWeights, nn.Parameter]:
    """A half parameter with a master, from its fp32 value."""
    masters = MasterWeights()
    param = nn.Parameter(value.to(dtype))
    masters.put(param, value.clone())
    return masters, param


def fp32(n: int = 64) -> torch.Tensor:
    """Values that no half type holds."""
    return torch.linspace(-3, 3, n) + 1e-5


@pytest.mark.parametrize("dtype", HALVES)
class TestReconcile:
    def test_a_master_that_rounds_to_its_parameter_stays(self, dtype):
        masters, param = half_param(fp32(), dtype)
        assert same_bits(masters.get(param), fp32())

    def test_where_someone_wrote_the_models_value_counts(self, dtype):
        masters, param = half_param(fp32(), dtype)
        param.data[3] = 1.5
        expected = fp32()
        expected[3] = 1.5
        assert same_bits(masters.get(param), expected)
        assert masters.of(param) is masters.get(param)

    def test_one_ulp_of_the_half_type_is_a_difference(self, dtype):
        masters, param = half_param(torch.ones(2), dtype)
        param.data[0] += torch.finfo(dtype).eps
        assert masters.get(param).tolist() == [1 + torch.finfo(dtype).eps, 1.0]

    def test_special_values(self, dtype):
        value = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 0.0, 1e30, 1e-40])
        masters, param = half_param(value, dtype)
        master = masters.get(param)
        assert master[:2].tolist() == [torch.inf, -torch.inf]
        assert master[2].isnan()
        assert same_bits(master[3:], value[3:]), "what rounds to inf or to 0 is no difference"

    def test_nan_written_to_the_model_reaches_the_master(self, dtype):
        masters, param = half_param(fp32(), dtype)
        param.data[0] = torch.nan
        assert masters.get(param)[0].isnan()

    def test_of_does_not_reconcile(self, dtype):
        masters, param = half_param(fp32(), dtype)
        param.data.fill_(1)
        assert same_bits(masters.of(param), fp32())


class TestBookkeeping:
    def test_a_master_is_made_on_demand_from_the_half_value(self):
        masters = MasterWeights()
        param = nn.Parameter(fp32().bfloat16())
        assert masters.get(param) is None
        assert param not in masters and len(masters) == 0
        master = masters.of(param)
        assert same_bits(master, param.detach().float()) and not master.requires_grad
        assert masters.of(param) is master and param in masters and len(masters) == 1

    def test_equal_tensors_are_two(self):
        masters = MasterWeights()
        a, b = nn.Parameter(torch.ones(2).half()), nn.Parameter(torch.ones(2).half())
        assert masters.of(a) is not masters.of(b)

    def test_write_rounds_masters_into_parameters(self):
        masters, param = half_param(fp32(), torch.bfloat16)
        masters.of(param).mul_(2)
        masters.write([param])
        assert same_bits(param.detach(), (fp32() * 2).bfloat16())

    def test_clear(self):
        masters, param = half_param(fp32(), torch.bfloat16)
        masters.clear()
        assert param not in masters

    def test_lists_may_be_empty(self):
        MasterWeights().reconcile([])
        MasterWeights().write([])

    def test_odd_layouts(self):
        value = fp32(24).reshape(2, 3, 4)
        masters = MasterWeights()
        param = nn.Parameter(value.bfloat16().permute(2, 0, 1))
        masters.put(param, value.permute(2, 0, 1).clone())
        param.data[1, 1, 1] = 9
        expected = value.permute(2, 0, 1).clone()
        expected[1, 1, 1] = 9
        assert same_bits(masters.get(param), expected)
        masters.of(param).neg_()
        masters.write([param])
        assert same_bits(param.detach(), (-expected).bfloat16())


class TestSwappedInto:
    @staticmethod
    def build(kind=torch.optim.AdamW, **kwargs):
        value = fp32()
        masters, param = half_param(value, torch.bfloat16)
        wide = nn.Parameter(torch.ones(3))
        optimizer = kind([{"params": [param]}, {"params": [wide], "lr": 0.5}], lr=0.1, **kwargs)
        param.grad = torch.full_like(param, 0.25)
        wide.grad = torch.ones(3)
        return value, masters, param, wide, optimizer

    def test_inside_the_optimizer_sees_masters_with_fp32_gradients(self):
        value, masters, param, wide, optimizer = self.build()
        with masters.swapped_into(optimizer):
            master = optimizer.param_groups[0]["params"][0]
            assert master is masters.of(param) and master.requires_grad
            assert same_bits(master.detach(), value)
            assert same_bits(master.grad, torch.full((64,), 0.25))
            assert optimizer.param_groups[1]["params"][0] is wide, "fp32 parameters stay"

    @pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop])
    def test_steps_equal_those_on_an_fp32_model(self, kind):
        value, masters, param, wide, optimizer = self.build(kind)
        reference = [nn.Parameter(value.clone()), nn.Parameter(torch.ones(3))]
        plain = kind([{"params": [reference[0]]}, {"params": [reference[1]], "lr": 0.5}], lr=0.1)
        for step in range(4):
            param.grad = torch.full_like(param, 0.25 * (step + 1))
            reference[0].grad, reference[1].grad = param.grad.float(), torch.ones(3)
            with masters.swapped_into(optimizer):
                optimizer.step()
            plain.step()
        assert same_bits(masters.get(param), reference[0])
        assert same_bits(param.detach(), reference[0].detach().bfloat16())
        assert same_bits(wide.detach(), reference[1].detach())
        for ours, theirs in ((param, reference[0]), (wide, reference[1])):
            assert optimizer.state[ours].keys() == plain.state[theirs].keys()
            for name, expected in plain.state[theirs].items():
                assert same_bits(optimizer.state[ours][name], expected), name

    def test_everything_is_in_its_place_afterwards(self):
        _, masters, param, wide, optimizer = self.build()
        lists = [group["params"] for group in optimizer.param_groups]
        groups = list(optimizer.param_groups)
        grad = param.grad
        with masters.swapped_into(optimizer):
            optimizer.step()
        assert [group["params"] for group in optimizer.param_groups] == [[param], [wide]]
        assert all(a is b for a, b in zip(optimizer.param_groups, groups, strict=True)), "a group was replaced"
        assert all(g["params"] is kept for g, kept in zip(optimizer.param_groups, lists, strict=True))
        assert set(optimizer.state) == {param, wide}
        assert param.grad is grad and param.dtype is torch.bfloat16
        assert masters.of(param).grad is None and not masters.of(param).requires_grad

    def test_an_exception_inside(self):
        _, masters, param, wide, optimizer = self.build()
        with masters.swapped_into(optimizer):
            optimizer.step()
        with pytest.raises(ArithmeticError), masters.swapped_into(optimizer):
            optimizer.param_groups[0]["params"][0].data.add_(1)
            raise ArithmeticError
        assert [group["params"] for group in optimizer.param_groups] == [[param], [wide]]
        assert set(optimizer.state) == {param, wide}
        assert masters.of(param).grad is None
        assert same_bits(param.detach(), masters.of(param).bfloat16()), "the two must agree, whatever happened"

    def test_no_gradient_no_step(self):
        value, masters, param, _, optimizer = self.build()
        param.grad = None
        before = param.detach().clone()
        with masters.swapped_into(optimizer):
            assert masters.of(param).grad is None
            optimizer.step()
        assert same_bits(masters.of(param), value) and same_bits(param.detach(), before)
        assert param not in optimizer.state

    def test_a_frozen_parameter(self):
        value, masters, param, _, optimizer = self.build()
        param.requires_grad_(False)
        param.grad = None
        with masters.swapped_into(optimizer):
            assert not masters.of(param).requires_grad
            optimizer.step()
        assert same_bits(masters.of(param), value)

    def test_a_parameter_that_someone_wrote_starts_from_what_was_written(self):
        _, masters, param, _, optimizer = self.build(torch.optim.SGD)
        param.data.fill_(2)
        with masters.swapped_into(optimizer):
            optimizer.step()
        assert same_bits(masters.of(param), torch.full((64,), 2.0) - 0.1 * 0.25)

    def test_a_parameter_without_a_master_gets_one(self):
        _, _, param, _, optimizer = self.build(torch.optim.SGD)
        empty = MasterWeights()
        start = param.detach().float()
        with empty.swapped_into(optimizer):
            optimizer.step()
        assert same_bits(empty.of(param), start - 0.1 * 0.25)
