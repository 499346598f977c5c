"""A cast module: cast in place, and fp32 to checkpoints bit for bit."""

import copy

import pytest
import torch
from cases import same_bits
from cast_net import BF16, CAST, CAST_BUFFERS, F16, Net, assert_same, cast, tensors, values
from torch import nn


@pytest.fixture
def net() -> Net:
    return Net()


class TestCasting:
    @pytest.mark.parametrize("dtype", [F16, BF16])
    def test_what_is_cast(self, net, dtype):
        before = values(net)
        cast(net, dtype)
        for name, tensor in tensors(net).items():
            expected = before[name].to(dtype) if name in CAST | CAST_BUFFERS else before[name]
            assert same_bits(tensor.detach(), expected), name

    def test_batchnorm_is_cast_where_asked(self, net):
        cast(net, keep_batchnorm=False)
        assert {t.dtype for t in net.body[1].state_dict(keep_vars=True).values()} >= {torch.float32, torch.int64}
        assert net.body[1].weight.dtype is net.body[1].running_var.dtype is BF16
        assert net.loss.weight.dtype is torch.float32

    def test_kept_modules_stay_with_their_buffers(self, net):
        cast(net, keep=["body.*"])
        assert net.body[0].weight.dtype is net.body[2].weight.dtype is torch.float32
        assert net.head.bias.dtype is BF16

    def test_in_place(self, net):
        before = tensors(net)
        pointers = {name: t.data_ptr() for name, t in before.items()}
        cast_module = cast(net)
        after = tensors(net)
        for name, tensor in before.items():
            assert after[name] is tensor, f"{name} is another object"
            if name in CAST | CAST_BUFFERS:
                assert cast_module.masters.of(tensor).data_ptr() == pointers[name], f"{name}: the fp32 storage lives on"
                assert tensor.data_ptr() != pointers[name]

    def test_tied_weights_have_one_master(self, net):
        cast_module = cast(net)
        assert net.head.weight is net.embedding.weight
        assert len(cast_module.masters) == len(cast_module.halves()) == len(CAST | CAST_BUFFERS) - 1

    def test_gradients_accumulate_in_the_half_type(self, net):
        cast(net)
        net.body[0](torch.ones(2, 3, dtype=BF16)).sum().backward()
        assert net.body[0].weight.grad.dtype is BF16

    def test_a_gradient_that_is_there_follows(self, net):
        net.scalar.grad = torch.tensor(0.5)
        cast_module = cast(net)
        assert net.scalar.grad.dtype is BF16
        cast_module.restore()
        assert net.scalar.grad.dtype is torch.float32 and net.scalar.grad == 0.5

    def test_requires_grad_stays(self, net):
        net.head.requires_grad_(False)
        flags = {n: p.requires_grad for n, p in net.named_parameters()}
        cast_module = cast(net)
        assert flags == {n: p.requires_grad for n, p in net.named_parameters()}
        cast_module.restore()
        assert flags == {n: p.requires_grad for n, p in net.named_parameters()}


