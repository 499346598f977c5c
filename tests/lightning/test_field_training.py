"""What people have met while they trained, where no other file of this folder shows it; see tests/field."""

import pytest
import torch
from helpers import (
    FEATURES,
    LEVELS,
    SCALED,
    Net,
    assert_close,
    batches,
    every_step,
    fit,
    halving,
    plugin,
    trainer,
    weights,
)
from lightning.pytorch import Callback
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_apex import FusedAdam, LossScaler

# --- losses, gradients, the scale ---------------------------------------------------------------------------------


@pytest.mark.parametrize("overflow_at", [[], [0], [1]])
def test_a_fixed_scale_with_a_scheduler_warns_of_nothing(overflow_at):
    """Warnings are errors here; the rate falls once for each step that was made."""
    made = fit(Net("torch_adamw", every_step(halving), overflow_at), plugin("O1", loss_scale=128.0), batches(4))
    assert made.optimizers[0].param_groups[0]["lr"] == 1e-2 * 0.5 ** (4 - len(overflow_at))


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_torchs_fused_optimizers_train_with_clipping(level, make):
    model, witness = (Net(lambda p, fused=fused: make(p, lr=0.01, fused=fused)) for fused in (True, False))
    fit(model, level, batches(4), gradient_clip_val=0.1)
    fit(witness, level, batches(4), gradient_clip_val=0.1)
    # Adam's first steps divide rounding errors by themselves
    assert_close(weights(model), weights(witness), atol=2e-3)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_our_optimizers_train_under_lightnings_own_precision_with_clipping(precision):
    assert not getattr(FusedAdam([nn.Parameter(torch.ones(1))]), "_step_supports_amp_scaling", False)
    model, witness = Net("fused_sgd"), Net(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    fit(model, precision, batches(4), gradient_clip_val=0.1)
    fit(witness, precision, batches(4), gradient_clip_val=0.1)
    assert_close(weights(model), weights(witness), atol=1e-5)


class ManualGrowth(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.scales = []

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        self.scales.append(self.trainer.scaler.get_scale())


@pytest.mark.parametrize("level", SCALED)
def test_the_scale_moves_after_each_manual_step(level):
    model = ManualGrowth()
    model.overflow_at = {3}
    fit(model, plugin(level, init_scale=8.0, growth_interval=2), batches(6))
    assert model.scales == [8.0, 16.0, 16.0, 8.0, 8.0, 16.0]


class Norms(Net):
    """The norm of all gradients where hooks see them."""

    def norm(self):
        return torch.cat([p.grad.float().flatten() for p in self.parameters()]).norm().item()

    def on_after_backward(self):
        self.after_backward = self.norm()

    def on_before_optimizer_step(self, optimizer):
        self.before_step = self.norm()


@pytest.mark.parametrize("level", SCALED)
def test_gradients_are_scaled_after_backward_and_unscaled_before_the_step(level):
    model = Norms("fused_sgd")
    fit(model, plugin(level, loss_scale=1024.0), batches(1))
    assert model.after_backward == pytest.approx(1024 * model.before_step, rel=1e-2)


class Casts(TorchDispatchMode):
    """Counts the casts from fp32 to bf16, by shape."""

    def __init__(self):
        super().__init__()
        self.of = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype is torch.bfloat16:
            self.of[tuple(result.shape)] = self.of.get(tuple(result.shape), 0) + 1
        return result


@pytest.mark.parametrize(("level", "times"), [("O0", 0), ("O1", 1), ("O2", 0), ("O4", 1), ("O5", 0)])
def test_a_weight_is_cast_once_in_a_forward_pass_or_never(level, times):
    class Counting(Net):
        def forward(self, x):
            with Casts() as casts:
                result = super().forward(x)
            self.casts = casts.of
            return result

    model = Counting(width=17)
    fit(model, level, batches(2))
    assert model.casts.get((17, FEATURES), 0) == times


class Unguarded(Net):
    def training_step(self, batch, batch_idx):
        if not torch.isfinite(batch[0]).all():
            return None
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("level", LEVELS)
def test_a_bad_batch_that_is_dropped_does_not_reach_batch_norms_statistics(level):
    """A skipped step cannot take back what a forward pass did to them; a step that returns None keeps out of it."""
    data = batches(4).dataset.tensors
    data[0][9, 3] = torch.inf
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), 8)
    model, witness = Unguarded("fused_sgd"), Net("fused_sgd")
    fit(model, level, loader)
    assert torch.isfinite(model.net[1].running_mean).all() and torch.isfinite(model.net[1].running_var).all()
    fit(witness, level, batches(4, only=[0, 2, 3]))
    assert_close(weights(model), weights(witness), atol=0.0)


class Probabilities(Net):
    """BCELoss of a sigmoid: torch's autocast on a CPU would compute it in half, on CUDA it raises."""

    def loss(self, batch):
        target = nn.functional.one_hot(batch[1], 4).float()
        loss = nn.BCELoss()(torch.sigmoid(self(batch[0]).float()), target)
        self.kind = loss.dtype
        return loss


