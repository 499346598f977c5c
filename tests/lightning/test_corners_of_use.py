"""Uses that one does not think of at first: nested trainers, weights tied late, hooks on optimizers."""

from __future__ import annotations

import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from helpers import LEVELS, MASTERED, SCALED, Net, all_fp32, batches, fit, plugin, trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from torch import nn

from lightning_apex import FusedAdam, FusedSGD, LossScaler


def test_a_dropped_batch_after_unscale() -> None:
    param = nn.Parameter(torch.ones(4))
    optimizer, scaler = FusedSGD([param], lr=0.0), LossScaler(init_scale=1024.0)
    scaler.scale(param.sum()).backward()
    scaler.unscale_(optimizer)
    optimizer.zero_grad()
    scaler.scale(param.sum()).backward()
    scaler.unscale_(optimizer)
    assert torch.equal(param.grad, torch.ones(4))


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_one_plugin_in_a_second_trainer_at_once_is_refused(level: str) -> None:
    shared = plugin(level)

    class Probe(Callback):
        message = ""

        def on_train_batch_end(self, outer: Any, pl_module: Any, *_: Any) -> None:
            if not self.message:
                with pytest.raises(MisconfigurationException) as refused:
                    trainer(shared).validate(Net(), batches(1))
                self.message = str(refused.value)

    probe, model, alone = Probe(), Net(), Net()
    trainer(shared, callbacks=[probe]).fit(model, batches(4))
    fit(alone, level, batches(4))
    assert "own ApexPrecision" in probe.message
    assert model.losses == alone.losses  # the run it was taken from went on as if nothing had happened
    assert all_fp32(model)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_complex_parameters_with_an_optimizer_of_torch(level: str) -> None:
    class Spectral(Net):
        def __init__(self) -> None:
            super().__init__("torch_sgd")
            self.phase = nn.Parameter(torch.ones(1, dtype=torch.complex64))

        def loss(self, batch: Any) -> torch.Tensor:
            return super().loss(batch).float() + (self.phase * 0.5).abs().square().sum()

    model, native = Spectral(), Spectral()
    fit(model, level, batches(3), gradient_clip_val=0.5)
    trainer("32-true", gradient_clip_val=0.5).fit(native, batches(3))
    torch.testing.assert_close(model.phase, native.phase, rtol=1e-2, atol=1e-3)
    assert model.phase.dtype is torch.complex64


@pytest.mark.parametrize("level", MASTERED)
def test_weights_tied_after_the_cast_are_saved_as_their_master(level: str) -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.twin = nn.Linear(16, 4)

        def on_fit_start(self) -> None:
            self.twin.weight = self.net[3].weight

        def on_train_end(self) -> None:
            state = self.state_dict()
            assert torch.equal(state["twin.weight"], state["net.3.weight"])
            assert not torch.equal(state["twin.weight"], self.net[3].weight.float())  # more than the rounded value

    fit(Tied(), level, batches(3))


@pytest.mark.parametrize("level", SCALED)
@pytest.mark.parametrize("optimizer", ["fused_adam", "torch_adamw"])
def test_a_step_pre_hook_sees_unscaled_gradients(level: str, optimizer: str) -> None:
    norms: dict[str, list[float]] = {level: [], "O0": []}

    def run(at: str) -> None:
        model = Net(optimizer)
        made = model.make_optimizer(model.parameters())

        def note(opt: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            grads = [p.grad.float() for g in opt.param_groups for p in g["params"] if p.grad is not None]
            norms[at].append(float(torch.nn.utils.get_total_norm(grads)))

        made.register_step_pre_hook(note)
        model.make_optimizer = lambda params: made
        fit(model, at, batches(3))

    run(level)
    run("O0")
    # At O0 a pre-hook runs before the closure, and sees the gradients of the step before.
    assert norms[level][:2] == pytest.approx(norms["O0"][1:], rel=0.05)


def test_a_scheduler_pickles_during_training() -> None:
    class Pickles(Callback):
        copied: Any = None

        def on_train_batch_end(self, outer: Any, *_: Any) -> None:
            self.copied = pickle.loads(pickle.dumps(outer.lr_scheduler_configs[0].scheduler))

    watch = Pickles()
    model = Net(scheduler=lambda o: {"scheduler": torch.optim.lr_scheduler.StepLR(o, 2), "interval": "step"})
    fit(model, "O2", batches(3), callbacks=[watch])
    assert type(watch.copied) is torch.optim.lr_scheduler.StepLR
    assert watch.copied.last_epoch == 3


@pytest.mark.parametrize("level", MASTERED)
def test_modules_that_cannot_compute_in_half(level: str) -> None:
    class Odd(Net):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))
            self.bag = nn.EmbeddingBag(4, 8, mode="sum")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            index = torch.zeros(len(x), 2, dtype=torch.long)
            return self.net(self.turn(x) + self.bag(index, per_sample_weights=torch.ones(len(x), 2)))

    model = Odd()
    fit(model, level, batches(4))
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert model.losses[-1] < 10


@pytest.mark.parametrize("level", LEVELS)
def test_moments_that_moved_away_are_not_held(level: str) -> None:
    model = Net()
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    model.make_optimizer = lambda params: optimizer
    seen: list[weakref.ref[torch.Tensor]] = []

    class Watch(Callback):
        def on_train_end(self, *_: Any) -> None:
            seen.extend(weakref.ref(state["exp_avg"]) for state in optimizer.state.values())

    fit(model, level, batches(2), callbacks=[Watch()])
    optimizer.state.clear()
    gc.collect()
    assert seen
    assert all(ref() is None for ref in seen)


