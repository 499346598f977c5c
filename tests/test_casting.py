"""Which modules are cast, tree casts that keep their containers, and where fp32 meets a half type in a model."""

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lightning_apex.casting import (
    cast_tree,
    castable_tensors,
    check_castable,
    has_running_statistics,
    kept_modules,
    map_tensors,
)

BF16 = torch.bfloat16


class Homemade(nn.Module):
    """A normalisation that is no class of torch's."""

    def __init__(self, statistics: bool = True) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(3) if statistics else None)
        self.register_buffer("running_var", torch.ones(3) if statistics else None)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.BatchNorm1d(3), True),
        (nn.BatchNorm2d(3), True),
        (nn.BatchNorm3d(3), True),
        (nn.BatchNorm2d(3, affine=False), True),
        (nn.BatchNorm2d(3, track_running_stats=False), True),
        (nn.SyncBatchNorm(3), True),
        (nn.LazyBatchNorm2d(), True),
        (nn.InstanceNorm2d(3, track_running_stats=True), True),
        (nn.InstanceNorm2d(3, affine=True), False),
        (Homemade(), True),
        (Homemade(statistics=False), False),
        (nn.LayerNorm(3), False),
        (nn.GroupNorm(1, 3), False),
        (nn.Linear(3, 3), False),
        (nn.Identity(), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_has_running_statistics(module, expected):
    assert has_running_statistics(module) is expected


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(2, 2)
        self.norm = nn.LayerNorm(2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([Block(), Block()])
        self.bn = nn.BatchNorm1d(2, affine=False)
        self.head = nn.Sequential(nn.Linear(2, 2), nn.GroupNorm(1, 2))
        self.loss = nn.CrossEntropyLoss(weight=torch.ones(2))


class TestKeptModules:
    def test_a_pattern_matches_whole_names(self):
        net = Net()
        assert kept_modules(net, ["encoder.*.norm"]) == [net.encoder[0].norm, net.encoder[1].norm]
        assert kept_modules(net, ["head"]) == [net.head]
        assert kept_modules(net, ["head.[01]"]) == list(net.head)

    def test_classes_include_subclasses(self):
        net = Net()
        assert kept_modules(net, [nn.GroupNorm]) == [net.head[1]]
        assert kept_modules(net, [nn.modules.batchnorm._NormBase]) == [net.bn]

    def test_only_the_outermost_module_is_returned_and_each_once(self):
        net = Net()
        assert kept_modules(net, ["head.1", "head", nn.Sequential, "head.0"]) == [net.head]

    def test_the_root_itself(self):
        net = Net()
        assert kept_modules(net, [Net]) == [net]
        assert kept_modules(net, [""]) == [net]

    def test_nothing(self):
        assert kept_modules(Net(), []) == []

    @pytest.mark.parametrize(("bad", "shown"), [("encoder.norm", "encoder.norm"), (nn.Conv2d, "Conv2d"), ("Encoder*", "Encoder*")])
    def test_an_entry_without_a_match_is_an_error(self, bad, shown):
        with pytest.raises(ValueError, match=r"keep_fp32=.* matches no module of Net.*named_modules") as caught:
            kept_modules(Net(), ["head", bad])
        assert shown in str(caught.value)

    @pytest.mark.parametrize("bad", [3, None, nn.Linear(1, 1), b"head"])
    def test_an_entry_that_is_no_pattern(self, bad):
        with pytest.raises(ValueError, match="module name patterns") as caught:
            kept_modules(Net(), [bad])
        assert repr(bad) in str(caught.value)


def names_of(root: nn.Module, keep=(), keep_batchnorm: bool = True) -> set[str]:
    paths = {module: name for name, module in root.named_modules()}
    return {f"{paths[m]}.{n}" for m, names in castable_tensors(root, keep, keep_batchnorm) for n in names}


class TestCastableTensors:
    def test_losses_and_kept_modules_with_all_they_hold_are_left_out(self):
        net = Net()
        expected = {n for n, _ in net.encoder.named_parameters("encoder")}
        assert names_of(net, [net.head]) == expected

    def test_batchnorm_is_included_where_it_is_cast(self):
        assert names_of(nn.BatchNorm1d(2), keep_batchnorm=False) == {".weight", ".bias", ".running_mean", ".running_var"}
        assert names_of(nn.BatchNorm1d(2)) == set()

    def test_only_fp32_tensors_are_cast(self):
        module = nn.Module()
        for i, dtype in enumerate((torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64)):
            module.register_buffer(f"b{i}", torch.ones(2).to(dtype))
        assert names_of(module) == {".b0"}

    def test_a_tensor_that_a_kept_module_holds_too_is_left_out(self):
        net = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3))
        net[1].weight = net[0].weight
        assert names_of(net) == {"0.weight", "1.weight", "1.bias"}
        assert names_of(net, [net[0]]) == {"1.bias"}


