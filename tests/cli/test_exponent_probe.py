"""What the probe counts at which module, for all shapes that models come in."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_apex.cli.exponents import Exponents
from lightning_apex.cli.probe import ExponentProbe, ProbeReport


def probed(model: nn.Module, step: Callable[[], Tensor], steps: int = 1) -> ProbeReport:
    with ExponentProbe(model) as probe:
        for _ in range(steps):
            step().backward()
        probe.count_weights()
    return probe.report()


def test_counts_are_those_of_the_tensors_themselves() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    report = probed(model, lambda: model(x).square().sum())
    h = model[0](x)
    t = h.tanh()
    y = model[2](t)
    model.zero_grad()
    for tensor in (h, t, y):
        tensor.retain_grad()
    y.square().sum().backward()
    for name, out in (("0", h), ("1", t), ("2", y), ("", y)):
        assert report.modules[name].counts["activations"] == Exponents.of(out)
        assert report.modules[name].counts["activation_gradients"] == Exponents.of(out.grad)
    for name in ("0", "2"):
        layer = model[int(name)]
        grads = Exponents.of(layer.weight.grad) + Exponents.of(layer.bias.grad)
        assert report.modules[name].counts["weight_gradients"] == grads
        assert report.modules[name].counts["weights"] == Exponents.of(layer.weight) + Exponents.of(layer.bias)
        assert report.modules[name].gradients() == grads + report.modules[name].counts["activation_gradients"]
    assert report.forward_order == ["0", "1", "2", ""]
    assert report.backward_order == ["2", "", "1", "0"]
    assert report.total("weights").elements == 26 and report.total("weights", ["2"]).elements == 10


@dataclass
class Output:
    logits: Tensor
    extra: Any = None


class Returns(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Any:
        return self.make(x * self.scale)


CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda t: (t, [t + 1]), lambda o: o[0] + o[1][0]),
    "dict": (lambda t: {"a": t, "b": {"c": t + 1}}, lambda o: o["a"] + o["b"]["c"]),
    "ordered": (lambda t: OrderedDict(a=t, b=t + 1), lambda o: o["a"] + o["b"]),
    "dataclass": (lambda t: Output(t, (t + 1, 3, None, "x")), lambda o: o.logits + o.extra[0]),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_outputs_in_containers(kind: str) -> None:
    make, read = CONTAINERS[kind]
    model = Returns(make)
    report = probed(model, lambda: read(model(torch.ones(4))).sum())
    assert report.modules[""].counts["activations"].histogram() == {0: 4, 1: 4}
    assert report.modules[""].counts["activation_gradients"].elements == 8


def test_other_outputs_are_passed_over() -> None:
    class Many(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x.long(), x > 0, None, "text", x.sum(), torch.complex(x, x), x.to("meta"), x.to_sparse()

    report = probed(Many(), lambda: Many()(torch.ones(4, requires_grad=True))[4])
    assert report.modules[""].counts["activations"].elements == 0
    model = Many()
    with ExponentProbe(model) as probe:
        model(torch.ones(4))
    assert probe.report().modules[""].counts["activations"].histogram() == {0: 8 + 4}  # complex, sparse


class Block(nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.inner(x)
        result: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return result


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks_count_as_others_do(reentrant: bool) -> None:
    x = torch.randn(6, 4, requires_grad=True)
    plain, other = Block(), Block(reentrant)
    other.load_state_dict(plain.state_dict())
    expected, actual = (probed(m, lambda m=m: m(x).square().sum(), 2) for m in (plain, other))
    for name, module in expected.modules.items():
        assert actual.modules[name].counts == module.counts, name
        assert actual.modules[name].calls == module.calls == 2
    assert actual.forward_order == expected.forward_order


def test_a_module_called_twice_and_one_never() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.parts = nn.Linear(2, 2), nn.Linear(2, 2), nn.ModuleList([nn.ReLU()])

        def forward(self, x: Tensor) -> Tensor:
            return self.used(self.parts[0](self.used(x)))

    model = Twice()
    report = probed(model, lambda: model(torch.randn(3, 2)).sum())
    assert report.modules["used"].calls == 2 and report.modules["used"].counts["activations"].elements == 12
    assert report.modules["used"].counts["weight_gradients"].elements == 6  # summed in one backward pass
    assert report.never_called == ["unused"]


def test_shared_modules_and_tied_weights_count_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight
            self.first = self.second = nn.Linear(4, 4, bias=False)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.second(self.first(self.embed(tokens))))

    model = Tied()
    report = probed(model, lambda: model(torch.arange(3)).sum())
    assert list(report.modules) == ["", "embed", "head", "first"]
    assert report.modules["embed"].counts["weights"].elements == 28
    assert report.modules["embed"].counts["weight_gradients"].elements == 28
    assert report.modules["head"].counts["weights"].elements == 0
    assert report.modules["first"].calls == 2


def test_recurrent_modules_and_sparse_gradients() -> None:
    embed, lstm = nn.Embedding(9, 3, sparse=True), nn.LSTM(3, 5, batch_first=True)
    model = nn.ModuleDict({"embed": embed, "lstm": lstm})
    report = probed(model, lambda: lstm(embed(torch.tensor([[1, 2, 2]])))[0].sum())
    assert report.modules["lstm"].counts["activations"].elements == 15 + 5 + 5
    assert report.modules["lstm"].counts["weight_gradients"].elements == sum(p.numel() for p in lstm.parameters())
    assert report.modules["embed"].counts["weight_gradients"].elements == 6  # of the two rows that were looked up


def test_packed_sequences() -> None:
    lstm = nn.LSTM(3, 5)
    packed = nn.utils.rnn.pack_sequence([torch.randn(4, 3), torch.randn(2, 3)])
    report = probed(lstm, lambda: lstm(packed)[0].data.sum())
    assert report.modules[""].counts["activations"].elements == 6 * 5 + 2 * 2 * 5


def test_in_place_modules_keep_their_gradients() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(inplace=True), nn.ReLU(inplace=True))
    report = probed(model, lambda: model(torch.randn(8, 4)).sum())
    assert all(report.modules[name].counts["activation_gradients"].elements == 32 for name in ("0", "1", "2"))
    # The same tensor all along, written twice.
    zeros = [report.modules[name].counts["activations"].zeros for name in ("0", "1", "2")]
    assert zeros[0] == 0 < zeros[1] < zeros[2]


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_inside_of_functional_transforms_nothing_counts_and_nothing_breaks(transform: str) -> None:
    model = nn.Linear(4, 2)

    def step() -> Tensor:
        if transform == "vmap":
            torch.func.vmap(model)(torch.randn(3, 4))
        else:
            values = dict(model.named_parameters())
            torch.func.grad(lambda p: torch.func.functional_call(model, p, torch.randn(4)).sum())(values)
        return model(torch.randn(3, 4)).sum()

    module = probed(model, step).modules[""]
    assert module.calls == 2 and module.counts["activations"].elements == 6
    assert module.counts["weight_gradients"].elements == 10


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of the compiler, at a break
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_compiled_modules(where: str) -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = nn.Sequential(nn.Linear(4, 4), torch.compile(inner, backend="eager") if where == "inside" else inner)
    called = torch.compile(model, backend="eager") if where == "outside" else model
    report = probed(model, lambda: called(torch.randn(3, 4)).sum())
    assert all(module.counts["activations"].elements == 12 for module in report.modules.values())
    assert all(module.counts["activation_gradients"].elements == 12 for module in report.modules.values())


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:.torch.jit:FutureWarning")
def test_scripted_modules_take_no_hooks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU())))
    report = probed(model, lambda: model(torch.randn(3, 4)).sum())
    assert report.modules[""].counts["activations"].elements == 12 and report.never_called == []
    assert report.modules["1.0"].counts["weight_gradients"].elements == 20


def test_frozen_then_unfrozen() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    with ExponentProbe(model) as probe:
        model(torch.ones(1, 2)).sum().backward()
        model[0].requires_grad_(True)
        model(torch.ones(1, 2)).sum().backward()
    assert probe.report().modules["0"].counts["weight_gradients"].elements == 6


def test_a_module_that_returns_its_parameter_keeps_no_hook_of_the_probe() -> None:
    class Position(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(3))

        def forward(self) -> Tensor:
            return self.table

    model = Position()
    report = probed(model, lambda: model().sum(), steps=3)
    assert report.modules[""].counts["activations"].elements == report.modules[""].gradients().elements == 9
    assert not model.table._backward_hooks


def test_loss_modules_and_scalars_are_left_out() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.criterion = nn.Linear(2, 2), nn.MSELoss(reduction="none")

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.net(x)
            return y, self.criterion(y, x).mean()

    model = WithLoss()
    report = probed(model, lambda: model(torch.randn(3, 2))[1])
    assert report.modules["criterion"].counts["activations"].elements == 0
    assert report.modules[""].counts["activations"].elements == 6


def test_pauses_evaluation_and_inference() -> None:
    model = nn.Linear(2, 2)
    with ExponentProbe(model) as probe:
        probe.recording = False
        model(torch.ones(1, 2)).sum().backward()
        probe.recording = True
        with torch.inference_mode():
            model(torch.ones(1, 2))
        with torch.no_grad():
            model(torch.ones(1, 2))
        model(torch.ones(1, 2)).sum().backward()
    module = probe.report().modules[""]
    assert module.counts["activations"].elements == 6 and module.counts["weight_gradients"].elements == 6


def test_nothing_stays_behind_and_copies_count_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with ExponentProbe(model) as probe:
        average = copy.deepcopy(model)
        average(torch.ones(1, 2)).sum().backward()
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model(torch.ones(1, 3))
    assert probe.report().total("activations").elements == 0
    model(torch.ones(1, 2)).sum().backward()
    assert probe.report().total("activations").elements == probe.report().total("weight_gradients").elements == 0
    assert not any(module._forward_hooks for module in model.modules())
    assert not any(param._backward_hooks for param in model.parameters())


def test_autocast_and_nested_gradients() -> None:
    model = nn.Linear(4, 1)
    x = torch.randn(3, 4, requires_grad=True)

    def penalty() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x).float().square().sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        return grad.square().sum()

    report = probed(model, penalty)
    assert report.modules[""].counts["activations"].elements == 3
    assert report.modules[""].counts["weight_gradients"].elements >= 4


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


@pytest.mark.parametrize(("factors", "activations", "gradients", "scaled"), [
    ((1.0, 1.0), None, None, None),
    ((7e4, 1e-4), "0", None, "0"),
    ((1e-4, 1e5), None, "0", "1"),
    ((1.0, 1e39), "1", "0", "1"),
])  # fmt: skip
def test_the_first_module_out_of_range(
    factors: tuple[float, float], activations: str | None, gradients: str | None, scaled: str | None
) -> None:
    model = nn.Sequential(*map(Times, factors))
    report = probed(model, lambda: model(torch.ones(2, requires_grad=True)).sum())
    assert report.first_out_of_range("activations") == activations
    assert report.first_out_of_range("gradients") == gradients
    # d/dy = 1: times 2**16 it is more than fp16 holds at the end of the model already.
    assert report.first_out_of_range("gradients", scale=2.0**16) in ("1", "")
    assert report.first_out_of_range("activations", torch.bfloat16) == (activations if factors[1] == 1e39 else None)


@pytest.mark.parametrize(("factors", "beyond", "not_finite"), [
    ((1.0, 7e4), "1", None),
    ((1.0, float("nan")), None, "1"),
    ((7e4, float("inf")), "0", "1"),
    ((1.0, 1.0), None, None),
])  # fmt: skip
def test_values_that_are_not_finite_already_are_told_apart_from_an_overflow(
    factors: tuple[float, float], beyond: str | None, not_finite: str | None
) -> None:
    model = nn.Sequential(*map(Times, factors))
    report = probed(model, lambda: model(torch.ones(2, requires_grad=True)).sum())
    assert report.first_out_of_range("activations", finite=True) == beyond
    assert report.first_not_finite == not_finite


def test_gradients_that_are_not_finite_are_named_where_outputs_are() -> None:
    model = nn.Sequential(Times(1.0), Times(2.0))
    report = probed(model, lambda: (model(torch.ones(2, requires_grad=True)) * float("nan")).sum())
    assert report.first_not_finite == "1" and report.first_out_of_range("gradients", finite=True) is None


def test_memory_does_not_grow_with_steps() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with ExponentProbe(model) as probe:
        sizes = []
        for _ in range(4):
            model(torch.randn(4, 8)).sum().backward()
            sizes.append((len(probe._bins), len(probe._handles), len(probe._hooked)))
    assert len(set(sizes)) == 1
