"""A level at work without Lightning: forward passes, inputs, optimizers of every origin, and the way back."""

import copy
import gc
import warnings

import pytest
import torch
from cases import assert_close, same_bits
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_apex import FusedAdam, FusedSGD, LossScaler
from lightning_apex.engine import PrecisionEngine
from lightning_apex.levels import resolve

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]


def engine_for(level: str, model: nn.Module, **overrides) -> PrecisionEngine:
    settings = resolve(level, **overrides).on("cpu")
    engine = PrecisionEngine(settings, LossScaler(settings.loss_scale, init_scale=2.0**4))
    engine.convert(model, "cpu")
    return engine


def net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def batch() -> torch.Tensor:
    return torch.linspace(-2, 2, 24).reshape(4, 6)


def train(engine, model, optimizer, steps: int = 1, x: torch.Tensor | None = None) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        with engine.forward_context():
            loss = model(engine.convert_input(batch() if x is None else x)).float().square().mean()
        engine.scale(loss).backward()
        engine.finish(optimizer)


class TestForward:
    @pytest.mark.parametrize(
        ("level", "inside", "output"),
        [
            ("O0", torch.float32, torch.float32),
            ("O1", torch.float32, torch.bfloat16),
            ("O2", torch.bfloat16, torch.bfloat16),
            ("O3", torch.bfloat16, torch.bfloat16),
            ("O4", torch.float32, torch.bfloat16),
            ("O5", torch.bfloat16, torch.bfloat16),
        ],
    )
    def test_types(self, level, inside, output):
        model = net()
        engine = engine_for(level, model)
        with engine.forward_context():
            result = model(engine.convert_input(batch()))
        assert model[3].weight.dtype is inside and result.dtype is output
        assert not torch.is_autocast_enabled("cpu")

    @pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
    def test_losses_and_reductions_are_fp32(self, level):
        model = net()
        engine = engine_for(level, model)
        with engine.forward_context():
            logits = model(batch())
            assert nn.functional.cross_entropy(logits, torch.tensor([0, 1, 0, 1])).dtype is torch.float32
            assert nn.functional.mse_loss(logits, torch.zeros(4, 2)).dtype is torch.float32

    @pytest.mark.parametrize("level", LEVELS)
    def test_only_strict_levels_cast_inputs(self, level):
        engine = engine_for(level, net())
        data = {"x": torch.ones(2), "y": [torch.arange(2)], "name": "n"}
        result = engine.convert_input(data)
        assert result["x"].dtype is (torch.bfloat16 if level == "O3" else torch.float32)
        assert result["y"][0].dtype is torch.int64 and (result is data) == (level != "O3")

    @pytest.mark.parametrize("level", ["O1", "O4"])
    def test_an_evaluation_leaves_no_cast_weights_behind(self, level):
        """Under one autocast a weight cast without a graph would be used again by the training pass."""
        model = net()
        engine = engine_for(level, model)
        with engine.forward_context():
            with torch.no_grad():
                model(batch())
            model(batch()).float().sum().backward()
        assert all(p.grad is not None for p in model.parameters())

    @pytest.mark.parametrize("level", LEVELS)
    def test_weights_edited_by_hand_count_at_once(self, level):
        model = net().eval()
        engine = engine_for(level, model)
        with torch.no_grad(), engine.forward_context():
            model(engine.convert_input(batch()))
            model[3].weight.zero_()
            model[3].bias.fill_(0.5)
            assert model(engine.convert_input(batch())).eq(0.5).all()

    @pytest.mark.parametrize("level", LEVELS)
    def test_activation_checkpointing(self, level):
        gradients = []
        for wrapped in (False, True):
            model = net().eval()
            engine = engine_for(level, model)
            x = engine.convert_input(batch()).requires_grad_()
            with engine.forward_context():
                out = checkpoint(model, x, use_reentrant=False) if wrapped else model(x)
            out.float().sum().backward()
            gradients.append([p.grad for p in model.parameters()])
        assert all(map(same_bits, *gradients))

    @pytest.mark.parametrize("level", LEVELS)
    def test_a_model_that_raises_leaves_global_state_alone(self, level):
        class Failing(nn.Linear):
            def forward(self, x):
                raise ArithmeticError

        model = Failing(2, 2)
        engine = engine_for(level, model)
        with pytest.raises(ArithmeticError), engine.forward_context():
            model(engine.convert_input(torch.ones(1, 2)))
        assert not torch.is_autocast_enabled("cpu") and torch.get_default_dtype() is torch.float32
        assert torch.is_autocast_cache_enabled()


class TestWayBack:
    @pytest.mark.parametrize("kind", [FusedAdam, FusedSGD, torch.optim.AdamW])
    @pytest.mark.parametrize("level", LEVELS)
    def test_after_training_the_weights_are_the_masters_and_hooks_are_gone(self, level, kind):
        model = net()
        objects = list(model.parameters())
        engine = engine_for(level, model)
        optimizer = kind(model.parameters(), lr=0.01)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine.adopt([optimizer])
        train(engine, model, optimizer, 2)
        state = copy.deepcopy(model.state_dict())
        engine.restore()
        assert all(p is q and p.dtype is torch.float32 for p, q in zip(model.parameters(), objects, strict=True))
        assert all(same_bits(v, model.state_dict()[k]) for k, v in state.items())
        for module in model.modules():
            assert not module._forward_hooks and not module._forward_pre_hooks
            assert not module._state_dict_hooks and not module._load_state_dict_pre_hooks
        assert not optimizer._optimizer_load_state_dict_pre_hooks or isinstance(optimizer, FusedAdam | FusedSGD)
        (model(batch()).sum()).backward()
        optimizer.step()

    def test_levels_may_follow_each_other_on_one_model(self):
        model = net()
        for level in [*LEVELS, *reversed(LEVELS)]:
            engine = engine_for(level, model)
            optimizer = FusedSGD(model.parameters(), lr=0.01)
            engine.adopt([optimizer])
            train(engine, model, optimizer)
            engine.restore()
            engine.restore()
        assert all(p.dtype is torch.float32 and p.isfinite().all() for p in model.parameters())

    @pytest.mark.parametrize("level", ["O2", "O5"])
    def test_many_passes_and_fits_keep_nothing_alive(self, level):
        model = net()

        def one_round() -> int:
            engine = engine_for(level, model)
            optimizer = FusedAdam(model.parameters(), lr=1e-3)
            engine.adopt([optimizer])
            with torch.no_grad(), engine.forward_context():
                for _ in range(10):
                    model(batch())
            train(engine, model, optimizer, 3)
            engine.restore()
            for param in model.parameters():
                param.grad = None
            del engine, optimizer
            gc.collect()
            return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

        one_round()
        counts = {one_round() for _ in range(4)}
        assert len(counts) == 1, counts


