"""Loops of other shapes: adversarial training, gradient penalties, several models and losses, recurrent nets."""

import pytest
import torch
from amp_support import BF16, LEVELS, OPTIMIZERS, batch, fp32, same, scale_of, start, step
from torch import nn

from lightning_apex import FusedAdam, amp

INF = float("inf")
ADAMS = {
    "torch": lambda p: torch.optim.Adam(p, lr=2e-3, betas=(0.5, 0.999)),
    "fused": lambda p: FusedAdam(p, lr=2e-3, betas=(0.5, 0.999), adam_w_mode=False),
}


def gan():
    torch.manual_seed(4)
    generator = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 8))
    discriminator = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    return generator, discriminator


class Adversaries:
    """The DCGAN example's loop: two models, two optimizers, three losses."""

    def __init__(self, level, kind, use_amp=True, **kwargs):
        self.g, self.d = gan()
        self.optimizers = [ADAMS[kind](self.d.parameters()), ADAMS[kind](self.g.parameters())]
        self.use_amp = use_amp
        if use_amp:
            (self.d, self.g), self.optimizers = amp.initialize(
                [self.d, self.g], self.optimizers, opt_level=level, num_losses=3, verbosity=0, **kwargs
            )

    def backward(self, loss, which, loss_id):
        if not self.use_amp:
            loss.backward()
            return
        with amp.scale_loss(loss, self.optimizers[which], loss_id=loss_id) as scaled_loss:
            scaled_loss.backward()

    def step(self, index, factors=(1.0, 1.0, 1.0)):
        criterion = nn.BCEWithLogitsLoss()
        generator = torch.Generator().manual_seed(index)
        real, noise = torch.randn(8, 8, generator=generator), torch.randn(8, 4, generator=generator)
        self.d.zero_grad()
        self.backward(criterion(self.d(real), torch.ones(8, 1)) * factors[0], 0, 0)
        fake = self.g(noise)
        self.backward(criterion(self.d(fake.detach()), torch.zeros(8, 1)) * factors[1], 0, 1)
        self.optimizers[0].step()
        self.g.zero_grad()
        self.backward(criterion(self.d(fake), torch.ones(8, 1)) * factors[2], 1, 2)
        self.optimizers[1].step()

    def weights(self):
        return fp32(self.d), fp32(self.g)


@pytest.mark.parametrize("kind", ADAMS)
class TestAdversaries:
    @pytest.mark.parametrize("level", LEVELS)
    def test_learn_as_in_fp32(self, level, kind):
        plain, ours = Adversaries("O0", kind, use_amp=False), Adversaries(level, kind)
        for index in range(10):
            plain.step(index)
            ours.step(index)
        for expected, found in zip(plain.weights(), ours.weights(), strict=True):
            for name, value in expected.items():
                difference = (found[name].float() - value).abs().max()
                assert difference <= (0 if level == "O0" else 2e-2), name

    @pytest.mark.parametrize("level", ["O1", "O2"])
    @pytest.mark.parametrize("bad", range(3))
    def test_one_loss_overflows(self, level, kind, bad):
        ours = Adversaries(level, kind, init_scale=256.0)
        ours.step(0)
        before = ours.weights()
        ours.step(1, [INF if i == bad else 1.0 for i in range(3)])
        after = ours.weights()
        assert same(after[0], before[0]) is (bad < 2)
        assert same(after[1], before[1]) is (bad == 2)
        assert [scale_of(ours.optimizers[0], i) for i in range(3)] == [128.0 if i == bad else 256.0 for i in range(3)]
        ours.step(2)
        assert all(value.isfinite().all() for weights in ours.weights() for value in weights.values())

    @pytest.mark.parametrize("level", ["O1", "O2"])
    def test_one_scale_for_all_and_both_backward_passes_before_both_steps(self, level, kind):
        runs = []
        for order in ("together", "apart"):
            torch.manual_seed(0)
            models = [nn.Linear(3, 1), nn.Linear(3, 1)]
            made = [ADAMS[kind](m.parameters()) for m in models]
            amp.initialize(models, made, opt_level=level, growth_interval=1, verbosity=0, half_dtype="bfloat16")
            for index in range(3):
                x = torch.full((2, 3), float(index + 1))
                for which in range(2):
                    made[which].zero_grad()
                    factor = INF if which == 0 and index == 1 else 1.0
                    with amp.scale_loss(models[which](x).square().mean() * factor, made[which]) as scaled_loss:
                        scaled_loss.backward()
                    if order == "apart":
                        made[which].step()
                if order == "together":
                    made[0].step()
                    made[1].step()
            runs.append([fp32(m) for m in models])
        assert same(*runs)


