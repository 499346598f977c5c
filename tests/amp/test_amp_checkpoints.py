"""{model, optimizer, amp}: a resumed run is the uninterrupted one, and Apex's own checkpoints load."""

import copy
import io

import pytest
import torch
from amp_support import BF16, LEVELS, OPTIMIZERS, batch, fp32, loss_of, net, same, scale_of, start, state_of, step
from torch import nn

from lightning_apex import FusedAdam, amp

FACTORS = [1.0, float("inf"), 1.0, 1.0, 1.0, 1.0, 1.0]
HALF = {"O1": "float16", "O2": "float16", "O3": "bfloat16"}


def through_a_file(checkpoint):
    file = io.BytesIO()
    torch.save(checkpoint, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def train(model, made, indices):
    for index in indices:
        step(model, made, index, FACTORS[index] if made.param_groups[0].get("overflows", True) else 1.0)


@pytest.mark.parametrize("load_first", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_resume_is_exact(level, optimizer, load_first):
    def begin(model=None):
        return start(level, optimizer, model, half_dtype=HALF.get(level), growth_interval=2)

    if level == "O3" and load_first:
        pytest.skip("without masters the half optimizer state needs the half model")
    factors = FACTORS if level in ("O1", "O2") else [1.0] * 7
    model, made = begin()
    for index in range(3):
        step(model, made, index, factors[index])
    saved = {"model": model.state_dict(), "optimizer": made.state_dict(), "amp": amp.state_dict(made)}
    saved = through_a_file(saved)
    assert all(v.dtype is not BF16 and v.dtype is not torch.float16 for v in saved["model"].values())
    for index in range(3, 7):
        step(model, made, index, factors[index])

    fresh = net(seed=9)
    if load_first:
        fresh.load_state_dict(saved["model"])
    again, remade = begin(fresh)
    if not load_first:
        again.load_state_dict(saved["model"])
    remade.load_state_dict(saved["optimizer"])
    amp.load_state_dict(saved["amp"], remade)
    for index in range(3, 7):
        step(again, remade, index, factors[index])
    assert same(fp32(again), fp32(model))
    assert same(state_of(remade), state_of(made))
    assert same(amp.state_dict(remade), amp.state_dict(made))


@pytest.mark.parametrize("source", LEVELS)
@pytest.mark.parametrize("target", LEVELS)
def test_any_level_loads_any_other(source, target):
    model, made = start(source, "adamw", half_dtype=None)
    step(model, made)
    saved = through_a_file({"model": model.state_dict(), "optimizer": made.state_dict(), "amp": amp.state_dict(made)})
    again, remade = start(target, "adamw", net(5), half_dtype=None)
    again.load_state_dict(saved["model"])
    remade.load_state_dict(saved["optimizer"])
    amp.load_state_dict(saved["amp"], remade)
    for name, value in again.state_dict().items():
        if target != "O3":
            assert same(value, saved["model"][name])
    step(again, remade, 1)
    assert scale_of(remade) == (2.0**8 if target in ("O1", "O2") else 1.0)


def test_state_dict_without_arguments():
    model, made = start("O1", num_losses=3, init_scale=2.0**16)
    state = amp.state_dict()
    assert list(state) == ["loss_scaler0", "loss_scaler1", "loss_scaler2"]
    assert all(s["loss_scale"] == 2.0**16 and s["unskipped"] == 0 for s in state.values())
    step(model, made, loss_id=1)
    assert [s["unskipped"] for s in amp.state_dict().values()] == [0, 1, 0]
    assert all(type(v) in (float, int, bool) for s in state.values() for v in s.values())


def test_a_dictionary_of_apex_itself():
    _, made = start("O2", "fused_adam", num_losses=2)
    amp.load_state_dict(
        {
            "loss_scaler0": {"loss_scale": 1024.0, "unskipped": 7},
            "loss_scaler1": {"loss_scale": 4096.0, "unskipped": 1999},
        }
    )
    state = amp.state_dict(made)
    assert (state["loss_scaler0"]["scale"], state["loss_scaler0"]["_growth_tracker"]) == (1024.0, 7)
    assert (state["loss_scaler1"]["scale"], state["loss_scaler1"]["_growth_tracker"]) == (4096.0, 1999)


def test_training_goes_on_from_an_apex_checkpoint():
    """Apex saves fp32 copies of half weights, and counts Adam's steps once a group."""
    witness = net()
    by_hand = torch.optim.AdamW(witness.parameters(), lr=1e-2, weight_decay=1e-2)
    for index in range(3):
        by_hand.zero_grad()
        loss_of(witness, index).backward()
        by_hand.step()
    saved = copy.deepcopy(by_hand.state_dict())
    for group in saved["param_groups"]:
        group["step"] = 3
    for state in saved["state"].values():
        del state["step"]
    weights = {k: v.half().float() if "weight" in k else v for k, v in fp32(witness).items()}

    model, made = start("O2", "fused_adam", half_dtype="float16")
    model.load_state_dict(weights)
    made.load_state_dict(saved)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 512.0, "unskipped": 3}})
    assert same(fp32(model), weights)
    step(model, made, 3)
    assert scale_of(made) == 512.0
    assert {s["step"].item() for s in made.state.values()} == {4.0}
    by_hand.zero_grad()
    witness.load_state_dict(weights)
    loss_of(witness, 3).backward()
    by_hand.step()
    for name, value in fp32(model).items():
        if value.is_floating_point() and name != "0.bias":  # before BatchNorm: its gradient is noise
            assert (value - fp32(witness)[name]).abs().max() < 4e-3, name


