"""Models of all kinds: late parameters, structured outputs, activation checkpointing, torch.compile."""

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from amp_support import LEVELS, OPTIMIZERS, batch, fp32, net, same, start, state_of, step
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_apex import amp


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
