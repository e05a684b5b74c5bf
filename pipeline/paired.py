"""What ratios of times say, where two forms of the same work took turns: noise that meets both of a pair is gone.

The median's confidence interval comes from the ratios' order statistics, the sign test turned around: it assumes no
distribution and shrugs off outliers.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.order_statistics import quantile_bounds
from plugins.errors import KilnError

LEAST_PAIRS = 6
"""For an interval of 95 %."""


@dataclass(frozen=True)
class Interval:
    """Of the ratio of times, the second form's to the first's."""

    median: float
    lowest: float
    highest: float
    pairs: int

    @property
    def decided(self) -> bool:
        """Whether one of the two is faster, beyond chance."""
        return not self.lowest <= 1.0 <= self.highest

    @property
    def noise(self) -> float:
        """How far the interval reaches from the median, relative to it."""
        return max(self.highest - self.median, self.median - self.lowest) / self.median


def interval_of(ratios: Sequence[float], confidence: float = 0.95) -> Interval:
    """Raises KilnError where there are too few ratios for the confidence."""
    ordered = sorted(ratios)
    lowest, highest = quantile_bounds(ordered, 0.5, (1 + confidence) / 2)
    if lowest is None or highest is None:
        raise KilnError(f"{len(ratios)} pairs are too few for a confidence of {confidence:g}; measure more of them")
    return Interval(statistics.median(ordered), lowest, highest, len(ordered))


def ratios_of(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Of the times of two forms that took turns."""
    return [b / a for a, b in zip(first, second, strict=True)]


def take_turns(
    first: Callable[[], object], second: Callable[[], object], seconds: float, *longer: float
) -> tuple[float, Interval]:
    """Median seconds of `first`, and the ratio of `second` to it, after one call of each to warm up.

    Measures for `seconds`, and up to each of `longer` where chance could explain the difference so far; at least
    `LEAST_PAIRS` pairs.
    """
    calls: tuple[Callable[[], object], ...] = (first, second)
    for call in calls:
        call()
    times: tuple[list[float], list[float]] = ([], [])
    start = time.perf_counter()
    for allowed in (seconds, *longer):
        while len(times[1]) < LEAST_PAIRS or time.perf_counter() < start + allowed:
            for call, taken in zip(calls, times, strict=True):
                begun = time.perf_counter()
                call()
                taken.append(time.perf_counter() - begun)
        ratio = interval_of(ratios_of(*times))
        if ratio.decided:
            break
    return statistics.median(times[0]), ratio
