"""Models and trainers off the beaten track."""

import io
import pickle

import pytest
import torch
from helpers import (
    CLASSES,
    FEATURES,
    LEVELS,
    SCALED,
    Net,
    all_fp32,
    assert_close,
    assert_same,
    batches,
    fit,
    plugin,
    trainer,
    weights,
)
from lightning.pytorch import Callback
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint


def close_to_fp32(make, level, tolerance=0.1, **kwargs):
    model, witness = make(), make()
    witness.load_state_dict(model.state_dict())
    fit(model, level, batches(4), **kwargs)
    fit(witness, "32-true", batches(4), **kwargs)
    assert max(abs(a - b) for a, b in zip(model.losses, witness.losses, strict=True)) < tolerance
    assert all_fp32(model)
    return model


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm"])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_parametrizations(level, kind, kept):
    def make():
        model = Net()
        getattr(nn.utils.parametrizations, kind)(model.net[0])
        return model

    close_to_fp32(make, plugin(level, keep_fp32=["net.0"] if kept else []))


@pytest.mark.parametrize("level", LEVELS)
def test_parameter_lists_dicts_and_bare_parameters(level):
    class Bare(Net):
        def __init__(self):
            super().__init__()
            self.many = nn.ParameterList([torch.ones(CLASSES), torch.ones(())])
            self.named = nn.ParameterDict({"a_b": torch.zeros(CLASSES), "second": torch.zeros(CLASSES)})
            self.scalar = nn.Parameter(torch.tensor(1.0))
            self.empty = nn.Parameter(torch.empty(0))

        def forward(self, x):
            out = self.net(x) * self.many[0] * self.many[1] * self.scalar
            return out + self.named["a_b"] + self.named["second"] + self.empty.sum()

    model = close_to_fp32(Bare, level, 0.2)
    assert model.named["second"].abs().max() > 0


@pytest.mark.parametrize("level", LEVELS)
def test_configure_model_and_setup_build_layers(level):
    class Late(Net):
        def setup(self, stage):
            if not hasattr(self, "head"):
                torch.manual_seed(5)
                self.head = nn.Linear(CLASSES, CLASSES)

        def configure_model(self):
            if not hasattr(self, "tail"):
                torch.manual_seed(6)
                self.tail = nn.Linear(CLASSES, CLASSES)

        def forward(self, x):
            return self.tail(self.head(self.net(x)))

    model, witness = Late(), Late()
    fit(model, level, batches(4))
    fit(witness, "32-true", batches(4))
    assert max(abs(a - b) for a, b in zip(model.losses, witness.losses, strict=True)) < 0.1
    assert all_fp32(model)


@pytest.mark.parametrize("level", LEVELS)
def test_transformer_evaluates_on_its_fast_path(level):
    class Encoder(Net):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(FEATURES, 2, 16, dropout=0.0, batch_first=True)
            self.net = nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False))
            self.head = nn.Linear(FEATURES, CLASSES)

        def forward(self, x):
            return self.head(self.net(x[:, None]).mean(1))

    model = Encoder()
    made = trainer(level)
    made.fit(model, batches(2), batches(1))
    (out,) = made.predict(model, batches(1))
    (expected,) = trainer("32-true").predict(model, batches(1))
    torch.testing.assert_close(out.float(), expected, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("level", LEVELS)
def test_metrics_keep_fp32_sums(level):
    torchmetrics = pytest.importorskip("torchmetrics")

    class Measured(Net):
        def __init__(self):
            super().__init__()
            self.mean = torchmetrics.MeanMetric()
            self.accuracy = torchmetrics.classification.MulticlassAccuracy(CLASSES)

        def validation_step(self, batch, batch_idx):
            out = self(batch[0])
            self.accuracy(out, batch[1])
            self.mean(nn.functional.cross_entropy(out.float(), batch[1]))
            self.log("acc", self.accuracy)
            self.log("loss", self.mean)

    model = Measured()
    made = trainer(level)
    made.fit(model, batches(3), batches(4))
    assert model.mean.mean_value.dtype is torch.float32
    assert 0 <= float(made.callback_metrics["acc"]) <= 1


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "kwargs", [{"fast_dev_run": 2}, {"barebones": True}, {"detect_anomaly": True}, {"inference_mode": False}]
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.filterwarnings("ignore:You requested `Trainer\\(barebones=True\\)`")
def test_trainer_options(level, kwargs):
    model = Net()
    if "barebones" in kwargs:
        kwargs = kwargs | dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        )
        model.validation_step = None
        made = trainer(level, **kwargs)
        made.fit(model, batches(2))
    else:
        made = trainer(level, **kwargs)
        made.fit(model, batches(2), batches(1))
    assert len(model.losses) == 2
    assert all_fp32(model)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_no_optimizer(level):
    class Without(Net):
        def configure_optimizers(self):
            return None

    model = Without()
    before = weights(model)
    fit(model, level, batches(2))
    assert_close({"w": model.net[0].weight}, {"w": before["net.0.weight"]}, atol=5e-3 if level == "O3" else 0.0)