class TestStateDict:
    @pytest.mark.parametrize("dtype", [F16, BF16])
    def test_is_what_it_was_before_the_cast_bit_for_bit(self, net, dtype):
        before = copy.deepcopy(net.state_dict())
        cast(net, dtype)
        assert_same(net.state_dict(), before)

    def test_of_submodules_and_with_a_prefix(self, net):
        before = copy.deepcopy(net.body.state_dict(prefix="x.")), copy.deepcopy(net.head.state_dict())
        cast(net)
        assert_same(net.body.state_dict(prefix="x."), before[0])
        assert_same(net.head.state_dict(), before[1])

    def test_inside_a_wrapper(self, net):
        wrapped = nn.ModuleDict({"model": net})
        before = copy.deepcopy(wrapped.state_dict())
        cast(net)
        assert_same(wrapped.state_dict(), before)

    def test_after_a_hand_edit_it_holds_the_edit(self, net):
        cast(net)
        expected = copy.deepcopy(net.state_dict())
        net.body[0].weight.data[0] = 0.5
        expected["body.0.weight"][0] = 0.5
        assert_same(net.state_dict(), expected)

    def test_load_reaches_the_masters_bit_for_bit(self, net):
        other = Net()
        cast_module = cast(net)
        net.load_state_dict(other.state_dict())
        assert_same(net.state_dict(), other.state_dict())
        for name, tensor in tensors(net).items():
            if name in CAST:
                assert same_bits(tensor.detach(), tensors(other)[name].detach().to(BF16)), name
        cast_module.restore()
        assert_same(net.state_dict(), other.state_dict())

    def test_load_from_another_half_module_and_from_half_values(self, net):
        other = Net()
        expected = copy.deepcopy(other.state_dict())
        cast(other, F16)
        cast(net, BF16)
        net.load_state_dict(other.state_dict())
        assert_same(net.state_dict(), expected)
        halved = {n: v.to(F16) if v.dtype is torch.float32 else v for n, v in expected.items()}
        net.load_state_dict(halved)
        assert same_bits(net.state_dict()["table"], halved["table"].float())

    def test_load_into_a_submodule(self, net):
        other = Net()
        cast(net)
        net.body.load_state_dict(other.body.state_dict())
        assert_same(net.body.state_dict(), other.body.state_dict())

    def test_partial_load(self, net):
        expected = copy.deepcopy(net.state_dict())
        cast(net)
        value = torch.rand(4) + 1e-5
        result = net.load_state_dict({"table": value, "unknown": value}, strict=False)
        assert result.unexpected_keys == ["unknown"] and "head.bias" in result.missing_keys
        expected["table"] = value
        assert_same(net.state_dict(), expected)

    def test_strict_errors_are_torchs(self, net):
        cast(net)
        with pytest.raises(RuntimeError, match=r"Missing key.*head\.bias"):
            net.load_state_dict({"table": torch.rand(4)})

    def test_a_shape_that_does_not_fit_changes_nothing(self, net):
        expected = copy.deepcopy(net.state_dict())
        cast(net)
        with pytest.raises(RuntimeError, match="size mismatch for table"):
            net.load_state_dict({"table": torch.rand(5)}, strict=False)
        assert_same(net.state_dict(), expected)

    def test_one_element_into_a_scalar(self, net):
        cast(net)
        net.load_state_dict({"scalar": torch.tensor([1.00001])}, strict=False)
        assert same_bits(net.state_dict()["scalar"], torch.tensor(1.00001))

    def test_assign(self, net):
        other = Net()
        cast_module = cast(net)
        net.load_state_dict(other.state_dict(), assign=True)
        assert_same(net.state_dict(), other.state_dict())
        cast_module.restore()
        assert_same(net.state_dict(), other.state_dict())

    def test_a_restore_of_an_earlier_copy_as_lr_find_does_it(self, net):
        cast_module = cast(net)
        checkpoint = copy.deepcopy(net.state_dict())
        for half in cast_module.halves():
            cast_module.masters.of(half).add_(0.1)
        cast_module.masters.write(cast_module.halves())
        assert not torch.equal(net.state_dict()["table"], checkpoint["table"])
        net.load_state_dict(checkpoint)
        assert_same(net.state_dict(), checkpoint)

    def test_without_masters_it_is_still_fp32(self, net):
        before = copy.deepcopy(net.state_dict())
        cast_module = cast(net)
        cast_module.drop_masters()
        after = net.state_dict()
        for name, value in before.items():
            rounded = value.to(BF16).float() if tensors(net)[name].dtype is BF16 else value
            assert same_bits(after[name], rounded), name
        other = Net()
        net.load_state_dict(other.state_dict())
        assert same_bits(net.state_dict()["table"], other.table.to(BF16).float())
