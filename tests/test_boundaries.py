"""Modules that compute in fp32 inside a half model, and modules that torch.autocast does not serve."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from lightning_apex.boundaries import fp32_islands, matched_inputs
from lightning_apex.engine import PrecisionEngine
from lightning_apex.levels import resolve
from lightning_apex.scaler import LossScaler

BF16 = torch.bfloat16


class Probe(nn.Module):
    """Notes what its forward finds."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.seen = []

    def forward(self, x, *, extra=None, fail=False):
        self.seen.append((x.dtype, None if extra is None else extra.dtype, torch.is_autocast_enabled("cpu")))
        if fail:
            raise ArithmeticError
        return x if self.inner is None else self.inner(x)


def autocast(enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", dtype=BF16, enabled=enabled, cache_enabled=False)


class TestIslands:
    def test_inside_everything_is_fp32_and_autocast_is_off(self):
        probe = Probe()
        fp32_islands([probe])
        with autocast():
            output = probe(torch.ones(2, dtype=BF16), extra=torch.ones(2, dtype=torch.float16))
            assert torch.is_autocast_enabled("cpu")
        assert probe.seen == [(torch.float32, torch.float32, False)]
        assert output.dtype is BF16, "half in, half out"

    def test_fp32_in_gives_fp32_out(self):
        probe = Probe()
        fp32_islands([probe])
        with autocast():
            assert probe(torch.ones(2)).dtype is torch.float32

    def test_integers_are_not_cast(self):
        embedding = nn.Embedding(4, 2)
        fp32_islands([embedding])
        with autocast():
            assert embedding(torch.tensor([1, 2])).dtype is torch.float32

    def test_nested_islands(self):
        inner = Probe()
        outer = Probe(inner)
        fp32_islands([outer, inner])
        with autocast():
            assert outer(torch.ones(2, dtype=BF16)).dtype is BF16
            assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is BF16
        assert not torch.is_autocast_enabled("cpu")
        assert inner.seen == [(torch.float32, None, False)]

    def test_autocast_that_a_user_turns_on_inside_ends_with_the_users_context(self):
        class Inner(Probe):
            def forward(self, x):
                with autocast():
                    return super().forward(x)

        inner = Inner()
        outer = Probe(inner)
        fp32_islands([outer])
        outer(torch.ones(2))
        assert inner.seen[0][2] is True
        assert not torch.is_autocast_enabled("cpu")

    @pytest.mark.parametrize("enabled", [True, False])
    def test_an_exception_inside_leaves_autocast_as_it_was(self, enabled):
        probe = Probe()
        fp32_islands([probe])
        with autocast(enabled):
            for _ in range(3):
                with pytest.raises(ArithmeticError):
                    probe(torch.ones(2), fail=True)
                assert torch.is_autocast_enabled("cpu") is enabled
            probe(torch.ones(2))
            assert torch.is_autocast_enabled("cpu") is enabled
        assert not torch.is_autocast_enabled("cpu")

    def test_an_exception_in_a_nested_island(self):
        class Failing(nn.Module):
            def forward(self, x):
                raise ArithmeticError

        failing = Failing()
        outer = Probe(failing)
        fp32_islands([outer, failing])
        with autocast():
            with pytest.raises(ArithmeticError):
                outer(torch.ones(2))
            assert torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_enabled("cpu")

    def test_a_pre_hook_that_fails_before_the_island(self):
        probe = Probe()

        def refuse(*_):
            raise ArithmeticError

        probe.register_forward_pre_hook(refuse)
        fp32_islands([probe])
        with autocast():
            with pytest.raises(ArithmeticError):
                probe(torch.ones(2))
            assert torch.is_autocast_enabled("cpu")

    def test_removed_handles_leave_nothing(self):
        probe = Probe()
        for handle in fp32_islands([probe]):
            handle.remove()
        with autocast():
            probe(torch.ones(2, dtype=BF16))
        assert probe.seen == [(BF16, None, True)]
        assert not probe._forward_hooks and not probe._forward_pre_hooks and not probe._forward_hooks_always_called

    def test_copies_have_islands_of_their_own(self):
        probe = Probe()
        fp32_islands([probe])
        for twin in (copy.deepcopy(probe), pickle.loads(pickle.dumps(probe))):
            with autocast():
                assert twin(torch.ones(2, dtype=BF16)).dtype is BF16
            assert twin.seen == [(torch.float32, None, False)]
        assert probe.seen == []

    def test_gradients_pass_through(self):
        linear = nn.Linear(2, 2)
        fp32_islands([linear])
        x = torch.ones(2, dtype=BF16, requires_grad=True)
        with autocast():
            linear(x).sum().backward()
        assert x.grad.dtype is BF16 and linear.weight.grad.dtype is torch.float32


def image(*shape: int) -> tuple:
    return (torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape),)


