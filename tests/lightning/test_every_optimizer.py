"""Each optimizer, and LARC around one, in a Trainer at each level: it trains, skips, clips and resumes bit for bit."""

import pytest
import torch
from helpers import (
    LEVELS,
    MASTERED,
    SCALED,
    Net,
    all_fp32,
    assert_same,
    batches,
    every_step,
    fit,
    plugin,
    trainer,
    weights,
)

from lightning_apex import (
    LARC,
    FusedAdagrad,
    FusedAdam,
    FusedAdamW,
    FusedLAMB,
    FusedLARS,
    FusedLion,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
    optimizers,
)

OPTIMIZERS = {
    "FusedAdagrad": lambda ps: FusedAdagrad(ps, lr=0.05),
    "FusedAdam": lambda ps: FusedAdam(ps, lr=0.01, amsgrad=True),
    "FusedAdamW": lambda ps: FusedAdamW(ps, lr=0.01),
    "FusedLAMB": lambda ps: FusedLAMB(ps, lr=0.05),
    "FusedLARS": lambda ps: FusedLARS(ps, lr=1.0, momentum=0.9, trust_coefficient=0.02),
    "FusedLion": lambda ps: FusedLion(ps, lr=0.005),
    "FusedMixedPrecisionLamb": lambda ps: FusedMixedPrecisionLamb(ps, lr=0.05),
    "FusedNovoGrad": lambda ps: FusedNovoGrad(ps, lr=0.3, betas=(0.9, 0.98)),
    "FusedSGD": lambda ps: FusedSGD(ps, lr=0.1, momentum=0.9),
    "LARC fused": lambda ps: LARC(FusedSGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01), trust_coefficient=0.1),
    "LARC torch": lambda ps: LARC(torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01), trust_coefficient=0.1),
}
# An optimizer that is not listed is there with its defaults.
OPTIMIZERS |= {name: getattr(optimizers, name) for name in optimizers.__all__ if name not in OPTIMIZERS}
every = pytest.mark.parametrize("name", OPTIMIZERS)
# The levels with masters in the quick tests, the others when asked for.
levels = pytest.mark.parametrize(
    "level", [level if level in MASTERED else pytest.param(level, marks=pytest.mark.slow) for level in LEVELS]
)


def decay(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.9)


def scaling(level):
    return {"init_scale": 256.0, "growth_interval": 3} if level in SCALED else {}


@every
@levels
def test_trains(level, name):
    model = Net(OPTIMIZERS[name])
    fit(model, plugin(level, **scaling(level)), batches(8), epochs=4)
    assert sum(model.losses[-8:]) < 0.8 * sum(model.losses[:8])
    assert all_fp32(model) and all(torch.isfinite(p).all() for p in model.parameters())


@every
@levels
def test_2n_steps_equal_n_save_load_n(level, name, tmp_path):
    """With a skipped step, a clip and a scheduler in both halves."""
    overflow = [1, 6] if level in SCALED else []

    def model(seen=0):
        made = Net(OPTIMIZERS[name], every_step(decay), overflow_at=overflow)
        made.seen = seen
        return made

    straight = model()
    whole = fit(straight, plugin(level, **scaling(level)), batches(5), epochs=2, gradient_clip_val=0.5)
    half = fit(model(), plugin(level, **scaling(level)), batches(5), epochs=1, gradient_clip_val=0.5)
    half.save_checkpoint(tmp_path / "half.ckpt")
    second = model(seen=5)
    rest = trainer(plugin(level, **scaling(level)), 2, gradient_clip_val=0.5)
    rest.fit(second, batches(5), ckpt_path=tmp_path / "half.ckpt")

    assert second.losses == straight.losses[5:]
    assert_same(weights(second), weights(straight))
    assert_same(rest.optimizers[0].state_dict(), whole.optimizers[0].state_dict())
    assert rest.scaler.skipped_steps == len(overflow)


@every
def test_masters_train_as_fp32_weights_do(name):
    """O5 against O0 with the same bf16 gradients: what differs is where the weights lie."""
    results = []
    for level in ("O0", "O5"):
        model = Net(OPTIMIZERS[name])
        fit(model, level, batches(6), epochs=2)
        results.append(weights(model))
    for key, expected in results[0].items():
        if expected.is_floating_point() and "running" not in key:
            error = (results[1][key] - expected).abs().mean()
            assert error < 0.03, f"{key}: {error}"


@pytest.mark.parametrize("name", ["LARC fused", "LARC torch"])
def test_larc_is_what_the_trainer_sees(name):
    model = Net(OPTIMIZERS[name], every_step(decay))
    made = fit(model, "O2", batches(2))
    assert isinstance(made.optimizers[0], LARC)
    assert made.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.9)
    assert made.optimizers[0].param_groups[0]["weight_decay"] == 0.01
