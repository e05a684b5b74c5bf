"""What follows from measurements of settings: efficiency, the knee, the best setting. Measures nothing itself.

    efficiency(b) = QPS(b) / (b x QPS(1)),    QPS(1) = 1 / latency of a single request

QPS(b) are requests/s with b requests always in flight, or with b items in each batch. Efficiency is 1 where b requests
together take as long as one alone does, and 1/b where they gain nothing over one after the other.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from plugins.errors import KilnError

Objective = Literal["throughput", "goodput"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)

FALL = 0.1
"""Efficiency has fallen when it is so much below the highest before, relative to that, and beyond the noise."""
_LEAST_MARGIN, _MOST_MARGIN = 0.02, 0.1
"""A batch size is better than another only by more than the noise, taken to be at least and at most so much."""


@dataclass(frozen=True)
class Setting:
    """What is tried: requests in flight or items of a batch; a decoder's tokens a step and tokens of a block."""

    batch: int
    tokens_per_step: int | None = None
    block_size: int | None = None

    def __str__(self) -> str:
        parts = [f"batch {self.batch}"]
        parts += [f"{self.tokens_per_step} tokens a step"] if self.tokens_per_step is not None else []
        parts += [f"blocks of {self.block_size}"] if self.block_size is not None else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Sample:
    """One measurement: requests/s, mean seconds of a request; P99s and goodput where they have a meaning."""

    rate: float
    latency: float
    first_token: float | None = None
    inter_token: float | None = None
    goodput: float | None = None


@dataclass
class Point:
    """A setting and its measurements so far, one of each round."""

    setting: Setting
    samples: list[Sample] = field(default_factory=list)

    def values(self, objective: Objective) -> list[float]:
        """What is to be high, of each round."""
        return [sample.rate if objective == "throughput" else sample.goodput or 0.0 for sample in self.samples]

    def value(self, objective: Objective) -> float:
        """Median of what is to be high."""
        return statistics.median(self.values(objective))

    @property
    def rate(self) -> float:
        return statistics.median(sample.rate for sample in self.samples)

    @property
    def latency(self) -> float:
        return statistics.median(sample.latency for sample in self.samples)

    @property
    def noise(self) -> float:
        """Half of the rates' range, relative to their median; 0 after one round, which tells nothing of it."""
        rates = [sample.rate for sample in self.samples]
        return (max(rates) - min(rates)) / 2 / self.rate

    def median_of(self, name: Literal["first_token", "inter_token", "goodput"]) -> float | None:
        """None where no measurement has it."""
        values = [value for sample in self.samples if (value := getattr(sample, name)) is not None]
        return statistics.median(values) if values else None


def efficiency(point: Point, single: Point) -> float:
    """QPS(b) / (b x QPS(1)); `single` is the point of batch 1."""
    assert single.setting.batch == 1
    return point.rate / (point.setting.batch * single.rate)


def single_of(points: Iterable[Point]) -> Point:
    """The point of batch 1, which efficiency is relative to. Raises KilnError without one."""
    for point in points:
        if point.setting.batch == 1:
            return point
    raise KilnError("a single request was not measured, which efficiency is relative to; raise --budget")


def knee(points: Sequence[Point]) -> tuple[int, bool]:
    """The batch size beyond which efficiency falls, and whether it falls at all within what was measured.

    It falls at the first batch size whose efficiency is below the highest before by more than FALL and than the noise
    of both. Points have ascending batch sizes from 1 on.
    """
    single = single_of(points)
    last = highest = single
    for point in points[1:]:
        before, now = efficiency(highest, single), efficiency(point, single)
        if now < before * (1 - max(FALL, point.noise + highest.noise)):
            return last.setting.batch, True
        if now > before:
            highest = point
        last = point
    return last.setting.batch, False


def margin(points: Iterable[Point]) -> float:
    """By how much, relatively, one of these must be better to be called so."""
    return min(max(_LEAST_MARGIN, *(point.noise for point in points)), _MOST_MARGIN)


def smallest_best(points: Sequence[Point], objective: Objective) -> Point:
    """The first point, in ascending order, that is as good as the best within the noise.

    Raises KilnError when no point kept the limits.
    """
    best = max(points, key=lambda point: point.value(objective))
    if not best.value(objective) > 0:
        raise KilnError(
            f"no setting kept the limits of the {objective}, from batch {points[0].setting.batch} to "
            f"{points[-1].setting.batch}; loosen them, or choose --objective throughput"
        )
    worth = best.value(objective)
    return next(point for point in points if point.value(objective) >= worth * (1 - margin((point, best))))


def best_or_default(points: Sequence[Point], default: Point, objective: Objective) -> Point:
    """The best point that beats the default in every round, by more than the least margin; else the default."""
    bar = max(*default.values(objective), default.value(objective) * (1 + _LEAST_MARGIN))
    better = [point for point in points if min(point.values(objective)) > bar]
    return max(better, key=lambda point: point.value(objective), default=default)


def still_growing(points: Sequence[Point]) -> bool:
    """Whether a larger batch is worth trying: one of the last two grew by more than the least margin."""
    rates = [point.rate for point in points]
    return len(rates) < 3 or max(rates[-2:]) > max(rates[:-2]) * (1 + _LEAST_MARGIN)


def doubling(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself."""
    sizes = [2**power for power in range(most.bit_length()) if 2**power < most]
    return [*sizes, most]
