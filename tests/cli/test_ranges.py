"""``lightning-apex ranges``: what it counts, what it suggests, and that the suggestions hold at O2."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

pytest.importorskip("rich")
pytest.importorskip("jsonargparse")
pytest.importorskip("matplotlib")

from lightning_apex import ApexPrecision
from lightning_apex.casting import kept_modules
from lightning_apex.cli import CommandError, Ranges, find_ranges
from lightning_apex.cli.exponents import Exponents
from lightning_apex.cli.probe import KINDS, ExponentProbe, ModuleExponents, ProbeReport
from lightning_apex.cli.program import main
from lightning_apex.cli.ranging.advice import advise, fewest_lost, scale_table, suggest_scale

FILE = Path(__file__).with_name("ranges_models.py")
F16 = torch.float16


def found(model: str, steps: int = 6, every: int = 1, **kwargs: Any) -> Ranges:
    return find_ranges(
        model=f"{FILE}:{model}", data=f"{FILE}:Numbers", steps=steps, every=every, accelerator="cpu", **kwargs
    )


def trained(model: LightningModule, data: Any, steps: int = 6, **precision: Any) -> ExponentProbe:
    """Trains in fp16 at O2 and counts what really became 0 or infinite."""
    probe = ExponentProbe(model)

    class Attach(Callback):
        def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            probe.__enter__()

        def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
            probe.__exit__(None, None, None)

    plugin = ApexPrecision("O2", half_dtype="float16", **precision)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=steps, max_epochs=-1, callbacks=[Attach()], plugins=[plugin], **quiet
    )
    trainer.fit(model, data)
    return probe


def models() -> Any:
    import ranges_models

    return ranges_models


# ---- the suggestions, tried out ----


def test_an_overflowing_module_is_named_and_keeping_it_mends_the_training() -> None:
    ranges = found("Overflowing")
    assert ranges.report.first_out_of_range("activations") == "net.1.1"
    assert ranges.keep_fp32 == ["net.1"]  # net.1.1 alone would hand on its values in half
    assert "net.1.1's outputs reach" in ranges.advice.keep_fp32[0].reason and ranges.exit_code == 1
    data = models().Numbers()
    before = trained(models().Overflowing(), data, max_consecutive_skips=None).report()
    assert before.first_out_of_range("activations") == "net.1.1"
    suggested = {"init_scale": ranges.init_scale, "keep_fp32": ranges.keep_fp32}
    after = trained(models().Overflowing(), data, **suggested).report()
    assert after.modules["net"].counts["activations"].fate(F16).nonfinite == 0
    assert all(not module.gradients().infs and not module.gradients().nans for module in after.modules.values())


def test_tiny_gradients_raise_the_scale_and_fewer_become_zero() -> None:
    ranges = found("Tiny")
    assert ranges.init_scale is not None and ranges.init_scale >= 2.0**20
    assert ranges.keep_fp32 == [] and ranges.exit_code == 0
    zeros = {}
    for name, precision in {"1": {"loss_scale": 1.0}, "ours": {"init_scale": ranges.init_scale}}.items():
        report = trained(models().Tiny(), models().Numbers(), **precision).report()
        zeros[name] = report.modules["net.2"].gradients().zeros
        predicted = ranges.report.modules["net.2"].gradients()
        flushed = predicted.fate(F16, 1.0 if name == "1" else ranges.init_scale).flushed
        # The first steps are alike; rounding moves the values a little.
        assert zeros[name] - predicted.zeros == pytest.approx(flushed, abs=0.05 * predicted.elements)
    assert zeros["ours"] < zeros["1"] / 20


def test_an_overflow_that_no_module_ends_is_said_to_be_beyond_help() -> None:
    ranges = found("Stuck")
    assert ranges.keep_fp32 == [] and ranges.exit_code == 1
    assert any("net.1's outputs reach" in note and "bf16" in note for note in ranges.advice.notes)


def test_a_healthy_model() -> None:
    ranges = found("Plain")
    assert ranges.keep_fp32 == [] and ranges.exit_code == 0 and ranges.advice.notes == ()
    row = next(row for row in ranges.advice.scales if row.scale == ranges.init_scale)
    assert row.overflowed == 0 and row.flushed == min(r.flushed for r in ranges.advice.scales if not r.overflowed)


# ---- the counts ----


def test_counting_every_batch_or_some_and_training_as_without_a_probe() -> None:
    ranges = found("Plain", steps=7, every=3)
    assert (ranges.steps, ranges.measured_batches) == (7, 3)
    assert ranges.report.modules["net.0"].calls == 3
    assert ranges.report.modules["net.0"].counts["activations"].elements == 3 * 8 * 16
    assert ranges.report.modules["net.0"].counts["weights"].elements == 2 * (6 * 16 + 16)


def test_odd_models_are_counted() -> None:
    ranges = found("Odd")
    modules = ranges.report.modules
    assert modules["first"].calls == 12 and modules["lstm"].calls == 6
    assert modules["tied"].counts["weights"].elements == 2 * 5
    assert modules["first"].counts["weight_gradients"].elements == 6 * 35
    assert ranges.report.never_called == ["unused"]
    assert any("Never called" in note and "unused" in note for note in ranges.advice.notes)


# ---- advice as a function of counts ----


def module(name: str, **values: list[float] | Tensor) -> ModuleExponents:
    counts = {kind: Exponents.of(torch.as_tensor(values.get(kind, []), dtype=torch.float32)) for kind in KINDS}
    return ModuleExponents(name, "Linear", calls=1, weights=1, counts=counts)


def report(*modules: ModuleExponents, **changes: Any) -> ProbeReport:
    all_modules = [module(""), *modules]
    names = [m.name for m in modules]
    for m in all_modules:
        for key, names_changed in changes.items():
            if m.name in names_changed:
                setattr(m, key, True)
    return ProbeReport({m.name: m for m in all_modules}, names, names[::-1])


def test_the_scale_table_counts_what_numpy_counts() -> None:
    grads = torch.randn(4000) * 10.0 ** torch.empty(4000).uniform_(-14, 2)
    rows = scale_table(report(module("a", activation_gradients=grads[:1000], weight_gradients=grads[1000:])))
    values = grads.numpy().astype(np.float64)
    for row in rows:
        with np.errstate(over="ignore"):
            half = (values * row.scale).astype(np.float16)
        assert row.flushed == ((half == 0) & (values != 0)).sum()
        assert row.overflowed == np.isinf(half).sum()
        assert row.nonzero == (values != 0).sum()
    best = fewest_lost(rows)
    assert best.flushed + best.overflowed == min(row.flushed + row.overflowed for row in rows)
    assert math.log2(rows[0].scale) == -10 and math.log2(rows[-1].scale) == 24


@pytest.mark.parametrize(("gradients", "scale", "said"), [
    ([1e-3, 1e-4], 2.0**16, "none of the gradients become 0"),  # the plugin's own, as good as others
    ([1e-9, 1e-2], 2.0**16, "first overflow comes at 8.38861e+06"),
    ([1e-10, 1e-8], 2.0**20, "none overflows up to"),
    ([1e-12, 1e-12], 2.0**24 / 2, "all are subnormal"),
    ([1e-3, 2.0**3], 2.0**12 / 2, "first overflow comes at 8192"),
    ([1e3, 1e-9], 2.0**5, "50 %"),  # overflows from 128 on; at 64 it just fits, and 32 leaves room
    ([1e6], 2.0**-5, "become 0"),
    ([1e9, 1.0], None, "use bf16"),
    ([0.0], None, "no loss scale to choose"),
])  # fmt: skip
def test_the_suggested_scale(gradients: list[float], scale: float | None, said: str) -> None:
    suggested, reason = suggest_scale(scale_table(report(module("a", activation_gradients=gradients))))
    assert suggested == scale, reason
    assert said in reason


@pytest.mark.parametrize(("gradients", "code"), [([1e9] * 7, 1), ([0.0], 0), ([1.0], 0)])
def test_gradients_that_overflow_at_every_scale_are_a_finding(gradients: list[float], code: int) -> None:
    assert Ranges("Net", 1, 1, report(module("a", activation_gradients=gradients))).exit_code == code


def test_gradients_that_are_computed_in_fp32_do_not_move_the_scale() -> None:
    tiny, usual = [1e-9], [0.1]
    kept = report(
        module("norm", activation_gradients=usual, weight_gradients=tiny),
        module("block", activation_gradients=usual, activations=[1.0]),
        module("block.inner", activation_gradients=tiny, activations=[1e6]),
        stays_fp32=["norm"],
    )
    advice = advise(kept)
    assert [keep.pattern for keep in advice.keep_fp32] == ["block"]
    assert all(row.nonzero == 2 for row in advice.scales)


def test_weights_and_their_gradients_that_fp16_cannot_hold() -> None:
    spread = [1e-12] * 9 + [10.0]
    advice = advise(
        report(
            module("large", weights=[1e5, 1.0]),
            module("small", weights=[1e-9, 1.0]),
            module("flushed", weight_gradients=spread, activation_gradients=[1.0] * 50),
            module("all.flushed", weight_gradients=spread, activation_gradients=spread),
            module("norm", weights=[1e9], weight_gradients=spread, activation_gradients=[1.0]),
            stays_fp32=["norm"],
        )
    )
    assert [keep.pattern for keep in advice.keep_fp32] == ["large", "small", "flushed"]
    assert "reach 1.3e+05" in advice.keep_fp32[0].reason and "50 %" in advice.keep_fp32[1].reason
    assert "90 % of the gradients of flushed's weights" in advice.keep_fp32[2].reason


def test_patterns_name_what_is_meant_and_nothing_else() -> None:
    def net(*bad: str) -> ProbeReport:
        names = ["layers.0.up", "layers.1.up", "layers.0.down", "layers.10.up", "head[1]"]
        return report(*[module(name, weights=[1e6 if name in bad else 1.0]) for name in names])

    patterns = lambda r: [keep.pattern for keep in advise(r).keep_fp32]  # noqa: E731
    assert patterns(net("layers.0.up", "layers.1.up", "layers.10.up")) == ["layers.*.up"]
    assert patterns(net("layers.0.up", "layers.1.up")) == ["layers.0.up", "layers.1.up"]
    (escaped,) = patterns(net("head[1]"))
    model = nn.Module()
    model.add_module("head[1]", nn.Linear(1, 1))
    assert kept_modules(model, [escaped]) == [model.get_submodule("head[1]")]


def test_only_the_outermost_is_kept() -> None:
    advice = advise(
        report(
            module("a.b.c", activations=[1e6]),
            module("a.b", activations=[1.0]),
            module("a.b.d", weights=[1e6]),
            module("a.e", activations=[1e6]),
            module("a", activations=[2.0]),
        )
    )
    assert [keep.pattern for keep in advice.keep_fp32] == ["a"]


def test_values_that_are_not_finite_in_fp32_are_told_apart() -> None:
    advice = advise(report(module("a", activations=[math.nan], activation_gradients=[math.inf, 1.0])))
    assert any("a returned values that are not finite, in fp32" in note for note in advice.notes)
    assert any("Gradients at a are not finite in fp32 already" in note for note in advice.notes)
    assert not advice.usable and advice.init_scale is None and advice.keep_fp32 == ()


# ---- what is written and printed ----


@pytest.mark.parametrize(("model", "said"), [
    ("NotANumber", "Gradients at net.2 are not finite in fp32 already"),
    ("ReturnsNone", "No gradient was measured, so no setting is suggested: return the loss"),
    ("CallsNothing", "Nothing was measured, so no setting is suggested: return the loss"),
])  # fmt: skip
def test_without_evidence_no_setting_is_suggested(
    model: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--model", f"{FILE}:{model}", "--data", f"{FILE}:Numbers", "--accelerator", "cpu", "--steps", "1"]
    assert main(["ranges", *words, "--out", str(tmp_path)]) == 1
    printed, html = " ".join(capsys.readouterr().out.split()), (tmp_path / "report.html").read_text()
    for text in (printed, html):
        assert said in text and "ApexPrecision(" not in text and "1 step at O0, counted on 1 batch" in text
        assert "1 batches" not in text
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["init_scale"] is None and content["keep_fp32"] == [] and not content["advice"]["usable"]


def test_the_folder_and_the_way_back(tmp_path: Path) -> None:
    ranges = found("Overflowing", out=str(tmp_path / "out"))
    files = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.*"))
    names = ["model", "net", "net.0", "net.1", "net.1.0", "net.1.1", "net.1.2", "net.2"]
    pictures = [f"modules/{name}.png" for name in names if name != "model"]
    assert files == sorted([*pictures, "report.html", "report.json", "scales.png"])
    assert all((tmp_path / "out" / file).read_bytes()[:4] == b"\x89PNG" for file in files if file.endswith("png"))
    html = (tmp_path / "out" / "report.html").read_text()
    assert "net.1.1" in html and 'src="http' not in html and "<link" not in html and html.count("data:image") == 8
    for path in (tmp_path / "out", tmp_path / "out" / "report.json"):
        back = Ranges.load(path)
        assert back.as_json() == ranges.as_json() and back.advice == ranges.advice
    assert ranges.plot("net.1.1").axes and ranges.plot_scales().axes
    with pytest.raises(CommandError, match="'nowhere' is no module"):
        ranges.plot("nowhere")
    (tmp_path / "other.json").write_text("[]")
    for path in (tmp_path / "other.json", tmp_path / "absent"):
        with pytest.raises(CommandError, match="report"):
            Ranges.load(path)


def test_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["ranges", "--model", f"{FILE}:Overflowing", "--data", f"{FILE}:Numbers", "--accelerator", "cpu"]
    assert main([*words, "--steps", "3", "--every", "1"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "net.1.1" in printed and "keep_fp32=['net.1']" in printed and "init_scale=2.0**" in printed
    assert main([*words, "--steps", "2", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["keep_fp32"] == ["net.1"] and data["measured_batches"] == 1
    assert data["first_activation_out_of_range"] == "net.1.1" and data["first_activation_out_of_range_bf16"] is None


@pytest.mark.parametrize(("changes", "said"), [
    ({"steps": 0}, "steps=0 is too few"),
    ({"every": 0}, "every=0 is too few"),
    ({"model": "Raising"}, "training at O0 fails: RuntimeError: the shapes are wrong"),
    ({"out": "/proc/nowhere"}, "out='/proc/nowhere' cannot be written"),
])  # fmt: skip
def test_bad_input_is_one_sentence(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CommandError) as raised:
        found(**{"model": "Plain"} | changes)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_an_interrupt_ends_the_program_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", f"{FILE}:Interrupted", "--data", f"{FILE}:Numbers", "--accelerator", "cpu"]
    assert main(["ranges", *words]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_no_data_is_said(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "model: {class_path: ranges_models.Plain}\n"
        "data: {class_path: ranges_models.Numbers, init_args: {batches: 1}}\n"
        "trainer: {accelerator: cpu, limit_train_batches: 0}\n"
    )
    with pytest.raises(CommandError, match="no batches"):
        find_ranges(str(config), steps=3)
