"""What a comparison concludes: a pure function of its runs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rich")

from lightning_apex.cli.comparing.findings import findings
from lightning_apex.cli.comparing.judging import (
    Judgement,
    Recommendation,
    distance_to_reference,
    judge,
    recommend,
    smooth,
)
from lightning_apex.cli.comparing.records import Memory, OutOfRange, Overflow, Run


def run(level: str, seed: int = 0, losses: Any = (3.0, 2.0, 1.0, 1.0), seconds: float = 1.0, **changes: Any) -> Run:
    values = list(losses)
    memory = Memory(weights=changes.pop("bytes", 100))
    made = Run(
        level,
        seed,
        status="finished",
        losses={"loss": values},
        seconds=[seconds] * len(values),
        timed=[True] * len(values),
        scales=[1.0] * len(values),
        memory=memory,
        device="d",
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def curve(end: float, steps: int = 40) -> list[float]:
    return [end + 2 * math.exp(-step / 5) for step in range(steps)]


def chosen(*runs: Run) -> Recommendation:
    return recommend(judge(runs))


O0 = (run("O0", 0, curve(1.0)), run("O0", 1, curve(1.2)))


@pytest.mark.parametrize("values", [[1.0], [float(v) for v in range(100)], [math.nan, 1.0, 2.0] * 20])
def test_smooth_is_a_running_mean(values: list[float]) -> None:
    width = max(1, len(values) // 20)
    expected = [np.nanmean(values[max(0, i - width + 1) : i + 1]) if np.isfinite(values[max(0, i - width + 1) : i + 1]).any() else math.nan for i in range(len(values))]  # fmt: skip # noqa: E501
    result = smooth(values)
    known = ~np.isnan(expected)
    np.testing.assert_allclose(np.array(result)[known], np.array(expected)[known], rtol=1e-12)


def test_distance_against_numpy() -> None:
    generator = np.random.default_rng(0)
    curves = {(level, seed): generator.normal(5, 1, 40).tolist() for level in ("O0", "O2") for seed in (0, 1, 2)}
    runs = [run(level, seed, values) for (level, seed), values in curves.items()]
    found = distance_to_reference("O2", runs)
    assert found is not None

    def half(key: tuple[str, int]) -> Any:
        values = np.array(curves[key])
        return np.array([values[max(0, i - 1) : i + 1].mean() for i in range(40)])[20:]

    pairs = [half(("O2", seed)) - half(("O0", seed)) for seed in (0, 1, 2)]
    spreads = [np.abs(half(("O0", a)) - half(("O0", b))).mean() for a, b in ((0, 1), (0, 2), (1, 2))]
    assert found.distance == pytest.approx(np.mean([np.abs(pair).mean() for pair in pairs]))
    assert found.difference == pytest.approx(np.mean(pairs))
    assert found.spread == pytest.approx(np.mean(spreads))
    assert found.tolerance == pytest.approx(1.5 * np.mean(spreads))


def test_the_fastest_that_learns_as_o0_does() -> None:
    level = chosen(*O0, run("O1", 0, curve(1.1), 0.5), run("O2", 0, curve(1.05), 0.4), run("O3", 0, curve(9.0), 0.1))
    assert level.level == "O2"
    for expected in (
        "0.40 times O0's time",
        "1.00 times its memory",
        "spread over seeds is 0.2",
        "no step was skipped",
    ):
        assert expected in level.reason
    assert "O3 is out: its loss is 8 from O0's, and O0's own spread over seeds is 0.2." in level.reason


def test_a_lower_loss_is_no_damage() -> None:
    level = chosen(*O0, run("O5", 0, curve(0.1), 0.5))
    assert level.level == "O5" and "lower than O0's by 0.9" in level.reason


def test_of_several_losses_lower_is_not_better() -> None:
    def gan(level: str, seed: int, end: float, seconds: float = 1.0) -> Run:
        made = run(level, seed, curve(end), seconds)
        made.losses = {"discriminator": curve(1.0), "generator": curve(end)}
        return made

    level = chosen(gan("O0", 0, 1.0), gan("O0", 1, 1.1), gan("O2", 0, 0.2, 0.5))
    assert level.level == "O0" and "its generator loss is 0.8 from O0's" in level.reason


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([run("O1", 0, curve(1.0), 0.5, bytes=99), run("O2", 0, curve(1.0), 0.51, bytes=50)], "O2"),  # same, smaller
        ([run("O1", 0, curve(1.0), 0.5), run("O2", 0, curve(1.0), 0.51)], "O1"),  # same in both, simpler
        ([run("O5", 0, curve(1.0), 0.5), run("O4", 0, curve(1.0), 0.51)], "O4"),
        ([run("O1", 0, curve(1.0), 0.97)], "O0"),  # nothing gained
        ([run("O1", 0, curve(1.0), 1.2, bytes=10)], "O0"),  # smaller, but slower
        ([run("O2", 0, curve(1.0), 1.03, bytes=60)], "O2"),  # as fast, and smaller
        ([run("O1", 0, curve(1.0), math.nan)], "O0"),
        ([run("O3", 0, curve(1.0), 0.5, bytes=30), run("O2", 0, curve(1.0), 0.52, bytes=50)], "O2"),  # fp32 masters
        ([run("O3", 0, curve(1.0), 0.4), run("O2", 0, curve(1.0), 0.5)], "O3"),
        ([run("O3", 0, curve(1.0), 0.45), run("O2", 0, curve(1.0), 0.5)], "O2"),
    ],
)
def test_ties(others: list[Run], expected: str) -> None:
    assert chosen(*O0, *others).level == expected


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (run("O2", 0, curve(1.0), 0.1, status="killed", error="its process was ended by SIGKILL"), "did not finish (seed 0: its process was ended by SIGKILL)"),  # noqa: E501
        (run("O2", 0, [*curve(1.0)[:-1], math.nan], 0.1), "its loss is not finite at step 40 (seed 0)"),
        (run("O2", 0, curve(1.0), 0.1, overflows=[Overflow(step, 2.0, 1.0, []) for step in (30, 35)]), "still skips steps late in training (2 of 20, seed 0)"),  # noqa: E501
        (run("O2", 0, curve(1.5), 0.1), "its loss is 0.5 from O0's"),
    ],
)  # fmt: skip
def test_what_stands_against_a_level(other: Run, why: str) -> None:
    level = chosen(*O0, other)
    assert level.level == "O0" and f"O2 is out: {'it ' if why[0] in 'ds' else ''}{why}" in level.reason


def test_skips_while_the_scale_is_found_are_no_trouble() -> None:
    other = run("O2", 0, curve(1.0), 0.1, overflows=[Overflow(step, 2.0, 1.0, ["net"]) for step in (1, 2, 3)])
    level = chosen(*O0, other)
    assert level.level == "O2" and "3 steps were skipped, while the loss scale was being found" in level.reason


def test_a_skipped_steps_loss_may_be_infinite() -> None:
    losses = curve(1.0)
    losses[1] = math.inf
    other = run("O2", 0, losses, 0.1, overflows=[Overflow(2, 2.0, 1.0, ["net"])])
    assert other.first_not_finite is None
    assert chosen(*O0, other).level == "O2"


def test_one_seed_says_so() -> None:
    level = chosen(run("O0", 0, curve(1.0)), run("O2", 0, curve(1.01), 0.1))
    assert level.level == "O2" and "one seed: O0's own spread is not known" in level.reason
    level = chosen(run("O0", 0, curve(1.0)), run("O2", 0, curve(1.1), 0.1))
    assert level.level == "O0" and "O0's spread is not known from one seed" in level.reason


@pytest.mark.parametrize(
    ("runs", "why"),
    [
        ([run("O0", status="killed"), run("O2")], "O0 was not trained to the end"),
        ([run("O2")], "O0 was not trained to the end"),
        (
            [run("O0", losses=[1.0, math.nan]), run("O2")],
            "cannot be trusted: its loss is not finite at step 2",
        ),
    ],
)
def test_without_a_reference_there_is_no_recommendation(runs: list[Run], why: str) -> None:
    level = chosen(*runs)
    assert level.level is None and why in level.reason


@pytest.mark.parametrize("levels", [("O0", "O5"), ("O0",)])
@pytest.mark.parametrize("seeds", [1, 2])
def test_without_a_loss_there_is_no_recommendation(levels: tuple[str, ...], seeds: int) -> None:
    runs = [run(level, seed, seconds=0.1 if level == "O5" else 1.0) for level in levels for seed in range(seeds)]
    for made in runs:
        made.losses = {}
    choice = chosen(*runs)
    assert choice.level is None
    assert "No loss could be read of O0" in choice.reason and 'self.log("train_loss", loss)' in choice.reason


def test_a_level_whose_loss_cannot_be_compared_is_out() -> None:
    silent = run("O5", 0, curve(1.0), 0.1)
    silent.losses = {}
    choice = chosen(*O0, silent, run("O4", 0, curve(1.0), 0.5))
    assert choice.level == "O4" and "O5 is out: its loss could not be compared with O0's." in choice.reason


def test_a_loss_that_is_never_finite_is_infinitely_far() -> None:
    found = distance_to_reference("O2", [*O0, run("O2", 0, [math.nan] * 40)])
    assert found is not None and found.distance == math.inf and not found.equal


@pytest.mark.parametrize("seeds", [1, 2])
def test_losses_that_are_nan_at_every_level(seeds: int) -> None:
    choice = chosen(*(run(level, seed, [math.nan] * 4) for level in ("O0", "O5") for seed in range(seeds)))
    assert choice.level is None
    assert "O0 itself cannot be trusted: its loss is not finite at step" in choice.reason


def test_findings_name_what_happened() -> None:
    overflow = [Overflow(3, 65536.0, 32768.0, ["net.0", "net.2"])]
    runs = [
        run("O0", out_of_range=OutOfRange("body.3", None, 0.25), notes=["One device is used."]),
        run("O1", overflows=overflow, scales=[32768.0], half_dtype="float16", device="another", notes=["One device is used."]),  # noqa: E501
        run("O2", status="out of memory", error="OutOfMemoryError: 3 GiB", half_dtype="bfloat16"),
        run("O3", losses=[1.0, math.nan]),
    ]  # fmt: skip
    said = findings(runs)
    for number, expected in enumerate(
        (
            "O2 (seed 0) ran out of memory after 4 steps: OutOfMemoryError: 3 GiB.",
            "O3 (seed 0): the loss is not finite at step 2.",
            "O1 (seed 0) skipped 1 of 4 steps; the loss scale ended at 32768, and gradients were first not finite in "
            "net.0, net.2 (step 3).",
            "At O0 the output of body.3 is beyond fp16's range (65504): bf16 holds it, and keep_fp32 keeps that module "
            "out.",
            "Without a loss scale fp16 would make 25.0% of O0's gradient values 0.",
            "One device is used.",
            "Times cannot be compared: runs were made on another and on d.",
        )
    ):
        assert said[number] == expected
    assert "computed in bfloat16" in said[-1] and len(said) == 8


def test_values_that_are_not_finite_at_o0_are_not_called_beyond_fp16() -> None:
    (said,) = findings([run("O0", out_of_range=OutOfRange(None, None, 0.0, "l"))])
    assert said == "At O0 values at l are not finite (inf or NaN) in fp32 already: no opt level mends that."


def test_judgements_are_in_the_order_of_the_runs() -> None:
    judged: list[Judgement] = judge([run("O2"), run("O0"), run("O2", 1, seconds=3.0)])
    assert [j.level for j in judged] == ["O2", "O0"]
    assert judged[0].seconds == 2.0  # between its seeds
