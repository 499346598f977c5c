"""Histograms of binary exponents, and what a 16-bit type would do to the values that were counted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_LOWEST, _HIGHEST = -150, 128  # exponents beyond (of fp64 values) are counted here
# A binade is cut where rounding to a 16-bit type changes what becomes of a value: an exact power of two, then up to
# bf16's and to fp16's last value that does not round to infinity, then the rest.
_PARTS = 4
_CUTS = (2 - 2.0**-8, 2 - 2.0**-11)
_BINS = (_HIGHEST - _LOWEST + 1) * _PARTS
_ZERO, _INF, _NAN = _BINS, _BINS + 1, _BINS + 2
_CHUNK = 2**18  # elements at a time: temporary tensors stay small whatever is counted


@dataclass(frozen=True)
class _Format:
    largest: int  # exponent of the largest finite value
    overflow_part: int  # from this part of that binade on, values round to infinity
    normal: int  # exponent of the smallest normal value
    smallest: int  # exponent of the smallest subnormal value


_FORMATS = {torch.float16: _Format(15, 3, -14, -24), torch.bfloat16: _Format(127, 2, -126, -133)}


def exponent_bins(tensor: Tensor) -> Tensor:
    """Counts a tensor's values by exponent, on its device and with little memory besides.

    Args:
        tensor: Any floating-point tensor.

    Returns:
        int64 counts, for `Exponents`; those of two tensors may be added.
    """
    flat = tensor.detach().reshape(-1)
    bins = torch.zeros(_BINS + 3, dtype=torch.int64, device=tensor.device)
    for chunk in flat.split(_CHUNK):
        bins += torch.bincount(_bin_numbers(chunk), minlength=_BINS + 3)
    return bins


def _bin_numbers(values: Tensor) -> Tensor:
    if values.dtype is not torch.float64:
        values = values.float()
    mantissa, exponent = torch.frexp(values.abs())  # a mantissa from 0.5 up to 1
    numbers = exponent.sub_(1 + _LOWEST).clamp_(0, _HIGHEST - _LOWEST).mul_(_PARTS)
    numbers += mantissa > 0.5
    for cut in _CUTS:
        numbers += mantissa >= cut / 2
    numbers.masked_fill_(mantissa == 0, _ZERO)
    numbers.masked_fill_(mantissa == math.inf, _INF)
    return numbers.masked_fill_(mantissa != mantissa, _NAN)


@dataclass(frozen=True)
class Fate:
    """What becomes of values that are rounded to a 16-bit type.

    Attributes:
        normal: How many keep the type's full precision.
        subnormal: How many are below its smallest normal value, and keep fewer bits.
        flushed: How many become 0 though they are not.
        overflowed: How many become infinite though they are finite.
        zero: How many are 0.
        nonfinite: How many are infinite or NaN already.
    """

    normal: int
    subnormal: int
    flushed: int
    overflowed: int
    zero: int
    nonfinite: int

    @property
    def nonzero(self) -> int:
        """How many values are finite and not 0."""
        return self.normal + self.subnormal + self.flushed + self.overflowed

    @property
    def flushed_share(self) -> float:
        """The share of the finite values that are not 0 and become 0."""
        return self.flushed / self.nonzero if self.nonzero else 0.0

    @property
    def subnormal_share(self) -> float:
        """The share of the finite values that are not 0 and become subnormal."""
        return self.subnormal / self.nonzero if self.nonzero else 0.0

    @property
    def overflowed_share(self) -> float:
        """The share of the finite values that are not 0 and become infinite."""
        return self.overflowed / self.nonzero if self.nonzero else 0.0


class Exponents:
    """How often each binary exponent occurred: a value from ``2**e`` up to ``2**(e + 1)`` has the exponent ``e``.

    Args:
        bins: From `exponent_bins`; None where nothing was counted.
    """

    def __init__(self, bins: Tensor | None = None) -> None:
        self._bins = torch.zeros(_BINS + 3, dtype=torch.int64) if bins is None else bins.cpu()

    @classmethod
    def of(cls, tensor: Tensor) -> Exponents:
        """Counts one tensor."""
        return cls(exponent_bins(tensor))

    def __add__(self, other: Exponents) -> Exponents:
        return Exponents(self._bins + other._bins)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Exponents) and torch.equal(self._bins, other._bins)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Exponents({self.histogram()}, zeros={self.zeros}, infs={self.infs}, nans={self.nans})"

    @property
    def elements(self) -> int:
        """How many values were counted, zeros and values that are not finite included."""
        return int(self._bins.sum())

    @property
    def zeros(self) -> int:
        """How many of them were 0."""
        return int(self._bins[_ZERO])

    @property
    def infs(self) -> int:
        """How many were infinite."""
        return int(self._bins[_INF])

    @property
    def nans(self) -> int:
        """How many were NaN."""
        return int(self._bins[_NAN])

    def histogram(self) -> dict[int, int]:
        """The counts of the exponents that occurred, smallest exponent first."""
        per_exponent = self._bins[:_BINS].view(-1, _PARTS).sum(1)
        return {int(i) + _LOWEST: int(per_exponent[i]) for i in per_exponent.nonzero()[:, 0]}

    def fate(self, dtype: torch.dtype, scale: float = 1.0) -> Fate:
        """Tells what rounding to a 16-bit type would do, to the value (not to the binade).

        Args:
            dtype: ``torch.float16`` or ``torch.bfloat16``.
            scale: A power of two that the values are multiplied by before.

        Raises:
            ValueError: If the type is another one, or the scale is no power of two.
        """
        if dtype not in _FORMATS:
            raise ValueError(f"dtype={dtype!r} is unknown: use torch.float16 or torch.bfloat16.")
        format, shift = _FORMATS[dtype], _exponent_of(scale)
        exponent = torch.arange(_LOWEST, _HIGHEST + 1).repeat_interleave(_PARTS) + shift
        part = torch.arange(_PARTS).repeat(_HIGHEST - _LOWEST + 1)
        # Half the smallest value is a tie, and rounds to 0, which is even.
        below = format.smallest - 1
        flushed = (exponent < below) | ((exponent == below) & (part == 0))
        overflowed = (exponent > format.largest) | ((exponent == format.largest) & (part >= format.overflow_part))
        subnormal = (exponent < format.normal) & ~flushed
        finite = self._bins[:_BINS]
        few, none, many = (int(finite[mask].sum()) for mask in (subnormal, flushed, overflowed))
        return Fate(int(finite.sum()) - few - none - many, few, none, many, self.zeros, self.infs + self.nans)

    def to_json(self) -> dict[str, Any]:
        """The counts as plain values that lose nothing; see `from_json`."""
        rows = self._bins[:_BINS].view(-1, _PARTS)
        binades = {str(int(i) + _LOWEST): rows[i].tolist() for i in rows.sum(1).nonzero()[:, 0]}
        return {"zeros": self.zeros, "infs": self.infs, "nans": self.nans, "binades": binades}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Exponents:
        """Reads what `to_json` returned."""
        result = cls()
        rows = result._bins[:_BINS].view(-1, _PARTS)
        for exponent, counts in data["binades"].items():
            rows[int(exponent) - _LOWEST] = torch.tensor(counts)
        for number, name in ((_ZERO, "zeros"), (_INF, "infs"), (_NAN, "nans")):
            result._bins[number] = data[name]
        return result


def _exponent_of(scale: float) -> int:
    mantissa, exponent = math.frexp(scale)
    if mantissa != 0.5:
        raise ValueError(f"scale={scale!r} is no power of two: use one, such as {2.0**16:g}.")
    return exponent - 1
