"""Manual optimization: one optimizer, several, clipping, and mistakes."""

import pytest
import torch
from helpers import FEATURES, LEVELS, OPTIMIZERS, SCALED, Net, assert_close, assert_same, batches, fit, plugin, weights
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn


class Manual(Net):
    clip: float = 0.0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.after_backward(optimizer)
        optimizer.step()

    def after_backward(self, optimizer):
        if self.clip:
            self.clip_gradients(optimizer, gradient_clip_val=self.clip, gradient_clip_algorithm="norm")


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("level", LEVELS)
def test_manual_equals_automatic(level, optimizer):
    manual, automatic = Manual(optimizer), Net(optimizer)
    fit(manual, plugin(level, init_scale=256.0), batches(5))
    fit(automatic, plugin(level, init_scale=256.0), batches(5))
    assert_same(weights(manual), weights(automatic))


@pytest.mark.parametrize("optimizer", ["fused_sgd", "torch_sgd"])
@pytest.mark.parametrize("level", LEVELS)
def test_manual_clip_is_on_unscaled_gradients(level, optimizer):
    class Clipping(Manual):
        clip = 0.1

        def after_backward(self, optimizer):
            super().after_backward(optimizer)
            self.norm = torch.stack([p.grad.float().norm() for p in self.parameters()]).norm().item()

    model, witness = Clipping(optimizer), Net(optimizer)
    fit(model, level, batches(4))
    fit(witness, "32-true", batches(4), gradient_clip_val=0.1)
    assert model.norm <= 0.1 * 1.02
    assert_close(weights(model), weights(witness), atol={"O0": 1e-6, "O3": 3e-2}.get(level, 4e-3))


@pytest.mark.parametrize("optimizer", ["fused_sgd", "torch_adamw"])
@pytest.mark.parametrize("level", LEVELS)
def test_clip_without_a_step_is_forgotten_by_the_next_backward(level, optimizer):
    """A batch that is clipped but not stepped on leaves no mark on the next one."""

    class Sometimes(Manual):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(Net.training_step(self, batch, batch_idx))
            if batch_idx == 0:
                self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            else:
                optimizer.step()

    model, witness = Sometimes(optimizer), Net(optimizer)
    fit(model, plugin(level), batches(3))
    fit(witness, plugin(level), batches(3, only=(1, 2)))
    parameters = [{n: p.detach() for n, p in m.named_parameters()} for m in (model, witness)]
    assert_close(*parameters, atol=3e-2 if level == "O3" else 1e-5)


@pytest.mark.parametrize("optimizer", ["fused_sgd", "torch_sgd"])
@pytest.mark.parametrize("level", LEVELS)
def test_clip_in_the_middle_of_an_accumulation(level, optimizer):
    """Gradients are clipped after the first of the two backward passes of a step, not after the second."""

    class Twice(Manual):
        clip = 0.5

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            if batch_idx % 2 == 0:
                optimizer.zero_grad()
            self.manual_backward(Net.training_step(self, batch, batch_idx))
            if batch_idx % 2:
                optimizer.step()
            else:
                self.after_backward(optimizer)

    model, witness = Twice(optimizer), Twice(optimizer)
    fit(model, plugin(level), batches(4))
    fit(witness, "32-true", batches(4))
    assert_close(weights(model), weights(witness), atol={"O0": 1e-6, "O3": 3e-2}.get(level, 6e-3))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_overflow_in_manual_optimization_skips(level):
    model = Manual(overflow_at=[0, 2])
    made = fit(model, plugin(level, init_scale=64.0), batches(4))
    assert made.scaler.skipped_steps == 2
    assert made.scaler.get_scale() == 16.0
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_manual_accumulation(level):
    class Accumulating(Manual):
        def training_step(self, batch, batch_idx):
            self.manual_backward(Net.training_step(self, batch, batch_idx) / 2)
            if batch_idx % 2:
                self.optimizers().step()
                self.optimizers().zero_grad()

    model, witness = Accumulating("torch_sgd"), Net("torch_sgd")
    fit(model, level, batches(6))
    fit(witness, level, batches(6), accumulate_grad_batches=2)
    assert_same(weights(model), weights(witness))


