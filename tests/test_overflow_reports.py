"""What is said about gradients that were not finite, and when a run is given up."""

import pytest
import torch
from torch import nn

from lightning_apex import FusedAdam, FusedSGD, LossScaleError, LossScaler
from lightning_apex.engine import PrecisionEngine
from lightning_apex.levels import resolve
from lightning_apex.overflow import OverflowReport


def report(**changes) -> OverflowReport:
    values = {
        "step": 3,
        "parameters": ("net.0.weight", "net.0.bias", "head.weight"),
        "old_scale": 8.0,
        "new_scale": 4.0,
    }
    return OverflowReport(**(values | {"consecutive_skips": 1, "skipped_steps": 2} | changes))


class TestReport:
    def test_names_scales_and_modules_in_one_line(self):
        assert str(report()) == "step skipped, loss scale 8 -> 4; gradients not finite in net.0, head"

    def test_a_scale_that_stays(self):
        assert "loss scale stays at 8" in str(report(new_scale=8.0))

    def test_many_modules_are_cut_short(self):
        text = str(report(parameters=tuple(f"layer{i}.weight" for i in range(20))))
        assert "layer7" in text and "layer8" not in text and "and 12 more" in text

    def test_parameters_of_the_root(self):
        assert report(parameters=("scale",)).modules == ("scale",)

    def test_nobody_known(self):
        assert "(unknown)" in str(report(parameters=()))


def skip(scaler, optimizer, params, bad=(0,)):
    for i, param in enumerate(params):
        param.grad = torch.full_like(param, torch.inf if i in bad else 1.0)
    scaler.step(optimizer)
    scaler.update()


@pytest.fixture(params=[FusedAdam, FusedSGD, torch.optim.SGD])
def optimizer(request):
    params = [nn.Parameter(torch.ones(n)) for n in (3, 0, 2)]
    return request.param([{"params": params[:1]}, {"params": params[1:]}], lr=0.1)


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


class TestWatch:
    def test_a_report_tells_what_happened(self, optimizer):
        scaler = LossScaler(init_scale=8.0)
        params = params_of(optimizer)
        assert scaler.last_overflow is None
        skip(scaler, optimizer, params, bad=())
        assert scaler.last_overflow is None
        skip(scaler, optimizer, params, bad=(0, 2))
        skip(scaler, optimizer, params, bad=(2,))
        assert scaler.last_overflow == OverflowReport(
            step=3,
            parameters=("parameter 1 of group 1",),
            old_scale=4.0,
            new_scale=2.0,
            consecutive_skips=2,
            skipped_steps=2,
        )
        first, second = scaler.watch.take_unread()
        assert first.parameters == ("parameter 0 of group 0", "parameter 1 of group 1")
        assert (first.old_scale, first.new_scale) == (8.0, 4.0) and second is scaler.last_overflow
        assert scaler.watch.take_unread() == []

    def test_reports_after_unscale(self, optimizer):
        scaler = LossScaler(init_scale=8.0)
        params = params_of(optimizer)
        params[2].grad = torch.full_like(params[2], torch.nan)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last_overflow.parameters == ("parameter 1 of group 1",)

    def test_only_a_hundred_are_kept(self, optimizer):
        scaler = LossScaler(max_consecutive_skips=None)
        for _ in range(120):
            skip(scaler, optimizer, params_of(optimizer))
        reports = scaler.watch.take_unread()
        assert [r.step for r in reports] == list(range(21, 121))

    def test_several_optimizers_in_one_update(self):
        a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        first, second = FusedSGD([a]), torch.optim.SGD([b], lr=0.1)
        scaler = LossScaler(init_scale=8.0)
        a.grad, b.grad = torch.tensor([1.0]), torch.tensor([torch.inf])
        scaler.step(first)
        scaler.step(second)
        scaler.update()
        assert scaler.last_overflow.parameters == ("parameter 0 of group 0",)
        assert scaler.last_overflow.skipped_steps == 1


class TestGivingUp:
    def test_after_so_many_skips_in_a_row(self, optimizer):
        scaler = LossScaler(init_scale=4.0, min_loss_scale=2.0, max_consecutive_skips=3)
        params = params_of(optimizer)
        for _ in range(3):
            skip(scaler, optimizer, params)
            skip(scaler, optimizer, params)
            skip(scaler, optimizer, params, bad=())
        skip(scaler, optimizer, params)
        skip(scaler, optimizer, params)
        with pytest.raises(LossScaleError, match=r"3 steps in a row .*parameter 0 of group 0 .*scale of 2") as caught:
            skip(scaler, optimizer, params)
        assert "max_consecutive_skips" in str(caught.value)
        with pytest.raises(LossScaleError):
            skip(scaler, optimizer, params)

    def test_never(self, optimizer):
        scaler = LossScaler(max_consecutive_skips=None)
        for _ in range(60):
            skip(scaler, optimizer, params_of(optimizer))

    def test_a_fixed_scale_gives_up_too(self, optimizer):
        scaler = LossScaler(8.0, max_consecutive_skips=2)
        skip(scaler, optimizer, params_of(optimizer))
        with pytest.raises(LossScaleError, match="2 steps"):
            skip(scaler, optimizer, params_of(optimizer))

    def test_is_a_runtime_error(self):
        assert issubclass(LossScaleError, RuntimeError)

    def test_a_model_that_is_never_finite_names_its_parameters(self):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        engine = PrecisionEngine(resolve("O2", half_dtype="float16"), LossScaler(max_consecutive_skips=5))
        engine.convert(model, "cpu")
        optimizer = FusedAdam(model.parameters())
        engine.adopt([optimizer])
        with pytest.raises(LossScaleError, match=r"0\.weight.*1\.bias"):
            for _ in range(6):
                with engine.forward_context():
                    loss = model(torch.ones(1, 2)).float().sum() * torch.nan
                engine.scale(loss).backward()
                engine.finish(optimizer)
                optimizer.zero_grad()
        assert engine.scaler.get_scale() == 2.0**11
        assert optimizer.state[model[0].weight]["step"] == 0
