"""A cast module undone exactly, copied with weights of its own, and seen in fp32 by code that averages."""

import copy
import io
import pickle

import pytest
import torch
from cases import same_bits
from cast_net import BF16, F16, Net, assert_same, cast, tensors, values


@pytest.fixture
def net() -> Net:
    return Net()


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
