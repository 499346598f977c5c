"""Which tensors of which modules are cast, and which models are refused."""

import pytest
import torch
from torch import nn

from lightning_apex.casting import (
    castable_tensors,
    check_castable,
    has_running_statistics,
    kept_modules,
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

    @pytest.mark.parametrize(
        ("bad", "shown"), [("encoder.norm", "encoder.norm"), (nn.Conv2d, "Conv2d"), ("Encoder*", "Encoder*")]
    )
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
        assert names_of(nn.BatchNorm1d(2), keep_batchnorm=False) == {
            ".weight",
            ".bias",
            ".running_mean",
            ".running_var",
        }
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
