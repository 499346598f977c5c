"""Clipping works on unscaled gradients, whatever the level and the loss scale."""

import pytest
import torch
from helpers import LEVELS, OPTIMIZERS, Net, assert_close, assert_same, batches, fit, plugin, weights
from lightning.pytorch import Callback

ALGORITHMS = ["norm", "value"]
CLIP = {"norm": 0.3, "value": 0.01}


def sgd_run(precision, algorithm, **kwargs):
    # plain SGD: a step is proportional to the clipped gradient, so a wrong factor shows
    model = Net("torch_sgd")
    fit(model, precision, batches(5), gradient_clip_val=CLIP[algorithm], gradient_clip_algorithm=algorithm, **kwargs)
    return weights(model)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_clipping_matters_in_these_tests(algorithm):
    free = Net("torch_sgd")
    fit(free, "32-true", batches(5))
    clipped = sgd_run("32-true", algorithm)
    assert (free.net[0].weight - clipped["net.0.weight"]).abs().max() > 0.02


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("level", LEVELS)
def test_clip_equals_fp32_clip(level, algorithm):
    tolerance = {"O0": 1e-6, "O3": 2e-2}.get(level, 4e-3)
    assert_close(sgd_run(plugin(level), algorithm), sgd_run("32-true", algorithm), atol=tolerance)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_clip_does_not_depend_on_the_loss_scale(level, algorithm, fused):
    def run(scale):
        model = Net("fused_sgd" if fused else "torch_adamw")
        clip = {"gradient_clip_val": CLIP[algorithm], "gradient_clip_algorithm": algorithm}
        fit(model, plugin(level, loss_scale=scale), batches(5), **clip)
        return weights(model)

    assert_close(run(65536.0), run(1.0), atol=1e-6)


