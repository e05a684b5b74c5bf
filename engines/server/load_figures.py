"""What the status page shows: load and latency of the last minute, from snapshots of an engine's Prometheus families.

Pure: time and families are passed in, a snapshot about every second. Counters and histograms are turned into what was
added between two snapshots; one that fell has started again with its engine, and counts from zero.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client.metrics_core import Metric

WINDOW = 60
"""Seconds that figures look back."""
_RATE_SECONDS = 5.0
"""Rates are means of so many seconds: a single one jumps too much to be read."""
_PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_LATENCIES = ("queue", "first_token", "inter_token", "request", "step")
_GAUGES = ("running", "waiting_interactive", "waiting_batch", "blocks_free", "blocks_cached", "blocks_held")
_TOTALS = (
    "prompt_tokens",
    "generated_tokens",
    "preemptions",
    "engine_restarts",
    "prefix_lookups",
    "prefix_hits",
    "prefix_saved_tokens",
    "drafted_tokens",
    "accepted_tokens",
    "swapped_blocks",
)

Buckets = tuple[tuple[float, float], ...]
"""Upper bound and number of observations at or below it, rising; the last bound is infinite."""


def quantile(buckets: Sequence[tuple[float, float]], share: float) -> float | None:
    """The value below which `share` of the observations lie, taken as evenly spread within their bucket.

    As PromQL's `histogram_quantile`: what lies above the last finite bound counts as that bound. None where there are
    no observations.
    """
    total = buckets[-1][1] if buckets else 0
    if total <= 0:
        return None
    rank = share * total
    below, lower = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank and count > below:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * (rank - below) / (count - below)
        below, lower = count, bound
    return lower


@dataclass(frozen=True)
class Reading:
    """One snapshot of one engine, by names without `kiln_`: `running`, `first_token_seconds`."""

    time: float
    gauges: Mapping[str, float] = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)
    """Totals; with labels beside the model's, as `requests/stop`."""
    histograms: Mapping[str, Buckets] = field(default_factory=dict)
    sums: Mapping[str, float] = field(default_factory=dict)
    """Sum of a histogram's observations."""


def reading_from_families(time: float, families: Iterable[Metric]) -> Reading:
    """`time` in seconds of any steady clock."""
    gauges: dict[str, float] = {}
    counters: dict[str, float] = {}
    histograms: dict[str, Buckets] = {}
    sums: dict[str, float] = {}
    for family in families:
        name = family.name.removeprefix("kiln_")
        buckets: list[tuple[float, float]] = []
        for sample in family.samples:
            suffix = sample.name.removeprefix(family.name)
            if family.type == "gauge":
                gauges[name] = sample.value
            elif suffix == "_total":
                labels = [value for label, value in sample.labels.items() if label != "model"]
                counters["/".join([name, *labels])] = sample.value
            elif suffix == "_bucket":
                buckets.append((float(sample.labels["le"]), sample.value))
            elif suffix == "_sum":
                sums[name] = sample.value
        if buckets:
            histograms[name] = tuple(sorted(buckets))
    return Reading(time, gauges, counters, histograms, sums)


def _added(before: Reading, after: Reading) -> Reading:
    """What happened between two readings; gauges and time are the later ones'."""

    def added(old: Mapping[str, float], new: Mapping[str, float]) -> dict[str, float]:
        return {name: value - old[name] if value >= old.get(name, 0) > 0 else value for name, value in new.items()}

    histograms = {}
    for name, buckets in after.histograms.items():
        old = dict(before.histograms.get(name, ()))
        fell = old.get(math.inf, 0) > buckets[-1][1]
        histograms[name] = tuple((bound, count - (0 if fell else old.get(bound, 0))) for bound, count in buckets)
    return Reading(
        after.time,
        after.gauges,
        added(before.counters, after.counters),
        histograms,
        added(before.sums, after.sums),
    )


@dataclass(frozen=True)
class _Second:
    """About a second of an engine's life; `added` is None while the engine was away."""

    seconds: float
    added: Reading | None


