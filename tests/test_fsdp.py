"""What FSDP2 gathers at each level, and what is refused; one process is enough to spread a model over."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torchs
from torch.distributed.tensor import DTensor

from lightning_apex import OptLevelError
from lightning_apex.engine import PrecisionEngine
from lightning_apex.fabric import ApexPrecision
from lightning_apex.levels import LEVELS, resolve
from lightning_apex.scaler import LossScaler

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(scope="module")
def mesh():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.LayerNorm(8)

    def forward(self, x):
        return self.out(self.norm(self.linear(x)))


def net():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(8, 2))


def plugin(level="O5", **kwargs):
    if level in ("O1", "O2", "O3"):
        kwargs.setdefault("half_dtype", "bfloat16")
    return ApexPrecision(level, **kwargs)


def sharded(precision, mesh, module=None):
    module = net() if module is None else module
    for child in module.children():
        precision.fully_shard(child, mesh=mesh)
    return precision.fully_shard(module, mesh=mesh)


def engine(level="O5", keep_fp32=(), **kwargs):
    row = resolve(level, **kwargs)
    return PrecisionEngine(row, LossScaler(row.loss_scale), keep_fp32)


class Seen:
    """The dtypes of the parameters that modules have while they are called."""

    def __init__(self, module):
        self.dtypes = {}
        for name, child in module.named_modules():
            if any(True for _ in child.parameters(recurse=False)):
                child.register_forward_pre_hook(self.note(name))

    def note(self, name):
        def hook(module, args):
            self.dtypes[name] = {p.dtype for p in module.parameters(recurse=False)}

        return hook


@pytest.mark.parametrize("level", [level for level in LEVELS if level != "O3"])
def test_what_is_gathered(level, mesh):
    precision = plugin(level)
    module = sharded(precision, mesh)
    assert all(isinstance(p, DTensor) and p.dtype is F32 for p in module.parameters())
    seen = Seen(module)
    work = engine(level, half_dtype=None if level == "O0" else "bfloat16")
    work.convert_sharded(module, "cpu")
    with work.forward_context():
        out = module(torch.randn(4, 8))
    out.float().square().sum().backward()
    half = BF16 if level in ("O2", "O5") else F32
    expected = {"0.linear": half, "0.norm": F32, "0.out": half, "1.linear": half, "1.norm": F32, "1.out": half}
    assert seen.dtypes == {name: {dtype} for name, dtype in (expected | {"2": half}).items()}
    assert all(p.grad.dtype is F32 for p in module.parameters())
    assert module[0].norm.running_mean.dtype is F32
    work.restore()
    assert all(len(m._forward_pre_hooks) == 1 for m in module.modules() if isinstance(m, nn.LayerNorm))  # the test's


def test_gradients_are_averaged_in_the_dtype_that_is_asked_for(mesh):
    for asked in (None, F32):
        module = plugin().fully_shard(nn.Linear(4, 4), mesh=mesh, reduce_dtype=asked)
        policy = module._get_fsdp_state()._mp_policy
        assert (policy.param_dtype, policy.reduce_dtype, policy.cast_forward_inputs) == (BF16, asked, False)


def test_float16_on_a_cpu_only_if_it_is_asked_for(mesh):
    for half_dtype, expected in ((None, BF16), ("float16", F16)):
        module = ApexPrecision("O2", half_dtype=half_dtype).fully_shard(nn.Linear(4, 4), mesh=mesh)
        assert module._get_fsdp_state()._mp_policy.param_dtype is expected


def test_classes_that_stay_in_fp32_are_gathered_in_fp32_once(mesh):
    precision = plugin(keep_fp32=[nn.LayerNorm])
    module = sharded(precision, mesh)
    seen = Seen(module)
    work = engine(keep_fp32=[nn.LayerNorm])
    work.convert_sharded(module, "cpu")
    with work.forward_context():
        module(torch.randn(4, 8))
    assert seen.dtypes["0.out"] == seen.dtypes["0.norm"] == {F32} and seen.dtypes["0.linear"] == {BF16}
    alone = precision.fully_shard(nn.LayerNorm(4), mesh=mesh)
    assert isinstance(alone, FSDPModule) and alone._get_fsdp_state()._mp_policy.param_dtype is None


def test_what_is_spread_already_stays_as_it_is(mesh):
    precision = plugin()
    module = sharded(precision, mesh)
    params = list(module.parameters())
    assert sharded(precision, mesh, module) is module
    assert precision.fully_shard(list(module), mesh=mesh) == list(module)
    assert all(p is q for p, q in zip(module.parameters(), params, strict=True))


def test_several_modules_are_gathered_together(mesh):
    layers = [Block(), nn.Linear(8, 8)]
    plugin().fully_shard(layers, mesh=mesh)
    assert all(isinstance(p, DTensor) for layer in layers for p in layer.parameters())
    assert layers[0]._get_fsdp_state() is layers[1]._get_fsdp_state()


def test_batchnorm_is_cast_where_the_level_says_so(mesh):
    module = plugin(keep_batchnorm_fp32=False).fully_shard(Block(), mesh=mesh)
    assert not isinstance(module.norm, FSDPModule)


@pytest.mark.parametrize("options", [{"level": "O3"}, {"level": "O5", "master_weights": False}])
def test_levels_without_fp32_weights_are_refused(options, mesh):
    precision = plugin(**options)
    with pytest.raises(OptLevelError, match="without master weights does not work with FSDP2"):
        precision.fully_shard(net(), mesh=mesh)
    work = PrecisionEngine(precision.level, LossScaler(1.0))
    with pytest.raises(OptLevelError, match="use 'O5', 'O2', or one of 'O0', 'O1' and 'O4'"):
        work.convert_sharded(net(), "cpu")


def test_a_policy_beside_the_levels_is_refused(mesh):
    with pytest.raises(ValueError, match=r"mp_policy=.* is what opt_level='O5' decides: leave it out"):
        plugin().fully_shard(net(), mesh=mesh, mp_policy=MixedPrecisionPolicy())


def refusal(module, level="O5", **kwargs):
    with pytest.raises(OptLevelError) as caught:
        engine(level, **kwargs).convert_sharded(module, "cpu")
    return str(caught.value)


def test_torchs_function_at_a_level_with_half_weights_is_refused(mesh):
    text = refusal(torchs(net(), mesh=mesh))
    assert "Parameter '0.linear.weight' would be computed in torch.float32 instead of torch.bfloat16" in text
    assert "plugin.fully_shard(module, mesh=...) instead of torch's fully_shard" in text


def test_weights_that_nobody_spread_are_refused_at_a_level_with_half_weights(mesh):
    module = net()
    plugin().fully_shard(module[0], mesh=mesh)
    text = refusal(module)
    assert "'1.linear.weight'" in text and "plugin.fully_shard(module, mesh=...) too, or use 'O1' or 'O4'" in text
    engine("O4").convert_sharded(module[1], "cpu")


def test_fp32_modules_in_a_group_of_half_weights_are_refused(mesh):
    module = plugin(keep_fp32=["0.out"]).fully_shard(net(), mesh=mesh)
    text = refusal(module, keep_fp32=["0.out"])
    assert "'0.out.weight' would be computed in torch.bfloat16 instead of torch.float32" in text
    assert "with torch's fully_shard before the modules around it" in text
    module = net()
    torchs(module[0].out, mesh=mesh)
    plugin(keep_fp32=["0.out"]).fully_shard(module, mesh=mesh)
    engine(keep_fp32=["0.out"]).convert_sharded(module, "cpu")


def test_half_weights_are_refused_where_the_level_has_none(mesh):
    module = torchs(nn.Linear(4, 4), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    assert "leave mp_policy out of torch's fully_shard, or use 'O5'" in refusal(module, "O4")
    torchs(same := nn.Linear(4, 4), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=F32))
    engine("O4").convert_sharded(same, "cpu")


def test_a_model_that_is_half_already_is_refused(mesh):
    module = plugin().fully_shard(nn.Linear(4, 4).bfloat16(), mesh=mesh)
    with pytest.raises(ValueError, match=r"Parameter 'weight' is torch\.bfloat16 already"):
        engine().convert_sharded(module, "cpu")


def test_a_model_that_is_spread_later_is_checked_before_its_first_forward_pass(mesh):
    module = net()
    work = engine()
    work.convert_sharded(module, "cpu", shards_later=True)
    torchs(module, mesh=mesh)
    with pytest.raises(OptLevelError, match="instead of torch's fully_shard"):
        work.forward_context()
