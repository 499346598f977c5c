"""Models of many kinds: keep_fp32, tied weights, recurrent nets, buffers, frozen parts, batches in containers."""

import dataclasses
from collections import namedtuple
from typing import Any

import pytest
import torch
from helpers import (
    CLASSES,
    FEATURES,
    LEVELS,
    Net,
    all_fp32,
    assert_close,
    assert_same,
    batches,
    fit,
    plugin,
    weights,
)
from torch import nn

CASTING = ("O2", "O3", "O5")


def net(*modules, optimizer="fused_adam"):
    made = Net(optimizer)
    made.net = nn.Sequential(*modules)
    return made


def dtypes_during(model, level, data=None, **kwargs):
    seen = {}

    def look(module, args):
        seen.update({n: t.dtype for n, t in (*model.named_parameters(), *model.named_buffers())})

    handle = model.net.register_forward_pre_hook(look)
    fit(model, plugin(level, **kwargs), data or batches(2))
    handle.remove()
    return seen


@pytest.mark.parametrize("keep", [["net.3"], [nn.Linear], ["net.[3-9]"], "net.3", nn.Linear])
@pytest.mark.parametrize("level", CASTING)
def test_keep_fp32_by_pattern_and_class(level, keep):
    outputs = []
    model = Net()
    model.net[3].register_forward_hook(lambda m, a, out: outputs.append((m.weight.dtype, a[0].dtype)))
    seen = dtypes_during(model, level, keep_fp32=keep)
    assert seen["net.3.weight"] is torch.float32
    by_class = nn.Linear in keep if isinstance(keep, list) else keep is nn.Linear
    assert seen["net.0.weight"] is (torch.float32 if by_class else torch.bfloat16)
    assert outputs[0] == (torch.float32, torch.float32)
    assert all_fp32(model)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_keep_fp32_under_autocast_computes_in_fp32(level):
    kinds = []
    model = Net()
    model.net[3].register_forward_hook(lambda m, a, out: kinds.append((a[0].dtype, torch.is_autocast_enabled("cpu"))))
    fit(model, plugin(level, keep_fp32=["net.3"]), batches(1))
    assert kinds == [(torch.float32, False)]


def test_keep_fp32_that_matches_nothing_is_an_error():
    model = Net()
    before = weights(model)
    with pytest.raises(ValueError, match=r"keep_fp32='encoder\.\*'"):
        fit(model, plugin("O2", keep_fp32=["encoder.*"]), batches(1))
    assert_same(weights(model), before)
    assert all_fp32(model)


@pytest.mark.parametrize("level", LEVELS)
def test_batchnorm_override(level):
    if level not in CASTING:
        return
    seen = dtypes_during(Net(), level, keep_batchnorm_fp32=level == "O3")
    assert seen["net.1.weight"] is (torch.float32 if level == "O3" else torch.bfloat16)


@pytest.mark.parametrize("level", CASTING)
def test_batchnorm_without_affine_or_tracking_keeps_fp32(level):
    model = net(
        nn.Linear(FEATURES, 16), nn.BatchNorm1d(16, affine=False), nn.BatchNorm1d(16, track_running_stats=False),
        nn.ReLU(), nn.Linear(16, CLASSES),
    )  # fmt: skip
    seen = dtypes_during(model, level)
    expected = torch.bfloat16 if level == "O3" else torch.float32
    assert seen["net.1.running_mean"] is expected
    assert seen["net.2.weight"] is expected


@pytest.mark.parametrize("optimizer", ["fused_adam", "torch_adamw"])
@pytest.mark.parametrize("level", LEVELS)
def test_tied_weights_stay_one_parameter(level, optimizer, tmp_path):
    class Tied(Net):
        def __init__(self):
            super().__init__(optimizer)
            self.encode, self.decode = nn.Linear(FEATURES, CLASSES), nn.Linear(CLASSES, FEATURES)
            self.net = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES))
            self.decode.weight = nn.Parameter(torch.randn(FEATURES, CLASSES) * 0.1)
            self.extra = nn.Linear(CLASSES, FEATURES, bias=False)
            self.extra.weight = self.decode.weight

        def forward(self, x):
            return self.encode(self.extra(self.net(x)) + self.decode(self.encode(x)))

    model, witness = Tied(), Tied()
    witness.load_state_dict(model.state_dict())
    made = fit(model, level, batches(4))
    fit(witness, "32-true", batches(4))
    assert model.extra.weight is model.decode.weight
    made.save_checkpoint(tmp_path / "x.ckpt")
    saved = torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(saved["extra.weight"], saved["decode.weight"])
    assert torch.equal(saved["extra.weight"], model.decode.weight)
    assert_close(weights(model), weights(witness), atol={"O0": 1e-5}.get(level, 4e-2))


class Recurrent(Net):
    def __init__(self, kind):
        super().__init__("fused_adam")
        self.rnn = getattr(nn, kind)(FEATURES, 8, batch_first=True)
        self.norm, self.act, self.head = nn.LayerNorm(8), nn.PReLU(), nn.Linear(8, CLASSES)
        del self.net

    def forward(self, x):
        out, _ = self.rnn(x[:, None, :].expand(-1, 3, -1))
        fp32 = torch.zeros(8)  # an fp32 tensor made here meets half weights
        return self.head(self.act(self.norm(out[:, -1] + fp32)))


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("level", LEVELS)
def test_recurrent_norm_and_prelu_with_fp32_inputs(level, kind):
    if level == "O3":
        pytest.skip("strict: an fp32 tensor made in forward is the user's to cast")
    model, witness = Recurrent(kind), Recurrent(kind)
    witness.load_state_dict(model.state_dict())
    fit(model, level, batches(6))
    fit(witness, "32-true", batches(6))
    assert max(abs(a - b) for a, b in zip(model.losses, witness.losses, strict=True)) < 0.05


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of torch's autocast, natively too
@pytest.mark.parametrize("level", LEVELS)
def test_modules_that_autocast_does_not_list(level):
    model = net(
        nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.PReLU(),
        nn.InstanceNorm1d(4, affine=True), nn.Flatten(), nn.LayerNorm(16), nn.RMSNorm(16), nn.Dropout(0.0),
        nn.Linear(16, CLASSES),
    )  # fmt: skip
    fit(model, level, batches(4))
    assert all(torch.isfinite(torch.tensor(loss)) for loss in model.losses)
    assert all_fp32(model)


