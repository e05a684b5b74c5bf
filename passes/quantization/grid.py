"""Integer grids for weights, and rounding to the nearest point. Methods that choose better points build on it.

Weights are [depth, width], one column an output. A scale belongs to one output and one group of `group_size`
consecutive values of the depth; the last group may be shorter. A weight is scale * (integer - zero).

Zeros are none (the grid is symmetric), integers, so that the weight 0 stays 0, or any numbers, so that the grid spans
from a group's least weight to its greatest exactly.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

COLUMNS = 4096
"""Columns that are worked on at once, so that temporary copies stay small."""
Zeros = Literal["none", "integer", "real"]
_CLIPS = np.linspace(1.0, 0.6, 17)
"""Shares of the largest magnitude that are tried as the end of the grid."""


@dataclass(frozen=True)
class Grid:
    """Which integers weights can be. Symmetric ones leave out the lowest, so that zero lies in the middle."""

    bits: Literal[4, 8] = 8
    group_size: int = 0
    """0: all of the depth."""
    zeros: Zeros = "none"
    clip: bool = False
    """Whether the grid may end below the largest magnitude, where the mean squared error is then smaller."""

    @property
    def high(self) -> int:
        return 2 ** (self.bits - 1) - 1

    @property
    def low(self) -> int:
        return -self.high - (self.zeros != "none")

    def groups(self, depth: int) -> Iterator[slice]:
        """The rows of each group."""
        size = self.group_size or depth
        return (slice(start, min(start + size, depth)) for start in range(0, depth, size))


@dataclass(frozen=True)
class QuantisedWeight:
    """Weights as integers. `error` is what the method minimised, as a share of the same of the weights themselves."""

    integers: NDArray[np.int8]
    """[depth, width]."""
    scales: NDArray[np.float32]
    """[width, groups]."""
    grid: Grid
    zeros: NDArray[np.float32] | None = field(default=None)
    """[width, groups]; None for a symmetric grid."""
    error: float = 0.0

    @cached_property
    def values(self) -> NDArray[np.float32]:
        """The weights that the integers stand for, [depth, width] float32."""
        values = np.empty(self.integers.shape, np.float32)
        for group, rows in enumerate(self.grid.groups(len(values))):
            zeros = 0 if self.zeros is None else self.zeros[:, group]
            values[rows] = (self.integers[rows] - zeros) * self.scales[:, group]
        return values


def round_to_nearest(weight: NDArray[np.floating], grid: Grid) -> QuantisedWeight:
    """Each weight becomes the nearest point of its group's grid; `error` is the root of the squared error's share."""
    depth, width = weight.shape
    groups = list(grid.groups(depth))
    integers = np.empty((depth, width), np.int8)
    scales = np.empty((width, len(groups)), np.float32)
    zeros = None if grid.zeros == "none" else np.empty((width, len(groups)), np.float32)
    for columns in chunks(width):
        for group, rows in enumerate(groups):
            part = weight[rows, columns].astype(np.float32)
            scale, zero = fit(part, grid)
            scales[columns, group] = scale
            if zeros is not None:
                zeros[columns, group] = zero
            integers[rows, columns] = nearest(part, scale, zero, grid)
    quantised = QuantisedWeight(integers, scales, grid, zeros)
    return QuantisedWeight(integers, scales, grid, zeros, relative_error(weight, quantised.values))


def fit(part: NDArray[np.floating], grid: Grid) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scale and zero of each column of one group [rows, columns], such that the grid spans its values.

    With `grid.clip`, the share of that span that has the least squared error.
    """
    low, high = part.min(axis=0), part.max(axis=0)
    best = _spanning(low, high, grid)
    if not grid.clip:
        return best
    least = _squared_error(part, *best, grid)
    middle = (low + high) / 2 if grid.zeros == "real" else np.zeros_like(low)
    for share in _CLIPS[1:]:
        tried = _spanning(middle + (low - middle) * share, middle + (high - middle) * share, grid)
        error = _squared_error(part, *tried, grid)
        better = error < least
        least = np.where(better, error, least)
        best = (np.where(better, tried[0], best[0]), np.where(better, tried[1], best[1]))
    return best


def nearest(
    part: NDArray[np.floating], scale: NDArray[np.floating], zero: NDArray[np.floating], grid: Grid
) -> NDArray[np.float32]:
    """The nearest integers of the grid, as floats."""
    return np.clip(np.rint(part / _divisible(scale) + zero), grid.low, grid.high).astype(np.float32)


def chunks(width: int) -> Iterator[slice]:
    return (slice(start, min(start + COLUMNS, width)) for start in range(0, width, COLUMNS))


def relative_error(weight: NDArray[np.floating], values: NDArray[np.floating]) -> float:
    """|weight - values| / |weight| in the Frobenius norm; 0 for weights of 0."""
    whole = float(np.linalg.norm(weight))
    return float(np.linalg.norm(weight - values)) / whole if whole else 0.0


def _spanning(
    low: NDArray[np.floating], high: NDArray[np.floating], grid: Grid
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    if grid.zeros == "none":
        scale = (np.maximum(-low, high) / grid.high).astype(np.float32)
        return scale, np.zeros_like(scale)
    if grid.zeros == "integer":
        low, high = np.minimum(low, 0), np.maximum(high, 0)
    else:  # one value needs a step to stand for it
        low, high = np.where(low == high, np.minimum(low, 0), low), np.where(low == high, np.maximum(high, 0), high)
    scale = ((high - low) / (grid.high - grid.low)).astype(np.float32)
    zero = grid.low - low / _divisible(scale)
    if grid.zeros == "integer":
        zero = np.clip(np.rint(zero), grid.low, grid.high)
    return scale, zero.astype(np.float32)


def _squared_error(
    part: NDArray[np.floating], scale: NDArray[np.floating], zero: NDArray[np.floating], grid: Grid
) -> NDArray[np.float32]:
    return np.square((nearest(part, scale, zero, grid) - zero) * scale - part).sum(axis=0)


def _divisible(scale: NDArray[np.floating]) -> NDArray[np.floating]:
    """Scales, with 1 for those of groups of zeros."""
    return np.where(scale > 0, scale, 1)
