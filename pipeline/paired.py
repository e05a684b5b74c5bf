"""What ratios of times say, where two forms of the same work took turns: noise that meets both of a pair is gone.

The median's confidence interval comes from the ratios' order statistics, the sign test turned around: it assumes no
distribution and shrugs off outliers.

    interval [x(k), x(n-k+1)], k the largest with P(Binomial(n, 1/2) < k) <= (1 - confidence) / 2
    (W. J. Conover, Practical Nonparametric Statistics, 3rd ed., section 3.2)
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

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
    n, ordered = len(ratios), sorted(ratios)
    allowed, k, below = (1 - confidence) / 2, 0, 0.0
    while (below := below + math.comb(n, k) / 2**n) <= allowed:
        k += 1
    if k == 0:
        raise KilnError(f"{n} pairs are too few for a confidence of {confidence:g}; measure more of them")
    return Interval(statistics.median(ordered), ordered[k - 1], ordered[n - k], n)


def ratios_of(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Of the times of two forms that took turns."""
    return [b / a for a, b in zip(first, second, strict=True)]
