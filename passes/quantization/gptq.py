"""GPTQ: integers that keep the outputs of a layer, chosen one row at a time (Frantar et al., 2022).

The objective is the squared error of the outputs over calibration data, trace(E' H E) with E the error of the weights
and H = X' X the second moments of the activations X [samples, depth]. After a row is rounded, the rows that are not yet
rounded take over its error as well as they can: the optimal brain surgeon's update, read off a Cholesky factor of the
inverse of H.
"""

import numpy as np
from numpy.typing import NDArray

from passes.quantization.grid import Grid, QuantisedWeight, chunks, fit, nearest

_BLOCK = 128
"""Rows whose updates are applied to the rest at once, where groups do not say otherwise."""


def gptq(
    weight: NDArray[np.floating],
    moments: NDArray[np.floating],
    grid: Grid,
    *,
    damping: float = 0.01,
    by_activation: bool = False,
) -> QuantisedWeight:
    """Integers of `weight` [depth, width] for activations with second `moments` [depth, depth] (any common factor).

    `damping` is added to the diagonal, as a share of its mean. `by_activation` rounds rows with large activations
    first, with the scales of the original weights. `error` is the root of the objective's share.
    """
    depth, width = weight.shape
    order = np.argsort(-np.diag(moments), kind="stable") if by_activation else np.arange(depth)
    factor = _inverse_factor(moments[np.ix_(order, order)].astype(np.float64), damping)
    integers = np.empty((depth, width), np.int8)
    groups = list(grid.groups(depth))
    scales = np.empty((width, len(groups)), np.float32)
    zeros = np.zeros((width, len(groups)), np.float32)
    for columns in chunks(width):
        part = weight[:, columns].astype(np.float32)
        fixed = by_activation or not grid.group_size
        for group, rows in enumerate(groups if fixed else ()):
            scales[columns, group], zeros[columns, group] = fit(part[rows], grid)
        part = part[order]
        size = _BLOCK if fixed else grid.group_size
        for start in range(0, depth, size):
            rows = slice(start, min(start + size, depth))
            if not fixed:
                scales[columns, start // size], zeros[columns, start // size] = fit(part[rows], grid)
            group_of = order[rows] // (grid.group_size or depth)
            integers[order[rows], columns] = _round_block(
                part, rows, factor, scales[columns][:, group_of].T, zeros[columns][:, group_of].T, grid
            )
    kept_zeros = None if grid.zeros == "none" else zeros
    quantised = QuantisedWeight(integers, scales, grid, kept_zeros)
    return QuantisedWeight(integers, scales, grid, kept_zeros, output_error(weight, quantised.values, moments))


def output_error(
    weight: NDArray[np.floating], values: NDArray[np.floating], moments: NDArray[np.floating] | None
) -> float:
    """Root of the outputs' squared error as a share of the squared outputs, by second moments [depth, depth].

    Where the moments are [depth], they stand for a diagonal; without any, all activations count the same.
    """
    found, whole = (_energy(part.astype(np.float64), moments) for part in (weight - values, weight))
    return float(np.sqrt(found / whole)) if whole > 0 else 0.0


def _energy(matrix: NDArray[np.float64], moments: NDArray[np.floating] | None) -> float:
    if moments is None:
        return float(np.square(matrix).sum())
    weighted = moments @ matrix if moments.ndim == 2 else moments[:, None] * matrix
    return max(0.0, float(np.einsum("ij,ij->", matrix, weighted)))


def _inverse_factor(moments: NDArray[np.float64], damping: float) -> NDArray[np.float32]:
    """Upper triangular U with inverse(H) = U' U, computed in float64.

    Inputs that are always 0 are made independent of the others.
    """
    damped = moments.copy()
    diagonal = np.diag(damped).copy()
    added = damping * float(diagonal.mean()) or 1.0
    damped[np.diag_indices_from(damped)] = np.where(diagonal > 0, diagonal, 0) + added
    return np.ascontiguousarray(np.linalg.cholesky(np.linalg.inv(damped)).T, np.float32)


def _round_block(
    part: NDArray[np.float32],
    rows: slice,
    factor: NDArray[np.float32],
    scales: NDArray[np.floating],
    zeros: NDArray[np.floating],
    grid: Grid,
) -> NDArray[np.float32]:
    """Round the `rows` of `part` in their order and let those below take over the errors; changes `part`."""
    block, integers = part[rows], np.empty_like(part[rows])
    errors = np.empty_like(block)
    own = factor[rows, rows]
    for row in range(len(block)):
        integers[row] = nearest(block[row], scales[row], zeros[row], grid)
        errors[row] = (block[row] - (integers[row] - zeros[row]) * scales[row]) / own[row, row]
        block[row + 1 :] -= np.outer(own[row, row + 1 :], errors[row])
    part[rows.stop :] -= factor[rows, rows.stop :].T @ errors
    return integers
