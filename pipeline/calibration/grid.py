"""What quantising the values of a histogram to 8 bits loses: squared error, clipped values, signal to noise.

Values are taken as evenly spread within a bin. The error of a grid of step s, x - s * clip(round(x / s)), has the
antiderivative of its square k * s^3 / 12 + r^3 / 3 with k = clip(round(x / s)) and r = x - k * s, so the sum over a
bin is exact, however wide the bin is beside the step.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.calibration.histogram import Histogram

Floats = NDArray[np.float64]
_TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Grid:
    """Integers `least` to `most` times `step`, per channel [channels]; real zero is one of them."""

    step: Floats
    least: Floats
    most: Floats


def grid_of(low: Floats, high: Floats, symmetric: bool, bits: int = 8) -> Grid:
    """The grid that quantises [low, high], which holds 0, as ONNX's QuantizeLinear does with a zero point.

    Symmetric: -127 to 127 steps of max(-low, high) / 127 for 8 bits. Otherwise 2^bits values, moved so that one is 0.
    """
    if symmetric:
        most = np.full(len(low), 2.0 ** (bits - 1) - 1)
        return Grid(np.maximum(np.maximum(-low, high) / most, _TINY), -most, most)
    levels = 2.0**bits - 1
    step = np.maximum((high - low) / levels, _TINY)
    zero = np.rint(-low / step)
    return Grid(step, -zero, levels - zero)


def squared_error(histogram: Histogram, grid: Grid) -> Floats:
    """Sum of the squared errors of all values, per channel."""
    edges = histogram.edges()
    step = grid.step[:, None]
    nearest = np.clip(np.rint(edges / step), grid.least[:, None], grid.most[:, None])
    rest = edges - nearest * step
    integral = nearest * step**3 / 12 + rest**3 / 3
    found: Floats = (histogram.counts * np.diff(integral, axis=1) / np.diff(edges, axis=1)).sum(axis=1)
    return found


def signal(histogram: Histogram) -> Floats:
    """Sum of the squares of all values, per channel."""
    edges = histogram.edges()
    squares = np.diff(edges**3, axis=1) / (3 * np.diff(edges, axis=1))
    squares[:, histogram.bins - 1] = 0  # the bin around zero: values that are small beside all others, mostly zeros
    found: Floats = (histogram.counts * squares).sum(axis=1)
    return found


def clipped(histogram: Histogram, low: Floats, high: Floats) -> Floats:
    """How many values of each channel lie outside of [low, high]; of a bin that an end cuts, its share."""
    edges = histogram.edges()
    widths = np.diff(edges, axis=1)
    above = np.clip((edges[:, 1:] - high[:, None]) / widths, 0, 1)
    below = np.clip((low[:, None] - edges[:, :-1]) / widths, 0, 1)
    above[histogram.high <= high] = 0  # the least and the largest value are known exactly
    below[histogram.low >= low] = 0
    found: Floats = (histogram.counts * np.minimum(above + below, 1)).sum(axis=1)
    return found


def sqnr(histogram: Histogram, grid: Grid) -> Floats:
    """Signal to quantisation noise, 10 log10(sum x^2 / sum error^2), in dB per channel; inf without noise."""
    noise, power = squared_error(histogram, grid), signal(histogram)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = 10 * np.log10(power / noise)
    return np.where(power > 0, ratio, np.inf)
