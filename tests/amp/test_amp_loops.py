"""The ordinary loop at every level, against loops written without the functional API."""

import warnings

import pytest
import torch
from amp_support import (
    BF16,
    F16,
    LEVELS,
    OPTIMIZERS,
    SCALED,
    HalfByHand,
    batch,
    by_grad_scaler,
    fp32,
    loss_of,
    net,
    same,
    scale_of,
    start,
    state_of,
    step,
    thinned,
)
from torch import nn

import lightning_apex as apex
from lightning_apex import amp

DTYPES = {"bfloat16": BF16, "float16": F16}
STEPS = 6


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_O0_is_the_plain_loop_to_the_last_bit(optimizer):
    plain, by_hand = net(), None
    by_hand = OPTIMIZERS[optimizer](plain.parameters())
    model, made = start("O0", optimizer)
    for index in range(STEPS):
        by_hand.zero_grad()
        loss_of(plain, index).backward()
        by_hand.step()
        step(model, made, index)
    assert same(fp32(model), fp32(plain))
    assert same(state_of(made), state_of(by_hand))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_O1_is_autocast_with_GradScaler(optimizer, dtype):
    factors = [1.0, float("inf"), 1.0, 1.0, 1.0, 1.0]
    witness = by_grad_scaler(optimizer, DTYPES[dtype], factors, growth_interval=2)
    model, made = start("O1", optimizer, half_dtype=dtype, growth_interval=2)
    for index, (factor, (weights, state, scale)) in enumerate(zip(factors, witness, strict=True)):
        step(model, made, index, factor)
        assert scale_of(made) == scale
        assert same(fp32(model), weights), index
        assert same(state_of(made), state), index


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("level", "dtype"), [("O2", "bfloat16"), ("O2", "float16"), ("O5", "bfloat16")])
def test_O2_and_O5_are_half_weights_with_masters(level, dtype, optimizer):
    witness = HalfByHand(optimizer, DTYPES[dtype], 2.0**8 if level == "O2" else 1.0)
    model, made = start(level, optimizer, half_dtype=dtype)
    for index in range(STEPS):
        witness.step(index)
        step(model, made, index)
    assert {p.dtype for p in model[0].parameters()} == {DTYPES[dtype]}
    assert same(fp32(model), witness.fp32())
    assert same(state_of(made)["state"], state_of(witness.optimizer)["state"])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_O3_updates_half_weights(optimizer):
    model, made = start("O3", optimizer, half_dtype="bfloat16")
    first = step(model, made)
    for _ in range(30):
        last = step(model, made)
    assert {p.dtype for p in model.parameters()} == {BF16}
    assert last < first / 2


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_writing_amp_autocast_changes_nothing(level, optimizer):
    results = []
    for explicit in (False, True):
        model, made = start(level, optimizer, half_dtype=None)
        for index in range(3):
            made.zero_grad()
            if explicit:
                with amp.autocast(made):
                    loss = loss_of(model, index)
            else:
                loss = loss_of(model, index)
            with amp.scale_loss(loss, made) as scaled_loss:
                scaled_loss.backward()
            made.step()
        results.append(fp32(model))
    assert same(*results)


@pytest.mark.parametrize("level", LEVELS)
def test_outputs_are_fp32_and_the_forward_pass_half(level):
    model, _ = start(level)
    seen = []
    model[3].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    assert model(torch.ones(2, 6)).dtype is torch.float32
    assert seen == [torch.float32 if level == "O0" else BF16]
    assert not torch.is_autocast_enabled("cpu")