class TestCheckCastable:
    @pytest.mark.parametrize("dtype", [torch.float16, BF16])
    def test_a_half_parameter(self, dtype):
        net = Net()
        net.head[0].to(dtype)
        with pytest.raises(ValueError, match=r"'head\.0\.weight' is .* already") as caught:
            check_castable(net)
        assert str(dtype) in str(caught.value)

    def test_a_frozen_half_parameter_is_fine(self):
        net = Net()
        net.head[0].half().requires_grad_(False)
        check_castable(net)

    def test_meta(self):
        with pytest.raises(ValueError, match=r"'0\.weight' is on the meta device .*to_empty"):
            check_castable(nn.Sequential(nn.Linear(2, 2, device="meta")))

    def test_lazy_modules_only_where_weights_are_cast(self):
        lazy = nn.Sequential(nn.LazyLinear(2))
        with pytest.raises(ValueError, match=r"'0\.weight' belongs to a lazy module .*one batch"):
            check_castable(lazy)
        check_castable(lazy, casts_weights=False)

    def test_other_dtypes_are_fine(self):
        check_castable(nn.Linear(2, 2, dtype=torch.float64))


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Batch:
    image: Any
    label: Any
    name: str = "batch"


@dataclasses.dataclass(frozen=True)
class Frozen:
    image: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    image: Any


class Tokens(dict):
    """Carries more than its items, as a tokenizer's batch does, and cannot be made from items alone."""

    def __init__(self, data: dict, encoding: str) -> None:
        super().__init__(data)
        self.encoding = encoding


class Pair(tuple):
    def __new__(cls, first: Any, second: Any) -> "Pair":
        return super().__new__(cls, (first, second))


class Opaque:
    def __init__(self) -> None:
        self.image = torch.ones(2)


def ones() -> torch.Tensor:
    return torch.ones(2)