class LoadHistory:
    """The last minute of one engine."""

    def __init__(self) -> None:
        self._last: Reading | None = None
        self._seconds: deque[_Second] = deque(maxlen=WINDOW)

    def add(self, time: float, families: Sequence[Metric]) -> None:
        """Take a snapshot; one without histograms is of an engine that is away, and at most its supervisor's."""
        reading = reading_from_families(time, families)
        away = not reading.histograms
        last = self._last or reading
        if self._last is not None and time > last.time:
            self._seconds.append(_Second(time - last.time, None if away else _added(last, reading)))
        self._last = reading
        if away:  # what it had counted before is what comes next is compared with
            self._last = replace(last, time=time, gauges=reading.gauges, counters={**last.counters, **reading.counters})

    def figures(self) -> dict[str, Any]:
        """Everything the page shows of this engine, JSON-ready; None stands for what is not known."""
        present = [second.added for second in self._seconds if second.added is not None]
        last = self._last or Reading(0.0)
        window = _merged(present)
        return {
            "window_seconds": sum(second.seconds for second in self._seconds),
            "now": {name: last.gauges.get(name) for name in _GAUGES},
            "per_second": {name: self._rate(name) for name in ("prompt_tokens", "generated_tokens", "requests")},
            "latency": {name: _percentiles(window.get(f"{name}_seconds", ())) for name in _LATENCIES},
            "means": {name: _mean(present, name) for name in ("batch_size", "step_tokens")},
            "prefix_hit_rate": _ratio(present, "prefix_hits", "prefix_lookups"),
            "acceptance_rate": _ratio(present, "accepted_tokens", "drafted_tokens"),
            "totals": {name: last.counters.get(name) for name in _TOTALS},
            "outcomes": {
                name.removeprefix("requests/"): count
                for name, count in last.counters.items()
                if name.startswith("requests/")
            },
            "history": self._series(),
        }

    def _rate(self, counter: str) -> float | None:
        """Of the last seconds; a counter with labels counts over all of them."""
        seconds, total = 0.0, 0.0
        for second in reversed(self._seconds):
            if seconds >= _RATE_SECONDS:
                break
            seconds += second.seconds
            total += _count(second.added, counter)
        return total / seconds if seconds else None

    def _series(self) -> dict[str, list[float | None]]:
        """A value for every second, the oldest first."""

        def series(value: Any) -> list[float | None]:
            return [None if second.added is None else value(second.added, second.seconds) for second in self._seconds]

        def latency(name: str, share: float) -> list[float | None]:
            return series(lambda added, _: quantile(added.histograms.get(f"{name}_seconds", ()), share))

        return {
            "generated_tokens": series(lambda added, seconds: _count(added, "generated_tokens") / seconds),
            "requests": series(lambda added, seconds: _count(added, "requests") / seconds),
            "running": series(lambda added, _: added.gauges.get("running")),
            "waiting": series(
                lambda added, _: added.gauges.get("waiting_interactive", 0) + added.gauges.get("waiting_batch", 0)
            ),
            "first_token": latency("first_token", 0.5),
            "inter_token": latency("inter_token", 0.5),
            "queue": latency("queue", 0.5),
            "request": latency("request", 0.5),
            "batch_size": series(lambda added, _: _mean([added], "batch_size")),
        }


def _count(added: Reading | None, counter: str) -> float:
    counters = added.counters if added is not None else {}
    return sum(value for name, value in counters.items() if name.partition("/")[0] == counter)


def _merged(readings: Iterable[Reading]) -> dict[str, Buckets]:
    """Histograms added up."""
    merged: dict[str, dict[float, float]] = {}
    for reading in readings:
        for name, buckets in reading.histograms.items():
            counts = merged.setdefault(name, {})
            for bound, count in buckets:
                counts[bound] = counts.get(bound, 0) + count
    return {name: tuple(sorted(counts.items())) for name, counts in merged.items()}


def _percentiles(buckets: Buckets) -> dict[str, float | None]:
    figures: dict[str, float | None] = {name: quantile(buckets, share) for name, share in _PERCENTILES.items()}
    finite = [bound for bound, _ in buckets if math.isfinite(bound)]
    return {**figures, "count": buckets[-1][1] if buckets else 0, "largest_bound": max(finite, default=None)}


def _mean(readings: Sequence[Reading], histogram: str) -> float | None:
    count = sum(r.histograms[histogram][-1][1] for r in readings if histogram in r.histograms)
    return sum(r.sums.get(histogram, 0) for r in readings) / count if count else None


def _ratio(readings: Sequence[Reading], part: str, whole: str) -> float | None:
    total = sum(_count(r, whole) for r in readings)
    return sum(_count(r, part) for r in readings) / total if total else None
