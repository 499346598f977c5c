"""Every level trains, and to what fp32 training gives."""

import pytest
import torch
from helpers import LEVELS, OPTIMIZERS, Net, all_fp32, assert_close, assert_same, batches, fit, plugin, trainer, weights
from torch import nn

from lightning_apex import ApexPrecision, ops


@pytest.mark.parametrize("optimizer", ["fused_adam", "fused_sgd", "torch_adamw"])
@pytest.mark.parametrize("level", LEVELS)
def test_level_trains(level, optimizer):
    model = Net(optimizer)
    fit(model, level, batches(8), epochs=4)
    assert sum(model.losses[-8:]) < 0.7 * sum(model.losses[:8])
    assert all_fp32(model)
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4", "O5"])
def test_loss_curve_is_that_of_fp32(level, dtype):
    if level in ("O4", "O5") and dtype == "float16":
        pytest.skip("bf16 levels")
    # a loss scale changes nothing, and skips a few first steps unless it starts low enough
    model, witness = Net(), Net()
    fit(model, plugin(level, half_dtype=dtype, init_scale=128.0), batches(10), epochs=2)
    fit(witness, "32-true", batches(10), epochs=2)
    tolerance = 0.05 if dtype == "float16" and level != "O3" else 0.15
    assert max(abs(a - b) for a, b in zip(model.losses, witness.losses, strict=True)) < tolerance


@pytest.mark.parametrize("optimizer", ["torch_adamw", "torch_sgd"])
def test_o0_is_native_fp32_bit_for_bit(optimizer):
    model, witness = Net(optimizer), Net(optimizer)
    fit(model, "O0", batches(6), epochs=2, accumulate_grad_batches=2)
    fit(witness, "32-true", batches(6), epochs=2, accumulate_grad_batches=2)
    assert model.losses == witness.losses
    assert_same(weights(model), weights(witness))


@pytest.mark.parametrize(("fused", "plain"), [("fused_adam", "torch_adamw"), ("fused_sgd", None)])
def test_o0_fused_equals_a_torch_loop(fused, plain):
    model = Net(fused)
    fit(model, "O0", batches(6), epochs=2)
    witness = Net()
    optimizer = (
        torch.optim.AdamW(witness.parameters(), lr=1e-2, weight_decay=0.01)
        if plain
        else torch.optim.SGD(witness.parameters(), lr=0.1, momentum=0.9)
    )
    for _ in range(2):
        for batch in batches(6):
            optimizer.zero_grad()
            witness.loss(batch).backward()
            optimizer.step()
    assert_close(weights(model), weights(witness), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 2.0**15])
