"""What becomes of models and optimizers: copies, pickles, second calls, other contexts, and amp switched off."""

import copy
import dataclasses
import gc
import io
import pickle
import weakref
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from amp_support import BF16, LEVELS, OPTIMIZERS, batch, fp32, loss_of, net, same, scale_of, start, state_of, step
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_apex import amp


class TestWhatComesBack:
    def test_single_objects_and_lists(self):
        def make():
            model = net()
            return model, torch.optim.SGD(model.parameters(), lr=0.1)

        for models_as_list in (False, True):
            for optimizers_as_list in (False, True):
                model, made = make()
                models, optimizers = amp.initialize(
                    [model] if models_as_list else model, [made] if optimizers_as_list else made, verbosity=0
                )
                assert (models[0] if models_as_list else models) is model
                assert (optimizers[0] if optimizers_as_list else optimizers) is made
        model, _ = make()
        assert amp.initialize(model, verbosity=0) is model
        assert amp.initialize([model], verbosity=0)[0] is model

    @pytest.mark.parametrize("level", LEVELS)
    def test_inference_without_an_optimizer(self, level):
        model = net().eval()
        expected = model(batch()[0])
        model = amp.initialize(model, opt_level=level, verbosity=0)
        with torch.no_grad():
            found = model(batch()[0])
        assert found.dtype is torch.float32
        assert (found - expected).abs().max() < (1e-7 if level == "O0" else 3e-2)
        assert same(fp32(model), fp32(net())) or level == "O3"
        with amp.autocast():
            model(batch()[0])

    @pytest.mark.parametrize(("dtype", "given"), [(torch.float16, "float16"), (BF16, BF16), (torch.float32, None)])
    @pytest.mark.parametrize("level", LEVELS)
    def test_cast_model_outputs(self, level, dtype, given):
        model, _ = start(level, cast_model_outputs=given)
        assert model(batch()[0]).dtype is dtype

    def test_arguments_as_strings(self):
        model, made = start("O2", keep_batchnorm_fp32="False", loss_scale="64", cast_model_type=torch.float16)
        assert {p.dtype for p in model.parameters()} == {torch.float16} and scale_of(made) == 64.0
        model, _ = start("O3", keep_batchnorm_fp32="True", cast_model_type="torch.bfloat16")
        assert model[1].weight.dtype is torch.float32 and model[0].weight.dtype is BF16
        start("O1", patch_torch_functions=True, master_weights=False, cast_model_type=None)
        start("O0", patch_torch_functions=False, cast_model_type=torch.float32, keep_batchnorm_fp32="True")

    def test_keep_fp32(self):
        models = [net(), net(1)]
        amp.initialize(models, opt_level="O2", keep_fp32="3", verbosity=0)
        assert all(m[3].weight.dtype is torch.float32 and m[0].weight.dtype is BF16 for m in models)


@pytest.mark.parametrize("enabled", [False, 0])
def test_disabled_is_the_plain_loop(enabled):
    plain, model = net(), net()
    by_hand = OPTIMIZERS["adamw"](plain.parameters())
    made = OPTIMIZERS["adamw"](model.parameters())
    before = [dict(vars(m)) for m in (model, *model.modules())], dict(vars(made))
    model, made = amp.initialize(model, made, enabled=enabled, opt_level="O2", num_losses=3)
    assert before == ([dict(vars(m)) for m in (model, *model.modules())], dict(vars(made)))
    for index in range(3):
        by_hand.zero_grad()
        loss_of(plain, index).backward()
        by_hand.step()
        made.zero_grad()
        with amp.autocast():
            loss = loss_of(model, index)
        with amp.scale_loss(loss, made, loss_id=2) as scaled_loss:
            assert scaled_loss is loss
            scaled_loss.backward()
        nn.utils.clip_grad_norm_(amp.master_params(made), 1e9)
        made.step()
    assert same(fp32(model), fp32(plain)) and same(state_of(made), state_of(by_hand))
    assert amp.state_dict() == {} == amp.state_dict(made)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 0}})


