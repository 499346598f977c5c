"""One optimizer step, in each of its ways: every one equals unscale, clip and step written out with torch."""

import pytest
import torch
from cases import assert_close, same_bits
from torch import nn

from lightning_apex import FusedAdam, FusedSGD, LossScaler
from lightning_apex.engine import PrecisionEngine
from lightning_apex.levels import resolve

SCALE = 2.0**10
# Ours or torch's, and the torch optimizer that is the witness.
OPTIMIZERS = {
    "fused_adam": (FusedAdam, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "fused_sgd": (FusedSGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "foreign_adamw": (torch.optim.AdamW, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "foreign_sgd": (torch.optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}
CLIPS = {
    "no clip": (lambda step: None, lambda params: None),
    "norm": (lambda step: step.clip_norm(0.5), lambda params: nn.utils.clip_grad_norm_(params, 0.5)),
    "loose norm": (lambda step: step.clip_norm(1e6), lambda params: nn.utils.clip_grad_norm_(params, 1e6)),
    "value": (lambda step: step.clip_value(0.3), lambda params: nn.utils.clip_grad_value_(params, 0.3)),
}


class Bench:
    """A model under an engine, its optimizer, and the same trained with torch alone in fp32."""

    def __init__(self, level: str, name: str, **overrides) -> None:
        ours, witness, kwargs = OPTIMIZERS[name]
        self.model = nn.ModuleDict({"a": nn.Linear(5, 3), "norm": nn.BatchNorm1d(3), "b": nn.Linear(3, 2)})
        self.plain = [nn.Parameter(p.detach().clone()) for p in self.model.parameters()]
        settings = resolve(level, half_dtype=None if level in ("O0", "O4", "O5") else "float16", **overrides)
        self.engine = PrecisionEngine(settings, LossScaler(settings.loss_scale, init_scale=SCALE))
        self.engine.convert(self.model, "cpu")
        self.params = list(self.model.parameters())
        self.optimizer = ours([{"params": self.params[:2]}, {"params": self.params[2:]}], **kwargs)
        self.witness = witness(
            [{"params": self.plain[:2]}, {"params": self.plain[2:]}], foreach=False, fused=False, **kwargs
        )
        self.engine.adopt([self.optimizer])
        self.random = torch.Generator().manual_seed(3)

    def fill(self, bad: float | None = None) -> None:
        """Gradients as a backward pass of a scaled loss leaves them; the same, unscaled, for the witness."""
        scale = self.engine.scaler.get_scale()
        for i, (param, plain) in enumerate(zip(self.params, self.plain, strict=True)):
            if i == 3:  # one parameter without
                param.grad = plain.grad = None
                continue
            param.grad = (torch.randn(param.shape, generator=self.random) * scale).to(param.dtype)
            plain.grad = param.grad.float() / scale
        if bad is not None:
            self.params[0].grad.view(-1)[0] = bad

    def values(self) -> list[torch.Tensor]:
        masters = self.engine.masters
        wide = [p if masters is None or p not in masters else masters.of(p) for p in self.params]
        return [p.detach().clone() for p in wide]

    def snapshot(self) -> list[torch.Tensor]:
        states = [v for p in self.params for v in self.optimizer.state[p].values() if isinstance(v, torch.Tensor)]
        return self.values() + [t.detach().clone() for t in (*self.params, *states)]

    def check(self) -> None:
        for ours, theirs, param in zip(self.values(), self.plain, self.params, strict=True):
            assert_close(ours, theirs.detach())
            assert same_bits(param.detach(), ours.to(param.dtype))


@pytest.mark.parametrize("exposed", [False, True])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_every_way_equals_torch(level, name, clip, exposed):
    bench = Bench(level, name)
    ours, theirs = CLIPS[clip]
    for _ in range(3):
        bench.fill()
        step = bench.engine.open(bench.optimizer)
        if exposed:
            step.expose()
        ours(step)
        assert bench.engine.finish(bench.optimizer) is step
        theirs(bench.plain)
        bench.witness.step()
        bench.check()
        assert all(p.grad is None or p.grad.dtype is p.dtype for p in bench.params)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("name", ["fused_adam", "fused_sgd"])
def test_clipping_by_norm_alone_writes_no_gradient(level, name):
    bench = Bench(level, name)
    bench.fill()
    before = [None if p.grad is None else p.grad.clone() for p in bench.params]
    pointers = [None if p.grad is None else p.grad.data_ptr() for p in bench.params]
    bench.engine.open(bench.optimizer).clip_norm(0.5)
    bench.engine.finish(bench.optimizer)
    for param, expected, pointer in zip(bench.params, before, pointers, strict=True):
        assert (param.grad is None) == (expected is None)
        if expected is not None:
            assert same_bits(param.grad, expected) and param.grad.data_ptr() == pointer


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O2", "O5"])
class TestExposedGradients:
    def test_are_unscaled_fp32_where_there_are_masters_and_half_afterwards(self, level, name):
        bench = Bench(level, name)
        bench.fill()
        bench.engine.open(bench.optimizer).expose()
        for param, plain in zip(bench.params, bench.plain, strict=True):
            assert (param.grad is None) == (plain.grad is None)
            if plain.grad is not None:
                assert same_bits(param.grad, plain.grad)
        bench.engine.finish(bench.optimizer)
        halves = [p for p in bench.params if p.dtype is bench.engine.level.half_dtype]
        assert halves and all(p.grad is None or p.grad.dtype is p.dtype for p in halves)
        for param in halves:
            param.grad = None
            (param.sum() * 2).backward()
            assert param.grad.dtype is param.dtype

    def test_edits_reach_the_update(self, level, name):
        bench = Bench(level, name)
        bench.fill()
        bench.engine.open(bench.optimizer).expose()
        for param, plain in zip(bench.params, bench.plain, strict=True):
            if param.grad is not None:
                param.grad.mul_(0.001)
                plain.grad.mul_(0.001)
        bench.engine.finish(bench.optimizer)
        bench.witness.step()
        bench.check()

    def test_a_step_that_is_dropped_gives_them_back_in_half(self, level, name):
        bench = Bench(level, name)
        bench.fill()
        bench.engine.open(bench.optimizer).expose()
        bench.engine.scaler.drop(bench.optimizer)
        assert all(p.grad is None or p.grad.dtype is p.dtype for p in bench.params)

    def test_a_failing_optimizer_leaves_order(self, level, name):
        bench = Bench(level, name)
        bench.fill()
        bench.engine.open(bench.optimizer).expose()

        def fail(*_):
            raise ArithmeticError

        handle = bench.optimizer.register_step_pre_hook(fail)
        with pytest.raises(ArithmeticError):
            bench.engine.finish(bench.optimizer)
        handle.remove()
        assert all(p.grad is None or p.grad.dtype is p.dtype for p in bench.params)
        assert [p for g in bench.optimizer.param_groups for p in g["params"]] == bench.params
        bench.fill()
        bench.engine.finish(bench.optimizer)
        bench.witness.step()
        bench.check()


@pytest.mark.parametrize("exposed", [False, True])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_skipped_step_changes_nothing(level, name, bad, exposed):
    bench = Bench(level, name)
    bench.fill()
    bench.engine.finish(bench.optimizer)
    before = bench.snapshot()
    bench.fill(bad)
    step = bench.engine.open(bench.optimizer)
    if exposed:
        step.expose()
    step.clip_norm(0.5)
    assert bench.engine.finish(bench.optimizer).was_skipped()
    assert all(map(same_bits, bench.snapshot(), before))
    assert bench.engine.scaler.get_scale() == SCALE / 2
    assert bench.engine.scaler.last_overflow.parameters == ("a.weight",)


class TestTheNorm:
    @pytest.mark.parametrize("exposed", [False, True])
    @pytest.mark.parametrize("clip", ["no clip", "norm", "value"])
    @pytest.mark.parametrize("name", ["fused_adam", "foreign_sgd"])
    @pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
    def test_is_that_of_the_unscaled_gradients_before_clipping(self, level, name, clip, exposed):
        bench = Bench(level, name)
        bench.engine.measures_always = True
        bench.fill()
        step = bench.engine.open(bench.optimizer)
        expected = torch.stack([p.grad.norm() for p in bench.plain if p.grad is not None]).norm()
        if exposed:
            step.expose()
        CLIPS[clip][0](step)
        bench.engine.finish(bench.optimizer)
        assert bench.engine.last_norm.dtype is torch.float32
        if clip != "value":
            torch.testing.assert_close(bench.engine.last_norm, expected)

    def test_of_values_whose_squares_overflow_fp32(self):
        param = nn.Parameter(torch.zeros(3))
        param.grad = torch.full((3,), 1e30)
        step = LossScaler(1.0).open(FusedSGD([param], lr=1.0))
        step.clip_norm(1.0)
        step.finish()
        assert_close(param.detach(), torch.full((3,), -(3**-0.5), dtype=torch.float64))

    def test_of_nothing(self):
        param = nn.Parameter(torch.zeros(3))
        for kind in (FusedSGD, torch.optim.SGD):
            step = LossScaler(8.0).open(kind([param], lr=1.0))
            step.measures_always = True
            step.clip_norm(1.0)
            step.clip_value(1.0)
            step.finish()
            assert step.norm is None and not step.was_skipped()

    def test_the_tighter_of_two_clips_counts(self):
        values = []
        for exposed in (False, True):
            param = nn.Parameter(torch.zeros(4))
            param.grad = torch.ones(4)
            step = LossScaler(8.0).open(FusedSGD([param], lr=1.0))
            if exposed:
                step.expose()
            step.clip_norm(0.1)
            step.clip_norm(0.01)
            step.clip_norm(0.0)
            step.finish()
            values.append(param.detach().norm())
        torch.testing.assert_close(values[0], torch.tensor(0.01), rtol=1e-3, atol=0)
        torch.testing.assert_close(values[1], values[0], rtol=1e-3, atol=0)

    def test_clipped_first_and_exposed_later(self):
        bench = Bench("O2", "fused_adam")
        bench.fill()
        step = bench.engine.open(bench.optimizer)
        step.clip_norm(0.5)
        step.expose()
        nn.utils.clip_grad_norm_(bench.plain, 0.5)
        for param, plain in zip(bench.params, bench.plain, strict=True):
            if plain.grad is not None:
                assert_close(param.grad, plain.grad)
        bench.engine.finish(bench.optimizer)
        bench.witness.step()
        bench.check()


class TestScaledGradientsThatWait:
    """Gradients of one optimizer, computed at a scale that another's overflow has moved since."""

    @pytest.mark.parametrize("exposed", [False, True])
    @pytest.mark.parametrize("name", ["fused_sgd", "foreign_sgd"])
    def test_are_brought_to_the_new_scale(self, name, exposed):
        kind, _, kwargs = OPTIMIZERS[name]
        model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
        engine = PrecisionEngine(resolve("O1", half_dtype="float16"), LossScaler(init_scale=8.0))
        engine.convert(model, "cpu")
        first, second = (kind(m.parameters(), **kwargs) for m in model)
        start = model[1].weight.detach().clone()
        engine.scale(model[0].weight.sum() * torch.inf).backward()
        engine.scale(model[1].weight.sum() * 3).backward()
        if exposed:
            engine.open(second).expose()
        assert engine.finish(first, [first, second]).was_skipped()
        assert engine.scaler.get_scale() == 4.0
        assert not engine.finish(second, [first, second]).was_skipped()
        look_ahead = 1.9 if kwargs.get("nesterov") else 1.0
        torch.testing.assert_close(model[1].weight.detach(), start - 0.1 * 3 * look_ahead)

    def test_stale_gradients_are_left_alone(self):
        model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
        engine = PrecisionEngine(resolve("O1", half_dtype="float16"), LossScaler(init_scale=8.0))
        first, second = (FusedSGD(m.parameters(), lr=0.1) for m in model)
        engine.scale(model[1].weight.sum()).backward()
        engine.finish(second)
        grad = model[1].weight.grad.clone()
        assert not engine.has_fresh_gradients(second) and engine.has_gradients(second)
        model[0].weight.grad = torch.full((2, 2), torch.inf)
        engine.finish(first, [first, second])
        assert same_bits(model[1].weight.grad, grad)
