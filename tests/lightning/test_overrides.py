"""Levels with overrides, real fp16, and optimizers of other makes."""

import pytest
import torch
from helpers import Net, all_fp32, assert_same, batches, every_step, fit, halving, plugin, trainer, weights

OVERRIDES = {
    "O2 fp16": ("O2", {"half_dtype": "float16", "init_scale": 256.0}),
    "O1 fp16": ("O1", {"half_dtype": "float16", "init_scale": 256.0}),
    "O3 fp16": ("O3", {"half_dtype": "float16"}),
    "O3 dynamic": ("O3", {"half_dtype": "float16", "loss_scale": "dynamic", "init_scale": 256.0}),
    "O3 masters": ("O3", {"master_weights": True}),
    "O3 masters dynamic": (
        "O3",
        {"master_weights": True, "loss_scale": "dynamic", "half_dtype": "float16", "init_scale": 256.0},
    ),
    "O3 bn": ("O3", {"keep_batchnorm_fp32": True, "half_dtype": "float16"}),
    "O2 no masters": ("O2", {"master_weights": False, "init_scale": 256.0}),
    "O2 scale 1": ("O2", {"loss_scale": 1.0}),
    "O5 dynamic": ("O5", {"loss_scale": "dynamic"}),
    "O5 half bn": ("O5", {"keep_batchnorm_fp32": False}),
    "O0 scale 128": ("O0", {"loss_scale": 128.0}),
    "O4 dynamic": ("O4", {"loss_scale": "dynamic"}),
}


@pytest.fixture(params=list(OVERRIDES))
def made(request):
    level, kwargs = OVERRIDES[request.param]
    return lambda: plugin(level, **kwargs)


@pytest.mark.parametrize("optimizer", ["fused_adam", "torch_adamw"])
def test_trains(made, optimizer):
    precision = made()
    if precision.level.name == "O3" and optimizer == "torch_adamw" and not precision.level.master_weights:
        pytest.skip("torch's AdamW keeps eps and moments in half there: the plugin warns")
    model, witness = Net(optimizer), Net(optimizer)
    fit(model, precision, batches(6), epochs=3, gradient_clip_val=1.0)
    fit(witness, "32-true", batches(6), epochs=3, gradient_clip_val=1.0)
    assert all_fp32(model)
    assert max(abs(a - b) for a, b in zip(model.losses, witness.losses, strict=True)) < 0.25
    assert sum(model.losses[-6:]) < 0.85 * sum(model.losses[:6])


@pytest.mark.parametrize("optimizer", ["fused_adam", "fused_sgd"])
def test_2n_equals_n_save_load_n(made, optimizer, tmp_path):
    straight, first, second = (Net(optimizer, every_step(halving)) for _ in range(3))
    whole = fit(straight, made(), batches(4), epochs=2)
    fit(first, made(), batches(4)).save_checkpoint(tmp_path / "x.ckpt")
    rest = trainer(made(), 2)
    rest.fit(second, batches(4), ckpt_path=tmp_path / "x.ckpt")
    assert_same(weights(second), weights(straight))
    assert_same(rest.optimizers[0].state_dict(), whole.optimizers[0].state_dict())
    assert_same(rest.precision_plugin.state_dict(), whole.precision_plugin.state_dict())


def test_an_overflow_is_skipped_where_scaled(made):
    precision = made()
    if not precision.scaler.is_enabled():
        return
    model = Net(overflow_at=[1])
    fit(model, precision, batches(4))
    assert precision.scaler.skipped_steps == 1
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.filterwarnings("ignore:AdamW with eps=1e-08 keeps its state in float16")
def test_o3_warns_of_an_eps_that_vanishes_in_fp16():
    with pytest.warns(UserWarning, match="eps=1e-08.*float16"):
        fit(Net("torch_adamw"), plugin("O3", half_dtype="float16"), batches(1))


FOREIGN = {
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


@pytest.mark.parametrize("name", list(FOREIGN))
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_torchs_other_optimizers(level, name, tmp_path):
    """They train to the fp32 run, skip an overflow, and resume bit for bit."""
    model, witness = Net(FOREIGN[name]), Net(FOREIGN[name])
    whole = fit(model, level, batches(4), epochs=2, gradient_clip_val=0.5)
    fit(witness, "32-true", batches(4), epochs=2, gradient_clip_val=0.5)
    assert max(abs(a - b) for a, b in zip(model.losses, witness.losses, strict=True)) < 0.1
    first, second = Net(FOREIGN[name]), Net(FOREIGN[name])
    fit(first, level, batches(4), gradient_clip_val=0.5).save_checkpoint(tmp_path / "x.ckpt")
    rest = trainer(level, 2, gradient_clip_val=0.5)
    rest.fit(second, batches(4), ckpt_path=tmp_path / "x.ckpt")
    assert_same(weights(second), weights(model))
    state = rest.optimizers[0].state_dict()["state"]
    assert_same(state, whole.optimizers[0].state_dict()["state"])
    moments = [t for s in state.values() for t in s.values() if torch.is_tensor(t) and t.is_floating_point()]
    assert all(t.dtype is torch.float32 for t in moments)


@pytest.mark.parametrize("name", ["adamw_fused", "sgd_fused"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_torchs_fused_optimizers_skip_an_overflow_on_the_first_step(level, name):
    model, witness = Net(FOREIGN[name], overflow_at=[0]), Net(FOREIGN[name])
    fit(model, plugin(level, init_scale=64.0), batches(4))
    fit(witness, plugin(level, loss_scale=64.0), batches(4, only=(1, 2, 3)))
    parameters = [{n: p.detach() for n, p in m.named_parameters()} for m in (model, witness)]
    assert_same(*parameters)
