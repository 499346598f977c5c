"""SyncBatchNorm in one process: equal to torch's BatchNorm, fused or not, trained or evaluated."""

import copy
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from sync_support import BASE, LAYERS, TOLERANCE, batches, check_row, close, in_memory, layer, run_row, witness
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_apex import SyncBatchNorm, convert_syncbn_model, has_cuda
from lightning_apex.parallel import _collectives


@pytest.fixture(autouse=True)
def no_collectives(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a collective")

    monkeypatch.setattr(_collectives, "_gather_flat", refuse)
    monkeypatch.setattr(dist, "all_reduce", refuse)


@pytest.mark.parametrize("name", list(LAYERS))
def test_trains_as_batchnorm(name):
    row = LAYERS[name]
    row = row.but(sizes=(sum(row.sizes),))
    check_row(row, [run_row(0, row)])


@pytest.mark.cuda
@pytest.mark.parametrize("name", list(LAYERS))
def test_trains_as_batchnorm_on_a_gpu(name):
    if not (has_cuda() and torch.cuda.is_available()):
        pytest.skip("needs a GPU and an extension built with CUDA")
    row = LAYERS[name]
    row = row.but(sizes=(sum(row.sizes),))
    check_row(row, [run_row(0, row, device="cuda")])


EVAL = [
    n for n in LAYERS if n.startswith(("2d", "3d", "4d", "5d", "last", "channels", "relu", "z", "not_", "fp", "bf"))
]


@pytest.mark.parametrize("name", EVAL)
def test_evaluates_as_batchnorm(name):
    row = LAYERS[name]
    module = layer(row).eval()
    batch = batches(row)[0]
    if row.track:
        module.running_mean.uniform_(-1, 1)
        module.running_var.uniform_(0.5, 2)
    x = in_memory(batch["x"], row.memory).requires_grad_()
    z = in_memory(batch["z"], row.z_memory or row.memory).requires_grad_() if row.z else None
    before = copy.deepcopy(module.state_dict())
    out = module(x, z)
    out.backward(in_memory(batch["g"], row.memory))
    back = -1 if row.memory == "last" else 1

    reference = copy.deepcopy(module).double()
    wide = [batch[key].detach().double().requires_grad_() for key in ("x", "z")]
    stats = (reference.running_mean, reference.running_var)
    reference.zero_grad()
    expected = F.batch_norm(wide[0], *stats, reference.weight, reference.bias, not row.track, 0.0, reference.eps)
    expected = expected + wide[1] if row.z else expected
    expected = F.relu(expected) if row.relu else expected
    expected.backward(batch["g"].double())
    atol, rtol = TOLERANCE[row.dtype]
    atol *= 3 if z is not None else 1  # rounded twice
    close(out.movedim(back, 1), expected, atol, rtol, "out")
    close(x.grad.movedim(back, 1), wide[0].grad, atol, rtol, "dx")
    if z is not None:
        close(z.grad.movedim(back, 1), wide[1].grad, atol, rtol, "dz")
    if row.affine:
        wide = max(atol, TOLERANCE[module.weight.dtype][0]) * 10 * reference.weight.grad.abs().max().item()
        close(module.weight.grad, reference.weight.grad, wide, 0, "dw")
    assert out.dtype is row.dtype
    assert all(torch.equal(t, before[k]) for k, t in module.state_dict().items())
    with torch.no_grad():
        assert torch.equal(module(x, z), out)


def test_the_witness_would_notice():
    row = BASE.but(sizes=(8,), relu=True, z=True)
    result = run_row(0, row)
    result["steps"][0]["dx"] += 1e-3
    with pytest.raises(AssertionError, match="dx of step 0"):
        check_row(row, [result])
    assert len(witness(row)["steps"]) == 1


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("shape", [(1, 4), (1, 4, 1), (1, 4, 1, 1)])
def test_a_single_value_is_an_error_before_anything_changes(shape, momentum):
    module = SyncBatchNorm(4, momentum=momentum)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        module(torch.randn(shape))
    assert all(torch.equal(t, before[k]) for k, t in module.state_dict().items())
    module.eval()(torch.randn(shape))


@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 4, 4), (4, 3, 0, 2)])
def test_an_empty_batch_is_torchs(shape):
    ours, theirs = SyncBatchNorm(3), nn.BatchNorm2d(3) if len(shape) == 4 else nn.BatchNorm1d(3)
    x = torch.randn(shape, requires_grad=True)
    out = ours(x)
    assert out.shape == x.shape
    out.sum().backward()
    theirs(x)
    assert all(torch.equal(t, theirs.state_dict()[k]) for k, t in ours.state_dict().items())


