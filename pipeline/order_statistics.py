"""What the order of some values says of the distribution that they come from, whatever that is.

of n values the r-th smallest lies above a quantile q with P(X < r), X ~ Binomial(n, q)
(W. J. Conover, Practical Nonparametric Statistics, 3rd ed., section 3.2)
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence


def binomial_below(successes: int, trials: int, probability: float) -> float:
    """P(X < successes) of X ~ Binomial(trials, probability)."""
    if probability <= 0:
        return 1.0 if successes > 0 else 0.0
    if probability >= 1:
        return 1.0 if successes > trials else 0.0
    log_p, log_q = math.log(probability), math.log1p(-probability)
    terms: Iterable[float] = (
        math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1) + k * log_p + (trials - k) * log_q
        for k in range(min(successes, trials + 1))
    )
    return min(1.0, math.fsum(math.exp(term) for term in terms))


def quantile_bounds(ordered: Sequence[float], quantile: float, confidence: float) -> tuple[float | None, float | None]:
    """Values below and above a quantile of the distribution, each so with `confidence`; None where too few are known.

    `ordered` ascends.
    """
    count = len(ordered)

    def below(rank: int) -> float:
        return binomial_below(rank, count, quantile)

    low = bisect_right(range(1, count + 1), 1 - confidence, key=below) - 1  # the largest rank that may lie above
    high = bisect_left(range(1, count + 1), confidence, key=below)  # the smallest that surely does
    return (ordered[low] if low >= 0 else None), (ordered[high] if high < count else None)
