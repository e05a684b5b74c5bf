"""The entropy method: clip where the quantised distribution has the least KL divergence from the original.

After S. Migacz, "8-bit Inference with TensorRT", GTC 2017: for every number of bins i that might be kept, P is the
first i bins with all that lies beyond added to the last one, Q is the same bins without that, joined into as many
groups as there are integers and spread evenly over those of a group's bins that are not empty; KL(P || Q) is least at
the best i. Bins of P that Q holds to be empty have a share of `_SMOOTHING` instead.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pipeline.calibration.grid import Floats
from pipeline.calibration.histogram import Histogram

_BINS = 4096
"""Of magnitudes, twice as many as there: an end below as many bins as there are integers cannot be found."""
_CANDIDATES = 128
"""Ends that are tried, evenly spaced."""
_SMOOTHING = 1e-4
_MOST = 1 << 22
"""Counts that are looked at together, which bounds temporary arrays."""


def entropy_ends(histogram: Histogram, low: Floats, high: Floats, symmetric: bool) -> tuple[Floats, Floats]:
    """Ends per channel, within [low, high]. Each side of an asymmetric range is judged for itself, by its share."""
    coarse = histogram.coarser(min(_BINS, histogram.bins))
    middle = coarse.bins - 1
    right, left = coarse.counts[:, middle:], coarse.counts[:, middle::-1]
    if symmetric:
        both = right.copy()
        both[:, 1:] += left[:, 1:]
        ends = np.minimum(_ends(both, coarse.widths, 128), high)
        return -ends, ends
    reach = np.maximum(high - low, np.finfo(np.float64).tiny)
    below, above = (_ends_by_share(*side, coarse.widths) for side in ((left, -low / reach), (right, high / reach)))
    return -np.minimum(below, -low), np.minimum(above, high)


def _ends_by_share(counts: NDArray[np.int64], shares: Floats, widths: Floats) -> Floats:
    """Of one side of asymmetric ranges, which gets its share of 256 integers, in sixteenths."""
    levels = 16 * np.maximum(np.rint(16 * shares), 1).astype(int)
    ends = np.empty(len(counts))
    for level in np.unique(levels):
        here = levels == level
        ends[here] = _ends(counts[here], widths[here], int(level))
    return ends


def _ends(counts: NDArray[np.int64], widths: Floats, levels: int) -> Floats:
    """Of rows of magnitudes that are quantised to `levels` integers."""
    rows = max(1, _MOST // counts.shape[1])
    parts = [_ends_of(counts[start : start + rows], levels) for start in range(0, len(counts), rows)]
    return np.concatenate(parts) * widths


def _ends_of(counts: NDArray[np.int64], levels: int) -> Floats:
    """In bins."""
    values = counts.astype(np.float64)
    values[:, 0] = values[:, 1]  # zeros cost no integers: they are exact in every grid
    used = counts.shape[1] - np.argmax(counts[:, ::-1] > 0, axis=1)
    best = np.where(counts[:, 1:].any(axis=1), used, 1).astype(np.float64)
    least = np.full(len(counts), np.inf)
    beyond = values[:, ::-1].cumsum(axis=1)[:, ::-1]
    for kept in _candidates(levels, int(used.max())):
        outside = beyond[:, kept] if kept < counts.shape[1] else np.zeros(len(counts))
        divergence = _divergence(values[:, :kept], outside, levels)
        better = (divergence < least) & (kept <= used)
        best, least = np.where(better, kept, best), np.where(better, divergence, least)
    return best


def _candidates(levels: int, used: int) -> Iterator[int]:
    first = min(levels, used)
    yield from sorted(set(np.linspace(first, used, _CANDIDATES).round().astype(int).tolist()))


def _divergence(inside: Floats, outside: Floats, levels: int) -> Floats:
    """KL(P || Q) per row; infinite for an empty row."""
    kept = inside.shape[1]
    reference = inside.copy()
    reference[:, -1] += outside
    starts = np.unique((np.arange(levels) * kept // levels).clip(0, kept - 1))
    sizes = np.diff(np.append(starts, kept))
    filled = (inside > 0).astype(np.float64)
    sums = np.add.reduceat(inside, starts, axis=1) / np.maximum(np.add.reduceat(filled, starts, axis=1), 1)
    quantised = np.repeat(sums, sizes, axis=1) * filled
    with np.errstate(divide="ignore", invalid="ignore"):
        p = reference / reference.sum(axis=1, keepdims=True)
        q = quantised / quantised.sum(axis=1, keepdims=True)
        q = np.where((q > 0) | ~(p > 0), q, _SMOOTHING)
        terms = np.where(p > 0, p * np.log(p / q), 0.0)
    total = terms.sum(axis=1)
    return np.where(np.isfinite(total), total, np.inf)