@pytest.mark.parametrize(
    ("module", "shape", "said"),
    [
        (SyncBatchNorm(3), (4,), "2D"),
        (SyncBatchNorm(3, channel_last=True), (2, 4, 5, 6), "neither in its last dimension"),
        (convert_syncbn_model(nn.BatchNorm2d(3)), (2, 3, 4), "4D"),
        (convert_syncbn_model(nn.BatchNorm1d(3)), (2, 3, 4, 4), "2D or 3D"),
    ],
)
def test_a_wrong_shape_is_named(module, shape, said):
    with pytest.raises(ValueError, match=said):
        module(torch.randn(shape))


def test_z_must_have_the_inputs_shape():
    with pytest.raises(ValueError, match=r"\[1, 3, 4, 4\].*\[2, 3, 4, 4\]"):
        SyncBatchNorm(3)(torch.randn(2, 3, 4, 4), torch.randn(1, 3, 4, 4))


def test_wrong_channels_are_an_error():
    module = SyncBatchNorm(3)
    with pytest.raises((ValueError, RuntimeError)):
        module(torch.randn(2, 5, 4, 4))
    assert module.num_batches_tracked == 0


@pytest.mark.parametrize("training", [True, False])
def test_channel_last_recognises_both_shapes(training):
    """[N, C, H, W] too: by its sizes, and where both fit by its memory."""
    plain = SyncBatchNorm(4).train(training)
    for shape in ((2, 4, 5, 3), (2, 4, 4, 4), (2, 4, 6, 4)):
        x = torch.randn(shape).contiguous(memory_format=torch.channels_last)
        last = SyncBatchNorm(4, channel_last=True).train(training)
        expected = plain(x)
        out = last(x)
        assert out.shape == x.shape and out.is_contiguous(memory_format=torch.channels_last)
        close(out, expected, 1e-6, 1e-6, "out")
        rows = x.permute(0, 2, 3, 1).contiguous()
        close(last(rows).permute(0, 3, 1, 2), expected, 1e-6, 1e-6, "rows")


def test_under_autocast_the_output_has_the_inputs_type():
    module = SyncBatchNorm(3)
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            assert module(torch.randn(2, 3, 4, 4, dtype=dtype)).dtype is dtype
    assert module.running_mean.dtype is torch.float32


TRANSFORMS = {
    "vmap": lambda module, x: torch.func.vmap(module)(x),
    "grad": lambda module, x: torch.func.grad(lambda x: module(x[0]).pow(3).sum())(x),
    "jvp": lambda module, x: torch.func.jvp(module, (x[0],), (x[1],))[1],
    "per_sample": lambda module, x: torch.func.vmap(torch.func.grad(lambda x: module(x).pow(3).sum()))(x),
}


@pytest.mark.parametrize("name", list(TRANSFORMS))
def test_function_transforms_work_as_with_batchnorm(name):
    x = torch.randn(2, 5, 3)
    ours, torchs = (kind(3, track_running_stats=False) for kind in (SyncBatchNorm, nn.BatchNorm1d))
    torch.testing.assert_close(TRANSFORMS[name](ours, x), TRANSFORMS[name](torchs, x), atol=1e-5, rtol=1e-5)


def test_forward_mode_differentiation():
    x, tangent, results = torch.randn(5, 3), torch.randn(5, 3), []
    for kind in (SyncBatchNorm, nn.BatchNorm1d):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, tangent)
            results.append(torch.autograd.forward_ad.unpack_dual(kind(3)(dual)).tangent)
    torch.testing.assert_close(*results)


