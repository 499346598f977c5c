"""A cast module: in place, fp32 to checkpoints bit for bit, and undone exactly."""

import copy
import io
import pickle

import pytest
import torch
from cases import same_bits
from torch import nn

from lightning_apex.casting import kept_modules
from lightning_apex.masters import CastModule

F16, BF16 = torch.float16, torch.bfloat16


class Net(nn.Module):
    """Tied weights, buffers of every kind, BatchNorm, a loss with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.LayerNorm(3))
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embedding.weight
        self.loss = nn.CrossEntropyLoss(weight=torch.rand(5))
        self.register_buffer("table", torch.rand(4) + 1e-5)
        self.register_buffer("hidden", torch.rand(4) + 1e-5, persistent=False)
        self.register_buffer("index", torch.arange(4))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("wide", torch.rand(4, dtype=torch.float64))
        self.register_buffer("phase", torch.rand(4, dtype=torch.complex64))
        self.register_buffer("absent", None)
        self.scalar = nn.Parameter(torch.tensor(1.0001))
        with torch.no_grad():
            self.body[1].running_mean.uniform_()


CAST = {"embedding.weight", "body.0.weight", "body.0.bias", "body.2.weight", "body.2.bias", "scalar"}
CAST |= {"head.weight", "head.bias"}
CAST_BUFFERS = {"table", "hidden"}


def tensors(net: nn.Module) -> dict[str, torch.Tensor]:
    return dict(net.named_parameters(remove_duplicate=False)) | dict(net.named_buffers())


def values(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors(net).items()}


def cast(net: nn.Module, dtype: torch.dtype = BF16, keep=(), keep_batchnorm: bool = True) -> CastModule:
    return CastModule(net, dtype, kept_modules(net, keep), keep_batchnorm)


def assert_same(actual: dict, expected: dict) -> None:
    assert list(actual) == list(expected)
    for name in expected:
        assert same_bits(actual[name], expected[name]), name


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


class TestRestore:
    @pytest.mark.parametrize("dtype", [F16, BF16])
    def test_is_exact_and_leaves_nothing(self, net, dtype):
        before, objects = values(net), tensors(net)
        pointers = {name: t.data_ptr() for name, t in objects.items()}
        cast_module = cast(net, dtype)
        cast_module.restore()
        assert_same(values(net), before)
        assert all(tensors(net)[name] is tensor for name, tensor in objects.items())
        assert {name: t.data_ptr() for name, t in tensors(net).items()} == pointers
        for module in net.modules():
            assert not module._state_dict_hooks and not module._load_state_dict_pre_hooks
        net.body[0](torch.ones(2, 3)).sum().backward()
        assert net.body[0].weight.grad.dtype is torch.float32

    def test_twice(self, net):
        before = values(net)
        cast_module = cast(net)
        cast_module.restore()
        cast_module.restore()
        assert_same(values(net), before)

    def test_keeps_edits(self, net):
        cast_module = cast(net)
        expected = values(net)
        net.scalar.data.fill_(3)
        cast_module.restore()
        assert net.scalar == 3
        assert same_bits(net.state_dict()["wide"], expected["wide"])

    def test_without_masters(self, net):
        cast_module = cast(net)
        halves = values(net)
        cast_module.drop_masters()
        cast_module.restore()
        assert_same(values(net), {n: v.float() if v.dtype is BF16 else v for n, v in halves.items()})

    def test_cast_again_at_another_type(self, net):
        before = values(net)
        for dtype in (F16, BF16, F16):
            cast(net, dtype).restore()
        assert_same(values(net), before)


def by_pickle(net):
    return pickle.loads(pickle.dumps(net))


def by_torch_save(net):
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("twin_of", [copy.deepcopy, by_pickle, by_torch_save])
class TestCopies:
    def test_show_the_same_fp32_values(self, net, twin_of):
        before = copy.deepcopy(net.state_dict())
        cast(net)
        twin = twin_of(net)
        assert_same(twin.state_dict(), before)
        assert twin.head.weight is twin.embedding.weight

    def test_own_their_weights(self, net, twin_of):
        before = copy.deepcopy(net.state_dict())
        cast_module = cast(net)
        twin = twin_of(net)
        twin.table.fill_(1)
        twin.load_state_dict(Net().state_dict())
        assert_same(net.state_dict(), before)
        twins = copy.deepcopy(twin.state_dict())
        net.load_state_dict(Net().state_dict())
        cast_module.restore()
        assert_same(twin.state_dict(), twins)


class TestFP32View:
    def test_shows_masters(self, net):
        before = values(net)
        view = cast(net).fp32_view(net)
        for shown, (name, _) in zip(view.parameters(), net.named_parameters(), strict=True):
            assert same_bits(shown.detach(), before[name]), name
        for shown, (name, _) in zip(view.buffers(), net.named_buffers(), strict=True):
            assert same_bits(shown.detach(), before[name]), name

    def test_shows_edits(self, net):
        cast_module = cast(net)
        net.scalar.data.fill_(2)
        shown = dict(zip(net.parameters(), cast_module.fp32_view(net).parameters(), strict=True))
        assert shown[net.scalar] == 2

    def test_what_is_written_reaches_module_and_master(self, net):
        cast_module = cast(net)
        view = cast_module.fp32_view(net)
        with torch.no_grad():
            for tensor in (*view.parameters(), *view.buffers()):
                if tensor.is_floating_point():
                    tensor.fill_(1.0001)
        view.commit()
        assert net.scalar == torch.tensor(1.0001).to(BF16)
        assert net.state_dict()["table"].eq(1.0001).all() and net.hidden.dtype is BF16
        cast_module.restore()
        assert net.scalar == 1.0001 and net.hidden.eq(1.0001).all()

    def test_without_masters_it_writes_through_half(self, net):
        cast_module = cast(net)
        cast_module.drop_masters()
        view = cast_module.fp32_view(net)
        for tensor in view.parameters():
            tensor.detach().fill_(0.5)
        view.commit()
        assert net.scalar.dtype is BF16 and net.scalar == 0.5


def test_averaging_a_cast_module_gives_a_model_that_owns_its_weights():
    net = Net()
    cast_module = cast(net)
    average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    start = copy.deepcopy(average.module.state_dict())
    for _ in range(2):
        average.update_parameters(net)
    assert_same(average.module.state_dict(), start)
    net.scalar.data.fill_(4)
    average.update_parameters(net)
    assert average.module.scalar == torch.tensor((1.0 + 4) / 2).to(BF16)
    assert average.module.state_dict()["scalar"].dtype is torch.float32
    cast_module.restore()
    assert average.module.scalar.dtype is BF16