# Modules and fp32 inputs for them; each must run, forward and backward, with half weights.
UNSERVED = {
    "LSTM": (lambda: nn.LSTM(3, 4), image(2, 1, 3)),
    "LSTM with a state": (lambda: nn.LSTM(3, 4), (*image(2, 1, 3), (torch.zeros(1, 1, 4), torch.zeros(1, 1, 4)))),
    "LSTM packed": (lambda: nn.LSTM(3, 4), (pack_sequence([torch.ones(2, 3), torch.ones(1, 3)]),)),
    "GRU": (lambda: nn.GRU(3, 4, 2, bidirectional=True), image(2, 1, 3)),
    "RNN": (lambda: nn.RNN(3, 4), image(2, 1, 3)),
    "LSTMCell": (lambda: nn.LSTMCell(3, 4), image(2, 3)),
    "LayerNorm": (lambda: nn.LayerNorm(3), image(2, 3)),
    "RMSNorm": (lambda: nn.RMSNorm(3), image(2, 3)),
    "GroupNorm": (lambda: nn.GroupNorm(1, 3), image(2, 3)),
    "InstanceNorm": (lambda: nn.InstanceNorm1d(3, affine=True), image(2, 3, 4)),
    "PReLU": (lambda: nn.PReLU(), image(2, 3)),
    "Bilinear": (lambda: nn.Bilinear(3, 3, 2), (*image(2, 3), *image(2, 3))),
    "BatchNorm": (lambda: nn.BatchNorm1d(3), image(2, 3)),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(4, 2), image(2, 1, 4) * 3),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(4, 2, dropout=0.0), image(2, 1, 4)),
    "Conv2d": (lambda: nn.Conv2d(1, 2, 1), image(1, 1, 2, 2)),
    "AdaptiveLogSoftmax": (lambda: nn.AdaptiveLogSoftmaxWithLoss(4, 6, [2]), (*image(2, 4), torch.tensor([0, 3]))),
}


def engine_for(level: str, keep=()) -> PrecisionEngine:
    half = "float16" if level in ("O1", "O2", "O3") else None
    return PrecisionEngine(resolve(level, half_dtype=half), LossScaler(1.0), keep)


def first_tensor(output):
    return output if isinstance(output, torch.Tensor) else first_tensor(output[0])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("name", UNSERVED)
def test_an_fp32_input_meets_half_weights(name, level, training):
    make, inputs = UNSERVED[name]
    torch.manual_seed(0)
    module = make().train(training)
    reference = first_tensor(copy.deepcopy(module)(*inputs))
    engine = engine_for(level)
    engine.convert(module, "cpu")
    with engine.forward_context():
        output = first_tensor(module(*inputs))
    output.float().sum().backward()
    torch.testing.assert_close(output.float(), reference, rtol=0.05, atol=0.05)
    assert all(p.grad is not None and p.grad.dtype is p.dtype for p in module.parameters())
    engine.restore()
    torch.testing.assert_close(first_tensor(module(*inputs)), reference)


def test_matched_inputs_leave_alone_what_has_no_half_weights():
    assert (
        matched_inputs(nn.Sequential(nn.LayerNorm(3), nn.LSTM(3, 3), nn.LayerNorm(3, elementwise_affine=False))) == []
    )
    assert len(matched_inputs(nn.Sequential(nn.LayerNorm(3).half(), nn.Linear(3, 3).half()))) == 1


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_keep_fp32_holds_for_weights_and_arithmetic(level):
    model = nn.Sequential(nn.Linear(4, 4), Probe(nn.LayerNorm(4)), nn.Linear(4, 4))
    engine = engine_for(level, ("1",))
    engine.convert(model, "cpu")
    with engine.forward_context():
        output = model(torch.ones(2, 4))
    assert model[1].inner.weight.dtype is torch.float32
    assert model[1].seen == [(torch.float32, None, False)]
    assert output.dtype is engine.level.half_dtype
    engine.restore()
    model(torch.ones(2, 4))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_weight_tied_to_a_kept_module_stays_fp32():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False))
    model[2].weight = model[0].weight
    engine = engine_for("O5", ("2",))
    engine.convert(model, "cpu")
    with engine.forward_context():
        model(torch.arange(8)).float().sum().backward()
    assert model[0].weight is model[2].weight
    assert model[2].weight.dtype is torch.float32


def test_lazy_modules_are_refused_or_work_but_nothing_is_left_half_done():
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3))
    engine = engine_for("O5")
    with pytest.raises(ValueError, match=r"1\.weight"):
        engine.convert(model, "cpu")
    assert model[0].weight.dtype is torch.float32
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in [model, model[0]])