@pytest.mark.parametrize("optimizer", ["fused_adam", "fused_sgd"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("level", LEVELS)
def test_fused_optimizer_with_dynamic_scale_and_clip(level, algorithm, optimizer):
    scale = {} if level == "O0" else {"loss_scale": "dynamic"}
    model = Net(optimizer, overflow_at=[1] if scale else [])
    clip = {"gradient_clip_val": CLIP[algorithm], "gradient_clip_algorithm": algorithm}
    made = fit(model, plugin(level, **scale), batches(6), epochs=3, **clip)
    assert made.scaler.skipped_steps == (1 if scale else 0)
    assert model.losses[-1] < model.losses[0]
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("level", LEVELS)
def test_fused_clip_equals_unfused_clip(level):
    def run(optimizer):
        model = Net(optimizer)
        fit(model, plugin(level), batches(5), gradient_clip_val=0.3)
        return weights(model)

    fused = run("fused_sgd")
    plain = run(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    assert_close(fused, plain, atol=3e-2 if level == "O3" else 1e-5)


@pytest.mark.parametrize("optimizer", ["fused_adam", "torch_adamw"])
@pytest.mark.parametrize("level", LEVELS)
def test_user_hook_sees_and_edits_unscaled_fp32_gradients(level, optimizer):
    """on_before_optimizer_step in the module: what it reads is the fp32 gradient, what it writes is what counts."""
    seen = []

    class Hooked(Net):
        def on_before_optimizer_step(self, optimizer):
            seen.append([p.grad.clone() for p in self.parameters()])
            for p in self.parameters():
                p.grad.clamp_(-0.01, 0.01)

    class Reference(Net):
        def on_before_optimizer_step(self, optimizer):
            expected.append([p.grad.clone() for p in self.parameters()])
            for p in self.parameters():
                p.grad.clamp_(-0.01, 0.01)

    expected = []
    model, witness = Hooked(optimizer), Reference(optimizer)
    fit(model, plugin(level), batches(4))
    fit(witness, "32-true", batches(4))
    if level != "O3":
        assert all(g.dtype is torch.float32 for g in seen[0])
    for mine, theirs in zip(seen[0], expected[0], strict=True):
        torch.testing.assert_close(mine.float(), theirs, atol=5e-2 if level == "O3" else 4e-3, rtol=0.05)
    assert_close(weights(model), weights(witness), atol=0.1 if level == "O3" else 0.03)


@pytest.mark.parametrize("optimizer", ["fused_sgd", "torch_sgd"])
@pytest.mark.parametrize("level", LEVELS)
def test_what_a_hook_writes_is_what_counts(level, optimizer):
    class Ones(Net):
        def on_before_optimizer_step(self, optimizer):
            for p in self.parameters():
                p.grad.fill_(1.0)

    model = Ones(optimizer)
    before = weights(model)
    fit(model, plugin(level), batches(1))
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, before[name] - 0.1, atol=2e-2 if level == "O3" else 1e-6, rtol=0)


@pytest.mark.parametrize("optimizer", ["fused_sgd", "torch_sgd"])
@pytest.mark.parametrize("level", LEVELS)
def test_callback_hook_sees_unscaled_gradients(level, optimizer):
    norms = []

    class Norms(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            norms.append(torch.stack([p.grad.float().norm() for p in pl_module.parameters()]).norm().item())

    fit(Net(optimizer), plugin(level), batches(1), callbacks=[Norms()])
    mine, norms = norms, []
    fit(Net(optimizer), "32-true", batches(1), callbacks=[Norms()])
    assert mine == pytest.approx(norms, rel=0.03)


@pytest.mark.parametrize("optimizer", ["fused_sgd", "torch_sgd"])
@pytest.mark.parametrize("level", LEVELS)
def test_user_configure_gradient_clipping(level, optimizer):
    class Own(Net):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            assert gradient_clip_val == 0.5
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
            self.norm = torch.stack([p.grad.float().norm() for p in self.parameters()]).norm().item()

    model = Own(optimizer)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    fit(model, plugin(level), batches(1), gradient_clip_val=0.5)
    assert model.norm == pytest.approx(0.1, rel=0.02)
    moved = torch.stack([(p - before[n]).norm() for n, p in model.named_parameters()]).norm().item()
    assert moved == pytest.approx(0.1 * 0.1, rel=0.5 if level == "O3" else 0.02)


@pytest.mark.parametrize("level", LEVELS)
def test_user_configure_gradient_clipping_may_call_clip_gradients(level):
    class Own(Net):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            self.norm = torch.stack([p.grad.float().norm() for p in self.parameters()]).norm().item()

    model = Own("fused_sgd")
    fit(model, plugin(level), batches(1))
    assert model.norm == pytest.approx(0.1, rel=0.02)


@pytest.mark.parametrize("level", LEVELS)
def test_user_optimizer_step_calling_step_with_the_closure(level):
    class Own(Net):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            optimizer.step(closure=optimizer_closure)
            self.after = [p.grad.clone() for p in self.parameters()]

    model, plain = Own(), Net()
    fit(model, plugin(level), batches(4), gradient_clip_val=0.3)
    fit(plain, plugin(level), batches(4), gradient_clip_val=0.3)
    assert_close(weights(model), weights(plain), atol=3e-2 if level == "O3" else 1e-4)
    norm = torch.stack([g.float().norm() for g in model.after]).norm()
    assert norm < 0.31  # unscaled and clipped


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_user_optimizer_step_with_warm_up(level):
    class WarmUp(Net):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (batch_idx + 1)
            optimizer.step(closure=optimizer_closure)

    model, witness = WarmUp("fused_sgd"), WarmUp("torch_sgd")
    model.make_optimizer = lambda params: OPTIMIZERS["fused_sgd"](params)
    witness.make_optimizer = lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)
    fit(model, plugin(level), batches(4))
    fit(witness, "32-true", batches(4))
    assert_close(weights(model), weights(witness), atol=1e-6 if level == "O0" else 1e-2)


@pytest.mark.parametrize("level", LEVELS)
def test_on_before_backward_sees_the_unscaled_loss(level):
    class Spy(Net):
        def on_before_backward(self, loss):
            self.shown = loss.item()

    model = Spy()
    scale = {} if level == "O0" else {"loss_scale": 4096.0}
    fit(model, plugin(level, **scale), batches(1))
    assert model.shown == pytest.approx(model.losses[0], rel=1e-6)


def test_clipping_and_accumulation_and_overflow_together():
    model = Net("fused_adam", overflow_at=[3])
    made = fit(model, plugin("O2"), batches(8), gradient_clip_val=0.1, accumulate_grad_batches=2)
    assert made.scaler.skipped_steps == 1
    assert_same(model.net[0].weight.isfinite().all(), torch.tensor(True))