def test_a_published_loop_with_its_import_changed():
    class Block(nn.Module):
        def __init__(self, channels):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
            self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

        def forward(self, x):
            return (x + self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))).relu()

    model = nn.Sequential(nn.Conv2d(3, 8, 3), Block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.warns(UserWarning, match="bfloat16 instead of float16"):
        model, optimizer = apex.amp.initialize(model, optimizer, opt_level="O1")
    images, targets = torch.randn(4, 3, 8, 8), torch.arange(4)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        with apex.amp.autocast():
            outputs = model(images)
            loss = criterion(outputs, targets)
        with apex.amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(("level", "dtype"), SCALED)
def test_gradients_are_scaled_inside_and_unscaled_after(level, dtype):
    model, optimizer = start(level, "sgd", half_dtype=dtype)
    loss = loss_of(model)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss.item() == loss.item() * 2**8
        scaled_loss.backward()
        inside = model[3].weight.grad.float().clone()
    assert torch.equal(model[3].weight.grad.float() * 2**8, inside)


def test_the_step_is_torchs_own():
    model, optimizer = start("O2", "adamw")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = type(optimizer).step, optimizer.param_groups, optimizer.param_groups[0], type(model).forward
    for index in range(2):
        step(model, optimizer, index)
        scheduler.step()
    assert before == (type(optimizer).step, optimizer.param_groups, optimizer.param_groups[0], type(model).forward)
    assert type(optimizer) is torch.optim.AdamW
    assert "forward" not in vars(model) and type(model) is nn.Sequential
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]


@pytest.mark.parametrize(("level", "optimizer", "when"), thinned(3, LEVELS, OPTIMIZERS, ["before", "after"]))
def test_schedulers_made_before_and_after(level, optimizer, when):
    model = net()
    made = OPTIMIZERS[optimizer](model.parameters())
    lr = made.param_groups[0]["lr"]

    def scheduler():
        return torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5)

    early = scheduler() if when == "before" else None
    model, made = amp.initialize(model, made, opt_level=level, verbosity=0, half_dtype=None)
    late = early or scheduler()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for index, factor in enumerate([float("inf"), 1.0, float("inf"), 1.0]):
            scaled = level in ("O1", "O2")
            step(model, made, index, factor if scaled else 1.0)
            late.step()
    assert made.param_groups[0]["lr"] == pytest.approx(lr / 16)


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("optimizer", ["sgd", "fused_adam"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_held_schedulers_advance_with_their_optimizer(level, optimizer, held):
    model, made = start(level, optimizer, half_dtype=None)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(made)
    lr = made.param_groups[0]["lr"]
    if held:
        amp.hold_schedulers(scheduler, plateau)
    for factor in [float("inf")] * 3 + [1.0] * 4:
        step(model, made, factor=factor)
        scheduler.step()
    assert made.param_groups[0]["lr"] == pytest.approx(lr / (16 if held else 128))
    assert type(scheduler).__name__ == "ExponentialLR"
    amp.initialize(model, made, enabled=False)
    assert type(scheduler) is torch.optim.lr_scheduler.ExponentialLR
    amp.hold_schedulers(scheduler)


def test_schedulers_of_other_optimizers_cannot_be_held():
    scheduler = torch.optim.lr_scheduler.ExponentialLR(torch.optim.SGD(net().parameters()), 0.5)
    with pytest.raises(RuntimeError, match=r"amp\.hold_schedulers\(\) got a SGD"):
        amp.hold_schedulers(scheduler)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_on_a_gpu(level, optimizer):
    model = net().cuda()
    made = OPTIMIZERS[optimizer](model.parameters())
    for group in made.param_groups:
        if "eps" in group:
            group["eps"] = 1e-4  # what fp16 can hold, for torch's AdamW at O3
    model, made = amp.initialize(model, made, opt_level=level, verbosity=0, init_scale=2.0**8)
    x, y = (t.cuda() for t in batch())
    losses = []
    for index in range(20):
        made.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        with amp.scale_loss(loss * (float("inf") if index == 3 and scaled(level) else 1.0), made) as scaled_loss:
            scaled_loss.backward()
        nn.utils.clip_grad_norm_(amp.master_params(made), 1.0)
        made.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] * 0.8
    assert scale_of(made) == (2.0**7 if scaled(level) else 1.0)
    half = {"O2": F16, "O3": F16, "O5": BF16}.get(level, torch.float32)
    assert model[0].weight.dtype is half and model[0].weight.is_cuda


def scaled(level):
    return level in ("O1", "O2")