class TestOptimizers:
    @pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam])
    @pytest.mark.parametrize("level", ["O2", "O5"])
    def test_loading_state_keeps_it_fp32(self, level, kind):
        model = net()
        engine = engine_for(level, model)
        optimizer = kind(model.parameters(), lr=0.01)
        engine.adopt([optimizer])
        train(engine, model, optimizer, 2)
        param = model[0].weight
        moments = [n for n, v in optimizer.state[param].items() if v.shape == param.shape]
        assert moments and all(optimizer.state[param][n].dtype is torch.float32 for n in moments)
        for name in moments:
            optimizer.state[param][name].fill_(1e-9)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert all(
            same_bits(optimizer.state[param][n], torch.full_like(param, 1e-9, dtype=torch.float32)) for n in moments
        )
        train(engine, model, optimizer)

    @pytest.mark.parametrize("kind", [FusedAdam, torch.optim.AdamW])
    @pytest.mark.parametrize("level", LEVELS)
    def test_a_layer_that_is_unfrozen_later_trains(self, level, kind):
        model = net()
        model[0].requires_grad_(False)
        engine = engine_for(level, model, half_dtype=None if level == "O0" else "bfloat16")
        optimizer = kind(model[1:].parameters(), lr=0.01)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine.adopt([optimizer])
        train(engine, model, optimizer, 2)
        frozen = model.state_dict()["0.weight"].clone()
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.1})
        train(engine, model, optimizer)
        assert optimizer.state[model[0].weight]["step"] == 1
        moved = (model.state_dict()["0.weight"] - frozen).abs()
        assert 0.05 < moved.max() < 0.2
        assert model[0].weight.grad.dtype is model[0].weight.dtype

    def test_a_parameter_added_after_the_cast_gets_a_master(self):
        model = net()
        engine = engine_for("O5", model)
        late = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        for kind in (FusedSGD, torch.optim.SGD):
            optimizer = kind([late], lr=1e-6)
            for _ in range(100):
                engine.scale((late * 1.0).sum()).backward()
                engine.finish(optimizer)
                late.grad = None
        assert_close(engine.masters.of(late), torch.full((4,), 1 - 2e-4, dtype=torch.float64))

    def test_o3_warns_of_an_eps_that_fp16_does_not_hold(self):
        model = net()
        engine = engine_for("O3", model, half_dtype="float16")
        with pytest.warns(UserWarning, match=r"AdamW with eps=1e-08 .*float16.*eps=1e-4"):
            engine.adopt([torch.optim.AdamW(model.parameters())])
        engine.adopt([FusedAdam(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)])
        engine.adopt([torch.optim.AdamW(model.parameters(), eps=1e-4)])

    def test_o3_with_fused_adam_stays_finite(self):
        model = net()
        engine = engine_for("O3", model, half_dtype="float16")
        optimizer = FusedAdam(model.parameters(), lr=1e-3)
        engine.adopt([optimizer])
        assert engine.masters is None
        train(engine, model, optimizer, 20)
        assert all(p.isfinite().all() and p.dtype is torch.float16 for p in model.parameters())

    @pytest.mark.parametrize("level", ["O1", "O2", "O5"])
    def test_accumulated_micro_batches_equal_one_large_batch(self, level):
        results = []
        for parts in (1, 4):
            model = net().eval()
            engine = engine_for(level, model)
            optimizer = FusedAdam(model.parameters(), lr=0.01)
            engine.adopt([optimizer])
            for _ in range(3):
                for x in batch().chunk(parts):
                    with engine.forward_context():
                        loss = model(x).float().square().mean() / parts
                    engine.scale(loss).backward()
                engine.open(optimizer).clip_norm(1.0)
                engine.finish(optimizer)
                optimizer.zero_grad()
            results.append(model.state_dict())
            assert engine.scaler.skipped_steps == 0
        for name, value in results[0].items():
            torch.testing.assert_close(value, results[1][name], rtol=0.02, atol=0.002)

    @pytest.mark.parametrize("kind", [FusedAdam, torch.optim.AdamW])
    @pytest.mark.parametrize("level", ["O0", "O4"])
    def test_what_is_handed_to_a_step_that_lightning_makes(self, level, kind):
        model, plain = net(), net()
        engine = engine_for(level, model)
        optimizer, witness = kind(model.parameters(), lr=0.01), kind(plain.parameters(), lr=0.01)
        assert not engine.steps_itself
        engine.measures_always = True
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
        engine.open(optimizer).clip_norm(0.1)
        engine.hand_over(optimizer)
        optimizer.step()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        witness.step()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(p, q.detach().double())
        torch.testing.assert_close(engine.last_norm, norm)
        assert engine.scaler.pending(optimizer) is None
