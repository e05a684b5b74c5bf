"""HQQ: half-quadratic quantisation, without data (Badri and Shaji, 2023).

Minimises the sum of |error|^p with p < 1, which lets few weights err much where many then err less: outliers of a
group no longer decide about its grid. The errors are split off as a variable of their own, W_e, with a quadratic
penalty for what it leaves. Two steps with closed forms alternate: W_e shrinks the error, and the grid is fitted to
W - W_e. The paper fits the zero point; on a symmetric grid the scale is fitted instead, by least squares.
"""

import numpy as np
from numpy.typing import NDArray

from passes.quantization.grid import Grid, QuantisedWeight, chunks, fit, nearest

_NORM = 0.7
_PENALTY, _GROWTH = 10.0, 1.01
_ROUNDS = 20


def hqq(weight: NDArray[np.floating], grid: Grid) -> QuantisedWeight:
    """Integers of `weight` [depth, width]; `error` is the sum of |error|^0.7 as a share of that of the weights."""
    depth, width = weight.shape
    groups = list(grid.groups(depth))
    integers = np.empty((depth, width), np.int8)
    scales = np.empty((width, len(groups)), np.float32)
    zeros = np.zeros((width, len(groups)), np.float32)
    lost = whole = 0.0
    for columns in chunks(width):
        for group, rows in enumerate(groups):
            part = weight[rows, columns].astype(np.float32)
            scale, zero, error = _fitted(part, grid)
            scales[columns, group], zeros[columns, group] = scale, zero
            integers[rows, columns] = nearest(part, scale, zero, grid)
            lost, whole = lost + float(error.sum()), whole + float((np.abs(part) ** _NORM).sum())
    return QuantisedWeight(
        integers, scales, grid, None if grid.zeros == "none" else zeros, lost / whole if whole else 0.0
    )


def _fitted(
    part: NDArray[np.float32], grid: Grid
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Scale, zero and error of each column, the best that the alternating steps come by."""
    scale, zero = fit(part, grid)
    best_scale, best_zero, least = scale, zero, np.full(len(scale), np.inf, np.float32)
    penalty = _PENALTY
    for _ in range(_ROUNDS):
        integers = nearest(part, scale, zero, grid) - zero
        difference = part - integers * scale
        error = (np.abs(difference) ** _NORM).sum(axis=0)
        better = error < least
        if not better.any():
            break
        least = np.where(better, error, least)
        best_scale, best_zero = np.where(better, scale, best_scale), np.where(better, zero, best_zero)
        target = part - _shrunk(difference, scale, penalty)
        scale, zero = _refitted(target, integers, scale, zero, grid)
        penalty *= _GROWTH
    return best_scale.astype(np.float32), best_zero.astype(np.float32), least


def _shrunk(difference: NDArray[np.float32], scale: NDArray[np.float32], penalty: float) -> NDArray[np.float32]:
    """The errors' own variable: generalised soft thresholding, in units of the grid's step."""
    step = np.where(scale > 0, scale, 1)
    size = np.abs(difference) / step
    with np.errstate(divide="ignore"):
        shrunk = np.maximum(size - size ** (_NORM - 1) / penalty, 0)
    return np.sign(difference) * shrunk * step


def _refitted(
    target: NDArray[np.float32],
    integers: NDArray[np.float32],
    scale: NDArray[np.float32],
    zero: NDArray[np.float32],
    grid: Grid,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    if grid.zeros != "none":
        moved = (integers + zero - target / np.where(scale > 0, scale, 1)).mean(axis=0)
        return scale, moved if grid.zeros == "real" else np.clip(np.rint(moved), grid.low, grid.high)
    squares = np.square(integers).sum(axis=0)
    fitted = (integers * target).sum(axis=0) / np.where(squares > 0, squares, 1)
    return np.where(fitted > 0, fitted, scale).astype(np.float32), zero
