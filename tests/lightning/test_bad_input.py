"""Bad input: a clear error that names the argument and its value, before anything has changed."""

import math

import pytest
import torch
from helpers import LEVELS, Net, all_fp32, assert_same, batches, fit, plugin, trainer, weights
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_apex import ApexPrecision, FusedAdam, FusedSGD, OptLevelError


@pytest.mark.parametrize("level", ["01", "o1", "O6", "", "O-1", None, 1, "16-mixed", ["O1"], b"O1"])
def test_unknown_level(level):
    with pytest.raises(OptLevelError, match="opt_level") as caught:
        ApexPrecision(level)
    assert repr(level) in str(caught.value)
    assert all(name in str(caught.value) for name in LEVELS)


def test_a_zero_for_the_letter_is_pointed_out():
    with pytest.raises(OptLevelError, match="letter O"):
        ApexPrecision("02")


@pytest.mark.parametrize(
    ("level", "override"),
    [
        ("O0", {"master_weights": True}),
        ("O1", {"master_weights": True}),
        ("O4", {"master_weights": True}),
        ("O0", {"half_dtype": "float16"}),
        ("O4", {"half_dtype": "float16"}),
        ("O5", {"half_dtype": torch.float16}),
        ("O0", {"keep_batchnorm_fp32": False}),
        ("O1", {"keep_batchnorm_fp32": False}),
        ("O2", {"half_dtype": "float32"}),
        ("O2", {"half_dtype": torch.float64}),
        ("O2", {"half_dtype": "fp16"}),
        ("O2", {"half_dtype": 16}),
        ("O2", {"half_dtype": torch.int8}),
        ("O2", {"master_weights": "yes"}),
        ("O2", {"master_weights": 1}),
        ("O2", {"keep_batchnorm_fp32": "False"}),
        ("O1", {"loss_scale": -1.0}),
        ("O1", {"loss_scale": 0}),
        ("O1", {"loss_scale": math.inf}),
        ("O1", {"loss_scale": math.nan}),
        ("O1", {"loss_scale": "static"}),
        ("O1", {"loss_scale": True}),
        ("O1", {"loss_scale": 1e39}),
        ("O1", {"loss_scale": 1e-50}),
    ],
)
def test_wrong_or_contradicting_override(level, override):
    ((name, value),) = override.items()
    with pytest.raises(OptLevelError, match=name) as caught:
        ApexPrecision(level, **override)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("init_scale", v) for v in (0, -2.0, math.inf, math.nan, "big", 1e39)),
        *(("growth_factor", v) for v in (1.0, 0.5, math.inf, math.nan, "2")),
        *(("backoff_factor", v) for v in (0.0, 1.0, 2.0, -0.5, math.nan, None)),
        *(("growth_interval", v) for v in (0, -1, 1.5, True, "2000")),
        *(("hysteresis", v) for v in (0, -1, 1.5)),
        *(("min_loss_scale", v) for v in (0, -1.0, math.nan, None, 1e-50)),
        *(("max_loss_scale", v) for v in (0, 2.0**-20, math.inf, math.nan, 1e39)),
        *(("max_consecutive_skips", v) for v in (0, -1, 1.5, True)),
    ],
)
def test_wrong_scaler_argument(name, value):
    with pytest.raises(ValueError, match=name) as caught:
        ApexPrecision("O1", **{name: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("keep", [[3], [None], 3, ["no.such.module"], [nn.Conv3d]])
def test_wrong_keep_fp32(keep):
    model = Net()
    before = weights(model)
    with pytest.raises((ValueError, TypeError), match="keep_fp32"):
        fit(model, plugin("O2", keep_fp32=keep), batches(1))
    assert_same(weights(model), before)


def test_precision_beside_the_plugin():
    with pytest.raises((MisconfigurationException, ValueError), match="precision"):
        Trainer(accelerator="cpu", precision="16-mixed", plugins=[ApexPrecision("O1")], logger=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
def test_model_that_is_half_already(level, dtype):
    model = Net()
    model.net[3].to(dtype)
    with pytest.raises(ValueError, match=r"net\.3\.weight.*" + str(dtype).replace(".", r"\.")):
        fit(model, level, batches(1))
    assert model.net[0].weight.dtype is torch.float32
    assert model.net[3].weight.dtype is dtype


@pytest.mark.parametrize("level", LEVELS)
def test_parameters_on_meta(level):
    model = Net()
    model.net[3] = nn.Linear(16, 4, device="meta")
    # Lightning moves the model to the CPU after any exception, fails at that too, and chains the two
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        fit(model, level, batches(1))
    first = caught.value.__context__ or caught.value
    assert isinstance(first, ValueError)
    assert "net.3.weight" in str(first)
    assert "meta" in str(first)
    assert model.net[0].weight.dtype is torch.float32


@pytest.mark.parametrize("make", [FusedAdam, FusedSGD])
@pytest.mark.parametrize("lr", [math.nan, math.inf, -1.0, "1e-3", None, True, torch.ones(2)])
def test_wrong_lr(make, lr):
    with pytest.raises(ValueError, match="lr"):
        make(Net().parameters(), lr=lr)


@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9,), (math.nan, 0.9), 0.9, ("a", "b")])
def test_wrong_betas(betas):
    with pytest.raises(ValueError, match="betas"):
        FusedAdam(Net().parameters(), betas=betas)


