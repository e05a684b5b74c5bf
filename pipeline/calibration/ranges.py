"""Which range of a tensor, or of each of its channels, is worth its 8 bits: four methods over histograms.

| method | chooses | source |
|---|---|---|
| minmax | all values | |
| percentile | the middle p % of the values | |
| entropy | least KL divergence of quantised from original values | Migacz, GTC 2017; `pipeline.calibration.entropy` |
| mse | least squared error of the quantised values, by search | Banner et al. (1810.05723) solve it in closed form |

A range always holds 0. Symmetric ranges are [-m, m]; for others, each end is sought for itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from passes.quantization.table import Method
from pipeline.calibration.entropy import entropy_ends
from pipeline.calibration.grid import Floats, grid_of, squared_error
from pipeline.calibration.histogram import Histogram
from plugins.errors import KilnError

_COARSE, _SMALLEST, _FINE = 40, 1e-3, 9
"""Ends that the MSE search tries: so many from the largest value down to a thousandth of it, then about the best."""
_SEARCHED = 1024
"""Bins a side that the MSE search looks at."""
_ROUNDS = 2
"""Of an asymmetric search: each end given the other."""


@dataclass(frozen=True)
class RangeConfig:
    """`percentile`: of the method of that name."""

    method: Method = "minmax"
    symmetric: bool = True
    percentile: float = 99.99

    def __post_init__(self) -> None:
        if not 50 < self.percentile <= 100:
            raise KilnError(f"the percentile is {self.percentile}; expected more than 50 and at most 100")


def ranges_of(histogram: Histogram, config: RangeConfig = RangeConfig()) -> tuple[Floats, Floats]:
    """Low and high ends [channels] for each channel of a histogram; 0 and 0 for a channel without values."""
    low, high = np.minimum(histogram.low, 0.0), np.maximum(histogram.high, 0.0)
    if config.symmetric:
        high = np.maximum(-low, high)
        low = -high
    if config.method == "percentile":
        low, high = _percentile_ends(histogram, low, high, config)
    elif config.method == "mse":
        low, high = _mse_ends(histogram, low, high, config.symmetric)
    elif config.method == "entropy":
        low, high = entropy_ends(histogram, low, high, config.symmetric)
    return low, high


def _percentile_ends(histogram: Histogram, low: Floats, high: Floats, config: RangeConfig) -> tuple[Floats, Floats]:
    """Interpolated within a bin, and never beyond the values."""
    share = config.percentile / 100
    if config.symmetric:
        counts, edges = magnitudes_of(histogram)
        ends = np.minimum(_quantiles(counts, edges, share), high)
        return -ends, ends
    edges = histogram.edges()
    tail = (1 - share) / 2
    return (
        np.minimum(np.maximum(_quantiles(histogram.counts, edges, tail), low), 0.0),
        np.maximum(np.minimum(_quantiles(histogram.counts, edges, 1 - tail), high), 0.0),
    )


def magnitudes_of(histogram: Histogram) -> tuple[NDArray[np.int64], Floats]:
    """Counts [channels, bins] of |value| and the bins' edges [channels, bins + 1]."""
    middle = histogram.bins - 1
    counts = histogram.counts[:, middle:].copy()
    counts[:, 1:] += histogram.counts[:, :middle][:, ::-1]
    return counts, histogram.widths[:, None] * np.arange(histogram.bins + 1)


def _quantiles(counts: NDArray[np.int64], edges: Floats, share: float) -> Floats:
    """Value of each row below which `share` of it lies."""
    sums = counts.cumsum(axis=1)
    wanted = sums[:, -1] * share
    bins = np.minimum((sums < wanted[:, None]).sum(axis=1), counts.shape[1] - 1)
    rows = np.arange(len(counts))
    inside = counts[rows, bins]
    within = np.clip((wanted - (sums[rows, bins] - inside)) / np.maximum(inside, 1), 0, 1)
    found: Floats = edges[rows, bins] + within * (edges[rows, bins + 1] - edges[rows, bins])
    return found


def _mse_ends(histogram: Histogram, low: Floats, high: Floats, symmetric: bool) -> tuple[Floats, Floats]:
    """Never worse than [low, high] by `squared_error`."""
    coarse = histogram.coarser(min(_SEARCHED, histogram.bins))

    def error(low: Floats, high: Floats) -> Floats:
        return squared_error(coarse, grid_of(low, high, symmetric))

    if symmetric:
        found_high = _searched(high, lambda end: error(-end, end))
        found_low = -found_high
    else:
        found_low, found_high = low, high
        for _ in range(_ROUNDS):
            found_high = _searched(high, partial(error, found_low))
            found_low = -_searched(-low, lambda end, other=found_high: error(-end, other))  # type: ignore[misc]
    before, after = (
        squared_error(histogram, grid_of(*ends, symmetric)) for ends in ((low, high), (found_low, found_high))
    )
    better = after < before
    return np.where(better, found_low, low), np.where(better, found_high, high)


def _searched(largest: Floats, error: Callable[[Floats], Floats]) -> Floats:
    """Per channel the end with the least error among `largest` and shares of it."""
    best, least = np.ones_like(largest), error(largest)

    def attempt(shares: Floats) -> None:
        nonlocal best, least
        found = error(shares * largest)
        better = found < least
        best, least = np.where(better, shares, best), np.where(better, found, least)

    factor = _SMALLEST ** (1 / _COARSE)
    for number in range(1, _COARSE + 1):
        attempt(np.full_like(largest, factor**number))
    centre = best
    for fine in np.linspace(factor, 1 / factor, _FINE):
        attempt(np.minimum(centre * fine, 1.0))
    return best * largest


def weight_ranges(weights: NDArray[np.float32], axis: int | None, config: RangeConfig) -> tuple[Floats, Floats]:
    """Ends for a constant tensor: for all of it (`axis` None), or for each index along `axis`."""
    rows = weights.reshape(-1, 1) if axis is None else np.moveaxis(weights, axis, -1).reshape(-1, weights.shape[axis])
    histogram = Histogram(rows.shape[1], 4096 if axis is None else 512)
    histogram.add(np.ascontiguousarray(rows, np.float32))
    return ranges_of(histogram, config)