@pytest.mark.parametrize("level", LEVELS)
def test_bce_loss(level):
    model, witness = Probabilities(), Probabilities()
    fit(model, level, batches(4))
    fit(witness, "32-true", batches(4))
    assert model.kind is torch.float32
    assert max(abs(a - b) for a, b in zip(model.losses, witness.losses, strict=True)) < 0.05


# --- what is left as it was -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_neither_step_nor_groups_of_an_optimizer_are_replaced(level):
    class Looking(Net):
        def on_train_batch_end(self, *_):
            optimizer = self.trainer.optimizers[0]
            assert optimizer is self.made and vars(optimizer).get("step") is self.step_of_the_scheduler
            assert optimizer.param_groups[0] is self.group
            assert all(a is b for a, b in zip(self.group["params"], self.parameters(), strict=True))

        def configure_optimizers(self):
            self.made = super().configure_optimizers()
            self.group = self.made.param_groups[0]
            self.scheduler = halving(self.made)
            self.step_of_the_scheduler = vars(self.made).get("step")  # torch's schedulers put one there
            return self.made

    model = Looking("torch_adamw")
    fit(model, level, batches(3))
    model.scheduler.step()  # one that was made early and that Lightning knows nothing of
    assert model.made.param_groups[0]["lr"] == 0.5e-2


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_what_a_user_changes_in_the_trainers_optimizers_counts(level):
    class Frozen(Net):
        def on_train_batch_start(self, batch, batch_idx):
            self.trainer.optimizers[0].param_groups[0]["lr"] = 0.0 if batch_idx else 0.1
            assert self.optimizers().param_groups[0]["lr"] == self.trainer.optimizers[0].param_groups[0]["lr"]

    model, witness = (Frozen("fused_sgd") for _ in range(2))
    fit(model, level, batches(4))
    fit(witness, level, batches(4, only=[0]))
    assert_close(*({n: p.detach() for n, p in m.named_parameters()} for m in (model, witness)), atol=0.0)


def test_a_plugins_scaler_is_its_own_and_may_be_replaced():
    one, other = plugin("O1"), plugin("O1")
    assert one.scaler is not other.scaler
    one.scaler = LossScaler(init_scale=32.0, growth_interval=1)
    made = fit(Net(), one, batches(2))
    assert made.scaler is one.scaler and one.scaler.get_scale() == 128.0
    assert other.scaler.get_scale() == 2.0**16


def test_lightning_may_ask_a_plugin_whether_it_is_there():
    """The Trainer takes `plugins` apart if it can be iterated over, and asks `if self.precision_plugin`."""
    made = plugin("O2")
    assert bool(made) and not hasattr(made, "__iter__") and not hasattr(made, "__len__")
    assert trainer(None, plugins=made).precision_plugin is made


# --- inputs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
def test_a_batch_is_cast_before_it_moves_and_integers_never(level):
    class Watching(Net):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            self.kinds = [t.dtype for t in batch]
            return batch

        def loss(self, batch):
            return super().loss(batch[:2])

    x, y = batches(1).dataset.tensors
    data = torch.utils.data.TensorDataset(x, y, y > 1, y.to(torch.int8), x.double())
    model = Watching()
    fit(model, level, torch.utils.data.DataLoader(data, 8))
    half = torch.bfloat16 if level == "O3" else torch.float32
    assert model.kinds[:4] == [half, torch.int64, torch.bool, torch.int8]
    assert model.kinds[4] in (half, torch.float64)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.filterwarnings("ignore:.*`dataloader_iter` (argument|step flavor)")
def test_a_training_step_that_draws_its_batches_itself(level):
    """Lightning casts no input there, so that strict levels meet fp32."""

    class Drawing(Net):
        def training_step(self, dataloader_iter):
            batch, batch_idx, _ = next(dataloader_iter)
            dtype = self.net[0].weight.dtype if level == "O3" else torch.float32
            return super().training_step([batch[0].to(dtype), batch[1]], batch_idx)

    model, witness = Drawing("fused_sgd"), Net("fused_sgd")
    fit(model, level, batches(3))
    fit(witness, level, batches(3))
    assert_close(weights(model), weights(witness), atol=0.0)


class Count(Callback):
    def __init__(self):
        self.batches = 0

    def on_validation_batch_end(self, *_):
        self.batches += 1


@pytest.mark.parametrize("level", LEVELS)
def test_the_sanity_check_leaves_no_trace(level):
    """Validation runs in inference mode; weights cast there would be useless for training."""
    model, witness, count = Net("fused_sgd"), Net("fused_sgd"), Count()
    trainer(level, callbacks=[count], num_sanity_val_steps=2).fit(model, batches(3), batches(2))
    assert count.batches == 4
    fit(witness, level, batches(3))
    assert_close(weights(model), weights(witness), atol=0.0)
