"""Histograms of values as they come, with exact counts and bounded memory: bins merge in pairs when values grow.

The bins of a channel have the width 2^e / bins, where 2^e is the least power of two above its largest magnitude; bin c
holds the values whose x / width truncates to c, for -bins < c < bins, so that the one around zero is twice as wide.
Truncating and halving commute, and scaling by a power of two is exact: the counts depend on the values alone, not on
their order or on how they were split, and merged histograms equal the histogram of everything.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

_LEAST_EXPONENT = -100
"""Of a channel of zeros; smaller magnitudes count as zero."""
_SLICE = 1 << 20
"""Values that are counted at a time, which bounds temporary arrays."""


class NotFiniteError(ValueError):
    """A value is NaN or infinite."""


class Histogram:
    """Of `channels` channels with `bins` (a power of two) bins on either side of zero.

    `counts` [channels, 2 * bins - 1] int64, `exponents` [channels], `low` and `high` [channels]: the least and largest
    value, inf and -inf before the first.
    """

    def __init__(self, channels: int = 1, bins: int = 4096) -> None:
        if channels < 1 or bins < 2 or bins & (bins - 1):
            raise ValueError(f"a histogram of {channels} channels and {bins} bins; expected a power of two from 2 on")
        self.channels, self.bins = channels, bins
        self.exponents = np.full(channels, _LEAST_EXPONENT, np.int64)
        self.counts = np.zeros((channels, 2 * bins - 1), np.int64)
        self.low = np.full(channels, np.inf)
        self.high = np.full(channels, -np.inf)

    @property
    def widths(self) -> NDArray[np.float64]:
        """Of the bins of each channel; the one around zero has twice that."""
        return np.ldexp(1.0 / self.bins, self.exponents)

    @property
    def totals(self) -> NDArray[np.int64]:
        """Values of each channel."""
        return self.counts.sum(axis=1)

    @property
    def magnitudes(self) -> NDArray[np.float64]:
        """Largest |value| of each channel; 0 before the first."""
        return np.maximum(np.maximum(-self.low, self.high), 0.0)

    def edges(self) -> NDArray[np.float64]:
        """[channels, 2 * bins]: bin i lies between edges i and i + 1."""
        codes = np.concatenate([np.arange(-self.bins, 0), np.arange(1, self.bins + 1)])
        return self.widths[:, None] * codes

    def add(self, values: NDArray[np.float32]) -> None:
        """Count float32 values [rows, channels]; for one channel any shape. Raises NotFiniteError, nothing counted."""
        rows = values.reshape(-1, self.channels)
        if not rows.size:
            return
        low, high = rows.min(axis=0), rows.max(axis=0)
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise NotFiniteError
        self.low, self.high = np.minimum(self.low, low), np.maximum(self.high, high)
        self._widen(_exponents(np.maximum(-low, high)))
        step = max(1, _SLICE // self.channels)
        for start in range(0, len(rows), step):
            self._count(rows[start : start + step])

    def _count(self, rows: NDArray[np.float32]) -> None:
        size = self.counts.shape[1]
        scale = np.ldexp(np.float32(self.bins), -self.exponents).astype(np.float32)
        codes = (rows * scale).astype(np.intp)  # truncates
        codes += np.arange(self.channels) * size + (self.bins - 1)
        self.counts += np.bincount(codes.ravel(), minlength=self.counts.size).reshape(self.counts.shape)

    def _widen(self, exponents: NDArray[np.int64]) -> None:
        steps = np.maximum(exponents - self.exponents, 0)
        for step in np.unique(steps[steps > 0]):
            here = steps == step
            self.counts[here] = _folded(self.counts[here], int(step))
        self.exponents += steps

    def merged(self, other: "Histogram") -> "Histogram":
        """A new histogram of the values of both."""
        assert (self.channels, self.bins) == (other.channels, other.bins)
        result, part = self.copy(), other.copy()
        result._widen(part.exponents)
        part._widen(result.exponents)
        result.counts += part.counts
        result.low, result.high = np.minimum(result.low, part.low), np.maximum(result.high, part.high)
        return result

    def copy(self) -> "Histogram":
        result = Histogram(self.channels, self.bins)
        result.exponents, result.counts = self.exponents.copy(), self.counts.copy()
        result.low, result.high = self.low, self.high
        return result

    def coarser(self, bins: int) -> "Histogram":
        """The same values in `bins` bins a side, a power of two that is not above the present one."""
        steps = self.bins.bit_length() - bins.bit_length()
        result = Histogram(self.channels, bins)
        middle, reach = self.bins - 1, bins - 1
        result.counts = _folded(self.counts, steps)[:, middle - reach : middle + reach + 1]
        result.exponents, result.low, result.high = self.exponents, self.low, self.high
        return result


def _exponents(magnitudes: NDArray[Any]) -> NDArray[np.int64]:
    """e of the least power of two above each magnitude."""
    exponents = np.frexp(magnitudes)[1].astype(np.int64)
    return np.where(magnitudes > 0, np.maximum(exponents, _LEAST_EXPONENT), _LEAST_EXPONENT)


def _folded(counts: NDArray[np.int64], steps: int) -> NDArray[np.int64]:
    """Counts in bins 2^steps as wide, in an array of the same shape."""
    middle = counts.shape[1] // 2
    codes = np.arange(-middle, middle + 1)
    targets = np.sign(codes) * (np.abs(codes) >> min(steps, 62))
    starts = np.flatnonzero(np.diff(targets, prepend=targets[0] - 1))
    result = np.zeros_like(counts)
    result[:, targets[starts] + middle] = np.add.reduceat(counts, starts, axis=1)
    return result


def merged_histogram(parts: "list[Histogram]") -> Histogram:
    """Of the values of all parts, at least one."""
    result, *others = parts
    for part in others:
        result = result.merged(part)
    return result
