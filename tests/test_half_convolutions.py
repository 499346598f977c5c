"""fp16 convolutions on a CPU: gradients are those of fp32, rounded, whoever calls the convolution."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_apex import amp
from lightning_apex.engine import PrecisionEngine
from lightning_apex.half_convolutions import HalfConvolutions
from lightning_apex.levels import resolve
from lightning_apex.scaler import LossScaler

CASES = {
    "1d": (lambda: nn.Conv1d(4, 6, 3), (2, 4, 9)),
    "2d": (lambda: nn.Conv2d(4, 6, 3, padding=1), (2, 4, 7, 6)),
    "3d": (lambda: nn.Conv3d(2, 3, 2), (2, 2, 4, 5, 4)),
    "no bias": (lambda: nn.Conv2d(4, 6, (3, 2), bias=False), (2, 4, 7, 6)),
    "strided, dilated": (lambda: nn.Conv2d(4, 6, 3, stride=(2, 1), dilation=2, padding=(2, 1)), (2, 4, 9, 8)),
    "groups": (lambda: nn.Conv2d(4, 8, 3, groups=2), (2, 4, 7, 6)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (2, 4, 7, 6)),
    "same, even kernel": (lambda: nn.Conv2d(4, 6, (2, 3), padding="same"), (2, 4, 7, 6)),
    "same, dilated": (lambda: nn.Conv1d(4, 6, 4, padding="same", dilation=3), (2, 4, 17)),
    "valid": (lambda: nn.Conv2d(4, 6, 3, padding="valid"), (2, 4, 7, 6)),
    "reflect": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (2, 4, 7, 6)),
    "circular": (lambda: nn.Conv1d(4, 6, 3, padding=2, padding_mode="circular"), (2, 4, 9)),
    "without a batch": (lambda: nn.Conv2d(4, 6, 3), (4, 7, 6)),
    "empty batch": (lambda: nn.Conv2d(4, 6, 3), (0, 4, 7, 6)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(4, 6, 3), (2, 4, 9)),
    "transposed 2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1), (2, 4, 5, 4)),
    "transposed groups": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2, dilation=2, bias=False), (2, 4, 5, 4)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(2, 3, 2), (2, 2, 3, 4, 3)),
}


def goes_our_way(tensor: Tensor) -> bool:
    """Whether a convolution of ours is in a tensor's graph."""
    nodes = [tensor.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and "HalfConvolution" in node.name():
            return True
        nodes += [] if node is None else [following for following, _ in node.next_functions]
    return False


def engine(level: str, *models: nn.Module) -> PrecisionEngine:
    made = PrecisionEngine(resolve(level, half_dtype="float16").on("cpu"), LossScaler(1.0))
    made.convert(list(models), "cpu")
    return made


def rounded(tensor: Tensor) -> Tensor:
    return tensor.half().float()


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # torch, of the witness
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_fp32_rounded(name, level):
    make, shape = CASES[name]
    layer, x = make(), torch.randn(shape)
    witness = copy.deepcopy(layer)
    with torch.no_grad():
        for param in witness.parameters():
            param.copy_(rounded(param))
    wide = rounded(x).requires_grad_()
    expected = witness(wide)
    grad = rounded(torch.randn_like(expected))
    expected.backward(grad)

    made = engine(level, layer)
    x = made.convert_input(x).requires_grad_()
    with made.forward_context():
        output = layer(x)
    assert output.dtype is torch.float16 and goes_our_way(output)
    output.backward(grad.half())
    torch.testing.assert_close(output.float(), expected.detach(), rtol=2e-3, atol=2e-3)
    pairs = [
        (x.grad, wide.grad),
        *((a.grad, b.grad) for a, b in zip(layer.parameters(), witness.parameters(), strict=True)),
    ]
    # padding of another mode is torch's, whose backward pass adds up in fp16
    slack = 2e-3 if name in ("reflect", "circular") else 2e-5
    for actual, wanted in pairs:
        torch.testing.assert_close(actual.float(), rounded(wanted), rtol=1e-3, atol=slack)


def test_gradients_are_near_torchs_own():
    x, weight = (torch.randn(*shape).half().requires_grad_() for shape in ((2, 4, 6, 6), (5, 4, 3, 3)))
    own = torch.autograd.grad(F.conv2d(x, weight, padding=1).sum(), (x, weight))
    with HalfConvolutions():
        output = F.conv2d(x, weight, padding=1)
    assert goes_our_way(output)
    for actual, wanted in zip(torch.autograd.grad(output.sum(), (x, weight)), own, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-2, atol=1e-2)


def test_large_gradients_overflow_as_fp16_does():
    x = torch.full((1, 1, 4), 200.0).half()
    weight = torch.ones(1, 1, 1).half().requires_grad_()
    with HalfConvolutions():
        output = F.conv1d(x, weight)
    output.backward(torch.full_like(output, 1000.0))
    assert torch.isinf(weight.grad).all()


def test_where_no_gradient_is_needed_torch_computes():
    layer, x = nn.Conv2d(4, 6, 3).half(), torch.randn(2, 4, 7, 6).half()
    plain = layer(x).detach()
    with HalfConvolutions():
        with torch.no_grad():
            assert torch.equal(layer(x), plain)
        with torch.inference_mode():
            assert torch.equal(layer(x), plain)
        assert not goes_our_way(layer.requires_grad_(False)(x))


def test_only_fp16_is_touched():
    with HalfConvolutions():
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            assert not goes_our_way(nn.Conv1d(2, 3, 2, dtype=dtype)(torch.randn(1, 2, 5, dtype=dtype)))
        with torch.autocast("cpu", torch.bfloat16):
            assert not goes_our_way(nn.Conv1d(2, 3, 2)(torch.randn(1, 2, 5)))
        with torch.autocast("cpu", torch.float16):
            assert not goes_our_way(nn.Conv1d(2, 3, 2).double()(torch.randn(1, 2, 5).double()))
            assert goes_our_way(nn.Conv1d(2, 3, 2)(torch.randn(1, 2, 5)))
        with pytest.raises(RuntimeError, match="should be the same"):
            nn.Conv1d(2, 3, 2).half()(torch.randn(1, 2, 5))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_nothing_is_left_behind(level):
    layer = nn.Conv2d(4, 6, 3)
    made = engine(level, layer)
    with made.forward_context():
        assert goes_our_way(layer(torch.randn(2, 4, 7, 6)))
    made.restore()
    assert not goes_our_way(layer(torch.randn(2, 4, 7, 6)))
    assert vars(layer).keys() == vars(nn.Conv2d(4, 6, 3)).keys()
    assert not layer._forward_pre_hooks


def test_the_default_half_type_needs_none_of_this():
    layer = nn.Conv1d(2, 3, 2)
    made = PrecisionEngine(resolve("O1").on("cpu"), LossScaler(1.0))
    made.convert(layer, "cpu")
    with made.forward_context():
        assert not goes_our_way(layer(torch.randn(1, 2, 5)))


def test_gradients_of_gradients():
    x, weight = rounded(torch.randn(2, 3, 6)), rounded(torch.randn(4, 3, 3))
    results = []
    for dtype in (torch.float32, torch.float16):
        a, w = x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        with HalfConvolutions(), torch.autocast("cpu", torch.float16, enabled=dtype is torch.float16):
            (first,) = torch.autograd.grad(F.conv1d(a, w).float().square().sum(), a, create_graph=True)
            results.append(torch.autograd.grad(first.float().square().sum(), w)[0].float())
    torch.testing.assert_close(results[1], results[0], rtol=2e-2, atol=float(results[0].abs().max()) * 1e-2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_compiled_models_train(level):
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.ConvTranspose2d(3, 2, 3))
    made = engine(level, model)
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(2, 2, 6, 6)
    grads = []
    for run in (model, compiled):
        model.zero_grad()
        with made.forward_context():
            output = run(x)
        with made.backward_context():
            output.float().square().mean().backward()
        grads.append([p.grad.float().clone() for p in model.parameters()])
    for actual, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-2, atol=1e-3)
    torch._dynamo.reset()


