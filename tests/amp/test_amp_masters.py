"""Masters as a user sees them: clipping and edits."""

import pytest
import torch
from amp_support import (
    BF16,
    F16,
    LEVELS,
    OPTIMIZERS,
    HalfByHand,
    by_grad_scaler,
    fp32,
    loss_of,
    same,
    start,
    state_of,
    step,
)
from torch import nn

from lightning_apex import amp

DTYPES = {"bfloat16": BF16, "float16": F16}
MAX_NORM = 0.05


def backward(model, made, index=0, factor=1.0):
    made.zero_grad()
    with amp.scale_loss(loss_of(model, index) * factor, made) as scaled_loss:
        scaled_loss.backward()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_clipping_at_O1(optimizer, dtype):
    witness = by_grad_scaler(optimizer, DTYPES[dtype], [1.0] * 4, MAX_NORM)
    model, made = start("O1", optimizer, half_dtype=dtype)
    for index in range(4):
        backward(model, made, index)
        nn.utils.clip_grad_norm_(amp.master_params(made), MAX_NORM)
        made.step()
        assert same(fp32(model), witness[index][0])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("level", "dtype"), [("O2", "bfloat16"), ("O2", "float16"), ("O5", "bfloat16")])
def test_clipping_with_masters(level, dtype, optimizer):
    witness = HalfByHand(optimizer, DTYPES[dtype], 2.0**8 if level == "O2" else 1.0)
    model, made = start(level, optimizer, half_dtype=dtype)
    for index in range(4):
        witness.step(index, max_norm=MAX_NORM)
        backward(model, made, index)
        norm = nn.utils.clip_grad_norm_(amp.master_params(made), MAX_NORM)
        assert norm > MAX_NORM
        after = torch.stack([p.grad.norm() for p in amp.master_params(made)]).norm()
        assert after == pytest.approx(MAX_NORM, rel=1e-3)
        made.step()
    assert same(fp32(model), witness.fp32())


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_clipping_the_models_own_parameters_works_with_torchs_optimizers(optimizer):
    witness = HalfByHand(optimizer, BF16, 2.0**8)
    model, made = start("O2", optimizer, half_dtype="bfloat16")
    for index in range(3):
        witness.step(index, max_norm=MAX_NORM)
        backward(model, made, index)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        made.step()
    assert same(fp32(model), witness.fp32())


def test_changing_gradients_that_are_still_scaled_is_refused():
    model, made = start("O2", "fused_adam", half_dtype="bfloat16")
    step(model, made)
    before, state = fp32(model), state_of(made)
    backward(model, made)
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    with pytest.raises(RuntimeError, match=r"amp\.master_params\(optimizer\) instead"):
        made.step()
    weights = {k: v for k, v in fp32(model).items() if "running" not in k and "tracked" not in k}
    assert same(weights, {k: before[k] for k in weights}) and same(state_of(made), state)
    step(model, made, 1)  # and on


@pytest.mark.parametrize("level", LEVELS)
def test_master_params(level):
    model, made = start(level, "adamw", half_dtype=None)
    masters = list(amp.master_params(made))
    assert [m.shape for m in masters] == [p.shape for p in model.parameters()]
    if level == "O3":
        assert all(m is p for m, p in zip(masters, model.parameters(), strict=True))
    else:
        assert {m.dtype for m in masters} == {torch.float32}
    for master, param in zip(masters, model.parameters(), strict=True):
        assert (master is param) is (param.dtype is torch.float32 or level == "O3")
        assert torch.equal(master.to(param.dtype), param)
    backward(model, made)
    assert all(m.grad is not None and m.grad.dtype is m.dtype for m in amp.master_params(made))
    made.step()
    assert same(fp32(model)["0.weight"].float(), next(amp.master_params(made)).detach().float())


def test_of_an_optimizer_that_nobody_initialised():
    param = nn.Parameter(torch.ones(2))
    assert list(amp.master_params(torch.optim.SGD([param]))) == [param]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
class TestEdits:
    def test_a_gradient_set_to_none_makes_no_step(self, level, optimizer):
        def drop(masters):
            masters[0].grad = None

        model, made = start(level, optimizer, half_dtype=None)
        step(model, made)
        backward(model, made, 1)
        before = fp32(model)
        drop(list(amp.master_params(made)))
        made.step()
        after = fp32(model)
        assert same(after["0.weight"], before["0.weight"])
        assert not same(after["3.weight"], before["3.weight"])

    def test_a_gradient_that_is_replaced_is_used(self, level, optimizer):
        results = []
        for replace in (True, False):
            model, made = start(level, optimizer, half_dtype=None)
            backward(model, made)
            for master in amp.master_params(made):
                if replace:
                    master.grad = master.grad * 0.5
                else:
                    master.grad.mul_(0.5)
            made.step()
            results.append(fp32(model))
        assert same(*results)

    def test_zero_grad_after_looking(self, level, optimizer):
        model, made = start(level, optimizer, half_dtype=None)
        backward(model, made, factor=100.0)
        assert next(amp.master_params(made)).grad is not None
        made.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        before = fp32(model)
        made.step()  # of nothing
        assert same(fp32(model), before)

    def test_looking_twice_and_changing_nothing(self, level, optimizer):
        results = []
        for looks in (0, 1, 2):
            model, made = start(level, optimizer, half_dtype=None)
            for index in range(3):
                backward(model, made, index)
                for _ in range(looks):
                    list(amp.master_params(made))
                made.step()
            results.append((fp32(model), state_of(made)))
        assert same(results[0], results[1]) and same(results[0], results[2])


@pytest.mark.parametrize("optimizer", ["sgd", "fused_adam"])
@pytest.mark.parametrize("level", LEVELS)
def test_gradients_of_masters_zeroed_by_hand_after_the_step(level: str, optimizer: str) -> None:
    def run(by_hand: bool) -> dict[str, torch.Tensor]:
        model, made = start(level, optimizer)
        for index in range(3):
            with amp.scale_loss(loss_of(model, index), made) as scaled_loss:
                scaled_loss.backward()
            made.step()
            if not by_hand:
                made.zero_grad()
            else:
                for param in amp.master_params(made):
                    param.grad = None
        return fp32(model)

    assert same(run(True), run(False))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_an_optimizer_that_is_named_twice_is_unscaled_once(level: str, optimizer: str) -> None:
    def run(times: int) -> dict[str, torch.Tensor]:
        model, made = start(level, optimizer)
        for index in range(3):
            made.zero_grad()
            with amp.scale_loss(loss_of(model, index), [made] * times) as scaled_loss:
                scaled_loss.backward()
            made.step()
        return fp32(model)

    assert same(run(2), run(1))
