"""Casts of nested batches: every container keeps its type, and all that is no floating-point tensor stays."""

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lightning_apex.casting import cast_tree, map_tensors

BF16 = torch.bfloat16


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

    @pytest.mark.parametrize(
        "leaf", [None, "text", 3, 2.5, True, b"raw", range(3), Opaque(), Opaque, torch.float32, object()]
    )
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