@pytest.mark.parametrize("kind", ADAMS)
@pytest.mark.parametrize("level", LEVELS)
def test_gradient_penalty(level, kind):
    """WGAN-GP: the loss holds a gradient, and its backward pass differentiates that again."""

    def critic():
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def loss_of(model, index):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(index)).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return model(x).mean() + 10 * (gradient.float().norm(dim=1) - 1).square().mean()

    plain, ours = critic(), critic()
    by_hand, made = ADAMS[kind](plain.parameters()), ADAMS[kind](ours.parameters())
    ours, made = amp.initialize(ours, made, opt_level=level, verbosity=0)
    for index in range(8):
        by_hand.zero_grad()
        loss_of(plain, index).backward()
        by_hand.step()
        made.zero_grad()
        with amp.scale_loss(loss_of(ours, index), made) as scaled_loss:
            scaled_loss.backward()
        made.step()
    for name, value in fp32(plain).items():
        assert (fp32(ours)[name].float() - value).abs().max() <= (0 if level == "O0" else 1.6e-2), name


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_gradients_that_have_a_graph_of_their_own():
    model, made = start("O1", "sgd", nn.Linear(6, 3))
    for _ in range(2):
        with amp.scale_loss(model(batch()[0]).square().mean(), made) as scaled_loss:
            scaled_loss.backward(create_graph=True)
    made.step()
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_one_optimizer_over_two_models(level, optimizer):
    def make(use_amp):
        torch.manual_seed(6)
        models = [nn.Linear(6, 8), nn.Linear(8, 3)]
        made = OPTIMIZERS[optimizer]([p for m in models for p in m.parameters()])
        return amp.initialize(models, made, opt_level=level, verbosity=0) if use_amp else (models, made)

    runs = []
    for use_amp in (False, True):
        (first, second), made = make(use_amp)
        for index in range(4):
            made.zero_grad()
            x, y = batch(index)
            loss = nn.functional.cross_entropy(second(first(x)), y)
            if use_amp:
                with amp.scale_loss(loss, made) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
            made.step()
        runs.append((fp32(first), fp32(second)))
    for expected, found in zip(*runs, strict=True):
        for name, value in expected.items():
            assert (found[name].float() - value).abs().max() <= (0 if level == "O0" else 3e-2), name


class WordModel(nn.Module):
    """An LSTM whose output layer is its embedding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(8)
        self.encoder, self.rnn, self.decoder = nn.Embedding(11, 12), nn.LSTM(12, 12, 2), nn.Linear(12, 11)
        self.decoder.weight = self.encoder.weight

    def forward(self, words, hidden):
        output, hidden = self.rnn(self.encoder(words), hidden)
        return self.decoder(output), hidden


@pytest.mark.parametrize("optimizer", ["sgd", "fused_adam"])
@pytest.mark.parametrize("level", LEVELS)
def test_tied_weights_and_a_hidden_state_that_is_carried_on(level, optimizer):
    model, made = start(level, optimizer, WordModel())
    words = torch.arange(55).reshape(5, 11) * 7 % 11
    hidden = (torch.zeros(2, 11, 12), torch.zeros(2, 11, 12))
    losses = []
    for _ in range(12):
        made.zero_grad()
        hidden = tuple(h.detach() for h in hidden)
        output, hidden = model(words[:-1], hidden)
        loss = nn.functional.cross_entropy(output.flatten(0, 1), words[1:].flatten())
        with amp.scale_loss(loss, made) as scaled_loss:
            scaled_loss.backward()
        nn.utils.clip_grad_norm_(amp.master_params(made), 1.0)
        made.step()
        losses.append(loss.item())
    assert model.decoder.weight is model.encoder.weight
    assert losses[-1] < losses[0]
    assert len(list(amp.master_params(made))) == len(list(model.parameters()))


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("inside", [True, False])
def test_bce_loss_is_fp32_instead_of_an_error(level, inside):
    model, made = start(level, "sgd", nn.Sequential(nn.Linear(6, 1), nn.Sigmoid()), half_dtype=None)
    with amp.autocast(enabled=True) if inside else amp.disable_casts():
        loss = nn.BCELoss()(model(batch()[0]), torch.ones(8, 1))
    assert loss.dtype is torch.float32
    with amp.scale_loss(loss, made) as scaled_loss:
        scaled_loss.backward()
    made.step()


@pytest.mark.parametrize("level", LEVELS)
def test_parts_of_a_model_called_by_themselves(level):
    """Inside amp.autocast() they compute as in the whole model."""
    model, made = start(level, "sgd", half_dtype=None)
    x = batch()[0]
    if level == "O3":
        x = x.to(BF16)
    with amp.autocast(model):
        loss = model[3](model[2](model[0](x))).float().square().mean()
    with amp.scale_loss(loss, made) as scaled_loss:
        scaled_loss.backward()
    made.step()
    step(model, made)