@pytest.mark.parametrize("level", LEVELS)
def test_transformer_and_embedding(level):
    class Tokens(Net):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 16)
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            self.net = nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False))
            self.head = nn.Linear(16, CLASSES)

        def forward(self, x):
            return self.head(self.net(self.embed((x.abs() * 3).long().clamp(0, 9))).mean(1))

    model, witness = Tokens(), Tokens()
    witness.load_state_dict(model.state_dict())
    fit(model, level, batches(4))
    fit(witness, "32-true", batches(4))
    assert max(abs(a - b) for a, b in zip(model.losses, witness.losses, strict=True)) < 0.15


@pytest.mark.parametrize("optimizer", ["fused_adam", "torch_adamw"])
@pytest.mark.parametrize("level", LEVELS)
def test_frozen_parameters_stay_exact(level, optimizer):
    model = Net(optimizer)
    model.net[0].requires_grad_(False)
    before = weights(model)
    fit(model, level, batches(3))
    assert_close({"w": model.net[0].weight}, {"w": before["net.0.weight"]}, atol=5e-3 if level == "O3" else 0.0)
    assert not model.net[0].weight.requires_grad
    assert not torch.equal(model.net[3].weight, before["net.3.weight"])


@pytest.mark.parametrize("level", LEVELS)
def test_buffers_that_are_no_floats_and_loss_buffers(level):
    class Buffers(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.tensor([2**40 + 1]))
            self.register_buffer("mask", torch.tensor([True, False]))
            self.register_buffer("wave", torch.tensor([1 + 2j], dtype=torch.complex64))
            self.register_buffer("fine", torch.tensor([1 / 3], dtype=torch.float64))
            self.register_buffer("scratch", torch.tensor([0.1]), persistent=False)
            self.criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.1, 1.2, 1.3]))
            self.kinds = {}

        def loss(self, batch):
            self.kinds = {n: b.dtype for n, b in self.named_buffers()}
            return self.criterion(self(batch[0]).float(), batch[1])

    model = Buffers()
    before = {n: b.clone() for n, b in model.named_buffers()}
    fit(model, level, batches(2))
    exact = ("count", "mask", "wave", "fine", "criterion.weight")
    for name in exact:
        assert model.kinds[name] is before[name].dtype
    after = dict(model.named_buffers())
    assert_same({n: after[n] for n in exact}, {n: before[n] for n in exact})
    assert after["scratch"].dtype is torch.float32
    assert_close({"s": after["scratch"]}, {"s": before["scratch"]}, atol=1e-3 if level == "O3" else 0.0)


@pytest.mark.parametrize("level", LEVELS)
def test_fp64_parameters_stay_fp64(level):
    class Wide(Net):
        def __init__(self):
            super().__init__("fused_adam")
            self.wide = nn.Parameter(torch.zeros(CLASSES, dtype=torch.float64))

        def loss(self, batch):
            return nn.functional.cross_entropy(self(batch[0]).double() + self.wide, batch[1])

    model = Wide()
    fit(model, level, batches(3))
    assert model.wide.dtype is torch.float64
    assert model.wide.abs().max() > 0


Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    y: torch.Tensor
    note: str = "kept"


class Holder:  # no known container
    def __init__(self, x, y):
        self.x, self.y = x, y


class Collated(Net):
    def loss(self, batch):
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else (batch.x, batch.y)
        self.got = (type(batch), x.dtype, y.dtype)
        return nn.functional.cross_entropy(self(x.to(self.net[0].weight.dtype)), y)


@pytest.mark.parametrize("kind", [dict, Pair, Record, Holder])
@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_batches_in_containers(level, kind):
    data = batches(2).dataset

    def collate(rows: list[Any]):
        x, y = (torch.stack(column) for column in zip(*rows, strict=True))
        return {"x": x, "y": y} if kind is dict else kind(x, y)

    model = Collated()
    fit(model, plugin(level), torch.utils.data.DataLoader(data, 8, collate_fn=collate))
    expected = torch.bfloat16 if level == "O3" and kind is not Holder else torch.float32
    assert model.got == (kind, expected, torch.int64)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_no_grad_forward_before_the_real_one(level, checkpointed):
    class Peeking(Net):
        def forward(self, x):
            with torch.no_grad():  # a cast of the weights cached here must not cut the graph below
                self.net(x)
            if checkpointed:
                return torch.utils.checkpoint.checkpoint(self.net, x, use_reentrant=False)
            return self.net(x)

    model, witness = Peeking("fused_sgd"), Peeking("fused_sgd")
    for m in (model, witness):
        m.net[1] = nn.LayerNorm(16)
    fit(model, level, batches(4))
    fit(witness, "32-true", batches(4))
    assert_close(weights(model), weights(witness), atol={"O0": 1e-6, "O3": 3e-2}.get(level, 1e-2))
