"""Exponent histograms, against numpy in float64."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_apex.cli.exponents import Exponents, Fate, exponent_bins

F16, BF16 = torch.float16, torch.bfloat16
# (bits of precision, smallest normal exponent, largest finite value)
FORMATS = {F16: (11, -14, 65504.0), BF16: (8, -126, (2 - 2.0**-7) * 2.0**127)}


def rounded(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """To the nearest number of the type, ties to even, by hand."""
    bits, normal, largest = FORMATS[dtype]
    with np.errstate(divide="ignore", over="ignore"):
        exponent = np.maximum(np.floor(np.log2(np.abs(values))), normal)
    spacing = 2.0 ** (exponent - (bits - 1))
    result = np.round(values / spacing) * spacing  # numpy rounds halves to even
    return np.where(np.abs(result) > largest, np.copysign(np.inf, values), result)


def expected_fate(values: np.ndarray, dtype: torch.dtype, scale: float) -> Fate:
    finite = values[np.isfinite(values) & (values != 0)] * scale
    half = rounded(finite, dtype)
    flushed, overflowed = half == 0, np.isinf(half)
    subnormal = (np.abs(finite) < 2.0 ** FORMATS[dtype][1]) & ~flushed
    normal = ~(flushed | overflowed | subnormal)
    lost = [int(mask.sum()) for mask in (normal, subnormal, flushed, overflowed)]
    return Fate(*lost, int((values == 0).sum()), int((~np.isfinite(values)).sum()))


def awkward() -> np.ndarray:
    """Values on and around every boundary of both types, at the scales that the tests use."""
    around = [1 - 2.0**-23, 1.0, 1 + 2.0**-23]
    edges = [65504, 65520, 65536, 2.0**-14, 2.0**-24, 2.0**-25, 2.0**-26, 1023 * 2.0**-24, 2.0**-126, 2.0**-133, 1.0]
    rows = [edge * factor for edge in edges for factor in around]
    rows += [2.0**-134, 1.5 * 2.0**-134, 2.0**-149, (2 - 2.0**-7) * 2.0**127, (2 - 2.0**-8) * 2.0**127]
    rows += [np.nextafter(np.float32((2 - 2.0**-8) * 2.0**127), np.float32(0)), np.finfo(np.float32).max]
    rows += [0.0, -0.0, math.inf, math.nan, -math.inf]
    values = np.concatenate([np.array(rows), -np.array(rows)])
    return values.astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("scale", [2.0**-10, 1.0, 2.0, 2.0**16, 2.0**24])
def test_what_becomes_of_a_value_is_what_rounding_by_hand_makes_of_it(dtype: torch.dtype, scale: float) -> None:
    random = np.random.default_rng(0)
    spread = random.standard_normal(5000) * 10.0 ** random.uniform(-44, 37, 5000)
    values = np.concatenate([awkward(), awkward() / scale, spread])
    values = values[~(np.abs(values) > np.finfo(np.float32).max)].astype(np.float32).astype(np.float64)
    counted = Exponents.of(torch.tensor(values, dtype=torch.float32))
    assert counted.fate(dtype, scale) == expected_fate(values, dtype, scale)


@pytest.mark.parametrize("dtype", FORMATS)
def test_one_boundary_value_at_a_time(dtype: torch.dtype) -> None:
    """In sums, two errors might cancel."""
    for value in awkward():
        fate = Exponents.of(torch.tensor([value], dtype=torch.float32)).fate(dtype)
        assert fate == expected_fate(np.array([value]), dtype, 1.0), value.hex()


def test_the_hand_rounding_is_numpys_own_for_fp16() -> None:
    values = awkward()
    with np.errstate(over="ignore"):
        own = values.astype(np.float16).astype(np.float64)
    finite = np.isfinite(values) & (values != 0)
    np.testing.assert_array_equal(rounded(values[finite], F16), own[finite])


def test_the_histogram_counts_binades() -> None:
    values = torch.tensor([1.0, 1.99, -2.0, 3.0, 0.5, 2.0**-149, 0.0, -0.0, math.inf, math.nan, math.nan])
    counted = Exponents.of(values)
    assert counted.histogram() == {-149: 1, -1: 1, 0: 2, 1: 2}
    assert (counted.elements, counted.zeros, counted.infs, counted.nans) == (11, 2, 1, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, F16, BF16])
def test_every_dtype_and_layout(dtype: torch.dtype) -> None:
    values = (torch.randn(6, 4, 5, dtype=torch.float64) * 0.1).to(dtype)
    expected = Exponents.of(values.float().contiguous())
    assert Exponents.of(values.transpose(0, 2)) == expected
    assert Exponents.of(values[:0]) == Exponents()
    assert Exponents.of(values[0, 0, 0]).elements == 1


def test_fp64_values_beyond_fp32_count_at_the_ends() -> None:
    counted = Exponents.of(torch.tensor([1e300, 1e-300], dtype=torch.float64))
    assert counted.fate(F16) == Fate(0, 0, 1, 1, 0, 0) == counted.fate(BF16)


def test_large_tensors_are_counted_in_pieces() -> None:
    values = torch.randn(3, 250_001)
    magnitudes = np.frexp(values.numpy().astype(np.float64).ravel())[1] - 1
    exponents, counts = np.unique(magnitudes, return_counts=True)
    assert Exponents.of(values).histogram() == dict(zip(exponents.tolist(), counts.tolist(), strict=True))


def test_sums_and_json_lose_nothing() -> None:
    one, two = (torch.tensor(awkward()[i::2], dtype=torch.float32) for i in (0, 1))
    both = Exponents.of(one) + Exponents.of(two)
    assert both == Exponents.of(torch.cat([one, two])) == Exponents(exponent_bins(one) + exponent_bins(two))
    assert Exponents.from_json(json.loads(json.dumps(both.to_json()))) == both


def test_shares() -> None:
    fate = Exponents.of(torch.tensor([1.0, 2.0**-20, 1e-12, 1e6, 1e6, 0.0, math.nan])).fate(F16)
    assert (fate.nonzero, fate.flushed_share, fate.subnormal_share, fate.overflowed_share) == (5, 0.2, 0.2, 0.4)
    empty = Exponents().fate(F16)
    assert (empty.flushed_share, empty.subnormal_share, empty.overflowed_share) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(("dtype", "scale", "message"), [
    (torch.float32, 1.0, "torch.float16 or torch.bfloat16"),
    (F16, 3.0, "scale=3.0 is no power of two"),
    (F16, 0.0, "power of two"),
    (F16, -2.0, "power of two"),
    (F16, math.inf, "power of two"),
])  # fmt: skip
def test_what_cannot_be_asked(dtype: torch.dtype, scale: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Exponents().fate(dtype, scale)


def test_counting_leaves_the_values_alone() -> None:
    values: Tensor = torch.randn(100, requires_grad=True)
    before, version = values.detach().clone(), values._version
    exponent_bins(values)
    assert torch.equal(values.detach(), before) and values._version == version