class TestAgain:
    @pytest.mark.parametrize("second", LEVELS)
    @pytest.mark.parametrize("first", LEVELS)
    def test_the_second_call_counts(self, first, second):
        runs = []
        for levels in ([first, second], [second]):
            model = net()
            made = OPTIMIZERS["fused_adam"](model.parameters())
            for level in levels:
                if level == "O3" and len(levels) == 2 and levels[0] == "O3":
                    pytest.skip("without masters a cast loses bits")
                amp.initialize(model, made, opt_level=level, verbosity=0)
            for index in range(2):
                step(model, made, index)
            runs.append(fp32(model))
        if first != "O3":
            assert same(*runs)
        assert len(made._optimizer_step_pre_hooks) == 1 and len(model._forward_pre_hooks) == 1

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_in_the_middle_of_training(self, optimizer):
        model, made = start("O2", optimizer)
        step(model, made)
        weights = fp32(model)
        amp.initialize(model, made, opt_level="O0", verbosity=0)
        assert same(fp32(model), weights)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        step(model, made, 1)
        amp.initialize(model, made, opt_level="O5", verbosity=0)
        step(model, made, 2)
        amp.initialize(model, made, enabled=False)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert not made._optimizer_step_pre_hooks and not model._forward_hooks
        assert {value.dtype for state in made.state.values() for value in state.values()} == {torch.float32}

    def test_with_gradients_under_way(self):
        for optimizer in ("sgd", "fused_adam"):
            model, made = start("O2", optimizer)
            with amp.scale_loss(loss_of(model), made) as scaled_loss:
                scaled_loss.backward()
            found = [m.grad.clone() for m in amp.master_params(made)]
            amp.initialize(model, made, opt_level="O0", verbosity=0)
            for p, grad in zip(model.parameters(), found, strict=True):
                assert p.grad.dtype is torch.float32
                assert (p.grad - grad).abs().max() <= 2**-7 * grad.abs().max()
            made.step()

    def test_a_refused_second_call_changes_nothing(self):
        model, made = start("O2")
        step(model, made)
        before = fp32(model), state_of(made), scale_of(made)
        with pytest.raises(ValueError, match="keep_fp32"):
            amp.initialize(model, made, opt_level="O5", keep_fp32=["nothing"], verbosity=0)
        assert same((fp32(model), state_of(made), scale_of(made)), before)
        step(model, made)

    def test_models_with_common_weights(self):
        first, second = net(), net(3)
        second[3].weight = first[3].weight
        made = torch.optim.SGD([*first.parameters(), *second[0].parameters()], lr=0.1)
        weights = fp32(first), fp32(second)
        amp.initialize([first, second], made, opt_level="O2", verbosity=0)
        assert second[3].weight is first[3].weight and first[3].weight.dtype is BF16
        assert same((fp32(first), fp32(second)), weights)
        with amp.scale_loss(loss_of(first) + loss_of(second), made) as scaled_loss:
            scaled_loss.backward()
        made.step()
        assert same(fp32(first)["3.weight"], fp32(second)["3.weight"])
        assert not same(fp32(first)["3.weight"], weights[0]["3.weight"])
        amp.initialize([first, second], made, opt_level="O0", verbosity=0)
        assert second[3].weight.dtype is torch.float32


class TestTwoContexts:
    def test_train_side_by_side_as_alone(self):
        def train(pairs):
            for index in range(4):
                for number, (model, made) in enumerate(pairs):
                    step(model, made, index, float("inf") if index == 1 and number == 0 else 1.0)
            return [(fp32(m), state_of(o)) for m, o in pairs]

        def first():
            return start("O2", "fused_adam", net(1))

        def second():
            return start("O1", "adamw", net(3), half_dtype="float16", init_scale=2.0**10)

        pair = [first(), second()]
        together = train(pair)
        assert (scale_of(pair[0][1]), scale_of(pair[1][1])) == (2.0**7, 2.0**10)
        (one,) = train([first()])
        assert same(together[0], one)
        model, made = second()
        for index in range(4):
            step(model, made, index)
        assert same(together[1], (fp32(model), state_of(made)))

    def test_other_models_are_left_alone(self):
        start("O1"), start("O5", model=net(3))
        other = net(4)
        assert other(batch()[0]).dtype is torch.float32
        assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype is torch.float32
        assert torch.nn.functional.linear.__module__ == "torch._C._nn" or callable(nn.functional.linear)

    def test_autocast_needs_no_choice_where_all_agree(self):
        first, second = start("O1"), start("O1", model=net(3))
        with amp.autocast():
            assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype is BF16
        assert first and second


