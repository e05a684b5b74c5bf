"""Which share of the activations' spread goes into the weights: SmoothQuant's formula, and AWQ's search.

Both divide each channel of an activation by a factor and multiply the rows of the weights that read it by the same, so
that the product stays as it is: `passes.quantization.rescale` does that to a graph. Where the factors suit, less is
lost in quantising. Knows no graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from passes.quantization.gptq import output_error
from passes.quantization.grid import Grid, round_to_nearest
from passes.quantization.table import Range, TensorStatistics

AWQ_STEPS = 20
_SMALLEST = 1e-5


def smoothing_scales(
    activations: ArrayLike,
    weights: Sequence[NDArray[np.floating]],
    alpha: float,
    tied: NDArray[np.integer] | None = None,
) -> NDArray[np.float32]:
    """SmoothQuant's factors (Xiao et al., 2022): max|x|^alpha / max|w|^(1 - alpha) of each channel, [depth] float32.

    `activations` are the largest magnitudes by channel, [depth]; `weights` [depth, width] are all that read them.
    Channels with the same number in `tied` get one factor, that of the largest among them. Channels that are always 0
    keep 1.
    """
    rows = np.max([np.abs(weight).max(axis=1) for weight in weights], axis=0)
    return _tied_power(np.asarray(activations, np.float64), rows.astype(np.float64), alpha, tied)


def range_after(statistics: TensorStatistics, factors: NDArray[np.floating]) -> Range:
    """An activation's range once its channels are divided by `factors` [depth]."""
    if statistics.channels is not None:
        low, high = (np.array(ends) / factors for ends in (statistics.channels.low, statistics.channels.high))
        return Range(float(low.min()), float(high.max()))
    largest = float((np.array(statistics.channel_magnitudes) / factors).max())
    return Range(-largest, largest)


@dataclass(frozen=True)
class ScaleSearch:
    """AWQ's choice. `error` and `unscaled_error` are shares of the outputs' energy, with the factors and without."""

    scales: NDArray[np.float32]
    alpha: float
    error: float
    unscaled_error: float


def awq_scales(
    magnitudes: NDArray[np.floating],
    weights: Sequence[NDArray[np.floating]],
    grids: Sequence[Grid],
    moments: NDArray[np.floating] | None = None,
    tied: NDArray[np.integer] | None = None,
) -> ScaleSearch:
    """AWQ's factors (Lin et al., 2023): mean|x|^alpha with the alpha, of 20, that loses least, [depth] float32.

    `magnitudes` are mean magnitudes by channel. The loss is that of the outputs after rounding to nearest, by the
    second `moments` [depth, depth], or by the magnitudes alone without them; clipping comes after. `tied` as in
    `smoothing_scales`.
    """
    whole = [replace(grid, clip=False) for grid in grids]
    weighting = np.square(magnitudes) if moments is None else moments
    best: ScaleSearch | None = None
    unscaled = 0.0
    for step in range(AWQ_STEPS):
        alpha = step / AWQ_STEPS
        scales = _tied_power(magnitudes.astype(np.float64), np.ones(len(magnitudes)), alpha, tied)
        scales /= np.sqrt(scales.max() * scales.min())
        column = scales[:, None]
        error = float(
            np.mean(
                [
                    output_error(weight, round_to_nearest(weight * column, grid).values / column, weighting)
                    for weight, grid in zip(weights, whole, strict=True)
                ]
            )
        )
        if best is None:
            unscaled = error
        if best is None or error < best.error:
            best = ScaleSearch(scales, alpha, error, unscaled)
    assert best is not None
    return best


def _tied_power(
    activations: NDArray[np.float64], rows: NDArray[np.float64], alpha: float, tied: NDArray[np.integer] | None
) -> NDArray[np.float32]:
    if tied is not None:
        activations, rows = (_largest_of(values, tied) for values in (activations, rows))
    used = (activations > 0) & (rows > 0) & np.isfinite(activations)
    powers = np.where(used, activations, 1) ** alpha / np.where(used, rows, 1) ** (1 - alpha)
    return np.where(used, np.maximum(powers, _SMALLEST), 1).astype(np.float32)


def _largest_of(values: NDArray[np.float64], tied: NDArray[np.integer]) -> NDArray[np.float64]:
    """Each value replaced by the largest of those with the same number in `tied`."""
    largest = np.full(int(tied.max()) + 1, -np.inf)
    np.maximum.at(largest, tied, values)
    return largest[tied]