def test_the_state_of_a_GradScaler():
    scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
    scaler.scale(torch.ones(()))
    _, made = start("O1")
    amp.load_state_dict({"loss_scaler0": scaler.state_dict()})
    assert scale_of(made) == 32.0


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "0 loss scales.*num_losses=2"),
        ({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 0}}, "1 loss scales.*num_losses=2"),
        ({f"loss_scaler{i}": {"loss_scale": 4.0, "unskipped": 0} for i in range(3)}, "num_losses=3"),
        ({"loss_scaler0": {"loss_scale": 4.0}, "loss_scaler2": {"loss_scale": 4.0}}, "num_losses"),
        ({"loss_scaler0": {"loss_scale": 4.0}, "scaler": {}}, "the key 'scaler'"),
        ({"loss_scaler0": {"loss_scale": 4.0}, "loss_scaler1": {"loss_scale": float("inf")}}, "finite"),
        ({"loss_scaler0": {"loss_scale": 4.0}, "loss_scaler1": {"what": 1}}, "what"),
        ({"loss_scaler0": {"loss_scale": 4.0}, "loss_scaler1": 4.0}, "must be a dictionary"),
        ([1], "got a list"),
    ],
)
def test_states_that_do_not_fit_change_nothing(state, message):
    _, made = start("O1", num_losses=2)
    before = amp.state_dict(made)
    with pytest.raises(ValueError, match=message):
        amp.load_state_dict(state)
    assert amp.state_dict(made) == before


def test_loading_between_the_backward_pass_and_the_step():
    """The gradients are of the old scale."""
    runs = []
    for loads in (True, False):
        model, made = start("O2", "fused_adam", half_dtype="bfloat16")
        with amp.scale_loss(loss_of(model), made, delay_unscale=True) as scaled_loss:
            scaled_loss.backward()
        if loads:
            amp.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 0}}, made)
        made.step()
        runs.append(fp32(model))
    assert same(*runs)


def test_ddp_and_dataparallel_names_do_not_matter_for_amp_state():
    model, made = start("O2", "fused_adam")
    parallel = nn.DataParallel(model)
    loss = parallel(batch()[0]).sum()
    with amp.scale_loss(loss, made) as scaled_loss:
        scaled_loss.backward()
    made.step()
    assert set(amp.state_dict(parallel)) == {"loss_scaler0"}
    assert FusedAdam is type(made)
