"""Efficiency, its knee and what is chosen, on measurements made up for them; the options of `kiln tune`."""

import pytest

from pipeline.tune import TuneConfig
from pipeline.tune.search import (
    Point,
    Sample,
    Setting,
    best_or_default,
    doubling,
    efficiency,
    knee,
    smallest_best,
    still_growing,
)
from plugins.errors import KilnError


def point(batch: int, *rates: float, goodput: float | None = None) -> Point:
    return Point(Setting(batch), [Sample(rate, batch / rate, goodput=goodput) for rate in rates])


def sweep(latencies: dict[int, float]) -> list[Point]:
    """Points of a machine on which a batch of b takes so many seconds."""
    return [point(batch, batch / seconds) for batch, seconds in latencies.items()]


def test_efficiency_is_qps_over_batch_times_single_qps() -> None:
    points = sweep({1: 0.5, 2: 0.5, 4: 1.0, 8: 4.0})
    assert [efficiency(each, points[0]) for each in points] == pytest.approx([1.0, 1.0, 0.5, 0.125])
    assert points[2].rate == pytest.approx(4.0)
    single_latency = 0.5
    for each in points:
        assert efficiency(each, points[0]) == pytest.approx(each.rate / (each.setting.batch * (1 / single_latency)))


@pytest.mark.parametrize(
    ("latencies", "expected"),
    [
        ({1: 1.0, 2: 1.0, 4: 1.02, 8: 1.05, 16: 2.0, 32: 4.0}, (8, True)),
        ({1: 1.0, 2: 2.0, 4: 4.0}, (1, True)),
        ({1: 1.0, 2: 1.0, 4: 1.0}, (4, False)),
        ({1: 1.0}, (1, False)),
        ({1: 1.0, 2: 1.06, 4: 1.13, 8: 1.2}, (2, True)),  # little by little counts from the highest, not the last
        ({1: 1.0, 2: 0.8, 4: 0.95, 8: 0.95}, (2, True)),  # 0.84 of the highest, although above batch 1
        ({1: 1.0, 2: 1.5, 4: 0.9}, (1, True)),  # beyond the first fall nothing counts
    ],
)
def test_the_knee_is_the_batch_beyond_which_efficiency_falls(
    latencies: dict[int, float], expected: tuple[int, bool]
) -> None:
    assert knee(sweep(latencies)) == expected


def test_a_fall_within_the_noise_is_none() -> None:
    single = point(1, 1.0)
    assert knee([single, point(2, 1.6)]) == (1, True)
    assert knee([single, point(2, 1.3, 1.6, 1.9)]) == (1, True)  # 0.8 of 1, noise 0.19
    assert knee([single, point(2, 1.2, 1.6, 2.0)]) == (2, False)  # noise 0.25


def test_the_knee_needs_a_single_request() -> None:
    with pytest.raises(KilnError, match="a single request was not measured"):
        knee([point(2, 1.0)])


def test_the_smallest_batch_as_good_as_the_best_is_chosen() -> None:
    points = [point(1, 1.0), point(2, 1.9), point(4, 2.97), point(8, 3.0), point(16, 2.9)]
    assert smallest_best(points, "throughput").setting.batch == 4
    points[2] = point(4, 2.8)
    assert smallest_best(points, "throughput").setting.batch == 8
    points[2] = point(4, 2.6, 2.8, 3.0)
    assert smallest_best(points, "throughput").setting.batch == 4


def test_goodput_chooses_by_what_is_within_the_limits() -> None:
    points = [point(1, 1.0, goodput=1.0), point(2, 1.9, goodput=1.5), point(4, 3.0, goodput=0.0)]
    assert smallest_best(points, "goodput").setting.batch == 2
    with pytest.raises(KilnError, match="no setting kept the limits"):
        smallest_best([points[2]], "goodput")


def test_another_setting_must_be_better_than_the_default_beyond_the_noise() -> None:
    default, slightly, better = point(4, 1.0), point(4, 1.01), point(4, 1.05)
    assert best_or_default([default, slightly], default, "throughput") is default
    assert best_or_default([default, slightly, better], default, "throughput") is better
    sometimes = point(4, 1.01, 1.5, 1.6)
    assert best_or_default([default, sometimes], default, "throughput") is default
    noisy = point(4, 0.8, 1.0, 1.2)
    assert best_or_default([noisy, point(4, 1.1, 1.15, 1.19)], noisy, "throughput") is noisy
    good = point(4, 0.5, goodput=0.5)
    assert best_or_default([point(4, 0.9, goodput=0.4), good], point(4, 1.0, goodput=0.3), "goodput") is good


def test_batches_grow_until_two_in_a_row_gain_nothing() -> None:
    rates = [1.0, 1.9, 2.0, 2.01]
    assert still_growing([point(1, rate) for rate in rates])
    assert still_growing([point(1, rate) for rate in (*rates, 2.5)])
    assert not still_growing([point(1, rate) for rate in (*rates, 2.0)])


def test_sizes_double_up_to_the_largest() -> None:
    assert [doubling(most) for most in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "speed"}, "the objective is 'speed'"),
        ({"objective": "goodput"}, "goodput needs a limit"),
        ({"budget": 0.0}, "budget is 0"),
        ({"window": float("nan")}, "window is nan"),
        ({"repetitions": 0}, "repetitions is 0"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"kv_blocks": 0}, "kv_blocks is 0"),
        ({"block_sizes": (8, 512)}, "block sizes from 1 to 256"),
    ],
)
def test_options_without_meaning_are_refused(options: dict, message: str) -> None:
    with pytest.raises(KilnError, match=message):
        TuneConfig(**options)
