"""fabric.save and fabric.load: fp32 files, and runs that go on as if nothing had happened."""

import pytest
import torch
from fabric_support import LEVELS, assert_equal, batches, fabric_with, net, plugin, train, weights

from lightning_apex import FusedAdamW

DATA = batches(8)


def objects(level, optimizer, seed=0, **options):
    precision, model = plugin(level, growth_interval=3, **options), net(seed)
    fabric = fabric_with(precision)
    fabric_model, fabric_optimizer = fabric.setup(model, optimizer(model.parameters(), lr=0.05))
    state = {"model": fabric_model, "optimizer": fabric_optimizer, "amp": precision}
    return fabric, model, state


def run(fabric, state, data):
    train(fabric, state["model"], state["optimizer"], data)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, FusedAdamW])
@pytest.mark.parametrize("level", LEVELS)
def test_a_resumed_run_equals_one_without_interruption(tmp_path, level, optimizer):
    fabric, whole, state = objects(level, optimizer)
    run(fabric, state, DATA)
    whole_scale = state["amp"].scaler.state_dict()

    fabric, _, state = objects(level, optimizer)
    run(fabric, state, DATA[:4])
    fabric.save(tmp_path / "x.ckpt", state)
    saved = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert all(v.dtype is torch.float32 for v in saved["model"].values())
    if state["amp"].level.master_weights or isinstance(state["optimizer"], FusedAdamW):
        assert all(s["exp_avg"].dtype is torch.float32 for s in saved["optimizer"]["state"].values())

    fabric, resumed, state = objects(level, optimizer, seed=5)
    fabric.load(tmp_path / "x.ckpt", state)
    run(fabric, state, DATA[4:])
    assert_equal(weights(resumed), weights(whole))
    assert state["amp"].scaler.state_dict() == whole_scale


@pytest.mark.parametrize("into", LEVELS)
@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_any_level_loads_what_any_level_saved(tmp_path, level, into):
    fabric, model, state = objects(level, FusedAdamW)
    run(fabric, state, DATA[:4])
    fabric.save(tmp_path / "x.ckpt", state)
    other, loaded, state = objects(into, FusedAdamW, seed=5)
    other.load(tmp_path / "x.ckpt", state)
    expected = weights(model)
    if into == "O3":
        expected = {name: value.bfloat16().float() for name, value in expected.items()}
    assert_equal(weights(loaded), expected)
    run(other, state, DATA[4:])


def test_an_optimizer_made_after_setup_is_met_or_warned_of(tmp_path):
    fabric, _, state = objects("O2", torch.optim.AdamW)
    run(fabric, state, DATA[:4])
    moments = [s["exp_avg"].clone() for s in state["optimizer"].state.values()]
    fabric.save(tmp_path / "x.ckpt", state)
    for how in ("after the model", "before the model", "before the model, watched"):
        precision, model = plugin("O2"), net(5)
        fabric = fabric_with(precision)
        fabric_model = fabric.setup(model)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.05))
        if how == "before the model, watched":
            precision.watch(optimizer)
        state = {"model": fabric_model, "optimizer": optimizer, "amp": precision}
        if how != "after the model":
            state = dict(reversed(state.items()))
        if how == "before the model":
            with pytest.warns(UserWarning, match=r"load the model before it, or call plugin\.watch\(optimizer\)"):
                fabric.load(tmp_path / "x.ckpt", state)
        else:
            fabric.load(tmp_path / "x.ckpt", state)
            for state, moment in zip(optimizer.state.values(), moments, strict=True):
                assert torch.equal(state["exp_avg"], moment)
        train(fabric, fabric_model, optimizer, DATA[4:])


def test_an_optimizer_loaded_alone_is_warned_of_at_its_step(tmp_path):
    fabric, _, state = objects("O2", torch.optim.AdamW)
    run(fabric, state, DATA[:4])
    saved = state["optimizer"].state_dict()
    model = net(5)
    fabric = fabric_with(plugin("O2"))
    fabric_model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.05))
    optimizer.load_state_dict(saved)
    with pytest.warns(UserWarning, match=r"plugin\.watch\(optimizer\)"):
        train(fabric, fabric_model, optimizer, DATA[4:])


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_an_optimizer_with_state_is_set_up(level):
    """The state of a run in fp32 goes on at a level with half weights."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for x, y in DATA[:3]:
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    fabric = fabric_with(plugin(level))
    losses = train(fabric, *fabric.setup(model, optimizer), DATA[3:])
    assert all(loss < 10 for loss in losses)


def test_a_fixed_scale_and_a_plugin_without_one_keep_to_themselves(tmp_path):
    fabric, _, state = objects("O2", FusedAdamW, init_scale=64.0)
    fabric.save(tmp_path / "x.ckpt", state)
    other, _, state = objects("O5", FusedAdamW)
    other.load(tmp_path / "x.ckpt", state)
    assert state["amp"].scaler.get_scale() == 1.0 and state["amp"].state_dict() == {}