class TestCastTree:
    @pytest.mark.parametrize("dtype", [torch.float16, BF16, torch.float64, torch.float32])
    def test_a_tensor(self, dtype):
        assert cast_tree(ones(), dtype).dtype is dtype

    def test_what_needs_no_cast_is_returned_itself(self):
        tensor = ones()
        assert cast_tree(tensor, torch.float32) is tensor

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64])
    def test_other_kinds_of_tensors_stay(self, dtype):
        tensor = torch.ones(2).to(dtype)
        assert cast_tree([tensor], BF16)[0] is tensor

    @pytest.mark.parametrize("leaf", [None, "text", 3, 2.5, True, b"raw", range(3), Opaque(), Opaque, torch.float32, object()])
    def test_what_is_no_container_stays(self, leaf):
        assert cast_tree(leaf, BF16) is leaf
        assert cast_tree((leaf,), BF16)[0] is leaf

    @pytest.mark.parametrize("kind", [list, tuple])
    def test_lists_and_tuples(self, kind):
        result = cast_tree(kind([ones(), None, kind([ones()])]), BF16)
        assert type(result) is kind and type(result[2]) is kind
        assert result[0].dtype is result[2][0].dtype is BF16
        assert result[1] is None

    @pytest.mark.parametrize("kind", [set, frozenset])
    def test_sets(self, kind):
        result = cast_tree(kind([ones()]), BF16)
        assert type(result) is kind
        assert [tensor.dtype for tensor in result] == [BF16]

    def test_a_namedtuple(self):
        result = cast_tree(Point(ones(), Point("a", [ones()])), BF16)
        assert type(result) is Point and type(result.y) is Point
        assert result.x.dtype is result.y.y[0].dtype is BF16

    def test_a_result_of_torch(self):
        result = cast_tree(torch.max(torch.ones(2, 2), dim=0), BF16)
        assert isinstance(result, torch.return_types.max)
        assert (result.values.dtype, result.indices.dtype) == (BF16, torch.int64)

    def test_a_size_stays_a_size(self):
        assert type(cast_tree(torch.Size([2, 3]), BF16)) is torch.Size

    def test_a_tuple_with_a_constructor_of_its_own_is_left_alone(self):
        pair = Pair(ones(), ones())
        assert type(cast_tree(pair, BF16)) is Pair

    @pytest.mark.parametrize("kind", [dict, collections.OrderedDict, collections.UserDict])
    def test_mappings(self, kind):
        tree = kind(b=ones(), a={"c": [ones()], "n": 3})
        result = cast_tree(tree, BF16)
        assert type(result) is kind
        assert list(result) == ["b", "a"]
        assert result["b"].dtype is result["a"]["c"][0].dtype is BF16
        assert result["a"]["n"] == 3
        assert tree["b"].dtype is tree["a"]["c"][0].dtype is torch.float32, "the batch itself was changed"

    def test_a_defaultdict_keeps_its_factory(self):
        tree = collections.defaultdict(list, a=[ones()])
        result = cast_tree(tree, BF16)
        assert type(result) is collections.defaultdict and result.default_factory is list
        assert result["a"][0].dtype is BF16
        assert tree["a"][0].dtype is torch.float32

    def test_a_dict_subclass_keeps_what_else_it_carries(self):
        tree = Tokens({"mask": ones()}, encoding="bpe")
        result = cast_tree(tree, BF16)
        assert type(result) is Tokens and result.encoding == "bpe"
        assert result["mask"].dtype is BF16 and tree["mask"].dtype is torch.float32

    def test_a_read_only_mapping_does_not_fail(self):
        tree = types.MappingProxyType({"a": ones()})
        assert set(cast_tree(tree, BF16)) == {"a"}

    def test_a_dataclass(self):
        batch = Batch(ones(), torch.arange(2), name="first")
        result = cast_tree(batch, BF16)
        assert type(result) is Batch and result is not batch
        assert (result.image.dtype, result.label.dtype, result.name) == (BF16, torch.int64, "first")
        assert batch.image.dtype is torch.float32

    @pytest.mark.parametrize("kind", [Frozen, Slotted])
    def test_a_frozen_dataclass(self, kind):
        batch = kind({"nested": ones()})
        result = cast_tree(batch, BF16)
        assert type(result) is kind
        assert result.image["nested"].dtype is BF16 and batch.image["nested"].dtype is torch.float32
        with pytest.raises(dataclasses.FrozenInstanceError):
            result.image = 1

    def test_a_dataclass_that_is_a_class_stays(self):
        assert cast_tree(Batch, BF16) is Batch

    def test_a_packed_sequence(self):
        packed = pack_sequence([torch.ones(3), torch.ones(2)])
        result = cast_tree(packed, BF16)
        assert type(result) is PackedSequence
        assert result.data.dtype is BF16
        assert result.batch_sizes.equal(packed.batch_sizes) and result.batch_sizes.dtype is torch.int64

    def test_a_cast_is_differentiable(self):
        leaf = torch.ones(2, requires_grad=True)
        cast_tree({"x": leaf}, BF16)["x"].sum().backward()
        assert leaf.grad.equal(torch.ones(2))

    def test_map_tensors_sees_every_tensor_once(self):
        seen = []
        map_tensors([ones(), {"a": (torch.arange(2), None)}], lambda t: seen.append(t.dtype) or t)
        assert seen == [torch.float32, torch.int64]
