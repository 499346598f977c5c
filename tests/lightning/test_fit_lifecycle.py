"""What a run leaves behind: evaluation, several fits, exceptions, copies, None from training_step."""

import copy
import gc
import io
import itertools
import pickle

import pytest
import torch
from helpers import (
    LEVELS,
    MASTERED,
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

from lightning_apex import FusedAdam


def evaluate(made, model, fn):
    kwargs = {} if fn == "predict" else {"verbose": False}
    return getattr(made, fn)(model, batches(2), **kwargs)


@pytest.mark.parametrize("fn", ["validate", "test", "predict"])
@pytest.mark.parametrize("level", LEVELS)
def test_evaluation_leaves_the_model_bit_identical(level, fn):
    model = Net()
    before = weights(model)
    evaluate(trainer(level), model, fn)  # without a fit
    assert_same(weights(model), before)
    made = trainer(level)
    evaluate(made, model, fn)
    made.fit(model, batches(3))
    trained = weights(model)
    evaluate(made, model, fn)  # after it, with the fit's optimizers still there
    assert_same(weights(model), trained)
    assert all_fp32(model)


@pytest.mark.parametrize("level", LEVELS)
def test_evaluation_in_between_does_not_change_training(level):
    straight, model = Net(), Net()
    fit(straight, level, batches(3), epochs=2)
    made = trainer(level, 2)
    made.fit(model, batches(3), batches(2))  # sanity check and validation every epoch
    assert_same(weights(model), weights(straight))


@pytest.mark.parametrize("level", LEVELS)
def test_predictions_are_those_of_fp32(level):
    model = Net()
    fit(model, "O0", batches(5))
    expected = torch.cat(trainer("32-true").predict(model, batches(2)))
    actual = torch.cat(trainer(level).predict(model, batches(2)))
    torch.testing.assert_close(actual.float(), expected, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("same_optimizer", [False, True])
@pytest.mark.parametrize(("first", "second"), [("O2", "O0"), ("O0", "O2"), ("O1", "O5"), ("O5", "O1"), ("O3", "O2")])
def test_fit_twice_at_different_levels(first, second, same_optimizer):
    """A second fit continues where the first ended, with a new optimizer or, as LightningCLI does, the same one."""
    model = Net()
    if same_optimizer:
        optimizer = FusedAdam(model.parameters(), lr=1e-2)
        model.make_optimizer = lambda params: optimizer
    fit(model, first, batches(4), epochs=2)
    middle = weights(model)
    early = sum(model.losses[:4])
    fit(model, second, batches(4), epochs=2)
    assert sum(model.losses[-4:]) < early
    assert (model.net[0].weight - middle["net.0.weight"]).abs().max() > 1e-3
    assert all_fp32(model)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["fused_adam", "torch_adamw"])
@pytest.mark.parametrize(("first", "second"), list(itertools.product(LEVELS, LEVELS)))
def test_fit_twice_all_pairs(first, second, optimizer):
    model = Net(optimizer)
    shared = model.make_optimizer(model.parameters())
    model.make_optimizer = lambda params: shared
    fit(model, first, batches(5))
    fit(model, second, batches(5), epochs=2)
    witness = Net(optimizer)
    fit(witness, "O0", batches(5), epochs=3)
    assert max(abs(a - b) for a, b in zip(model.losses, witness.losses, strict=True)) < 0.25


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_same_optimizer_twice_equals_one_long_run(level):
    straight, model = Net(), Net()
    fit(straight, level, batches(3), epochs=2)
    optimizer = model.make_optimizer(model.parameters())
    model.make_optimizer = lambda params: optimizer
    fit(model, level, batches(3))
    fit(model, level, batches(3))
    assert_same(weights(model), weights(straight))


@pytest.mark.parametrize("same_plugin", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_same_trainer_or_plugin_fits_two_models(level, same_plugin):
    shared = plugin(level)
    models = [Net(), Net()]
    for model in models:
        fit(model, shared if same_plugin else plugin(level), batches(3))
    assert_same(weights(models[0]), weights(models[1]))


class Boom(RuntimeError):
    pass


@pytest.mark.parametrize("where", ["training_step", "validation_step", "on_after_backward", "configure_optimizers"])
@pytest.mark.parametrize("level", LEVELS)
def test_exception_restores_everything(level, where):
    def fail(*args, **kwargs):
        raise Boom

    model = Net()
    before = {n: (id(p), p.detach().clone()) for n, p in model.named_parameters()}
    setattr(model, where, fail)
    made = trainer(level)
    with pytest.raises(Boom):
        made.fit(model, batches(3), batches(1))
    assert torch.get_default_dtype() is torch.float32
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cuda")
    assert torch.is_grad_enabled()
    assert all_fp32(model)
    assert {n: id(p) for n, p in model.named_parameters()} == {n: i for n, (i, _) in before.items()}
    assert_close(
        {n: p.detach() for n, p in model.named_parameters()},
        {n: p for n, (_, p) in before.items()},
        atol=5e-3 if level == "O3" else 0.0,
    )
    delattr(model, where)
    model.train()
    fit(model, level, batches(2))
    assert all_fp32(model)


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_is_left_on_the_module(level):
    def hooks(model):
        return {
            (name, key): len(value)
            for name, module in model.named_modules()
            for key, value in vars(module).items()
            if "hook" in key and hasattr(value, "__len__")
        }

    model = Net()
    model.net[2] = torch.nn.PReLU()  # a module that gets forward hooks when cast, beside one kept in fp32
    before, attributes = hooks(model), {n: set(vars(m)) for n, m in model.named_modules()}
    identities = {n: id(t) for n, t in (*model.named_parameters(), *model.named_buffers())}
    fit(model, plugin(level, keep_fp32=["net.0"]), batches(2))
    assert hooks(model) == before
    assert {n: id(t) for n, t in (*model.named_parameters(), *model.named_buffers())} == identities
    for name, module in model.named_modules():
        assert not {a for a in set(vars(module)) - attributes[name] if "apex" in a.lower()}


@pytest.mark.parametrize("optimizer", ["fused_adam", "torch_adamw"])
@pytest.mark.parametrize("none_at", [{0}, {2}, {0, 1, 2}])
@pytest.mark.parametrize("level", LEVELS)
def test_training_step_returning_none(level, none_at, optimizer):
    class Sometimes(Net):
        def training_step(self, batch, batch_idx):
            return None if batch_idx in none_at else super().training_step(batch, batch_idx)

    model, witness = Sometimes(optimizer), Net(optimizer)
    fit(model, level, batches(5))
    fit(witness, level, batches(5, only=[i for i in range(5) if i not in none_at]))
    assert_same(weights(model), weights(witness))


@pytest.mark.parametrize("level", LEVELS)
def test_none_in_an_accumulation_window(level):
    class Sometimes(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx in (1, 2) else loss

    model, witness = Sometimes("torch_sgd"), Sometimes("torch_sgd")
    fit(model, level, batches(6), accumulate_grad_batches=2)
    fit(witness, "32-true", batches(6), accumulate_grad_batches=2)
    assert_close(weights(model), weights(witness), atol={"O0": 0.0, "O3": 2e-2}.get(level, 4e-3))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch_save"])
@pytest.mark.parametrize("level", LEVELS)
def test_copies_made_during_training_own_their_weights(level, how):
    class Copier(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx != 1:
                return
            self.expected = weights(pl_module)
            make, pl_module.make_optimizer = pl_module.make_optimizer, None  # a lambda does not pickle
            if how == "deepcopy":
                self.copy = copy.deepcopy(pl_module)
            elif how == "pickle":
                self.copy = pickle.loads(pickle.dumps(pl_module))
            else:
                file = io.BytesIO()
                torch.save(pl_module, file)
                file.seek(0)
                self.copy = torch.load(file, weights_only=False)
            pl_module.make_optimizer = make

    copier, model = Copier(), Net()
    fit(model, level, batches(5), callbacks=[copier])
    # the run went on; the copy did not
    assert_same(weights(copier.copy), copier.expected)
    with torch.no_grad():
        for p in copier.copy.parameters():
            p.zero_()
    assert all(t.abs().sum().item() == 0 for n, t in weights(copier.copy).items() if n.startswith(("net.0", "net.3")))
    assert model.net[0].weight.abs().sum().item() > 0


@pytest.mark.parametrize("level", LEVELS)
def test_plugin_pickles_and_copies(level):
    made = plugin(level, keep_fp32=["net.3"], init_scale=32.0)
    model = Net()
    fit(model, made, batches(2))
    for twin in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert twin.level == made.level
        assert_same(twin.state_dict(), made.state_dict())
        other, again = Net(), Net()
        fit(other, twin, batches(2))
        fit(again, plugin(level, keep_fp32=["net.3"], init_scale=32.0), batches(2))
        assert_same(weights(other), weights(again))


@pytest.mark.parametrize("level", MASTERED)
def test_weights_written_by_a_user_during_training_win(level):
    class Writer(Net):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 2:
                with torch.no_grad():
                    self.net[3].bias.fill_(0.25)
                self.load_state_dict(self.state_dict() | {"net.0.weight": torch.full((16, 8), 0.1)})

    model = Writer(lambda params: torch.optim.SGD(params, lr=0.0))
    fit(model, level, batches(4))
    assert torch.equal(model.net[3].bias, torch.full((4,), 0.25))
    assert torch.equal(model.net[0].weight, torch.full((16, 8), 0.1))  # 0.1 in fp32, not rounded


@pytest.mark.parametrize("level", LEVELS)
def test_state_dict_between_forward_and_backward(level):
    class Reader(Net):
        def on_before_backward(self, loss):
            self.state_dict()

    model, witness = Reader(), Net()
    fit(model, level, batches(3))
    fit(witness, level, batches(3))
    assert_same(weights(model), weights(witness))


def tensors_alive():
    gc.collect()
    # not isinstance: some objects compute __class__, and warn
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_a_hundred_fits_keep_memory_flat(level):
    model = Net()
    shared = model.make_optimizer(model.parameters())
    model.make_optimizer = lambda params: shared
    for _ in range(3):
        fit(model, level, batches(1))
    before = tensors_alive()
    for _ in range(97):
        fit(model, level, batches(1))
    assert tensors_alive() <= before + 5
    hooks = [len(getattr(shared, name)) for name in vars(shared) if name.endswith("_hooks")]
    assert sum(hooks) == 0
    assert all(len(m._forward_pre_hooks) == 0 for m in model.modules())


@pytest.mark.parametrize("level", SCALED)
def test_skips_do_not_pile_up_state(level):
    class Count(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx in (5, 29):
                self.seen = (*getattr(self, "seen", ()), tensors_alive())

    count = Count()
    fit(Net(overflow_at=range(30)), plugin(level, max_consecutive_skips=None), batches(30), callbacks=[count])
    assert count.seen[1] <= count.seen[0] + 5
