"""What the HTTP side notes about a version's answers, and the verdict on a new version from it. Pure.

A request that a replica failed counts as a failure also where another one answered it in the end. Latency is seconds
for each generated token, from sending to the end of the answer (normalised latency, as in vLLM, arXiv 2309.06180), so
that long and short answers compare.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from pipeline.order_statistics import binomial_below, quantile_bounds
from plugins.errors import KilnError

_KEPT = 2000
"""Latencies of a version, the newest."""
QUANTILES = (0.5, 0.95)


@dataclass
class Figures:
    """Counts of one version since somebody took them."""

    requests: int = 0
    failures: int = 0
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def answered(self, seconds: float, tokens: int) -> None:
        self.requests += 1
        self.latencies.append(seconds / max(tokens, 1))

    def failed(self) -> None:
        self.requests += 1
        self.failures += 1

    def add(self, other: "Figures") -> None:
        self.requests += other.requests
        self.failures += other.failures
        self.latencies.extend(other.latencies)

    @property
    def error_rate(self) -> float:
        return self.failures / self.requests if self.requests else 0.0

    def sentence(self) -> str:
        """For people."""
        if not self.requests:
            return "no request"
        text = f"{self.requests} requests, {self.failures} failed"
        if not self.latencies:
            return text
        ordered = sorted(self.latencies)
        each = (f"{1e3 * ordered[int(q * (len(ordered) - 1))]:.3g} ms" for q in QUANTILES)
        return f"{text}, {' and '.join(each)} a token (median, 95th percentile)"


@dataclass(frozen=True)
class Limits:
    """What a new version may cost. Raises KilnError for values out of range."""

    errors: float = 0.01
    """Share of requests that it may fail more than the old one."""
    latency: float = 0.25
    """Share by which its median and its 95th percentile of latency may be higher."""
    requests: int = 50
    """Answers of the new version that a step needs."""
    confidence: float = 0.999
    """Of a verdict against it: it is looked at about every second."""
    patience: float = 1800.0
    """Seconds that a step may take; a version that cannot be judged goes back."""

    def __post_init__(self) -> None:
        if not 0 <= self.errors < 1:
            raise KilnError(f"the limit of errors is {self.errors}; expected a share from 0, below 1")
        if not self.latency >= 0:
            raise KilnError(f"the limit of latency is {self.latency}; expected a share, 0 or more")
        if self.requests < 1 or not self.patience > 0:
            raise KilnError(f"requests is {self.requests}, patience {self.patience}; expected positive numbers")
        if not 0.5 < self.confidence < 1:
            raise KilnError(f"confidence is {self.confidence}; expected a number above 0.5 and below 1")


@dataclass(frozen=True)
class Verdict:
    """`wait`: not enough is known yet."""

    word: Literal["wait", "pass", "fail"]
    text: str = ""


def verdict(old: Figures, new: Figures, limits: Limits) -> Verdict:
    """Of a new version, beside the old one in the same time.

    It fails where chance explains its failures, or the difference of a quantile of latency, with less than
    1 - confidence: by the binomial distribution, and by the quantiles' distribution-free intervals.
    """
    allowed = min(old.error_rate + limits.errors, 1.0)
    chance = 1 - binomial_below(new.failures, new.requests, allowed)
    if new.failures and chance < 1 - limits.confidence:
        return Verdict(
            "fail",
            f"{new.failures} of {new.requests} requests failed, {old.failures} of {old.requests} with the old version; "
            f"allowed are {limits.errors:.1%} more",
        )
    for quantile in QUANTILES:
        low = quantile_bounds(sorted(new.latencies), quantile, limits.confidence)[0]
        high = quantile_bounds(sorted(old.latencies), quantile, limits.confidence)[1]
        if low is not None and high is not None and low > (1 + limits.latency) * high:
            return Verdict(
                "fail",
                f"its {quantile:.0%} quantile of latency is above {1e3 * low:.3g} ms a token, the old version's below "
                f"{1e3 * high:.3g} ms; allowed is {limits.latency:.0%} more",
            )
    if new.requests < limits.requests:
        return Verdict("wait", f"{new.requests} of {limits.requests} requests")
    return Verdict("pass", new.sentence())