class Lookahead(torch.optim.Optimizer):
    """A wrapper as many copy it: it shares groups and state, and never calls Optimizer.__init__."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class Owner(torch.optim.Optimizer):
    """A wrapper with groups of its own around an optimizer of the same parameters."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, {"lr": 0.1})
        self.inner = FusedSGD(params, lr=0.1)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@pytest.mark.parametrize("level", LEVELS)
def test_a_wrapper_that_shares_groups(level: str) -> None:
    model, plain = Net(lambda p: Lookahead(torch.optim.SGD(p, lr=0.1))), Net("torch_sgd")
    fit(model, level, batches(3))
    fit(plain, level, batches(3))
    assert model.losses == plain.losses


@pytest.mark.parametrize("level", MASTERED)
def test_a_wrapper_that_goes_past_the_masters_is_refused(level: str) -> None:
    with pytest.raises(RuntimeError, match=r"Owner\.step\(\) updated.*share its param_groups"):
        fit(Net(Owner), level, batches(1))


def test_state_dict_hooks_of_the_user_come_after_ours() -> None:
    class Renames(Net):
        def __init__(self) -> None:
            super().__init__()

            def rename(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
                state[prefix + "w"] = state.pop(prefix + "weight")

            self.net[3].register_state_dict_post_hook(rename)

        def on_train_end(self) -> None:
            assert self.net[3].state_dict()["w"].dtype is torch.float32

    fit(Renames(), "O5", batches(1))


# The compiler looks at .grad of what crosses a graph break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("level", ["O1", "O5"])
def test_compiled_module_with_a_kept_one(level: str) -> None:
    eager, compiled = Net(), Net()
    compiled.net = torch.compile(compiled.net, backend="eager", dynamic=True)
    for model in (eager, compiled):
        trainer(plugin(level, keep_fp32=[nn.BatchNorm1d])).fit(model, batches(3))
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-2)


@pytest.mark.parametrize("clip", [{}, {"gradient_clip_algorithm": "value"}])
@pytest.mark.parametrize("optimizer", ["fused_adam", "torch_sgd"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_hook_that_drops_the_gradients(level: str, optimizer: str, clip: dict[str, str]) -> None:
    class Drops(Net):
        def on_before_optimizer_step(self, opt: torch.optim.Optimizer) -> None:
            self.zero_grad()

    model = Drops(optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    made = fit(model, level, batches(2), gradient_clip_val=0.5, **clip)
    if level == "O3":  # which has nothing but rounded weights
        before = [old.bfloat16().float() for old in before]
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert made.precision_plugin.scaler.skipped_steps == 0


@pytest.mark.parametrize("level", MASTERED)
def test_a_step_post_hook_meets_the_new_weights(level: str) -> None:
    model, plain = Net("torch_sgd"), Net("torch_sgd")
    made = model.make_optimizer(model.parameters())
    made.register_step_post_hook(lambda *_: model.state_dict())
    model.make_optimizer = lambda params: made
    fit(model, level, batches(3))
    fit(plain, level, batches(3))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("optimizer", ["fused_adam", "torch_adamw"])
@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_tensors_made_or_moved_after_the_cast(level: str, optimizer: str) -> None:
    class Pruned(Net):
        def on_fit_start(self) -> None:
            nn.utils.prune.l1_unstructured(self.net[3], "weight", 0.5)
            nn.utils.parametrizations.weight_norm(self.net[0])

        def on_train_end(self) -> None:
            state = self.state_dict()
            assert all(t.dtype is torch.float32 for t in state.values() if t.is_floating_point())
            nn.utils.parametrize.remove_parametrizations(self.net[0], "weight")

    model = Pruned(optimizer)
    fit(model, level, batches(3))
    assert all_fp32(model)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_scripted_module_is_refused_where_weights_are_cast(level: str) -> None:
    model = Net()
    model.net[2] = torch.jit.script(nn.ReLU())
    with pytest.raises(ValueError, match=r"'net.2' is a torch.jit.ScriptModule"):
        fit(model, level, batches(1))
    assert all_fp32(model)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_weights_that_somebody_made_fp32_meanwhile(level: str) -> None:
    class Widens(Net):
        def on_train_end(self) -> None:
            self.net[3].weight.data = torch.full_like(self.net[3].weight, 1.0001, dtype=torch.float32)

    model = Widens()
    fit(model, level, batches(2))
    assert all_fp32(model)
    assert torch.equal(model.net[3].weight, torch.full_like(model.net[3].weight, 1.0001))


def test_a_loss_scaled_early_leaves_clipped_gradients_alone() -> None:
    param = nn.Parameter(torch.ones(4))
    optimizer, scaler = torch.optim.SGD([param], lr=1.0), LossScaler(init_scale=1024.0)
    scaler.scale(param.sum()).backward()
    scaler.unscale_(optimizer)
    later = scaler.scale(2 * param.sum())
    torch.nn.utils.clip_grad_norm_([param], 1.0)
    scaler.step(optimizer)
    torch.testing.assert_close(param.detach(), torch.full((4,), 0.5))
    optimizer.zero_grad()
    later.backward()
    scaler.unscale_(optimizer)
    assert torch.equal(param.grad, torch.full((4,), 2.0))