@pytest.mark.parametrize("level", LEVELS)
def test_raw_backward_is_refused_where_it_would_be_wrong(level):
    class Raw(Manual):
        def training_step(self, batch, batch_idx):
            self.optimizers().zero_grad()
            Net.training_step(self, batch, batch_idx).backward()
            self.optimizers().step()

    model = Raw()
    if level in SCALED:
        before = weights(model)
        with pytest.raises(MisconfigurationException, match="manual_backward"):
            fit(model, level, batches(2))
        parameters = {n: p.detach() for n, p in model.named_parameters()}
        assert_same(parameters, {n: before[n] for n in parameters})
    else:
        witness = Net()
        fit(model, level, batches(2))
        fit(witness, level, batches(2))
        assert_same(weights(model), weights(witness))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_raw_backward_with_clip_gradients_is_refused(level):
    class Raw(Manual):
        def training_step(self, batch, batch_idx):
            self.optimizers().zero_grad()
            Net.training_step(self, batch, batch_idx).backward()
            self.clip_gradients(self.optimizers(), gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            self.optimizers().step()

    with pytest.raises(MisconfigurationException, match="manual_backward"):
        fit(Raw(), level, batches(2))


class GAN(LightningModule):
    """A generator and a discriminator; either's loss may be made to overflow."""

    def __init__(self, optimizer="fused_adam", bad_g=(), bad_d=(), shared_backward=False):
        super().__init__()
        torch.manual_seed(3)
        self.automatic_optimization = False
        self.g = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, FEATURES))
        self.d = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, 1))
        self.make = OPTIMIZERS[optimizer]
        self.bad_g, self.bad_d, self.shared = bad_g, bad_d, shared_backward

    def configure_optimizers(self):
        return self.make(self.g.parameters()), self.make(self.d.parameters())

    def g_loss(self, x, i):
        loss = -nn.functional.logsigmoid(self.d(self.g(x))).mean()
        return loss * (float("inf") if i in self.bad_g else 1.0)

    def d_loss(self, x, i):
        loss = (
            -nn.functional.logsigmoid(self.d(x)).mean() - nn.functional.logsigmoid(-self.d(self.g(x).detach())).mean()
        )
        return loss * (float("inf") if i in self.bad_d else 1.0)

    def training_step(self, batch, i):
        x = batch[0]
        g, d = self.optimizers()
        if self.shared:  # both backward passes first, then both steps: the second step meets a moved scale
            g.zero_grad()
            d.zero_grad()
            self.toggle_optimizer(g)
            self.manual_backward(self.g_loss(x, i))
            self.untoggle_optimizer(g)
            self.toggle_optimizer(d)
            self.manual_backward(self.d_loss(x, i))
            self.untoggle_optimizer(d)
            g.step()
            d.step()
            return
        for optimizer, loss, other in ((g, self.g_loss, self.d), (d, self.d_loss, self.g)):
            self.toggle_optimizer(optimizer)
            assert not any(p.requires_grad for p in other.parameters())
            optimizer.zero_grad()
            self.manual_backward(loss(x, i))
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        assert all(p.requires_grad for p in self.parameters())


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("optimizer", ["fused_adam", "torch_adamw"])
@pytest.mark.parametrize("level", LEVELS)
def test_gan_equals_fp32(level, optimizer, shared):
    model, witness = GAN(optimizer, shared_backward=shared), GAN(optimizer, shared_backward=shared)
    made = fit(model, level, batches(5))
    fit(witness, "32-true", batches(5))
    assert made.global_step == 10
    assert_close(weights(model), weights(witness), atol=1e-5 if level == "O0" else 0.1)
    if level != "O3":
        error = sum((weights(model)[n] - w).abs().mean() for n, w in weights(witness).items()) / 8
        assert error < 0.01


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("optimizer", ["fused_sgd", "torch_sgd"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gan_one_skipped_and_one_not(level, optimizer, shared):
    """The scale moves between two steps of one batch; the waiting optimizer's gradients stay right."""
    model = GAN(optimizer, bad_g=[1, 2], shared_backward=shared)
    made = fit(model, plugin(level, init_scale=1024.0), batches(5))
    assert made.scaler.skipped_steps == 2
    assert made.scaler.get_scale() == 256.0

    class WithoutG(GAN):
        """The same run, where the generator makes no step in batches 1 and 2."""

        def training_step(self, batch, i):
            g, d = self.optimizers()
            for optimizer, loss in ((g, self.g_loss), (d, self.d_loss)):
                optimizer.zero_grad()
                if optimizer is d or i not in (1, 2):
                    self.toggle_optimizer(optimizer)
                    self.manual_backward(loss(batch[0], i))
                    optimizer.step()
                    self.untoggle_optimizer(optimizer)

    # With both losses computed first: the same run where the scale does not move.
    witness = GAN(optimizer, bad_g=[1, 2], shared_backward=True) if shared else WithoutG(optimizer)
    fit(witness, plugin(level, loss_scale=1024.0), batches(5))
    assert_close(weights(model), weights(witness), atol=1e-6)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_only_one_of_two_optimizers_stepped(level):
    class Turns(GAN):
        def training_step(self, batch, i):
            g, d = self.optimizers()
            optimizer, loss = (g, self.g_loss) if i % 2 else (d, self.d_loss)
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss(batch[0], i))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    model = Turns(bad_g=[1])
    made = fit(model, plugin(level, init_scale=16.0), batches(6))
    assert made.scaler.skipped_steps == 1
    assert made.global_step == 6


@pytest.mark.parametrize("level", LEVELS)
def test_step_without_any_backward_changes_nothing(level):
    class Idle(Manual):
        def training_step(self, batch, batch_idx):
            self.optimizers().step()

    model = Idle()
    before = weights(model)
    fit(model, level, batches(2))
    assert_close(weights(model), before, atol=5e-3 if level == "O3" else 0.0)


@pytest.mark.parametrize("level", LEVELS)
def test_one_backward_for_two_optimizers(level):
    """One loss whose gradients two optimizers use, one after the other."""

    class Joint(GAN):
        def training_step(self, batch, i):
            g, d = self.optimizers()
            g.zero_grad()
            d.zero_grad()
            self.manual_backward(self.d(self.g(batch[0])).pow(2).mean())
            g.step()
            d.step()

    model, witness = Joint("torch_sgd"), Joint("torch_sgd")
    kwargs = {"growth_interval": 1, "init_scale": 4.0} if level in SCALED else {}  # the scale moves at every update
    fit(model, plugin(level, **kwargs), batches(4))
    fit(witness, "32-true", batches(4))
    assert_close(weights(model), weights(witness), atol={"O0": 1e-6, "O3": 2e-2}.get(level, 4e-3))