@pytest.mark.parametrize("optimizer", ["adamw", "fused_adam"])
@pytest.mark.parametrize("level", LEVELS)
class TestCopies:
    def copies(self, model):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        yield copy.deepcopy(model)
        yield pickle.loads(pickle.dumps(model))
        yield torch.load(file, weights_only=False)

    def test_compute_the_same_and_live_on_their_own(self, level, optimizer):
        model, made = start(level, optimizer)
        step(model, made)
        model.eval()
        expected, weights = model(batch()[0]), fp32(model)
        copies = list(self.copies(model))
        model.train()
        step(model, made, 1)
        for each in copies:
            assert torch.equal(each(batch()[0]), expected)
            assert same(fp32(each), weights)

    def test_can_be_initialised(self, level, optimizer):
        model, made = start(level, optimizer)
        step(model, made)
        expected = None
        for each in self.copies(model):
            each, remade = start("O2", optimizer, each)
            assert len(each._forward_pre_hooks) == 1
            if level != "O3":
                assert same(fp32(each), fp32(model))
            step(each, remade, 1)
            expected = expected or fp32(each)
            assert same(fp32(each), expected)

    def test_optimizers(self, level, optimizer):
        model, made = start(level, optimizer)
        step(model, made)
        for duplicate in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
            model2, made2 = duplicate((model, made))
            assert not made2._optimizer_step_pre_hooks
            assert same(state_of(made2), state_of(made))
            model2, made2 = amp.initialize(model2, made2, opt_level=level, init_scale=256.0, verbosity=0)
            step(model2, made2, 1)
        step(model, made, 1)
        if level != "O3":
            assert same(fp32(model2), fp32(model))
            assert same(state_of(made2)["state"], state_of(made)["state"])


@pytest.mark.parametrize("level", LEVELS)
def test_an_ema_copy(level):
    model, made = start(level, "adamw", half_dtype=None)
    ema = copy.deepcopy(model).eval()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for index in range(3):
        step(model, made, index)
        with torch.no_grad():
            for slow, fast in zip(ema.parameters(), model.parameters(), strict=True):
                slow.mul_(0.5).add_(fast, alpha=0.5)
        averaged.update_parameters(model)
    trained = fp32(model)
    assert ema(batch()[0]).dtype is torch.float32 and averaged(batch()[0]).isfinite().all()
    assert same(fp32(model), trained)
    assert not same(fp32(ema)["0.weight"], trained["0.weight"])
    with torch.no_grad():  # and back: the model's value becomes the master
        for slow, fast in zip(ema.parameters(), model.parameters(), strict=True):
            fast.copy_(slow)
    assert (fp32(model)["0.weight"] - fp32(ema)["0.weight"]).abs().max() < 1e-2
    step(model, made, 4)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_parameters_frozen_at_first(level, optimizer):
    model = net()
    for p in model[0].parameters():
        p.requires_grad_(False)
    model, made = start(level, optimizer, model)
    before = fp32(model)
    step(model, made)
    assert same(fp32(model)["0.weight"], before["0.weight"])
    for p in model[0].parameters():
        p.requires_grad_(True)
    step(model, made, 1)
    after = fp32(model)
    assert not same(after["0.weight"], before["0.weight"])
    steps = {str(name): s["step"].item() for name, s in state_of(made)["state"].items() if "step" in s}
    if steps:
        assert (steps["0"], steps["4"]) == (1.0, 2.0)
    expected = [p.dtype if level == "O3" else torch.float32 for p in model.parameters()]
    assert [m.dtype for m in amp.master_params(made)] == expected


