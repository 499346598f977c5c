"""convert_syncbn_model and its way back: the same modules, parameters and buffers, and nothing left behind."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import lightning_apex
from lightning_apex import FusedSGD, SyncBatchNorm, convert_syncbn_model, revert_syncbn_model
from lightning_apex.casting import has_running_statistics

KINDS = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm]


class Doubling(nn.BatchNorm2d):
    """A subclass with an attribute, an argument and a forward of its own."""

    def __init__(self, features, factor=2.0):
        super().__init__(features)
        self.factor = factor

    def forward(self, input):
        return super().forward(input) * self.factor


class Named(nn.BatchNorm2d):
    pass


class Functional(nn.BatchNorm2d):
    def forward(self, input):
        return torch.relu(nn.functional.batch_norm(input, self.running_mean, self.running_var))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4, eps=1e-3, momentum=None)
        self.again = self.norm
        self.inner = nn.ModuleDict({"a": Doubling(4), "b": nn.Sequential(nn.BatchNorm2d(4, affine=False), nn.ReLU())})
        self.instance = nn.InstanceNorm2d(4, track_running_stats=True)
        self.untracked = nn.BatchNorm2d(4, track_running_stats=False)
        self.untracked.eval()

    def forward(self, x):
        x = self.again(self.norm(self.conv(x)))
        return self.untracked(self.instance(self.inner["b"](self.inner["a"](x))))


def identity(model):
    """What must not change: modules, tensors, flags and classes, by name."""
    modules = {n: (id(m), m.training) for n, m in model.named_modules(remove_duplicate=False)}
    tensors = {n: (id(t), t.requires_grad, t.dtype) for n, t in model.state_dict(keep_vars=True).items()}
    return modules, tensors


def everything(model):
    return {
        name: (type(module), {k: v for k, v in module.__dict__.items() if not k.startswith("_")}, set(module.__dict__))
        for name, module in model.named_modules(remove_duplicate=False)
    }


def test_everything_keeps_its_identity_and_comes_back():
    model = Net()
    model.norm.weight.requires_grad_(False)
    model.inner["a"].double()
    before, all_of_it, keys = identity(model), everything(model), list(model.state_dict())
    assert convert_syncbn_model(model) is model
    assert identity(model) == before
    assert list(model.state_dict()) == keys
    assert type(model.norm) is SyncBatchNorm and model.norm is model.again
    assert isinstance(model.inner["a"], SyncBatchNorm) and isinstance(model.inner["a"], Doubling)
    assert isinstance(model.inner["b"][0], SyncBatchNorm) and not model.inner["b"][0].affine
    assert type(model.instance) is nn.InstanceNorm2d
    assert not model.untracked.training and isinstance(model.untracked, SyncBatchNorm)
    assert (model.norm.eps, model.norm.momentum) == (1e-3, None)
    assert revert_syncbn_model(model) is model
    assert identity(model) == before
    assert everything(model) == all_of_it


def test_converting_twice_and_reverting_once_more():
    model = Net()
    before = everything(model)
    revert_syncbn_model(model)
    assert everything(model) == before
    convert_syncbn_model(convert_syncbn_model(model))
    once = everything(model)
    convert_syncbn_model(model)
    assert everything(model) == once
    revert_syncbn_model(revert_syncbn_model(model))
    assert everything(model) == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_a_batchnorm_itself(kind):
    module = kind(3)
    assert convert_syncbn_model(module) is module
    assert type(module) is SyncBatchNorm
    assert has_running_statistics(module)
    assert type(revert_syncbn_model(module)) is kind


def test_a_sync_batchnorm_of_the_users_own_stays():
    model = nn.Sequential(SyncBatchNorm(3, fuse_relu=True), nn.BatchNorm1d(3))
    convert_syncbn_model(model, channel_last=True)
    assert model[0].fuse_relu and not model[0].channel_last and model[1].channel_last
    revert_syncbn_model(model)
    assert type(model[0]) is SyncBatchNorm and type(model[1]) is nn.BatchNorm1d


def test_state_survives_both_ways():
    """Trained under SyncBatchNorm, loaded in a plain model, and back."""
    model = convert_syncbn_model(Net())
    for _ in range(3):
        model(torch.randn(2, 3, 6, 6))
    plain = Net()
    plain.load_state_dict(model.state_dict(), strict=True)
    assert plain.norm.num_batches_tracked == 6
    again = convert_syncbn_model(Net())
    again.load_state_dict(plain.state_dict(), strict=True)
    x = torch.randn(2, 3, 6, 6)
    outputs = [m.eval()(x) for m in (model, plain, again, revert_syncbn_model(model))]
    for out in outputs[1:]:
        torch.testing.assert_close(out, outputs[0])


def test_an_optimizer_made_before_trains_it():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    convert_syncbn_model(model)
    out = model(torch.randn(8, 3))
    (out * torch.randn(8, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(model[1].weight, torch.ones(4))


def test_hooks_stay():
    model, calls = Net(), []
    model.norm.register_forward_hook(lambda *_: calls.append("forward"))
    model.norm.register_full_backward_hook(lambda *_: calls.append("backward"))
    model.norm.register_state_dict_post_hook(lambda *_: calls.append("state"))
    convert_syncbn_model(model)
    model(torch.randn(2, 3, 6, 6)).sum().backward()
    model.state_dict()
    assert {"forward", "backward", "state"} <= set(calls)
    revert_syncbn_model(model)
    calls.clear()
    model(torch.randn(2, 3, 6, 6)).sum().backward()
    assert calls.count("forward") == 2


def test_a_subclass_keeps_its_forward_and_its_checks():
    model, plain = nn.Sequential(Doubling(3, 3.0), Named(3)), nn.Sequential(Doubling(3, 3.0), Named(3))
    convert_syncbn_model(model)
    x = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(model(x), plain(x))
    with pytest.raises(ValueError, match="4D"):
        model[1](torch.randn(2, 3))
    assert "SyncDoubling" in repr(model)
    revert_syncbn_model(model)
    assert [type(m) for m in model] == [Doubling, Named]


def test_a_forward_that_cannot_be_reached_is_left_alone_with_a_warning():
    model = nn.Sequential(Functional(3), nn.BatchNorm2d(3))
    with pytest.warns(UserWarning, match=r"Functional is not synchronised.*super\(\)\.forward"):
        convert_syncbn_model(model)
    assert type(model[0]) is Functional and type(model[1]) is SyncBatchNorm
    patched = nn.BatchNorm2d(3)
    patched.forward = lambda x: x
    with pytest.warns(UserWarning, match="BatchNorm2d is not synchronised"):
        convert_syncbn_model(patched)
    assert type(patched) is nn.BatchNorm2d


@pytest.mark.parametrize("used", ["before", "between", "never"])
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_modules(used):
    x = torch.randn(2, 3, 4, 4)
    model = nn.Sequential(nn.LazyBatchNorm2d())
    if used == "before":
        model(x)
    convert_syncbn_model(model)
    assert isinstance(model[0], SyncBatchNorm)
    if used == "between":
        plain = nn.BatchNorm2d(3)
        torch.testing.assert_close(model(x), plain(x))
        assert type(model[0]) is SyncBatchNorm and model[0].num_features == 3
        assert set(model[0].state_dict()) == set(plain.state_dict())
    revert_syncbn_model(model)
    assert type(model[0]) is (nn.LazyBatchNorm2d if used == "never" else nn.BatchNorm2d)
    assert set(model[0].__dict__) == set((nn.LazyBatchNorm2d() if used == "never" else nn.BatchNorm2d(3)).__dict__)
    assert model(x).shape == x.shape


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_module_with_its_channels_last():
    module = convert_syncbn_model(nn.LazyBatchNorm2d(), channel_last=True)
    out = module(torch.randn(2, 5, 6, 3))
    assert module.num_features == 3 and out.shape == (2, 5, 6, 3)


def test_a_parametrized_module():
    class Positive(nn.Module):
        def forward(self, weight):
            return weight.abs()

    module = nn.BatchNorm1d(3)
    parametrize.register_parametrization(module, "weight", Positive())
    before, kind = set(module.state_dict()), type(module)
    x = torch.randn(4, 3)
    expected = module(x)
    convert_syncbn_model(module)
    assert isinstance(module, SyncBatchNorm) and set(module.state_dict()) == before
    torch.testing.assert_close(module(x), expected)
    assert type(revert_syncbn_model(module)) is kind
    convert_syncbn_model(plain := nn.BatchNorm1d(3))
    parametrize.register_parametrization(plain, "weight", Positive())
    with pytest.warns(UserWarning, match="parametrization"):
        revert_syncbn_model(plain)
    parametrize.remove_parametrizations(plain, "weight")
    assert type(revert_syncbn_model(plain)) is nn.BatchNorm1d


@pytest.mark.parametrize("how", ["pickle", "deepcopy", "torch.save"])
def test_copies_of_a_converted_model(how):
    model = convert_syncbn_model(Net())
    model(torch.randn(2, 3, 6, 6))
    if how == "torch.save":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    else:
        twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert twin.norm is twin.again and twin.norm is not model.norm
    assert type(twin.inner["a"]) is type(model.inner["a"])
    x = torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(twin.eval()(x), model.eval()(x))
    assert everything(revert_syncbn_model(twin)) == everything(revert_syncbn_model(model))


def test_a_process_group_is_shared_by_a_copy_and_not_pickled():
    class Group:
        def __deepcopy__(self, memo):
            raise AssertionError("copied")

    group = Group()
    model = convert_syncbn_model(Net(), process_group=group)
    assert model.norm.process_group is group
    assert copy.deepcopy(model).norm.process_group is group
    for module in (model.norm, model.inner["a"]):
        with pytest.raises(TypeError, match=r"process group.*state_dict"):
            pickle.dumps(module)


def test_torchs_group_is_kept_unless_another_is_given():
    theirs, ours = object(), object()
    module = nn.SyncBatchNorm(3, process_group=theirs)
    assert convert_syncbn_model(module).process_group is theirs
    revert_syncbn_model(module)
    assert type(module) is nn.SyncBatchNorm and module.process_group is theirs
    assert convert_syncbn_model(module, ours).process_group is ours
    assert revert_syncbn_model(module).process_group is theirs


def test_attributes_of_the_same_name_come_back():
    module = nn.BatchNorm2d(3)
    module.channel_last = "mine"
    convert_syncbn_model(module)
    assert module.channel_last is False
    assert revert_syncbn_model(module).channel_last == "mine"


def test_without_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        revert_syncbn_model(convert_syncbn_model(Net()))


def test_what_belongs_together_is_imported_from_one_place():
    for name in ("SyncBatchNorm", "convert_syncbn_model", "create_syncbn_process_group", "revert_syncbn_model"):
        assert getattr(lightning_apex, name) is getattr(lightning_apex.parallel, name)
        assert name in lightning_apex.__all__
