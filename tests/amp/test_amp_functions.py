"""Functions that cast their arguments, and disable_casts."""

import types
from typing import NamedTuple

import pytest
import torch
from amp_support import BF16, F16, LEVELS, start
from torch import nn

from lightning_apex import amp

F32 = torch.float32


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def report(first, *rest, nested=None, pair=None, flag=None, autocast=False):
    """The types of everything, and whether autocast is on."""
    dtypes = [t.dtype for t in (first, *rest, *(nested or {}).values(), *(pair or ()))]
    return dtypes, torch.is_autocast_enabled("cpu"), flag


def call(function, dtype=F32):
    t = torch.ones(2, dtype=dtype)
    return function(t, t.long(), nested={"a": t, "b": t.to(BF16)}, pair=Pair(t, t.to(F16)), flag="x")


KINDS = {
    "half": (amp.half_function, amp.register_half_function, BF16, True),
    "bfloat16": (amp.bfloat16_function, amp.register_bfloat16_function, BF16, True),
    "float": (amp.float_function, amp.register_float_function, F32, False),
    "promote": (amp.promote_function, amp.register_promote_function, F32, True),
}


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_is_cast_inside_autocast(kind, by_name):
    decorate, register, dtype, autocast = KINDS[kind]
    _, made = start("O1")
    if by_name:
        module = types.ModuleType("ops")
        module.report = report
        register(module, "report")
        function = module.report
    else:
        function = decorate(report)
    assert function.__name__ == "report" and "types of everything" in function.__doc__
    unchanged = call(report)
    assert call(function) == unchanged  # outside of everything
    with amp.autocast(made):
        dtypes, inside, flag = call(function)
        assert dtypes == [dtype, torch.int64, dtype, dtype, dtype, dtype]
        assert inside is autocast and flag == "x"
        assert torch.is_autocast_enabled("cpu")
        with amp.disable_casts():
            assert call(function) == unchanged
    assert call(function) == unchanged


def test_half_means_the_level_at_work():
    function = amp.half_function(lambda t: t.dtype)
    for dtype in ("float16", "bfloat16"):
        _, made = start("O1", half_dtype=dtype)
        with amp.autocast(made):
            assert str(function(torch.ones(1))) == f"torch.{dtype}"
        with amp.autocast(made):
            assert amp.bfloat16_function(lambda t: t.dtype)(torch.ones(1)) is BF16


def test_promote_takes_the_widest():
    function = amp.promote_function(lambda *ts: [t.dtype for t in ts])
    with torch.autocast("cpu", dtype=BF16):
        assert function(torch.ones(1, dtype=BF16), torch.ones(1, dtype=BF16)) == [BF16, BF16]
        assert function(torch.ones(1, dtype=BF16), torch.ones(1)) == [F32, F32]
        assert function(torch.ones(1, dtype=F16), torch.ones(1, dtype=BF16)) == [F32, F32]
        assert function(torch.ones(1, dtype=torch.float64), torch.ones(1)) == [torch.float64] * 2
        assert function(torch.ones(1, dtype=torch.int64)) == [torch.int64]


@pytest.mark.parametrize(("level", "expected"), [("O0", F32), ("O1", BF16), ("O2", BF16), ("O4", BF16), ("O5", BF16)])
def test_inside_a_model(level, expected):
    seen = []

    @amp.half_function
    def note(x):
        seen.append(x.dtype)
        return x

    @amp.float_function
    def precise(x):
        seen.append(x.dtype)
        return x.exp()

    class Net(nn.Linear):
        def forward(self, x):
            return precise(note(super().forward(x).float()))

    model, _ = start(level, model=Net(2, 2))
    model(torch.ones(1, 2))
    assert seen == [expected, F32]


def test_custom_autograd_functions():
    dtypes = []

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            dtypes.append(x.dtype)
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 3 * x**2 * grad

    class Net(nn.Linear):
        def forward(self, x):
            return Cube.apply(super().forward(x))

    original = Cube.apply
    amp.register_float_function(Cube, "apply")
    for level in LEVELS:
        model, made = start(level, "sgd", Net(3, 2))
        x = torch.ones(4, 3)
        expected = nn.functional.linear(x, model.weight.float(), model.bias.float()).pow(3)
        dtypes.clear()
        output = model(x)
        assert dtypes == [BF16 if level == "O3" else F32]  # O3 casts nothing but inputs
        assert (output - expected).abs().max() < 0.05 * expected.abs().max() + 0.01
        with amp.scale_loss(output.sum(), made) as scaled_loss:
            scaled_loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        made.step()
    amp.register_half_function(Cube, "apply")  # the last one counts
    dtypes.clear()
    start("O1", "sgd", model=(last := Net(3, 2)))
    last(x)
    assert dtypes == [BF16]
    assert Cube.__mro__ and original is not Cube.apply


def test_methods_of_classes():
    class Ops:
        def method(self, x):
            return self, x.dtype

        @staticmethod
        def static(x):
            return x.dtype

        @classmethod
        def of_class(cls, x):
            return cls, x.dtype

    for name in ("method", "static", "of_class"):
        amp.register_float_function(Ops, name)
    ops, x = Ops(), torch.ones(1, dtype=BF16)
    with torch.autocast("cpu", dtype=BF16):
        assert ops.method(x) == (ops, F32)
        assert ops.static(x) is F32 and Ops.static(x) is F32
        assert ops.of_class(x) == (Ops, F32)
    one = Ops()
    amp.register_half_function(one, "method")
    with torch.autocast("cpu", dtype=BF16):
        assert one.method(x.float()) == (one, BF16)
        assert ops.method(x.float()) == (ops, F32)


@pytest.mark.parametrize("register", [kind[1] for kind in KINDS.values()])
def test_functions_that_are_not_there(register):
    with pytest.raises(ValueError, match="math has no function 'no_such'"):
        import math

        register(math, "no_such")
    with pytest.raises(ValueError, match="math has no function 'pi'"):
        register(math, "pi")


class TestDisableCasts:
    def test_fp32_models_compute_in_fp32(self):
        model, made = start("O1", model=nn.Linear(3, 3))
        seen = []
        model.register_forward_hook(lambda m, a, output: seen.append(output.dtype), prepend=True)
        x = torch.ones(1, 3)
        with amp.autocast(made):
            model(x)
            with amp.disable_casts():
                model(x)
                with amp.disable_casts():
                    model(x)
                model(x)
                with pytest.raises(ArithmeticError), amp.disable_casts():
                    raise ArithmeticError
                model(x)
                assert torch.mm(x, x.T).dtype is F32
            model(x)
        assert seen == [BF16, F32, F32, F32, F32, BF16]

    def test_half_models_go_on(self):
        for level in ("O2", "O3", "O5"):
            model, _ = start(level, model=nn.Linear(3, 3))
            with amp.disable_casts():
                assert model(torch.ones(1, 3)).dtype is F32

    def test_autocast_enabled_False(self):
        with amp.autocast(enabled=False), torch.autocast("cpu", dtype=BF16):
            assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype is BF16
        with torch.autocast("cpu", dtype=BF16), amp.autocast(enabled=False):
            assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype is F32