def test_o1_equals_a_torch_autocast_loop(scale):
    model = Net("torch_adamw")
    fit(model, plugin("O1", loss_scale=scale), batches(6), epochs=2)
    witness = Net("torch_adamw")
    optimizer = OPTIMIZERS["torch_adamw"](witness.parameters())
    for _ in range(2):
        for batch in batches(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                loss = witness.loss(batch)
            loss.backward()
            optimizer.step()
    # a power of two scales without rounding: the same bits
    assert_same(weights(model), weights(witness))


def test_o2_equals_a_hand_written_master_loop():
    model = Net("torch_adamw")
    fit(model, plugin("O2", half_dtype="bfloat16", loss_scale=1024.0), batches(6), epochs=2)
    masters, half = Net(), Net()
    for name, module in half.net.named_children():
        if not isinstance(module, nn.BatchNorm1d):
            half.net.get_submodule(name).to(torch.bfloat16)
    optimizer = OPTIMIZERS["torch_adamw"](masters.parameters())
    for _ in range(2):
        for batch in batches(6):
            with torch.no_grad():
                for p, master in zip(half.parameters(), masters.parameters(), strict=True):
                    p.copy_(master)
                    p.grad = None
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                loss = half.loss(batch)
            (loss * 1024.0).backward()
            for p, master in zip(half.parameters(), masters.parameters(), strict=True):
                master.grad = p.grad.float() / 1024.0
            optimizer.step()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    assert_same(parameters, {name: p.detach() for name, p in masters.named_parameters()})


def test_small_updates_reach_masters_but_not_o3():
    # lr=1e-6 on weights near 1 is far below bf16's resolution
    def run(level):
        model = Net(lambda params: torch.optim.SGD(params, lr=1e-5))
        start = weights(model)
        fit(model, level, batches(10), epochs=2)
        return (model.net[0].weight - start["net.0.weight"]).abs().max().item()

    witness = run("O0")
    assert witness > 0
    assert run("O5") == pytest.approx(witness, rel=0.05)


@pytest.mark.parametrize("level", LEVELS)
def test_dtypes_during_training(level):
    seen = {}

    class Spy(Net):
        def training_step(self, batch, batch_idx):
            seen["linear"] = self.net[0].weight.dtype
            seen["bn"] = self.net[1].weight.dtype
            seen["stats"] = self.net[1].running_mean.dtype
            seen["batch"] = batch[0].dtype
            seen["target"] = batch[1].dtype
            out = self(batch[0])
            seen["out"] = out.dtype
            loss = nn.functional.cross_entropy(out, batch[1])
            seen["loss"] = loss.dtype
            return loss

    fit(Spy(), level, batches(1))
    half, full = torch.bfloat16, torch.float32
    casts = level in ("O2", "O3", "O5")
    assert seen["linear"] is (half if casts else full)
    assert seen["bn"] is seen["stats"] is (half if level == "O3" else full)
    assert seen["batch"] is (half if level == "O3" else full)
    assert seen["target"] is torch.int64
    assert seen["out"] is (full if level == "O0" else half)
    assert seen["loss"] is (half if level == "O3" else full)


def test_fp16_is_bf16_on_a_cpu_with_one_warning():
    with pytest.warns(UserWarning, match="bfloat16 instead of float16 on a CPU") as caught:
        made = trainer(ApexPrecision("O1"))
        made.fit(Net(), batches(1))
        made.validate(Net(), batches(1), verbose=False)
    assert sum("bfloat16 instead" in str(w.message) for w in caught) == 1
    assert made.precision == "bf16-mixed"


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("O0", "32-true"),
        ("O1", "16-mixed"),
        ("O2", "16-mixed"),
        ("O3", "16-true"),
        ("O4", "bf16-mixed"),
        ("O5", "bf16-mixed"),
    ],
)
def test_precision_names_lightnings_nearest(level, expected):
    kwargs = {"half_dtype": "float16"} if level in ("O1", "O2", "O3") else {}
    made = trainer(plugin(level, **kwargs))
    assert made.precision == expected
    made.fit(Net(), batches(1))
    assert made.precision == expected


@pytest.mark.parametrize("level", LEVELS)
def test_accumulation_equals_a_larger_batch(level):
    def model():
        made = Net("torch_sgd")
        made.net[1] = nn.LayerNorm(16)  # BatchNorm statistics depend on the batch size
        return made

    accumulated, large = model(), model()
    fit(accumulated, plugin(level), batches(8, size=4), accumulate_grad_batches=4)
    fit(large, plugin(level), batches(2, size=16))
    assert_close(weights(accumulated), weights(large), atol=1e-6 if level == "O0" else 4e-3)
    assert accumulated.trainer.global_step == large.trainer.global_step == 2


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_scale_is_constant_in_an_accumulation_window(level, monkeypatch):
    scales, checks = [], []

    class Spy(Net):
        def on_train_batch_start(self, batch, batch_idx):
            scales.append(self.trainer.scaler.get_scale())

    made = plugin(level, init_scale=64.0, growth_interval=1)
    kernel = ops.update_scale_
    monkeypatch.setattr(ops, "update_scale_", lambda *args: (checks.append(1), kernel(*args)))
    # batch 5 is the second of the second window
    model = Spy(overflow_at=[5])
    fit(model, made, batches(12), accumulate_grad_batches=4)
    assert scales == [64.0] * 4 + [128.0] * 4 + [64.0] * 4
    assert len(checks) == 3
    assert made.scaler.skipped_steps == 1


@pytest.mark.parametrize("level", LEVELS)
def test_last_short_accumulation_window_steps(level):
    model = Net()
    made = fit(model, plugin(level), batches(5), accumulate_grad_batches=4)
    assert made.global_step == 2
    assert all(torch.isfinite(p).all() for p in model.parameters())