@pytest.mark.parametrize("level", LEVELS)
def test_keyboard_interrupt_restores_fp32(level):
    class Stop(Net):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            raise KeyboardInterrupt

    model = Stop()
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        fit(model, level, batches(3))
    assert all_fp32(model)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_submodule_state_dicts_are_fp32_during_training(level):
    class Look(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.net = {n: t.clone() for n, t in pl_module.net.state_dict().items()}
            file = io.BytesIO()
            torch.save(pl_module.net[3].state_dict(), file)
            self.bytes = file.tell()
            self.all = weights(pl_module)
            pickle.dumps(pl_module.net)

    look = Look()
    fit(Net(), level, batches(2), callbacks=[look])
    assert_same(look.net, {n.removeprefix("net."): t for n, t in look.all.items()})
    assert all(t.dtype is torch.float32 for t in look.net.values() if t.is_floating_point())


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("clip", [False, True])
def test_an_optimizer_that_accumulates_while_another_steps(level, clip):
    """The scale moves with every step of one optimizer, under the gradients another one is still collecting."""

    class Two(Net):
        def __init__(self, *args):
            super().__init__(*args)
            self.automatic_optimization = False
            self.other = nn.Linear(FEATURES, CLASSES)

        def configure_optimizers(self):
            return self.make_optimizer(self.net.parameters()), self.make_optimizer(self.other.parameters())

        def training_step(self, batch, batch_idx):
            slow, fast = self.optimizers()
            x, y = batch
            self.manual_backward(nn.functional.cross_entropy(self.net(x), y))
            if clip and batch_idx % 3 == 0:
                self.clip_gradients(slow, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            fast.zero_grad()
            self.manual_backward(nn.functional.cross_entropy(self.other(x), y))
            fast.step()
            if batch_idx % 3 == 2:
                slow.step()
                slow.zero_grad()

    model, witness = Two("torch_sgd"), Two("torch_sgd")
    witness.load_state_dict(model.state_dict())
    fit(model, plugin(level, init_scale=8.0, growth_interval=1, max_loss_scale=2.0**20), batches(9))
    fit(witness, "32-true", batches(9))
    assert_close(weights(model), weights(witness), atol=8e-3)
    assert level in SCALED


class Checkpointed(Net):
    """Re-entrant checkpointing repeats its convolution in the backward pass."""

    def __init__(self, manual=False):
        super().__init__("fused_sgd")
        self.automatic_optimization = not manual
        self.conv = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x):
        x = x.requires_grad_().to(self.conv.weight.dtype)
        return self.net(checkpoint(lambda x: self.conv(x[:, None])[:, 0], x, use_reentrant=True))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
        return None


class Backwards(TorchDispatchMode):
    """The types in which convolutions are differentiated; entered first, it sees what reaches torch."""

    def __init__(self):
        super().__init__()
        self.types = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution_backward.default:
            self.types.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_reentrant_checkpointing_of_fp16_convolutions(level, manual):
    with Backwards() as seen:
        fit(Checkpointed(manual), plugin(level, half_dtype="float16"), batches(2))
    assert seen.types == {torch.float32}
