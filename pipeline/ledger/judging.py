"""Whether one set of runs is slower than another, judged so that a single odd run decides nothing.

Runs are what is independent, so the sample of a run is the median of its repetitions. With enough runs on both sides a
difference counts when the Mann-Whitney U test (H. B. Mann, D. R. Whitney, Annals of Mathematical Statistics 18, 1947;
exact for small samples, two-sided) rejects that both come from one distribution, and the medians differ by more than
`LEAST`. With fewer, no test can reject; then the difference is held against the spread of the repetitions, by their
median absolute deviation, and called suspected at most. A larger difference that neither shows is unknown, not "same".
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from plugins.errors import KilnError

SIGNIFICANCE = 0.05
LEAST = 0.02
"""Relative difference of the medians that matters to anybody."""
_ENOUGH = 4
"""Runs on each side from which the exact test can reject: with 4 and 4 its least p is 2 / 70."""
_SIGMAS = 3.0
_MAD_TO_SIGMA = 1.4826
"""Of a normal distribution."""

Verdict = Literal["better", "worse", "same", "suspected better", "suspected worse", "unknown"]


@dataclass(frozen=True)
class Judgement:
    """`change` is relative to the first side's median, None where that is 0; `p` None where no test was possible."""

    verdict: Verdict
    before: float
    after: float
    change: float | None
    p: float | None
    runs: tuple[int, int]

    @property
    def regressed(self) -> bool:
        return self.verdict == "worse"

    def sentence(self) -> str:
        """For people."""
        change = "" if self.change is None else f"{self.change:+.1%}, "
        runs = f"{self.runs[0]} and {self.runs[1]} runs"
        if self.p is not None:
            return f"{self.verdict} ({change}p {self.p:.3f}, {runs})"
        return f"{self.verdict} ({change}{runs}; a test needs {_ENOUGH} of each)"


def judge(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]], higher_is_better: bool) -> Judgement:
    """Compare runs, each with the values of its repetitions. Raises KilnError without SciPy where a test is needed."""
    assert before
    assert after
    first, second = [statistics.median(run) for run in before], [statistics.median(run) for run in after]
    old, new = statistics.median(first), statistics.median(second)
    change = (new - old) / abs(old) if old else None
    runs = (len(first), len(second))
    improved = (new > old) == higher_is_better
    matters = new != old if change is None else abs(change) > LEAST
    p = _mann_whitney(first, second) if min(runs) >= _ENOUGH else None
    verdict: Verdict = "unknown"
    if not matters:
        verdict = "same"
    elif p is not None:
        if p < SIGNIFICANCE:
            verdict = "better" if improved else "worse"
    elif max(map(len, (*before, *after))) > 1 and abs(new - old) > _SIGMAS * (_spread(before) + _spread(after)):
        verdict = "suspected better" if improved else "suspected worse"
    return Judgement(verdict, old, new, change, p, runs)


def _spread(runs: Sequence[Sequence[float]]) -> float:
    """Standard deviation of a normal distribution with the values' median absolute deviation."""
    values = [value for run in runs for value in run]
    middle = statistics.median(values)
    return _MAD_TO_SIGMA * statistics.median(abs(value - middle) for value in values)


def _mann_whitney(first: Sequence[float], second: Sequence[float]) -> float:
    try:
        from scipy.stats import mannwhitneyu
    except ImportError as error:
        raise KilnError(
            f"cannot import scipy ({error}), which tests for regressions; install it: pip install 'kiln-engine[ledger]'"
        ) from error
    return float(mannwhitneyu(first, second, alternative="two-sided", method="auto").pvalue)