@pytest.mark.parametrize("make", [FusedAdam, FusedSGD])
def test_parameter_in_two_groups(make):
    model = Net()
    with pytest.raises(ValueError, match="group"):
        make([{"params": model.net[0].parameters()}, {"params": model.net.parameters()}], lr=0.1)


def test_lr_that_turns_bad_during_training():
    class Turns(Net):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 1:
                self.before = weights(self)
                self.trainer.optimizers[0].param_groups[0]["lr"] = math.nan

    model = Turns()
    with pytest.raises(ValueError, match=r"lr=nan"):
        fit(model, "O2", batches(3))
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    assert_same(parameters, {n: model.before[n] for n in parameters})


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_lbfgs_is_refused(level):
    model = Net(lambda params: torch.optim.LBFGS(params))
    before = weights(model)
    with pytest.raises(MisconfigurationException, match=r"LBFGS.*O0"):
        fit(model, level, batches(1))
    assert_same(weights(model), before)
    assert all_fp32(model)


@pytest.mark.parametrize("level", ["O0", "O4"])
def test_lbfgs_is_allowed_without_scaling_and_masters(level):
    model = Net(lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3))
    fit(model, level, batches(4), epochs=2)
    assert model.losses[-1] < model.losses[0]
    if level == "O0":
        witness = Net(lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3))
        fit(witness, "32-true", batches(4), epochs=2)
        assert_same(weights(model), weights(witness))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_sparse_gradients_are_refused_by_fused_optimizers(level):
    class Sparse(Net):
        def __init__(self, *args):
            super().__init__(*args)
            self.embed = nn.Embedding(10, 4, sparse=True)

        def loss(self, batch):
            return super().loss(batch) + self.embed(batch[1]).sum() * 0.01

    model = Sparse("fused_adam")
    with pytest.raises(RuntimeError, match=r"FusedAdam.*sparse"):
        fit(model, level, batches(1))
    assert all_fp32(model)
    plain = Sparse(lambda params: torch.optim.SGD(params, lr=0.1))
    before = plain.embed.weight.detach().clone()
    fit(plain, level, batches(2))
    assert not torch.equal(plain.embed.weight, before)


def test_two_precision_plugins():
    with pytest.raises((MisconfigurationException, ValueError)):
        trainer(plugin("O1"), plugins=[plugin("O2")])


def test_plugin_of_the_wrong_namespace_is_lightnings_error():
    pl = pytest.importorskip("pytorch_lightning")
    with pytest.raises(Exception, match="plugin"):
        pl.Trainer(accelerator="cpu", plugins=[ApexPrecision("O1")], logger=False)