class Recomputed(nn.Module):
    """Computes a convolution once more in the backward pass."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = nn.Conv1d(2, 3, 2), nn.Conv1d(3, 2, 2), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.reentrant is None:
            return self.second(x)
        return torch.utils.checkpoint.checkpoint(self.second, x, use_reentrant=self.reentrant)


class Backwards(TorchDispatchMode):
    """The types in which convolutions are differentiated; entered first, it sees what reaches torch."""

    def __init__(self) -> None:
        super().__init__()
        self.types: list[torch.dtype] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution_backward.default:
            self.types.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_checkpointing(level, reentrant):
    x, grads = torch.randn(2, 2, 6), []
    for use in (reentrant, None):
        torch.manual_seed(0)
        model = Recomputed(use)
        made = engine(level, model)
        with made.forward_context():
            loss = model(made.convert_input(x)).float().square().mean()
        with Backwards() as seen, made.backward_context():
            made.scale(loss).backward()
        assert seen.types == [torch.float32] * 2
        grads.append([p.grad for p in model.parameters()])
    for actual, wanted in zip(*grads, strict=True):
        assert actual.dtype is wanted.dtype
        torch.testing.assert_close(actual, wanted, rtol=2e-3, atol=1e-4)


def test_checkpointing_in_a_backward_pass_that_nobody_surrounds_is_torchs():
    model = Recomputed(True)
    made = engine("O1", model)
    with made.forward_context():
        loss = model(torch.randn(2, 2, 6)).float().square().mean()
    with Backwards() as seen:
        loss.backward()
    assert sorted(seen.types, key=str) == [torch.float16, torch.float32]


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_checkpointing_in_an_old_loop(level):
    model = Recomputed(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, half_dtype="float16", verbosity=0)
    loss = model(torch.randn(2, 2, 6)).float().square().mean()
    with Backwards() as seen, amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    assert seen.types == [torch.float32] * 2
    optimizer.step()