def test_a_second_derivative_is_refused_with_a_sentence():
    module, x = SyncBatchNorm(3), torch.randn(4, 3, requires_grad=True)
    (grad,) = torch.autograd.grad(module(x).pow(2).sum(), x, create_graph=True)  # alone, it is no error
    with pytest.raises(RuntimeError, match=r"SyncBatchNorm has no second derivative.*BatchNorm"):
        grad.sum().backward()
    module.eval()
    (grad,) = torch.autograd.grad(module(x).pow(2).sum(), x, create_graph=True)
    grad.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant):
    results = []
    for kind in (nn.BatchNorm2d, SyncBatchNorm):
        module = kind(3)
        x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(3), requires_grad=True)
        checkpoint(lambda x, m=module: m(x.sin()).cos(), x, use_reentrant=reentrant).square().sum().backward()
        results.append({"dx": x.grad, "dw": module.weight.grad, **module.state_dict()})
    for key, value in results[0].items():
        close(results[1][key], value, 1e-4, 1e-4, key)


@pytest.mark.parametrize("relu", [False, True])
def test_eval_compiles_to_one_graph(relu):
    module = SyncBatchNorm(3, fuse_relu=relu).eval()
    module.running_mean.uniform_(-1, 1)
    x, z = torch.randn(2, 2, 3, 4, 4)
    for model in (module, convert_syncbn_model(nn.Sequential(nn.BatchNorm2d(3))).eval()):
        arguments = (x, z) if model is module else (x,)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        close(compiled(*arguments), model(*arguments), 1e-6, 1e-6, "out")
    last = SyncBatchNorm(4, channel_last=True).eval()
    close(torch.compile(last, fullgraph=True, backend="aot_eager")(x), last(x), 1e-6, 1e-6, "channel_last")


@pytest.mark.parametrize("momentum", [0.1, None])
def test_training_compiles_as_torchs(momentum):
    ours, theirs = SyncBatchNorm(3, momentum=momentum), nn.BatchNorm2d(3, momentum=momentum)
    x = torch.randn(2, 3, 4, 4)
    for module in (ours, theirs):
        compiled = torch.compile(module, backend="aot_eager", fullgraph=momentum is not None)
        for _ in range(2):
            compiled(x).square().sum().backward()
    assert set(ours.state_dict()) == set(theirs.state_dict())
    for key, value in theirs.state_dict().items():
        close(ours.state_dict()[key], value, 1e-6, 1e-6, key)
    close(ours.weight.grad, theirs.weight.grad, 1e-5, 1e-5, "dw")


def test_eval_exports():
    module = SyncBatchNorm(3, fuse_relu=True).eval()
    x = torch.randn(2, 3, 4, 4)
    exported = torch.export.export(module, (x,)).module()
    close(exported(x), module(x), 1e-6, 1e-6, "out")


def test_a_frozen_layer_in_a_training_model():
    """eval() on the layer alone, weights without gradients: the input still gets its gradient."""
    model = convert_syncbn_model(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)))
    model[1].eval().requires_grad_(False)
    before = copy.deepcopy(model[1].state_dict())
    model(torch.randn(2, 3, 4, 4)).sum().backward()
    assert model[0].weight.grad.abs().sum() > 0
    assert model[1].weight.grad is None
    assert all(torch.equal(t, before[k]) for k, t in model[1].state_dict().items())


def test_apex_signature():
    module = SyncBatchNorm(8, 1e-3, 0.2, True, True, None, True, True)
    assert (module.eps, module.momentum, module.channel_last, module.fuse_relu) == (1e-3, 0.2, True, True)
    assert "channel_last=True" in repr(module) and "fuse_relu=True" in repr(module)


def test_importing_it_does_not_import_the_compiler():
    """Which would take two seconds."""
    code = "import sys; sys.modules['lightning'] = None; import lightning_apex; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr
