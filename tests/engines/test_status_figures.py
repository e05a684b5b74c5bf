"""The figures of the status page by themselves: percentiles, the last minute, and all of them as JSON."""

import json
import math
from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.metrics_core import CounterMetricFamily
from starlette.testclient import TestClient

from engines.runtime.metrics import EngineMetrics
from engines.server.app import create_app
from engines.server.load_figures import LoadHistory, quantile
from tests.engines.scripted_engine import Scripted

BOUNDS = (0.01, 0.1, 1.0, math.inf)

# --- percentiles


def buckets_from(values, bounds=BOUNDS):
    ordered = sorted(values)
    return tuple((bound, sum(value <= bound for value in ordered)) for bound in bounds)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, None),
        ([0.05] * 10, 0.5, 0.055),  # the middle of its bucket: 0.01 + 0.09 / 2
        ([0.05] * 10, 1.0, 0.1),
        ([0.005] * 4, 0.5, 0.005),
        ([0.005] * 9 + [0.5], 0.9, 0.01),
        ([0.005] * 9 + [0.5], 0.95, 0.55),
        ([50.0] * 3, 0.5, 1.0),  # above every bound: the last one, as PromQL has it
        ([0.05, 50.0], 0.99, 1.0),
    ],
)
def test_percentiles_from_buckets(values, share, expected):
    found = quantile(buckets_from(values), share)
    assert found == (None if expected is None else pytest.approx(expected))
    assert quantile((), share) is None


@given(st.lists(st.floats(0, 2), min_size=1, max_size=50), st.floats(0.01, 1))
def test_a_percentile_lies_in_the_bucket_of_the_true_one(values, share):
    found = quantile(buckets_from(values), share)
    true = sorted(values)[math.ceil(share * len(values)) - 1]
    above = bisect_left(BOUNDS, true)
    assert (0, *BOUNDS)[above] <= found <= min(BOUNDS[above], 1.0)


@given(st.lists(st.floats(0, 2), min_size=1, max_size=50))
def test_percentiles_rise_with_the_share(values):
    buckets = buckets_from(values)
    found = [quantile(buckets, share / 20) for share in range(1, 21)]
    assert found == sorted(found)


# --- the last minute


def counted(metrics, tokens=0, first=()):
    metrics.generated_tokens.inc(tokens)
    for seconds in first:
        metrics.first_token_seconds.observe(seconds)
    return metrics.families()


def test_rates_and_percentiles_are_of_the_last_minute_only():
    metrics, history = EngineMetrics("m"), LoadHistory()
    history.add(0.0, counted(metrics, 1000, [50.0] * 100))  # before anybody looked
    history.add(1.0, counted(metrics, 7, [0.003]))
    history.add(3.0, counted(metrics, 20, [0.003]))
    figures = history.figures()
    assert figures["window_seconds"] == 3
    assert figures["per_second"]["generated_tokens"] == pytest.approx(9)
    assert figures["history"]["generated_tokens"] == [7, 10]
    assert figures["totals"]["generated_tokens"] == 1027
    assert figures["latency"]["first_token"]["count"] == 2
    assert 0.0025 <= figures["latency"]["first_token"]["p99"] <= 0.005
    assert figures["latency"]["first_token"]["largest_bound"] == 60
    for second in range(4, 70):
        history.add(float(second), counted(metrics))
    later = history.figures()
    assert later["window_seconds"] == 60
    assert later["latency"]["first_token"] == {"p50": None, "p90": None, "p99": None, "count": 0, "largest_bound": 60}
    assert later["per_second"]["generated_tokens"] == 0
    assert later["history"]["generated_tokens"] == [0] * 60


def test_an_engine_that_was_away_and_starts_again_counts_from_zero():
    metrics, history = EngineMetrics("m"), LoadHistory()
    history.add(0.0, counted(metrics, 500, [0.2] * 5))
    history.add(1.0, counted(metrics, 10))
    history.add(2.0, [])
    supervisor = CounterMetricFamily("kiln_engine_restarts", "", labels=["model"])
    supervisor.add_metric(["m"], 1)
    history.add(3.0, [supervisor])
    away = history.figures()
    assert (away["totals"]["engine_restarts"], away["totals"]["generated_tokens"]) == (1, 510)
    history.add(4.0, [*counted(EngineMetrics("m"), 8, [0.3] * 2), supervisor])
    figures = history.figures()
    assert figures["history"]["generated_tokens"] == [10, None, None, 8]
    assert figures["latency"]["first_token"]["count"] == 2
    assert figures["totals"]["generated_tokens"] == 8


def test_before_anything_happened_nothing_is_claimed():
    figures = LoadHistory().figures()
    assert figures["per_second"] == {"prompt_tokens": None, "generated_tokens": None, "requests": None}
    assert figures["latency"]["queue"]["p50"] is None
    assert figures["now"]["blocks_free"] is None
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures


def test_the_figures_as_json(monkeypatch):
    monkeypatch.setattr("engines.server.status_page._INTERVAL", 0.01)
    with TestClient(create_app({"scripted": Scripted()})) as client:
        status = client.get("/status.json").json()
        while status["models"][0]["per_second"]["generated_tokens"] is None:
            status = client.get("/status.json").json()
    (model,) = status["models"]
    assert (model["name"], model["kind"], model["ready"]) == ("scripted", "decoder", True)
    assert model["now"] == Scripted().values
    assert model["prefix_hit_rate"] == 0.75
    assert model["means"] == {"batch_size": 4, "step_tokens": None}
    assert (model["totals"]["preemptions"], model["totals"]["engine_restarts"]) == (4, 1)
    assert (status["draining"], status["requests_running"]) == (False, 0)