@pytest.mark.parametrize("optimizer", ["sgd", "fused_adam"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_group_added_later(level, optimizer):
    model = net()
    made = OPTIMIZERS[optimizer](model[0].parameters())
    model, made = amp.initialize(model, made, opt_level=level, verbosity=0)
    step(model, made)
    before = fp32(model)["3.weight"]
    made.add_param_group({"params": list(model[3].parameters())})
    step(model, made, 1)
    assert not same(fp32(model)["3.weight"], before)


class Point(NamedTuple):
    x: torch.Tensor
    label: str


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    extra: Any = None


class Output(OrderedDict):
    def __getattr__(self, name):
        return self[name]


class Structured(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x, *, kind, scale):
        y = self.linear(x) * scale["s"]
        count = torch.arange(3)
        made = {
            "namedtuple": lambda: Point(y, "a"),
            "dataclass": lambda: Result(y, [count, {"y": y}]),
            "subclass": lambda: Output(logits=y, count=count),
            "nested": lambda: (y, [y, None, "text", (count, y)], {"k": {"z": y}}),
        }
        return made[kind]()


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_outputs_keep_their_kinds(level):
    model, _ = start(level, model=Structured())
    x, scale = batch()[0], {"s": torch.ones(())}
    point = model(x, kind="namedtuple", scale=scale)
    assert type(point) is Point and point.x.dtype is torch.float32 and point.label == "a"
    result = model(x, kind="dataclass", scale=scale)
    assert type(result) is Result and result.logits.dtype is torch.float32
    assert result.extra[0].dtype is torch.int64 and result.extra[1]["y"].dtype is torch.float32
    output = model(x, kind="subclass", scale=scale)
    assert type(output) is Output and output.logits.dtype is torch.float32 and output.count.dtype is torch.int64
    nested = model(x, kind="nested", scale=scale)
    assert nested[1][1:3] == [None, "text"] and nested[2]["k"]["z"].dtype is torch.float32


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(level, reentrant):
    class Net(nn.Module):
        def __init__(self, use):
            super().__init__()
            torch.manual_seed(2)
            self.a, self.b, self.use = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 3), use

        def forward(self, x):
            x = checkpoint(self.a, x, use_reentrant=reentrant) if self.use else self.a(x)
            return self.b(x)

    runs = []
    for use in (True, False):
        model, made = start(level, "adamw", Net(use), half_dtype=None)
        for index in range(2):
            made.zero_grad()
            x, y = batch(index)
            loss = nn.functional.cross_entropy(model(x.requires_grad_()), y)
            with amp.scale_loss(loss, made) as scaled_loss:
                scaled_loss.backward()
            made.step()
        runs.append(fp32(model))
    assert same(*runs)


@pytest.mark.parametrize("level", LEVELS)
def test_no_stale_casts(level):
    """eval under no_grad, an edit by hand, then training."""
    model, made = start(level, "sgd", half_dtype=None)
    model.eval()
    with torch.no_grad():
        first = model(batch()[0])
        for p in model.parameters():
            p.mul_(2.0)
        assert not torch.equal(model(batch()[0]), first)
    model.train()
    before = fp32(model)
    assert (before["3.weight"] - 2 * fp32(net())["3.weight"]).abs().max() < 1e-2
    step(model, made)
    assert all(p.grad is not None for p in model.parameters())


def test_an_error_in_the_forward_pass_leaves_autocast():
    model, made = start("O1")
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 5))
    assert not torch.is_autocast_enabled("cpu")
    step(model, made)


def test_an_interrupted_forward_pass_is_mended():
    model, made = start("O1")

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model[0].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(batch()[0])
    handle.remove()
    step(model, made)
    assert not torch.is_autocast_enabled("cpu")


def test_nothing_is_kept_alive():
    gc.collect()
    gc.disable()
    try:
        for optimizer in ("adamw", "fused_adam"):
            for level in LEVELS:
                model, made = start(level, optimizer, half_dtype=None)
                step(model, made)
                gone = [weakref.ref(made), weakref.ref(model), weakref.ref(model[0].weight)]
                del model, made
                assert [r() for r in gone] == [None] * 3, (level, optimizer)  # at once, without the collector
    finally:
        gc.enable()


def test_a_hundred_models_in_one_process():
    def one():
        model, made = start("O2", "fused_adam", half_dtype=None)
        step(model, made)

    def tensors():
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    one()
    before = tensors()
    for _ in range(30):
        one()
    assert tensors() == before


def test_compiled_models():
    for level in ("O1", "O2"):
        model, made = start(level, "sgd", half_dtype=None)
        plain = fp32(model)
        compiled = torch.compile(model, backend="eager")
        step(compiled, made)
        again, remade = start(level, "sgd", half_dtype=None)
        step(again, remade)
        assert same(fp32(model), fp32(again)) and not same(fp32(model), plain)
        torch._dynamo.reset()
