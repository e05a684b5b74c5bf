"""Histograms count exactly however values come; errors equal those of real quantisation; each method keeps its word."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pipeline.calibration.grid import clipped, grid_of, signal, sqnr, squared_error
from pipeline.calibration.histogram import Histogram, NotFiniteError, merged_histogram
from pipeline.calibration.ranges import RangeConfig, magnitudes_of, ranges_of, weight_ranges
from plugins.errors import KilnError

METHODS = ("minmax", "percentile", "entropy", "mse")
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
VALUES = arrays(np.float32, st.integers(1, 60), elements=FLOATS)


def histogram_of(values, bins=4096, channels=1):
    found = Histogram(channels, bins)
    found.add(np.asarray(values, np.float32))
    return found


def quantised(values, low, high, symmetric):
    grid = grid_of(np.array([low]), np.array([high]), symmetric)
    return np.clip(np.rint(values / grid.step), grid.least, grid.most) * grid.step


def real_error(values, low, high, symmetric):
    values = values.astype(np.float64)
    return float(((values - quantised(values, low, high, symmetric)) ** 2).sum())


def same(a, b):
    assert (a.low == b.low).all()
    assert (a.high == b.high).all()
    assert (a.exponents == b.exponents).all()
    assert (a.counts == b.counts).all()


@given(VALUES, st.integers(0, 60), st.sampled_from([4, 64]), st.randoms())
@settings(deadline=None)
def test_parts_in_any_order_and_merged_ones_equal_one_pass(values, cut, bins, random):
    whole = histogram_of(values, bins)
    assert whole.totals[0] == values.size
    parts = [part for part in (values[:cut], values[cut:]) if part.size]
    shuffled = list(values)
    random.shuffle(shuffled)
    one_by_one = Histogram(bins=bins)
    for value in shuffled:
        one_by_one.add(np.array([value], np.float32))
    same(one_by_one, whole)
    same(merged_histogram([histogram_of(part, bins) for part in parts]), whole)
    same(whole.coarser(4), histogram_of(values, 4))


@given(VALUES)
def test_values_lie_in_their_bins(values):
    found = histogram_of(values, 64)
    edges = found.edges()[0]
    if found.magnitudes[0] < 2.0**-90:  # smaller ones count as zero
        return
    first, *_, last = np.flatnonzero(found.counts[0])[[0, 0, -1]]
    assert edges[first] <= values.min() <= edges[first + 1]
    assert edges[last] <= values.max() <= edges[last + 1]
    assert edges[-1] / 2 <= found.magnitudes[0] < edges[-1]


def test_channels_are_counted_each_for_itself():
    rows = np.random.default_rng(0).normal(size=(500, 3)).astype(np.float32) * [1e-3, 1, 1e4]
    rows = rows.astype(np.float32)
    together = histogram_of(rows[:200], 64, 3)
    together.add(rows[200:])
    for channel in range(3):
        alone = histogram_of(rows[:, channel], 64)
        assert (together.counts[channel] == alone.counts[0]).all()
        assert together.exponents[channel] == alone.exponents[0]
    low, high = ranges_of(together, RangeConfig("minmax", symmetric=False))
    assert low == pytest.approx(rows.min(axis=0))
    assert high == pytest.approx(rows.max(axis=0))


def test_what_is_not_finite_is_not_counted():
    found = histogram_of([1.0, 2.0])
    for value in (np.nan, np.inf, -np.inf):
        with pytest.raises(NotFiniteError):
            found.add(np.array([1.0, value], np.float32))
    same(found, histogram_of([1.0, 2.0]))
    with pytest.raises(ValueError, match="power of two"):
        Histogram(bins=100)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.05])
def test_errors_and_clipping_equal_those_of_the_values(symmetric, share):
    values = np.random.default_rng(1).standard_t(4, 200_000).astype(np.float32)
    found = histogram_of(values)
    high = share * np.array([values.max()], np.float64)
    low = -high if symmetric else share * np.array([values.min()], np.float64)
    grid = grid_of(low, high, symmetric)
    exact = real_error(values, low[0], high[0], symmetric)
    assert squared_error(found, grid)[0] == pytest.approx(exact, rel=0.01)
    assert signal(found)[0] == pytest.approx(float((values.astype(np.float64) ** 2).sum()), rel=1e-3)
    outside = int(((values < low) | (values > high)).sum())
    assert clipped(found, low, high)[0] == pytest.approx(outside, abs=2, rel=1e-3)
    assert clipped(found, np.array([values.min()]), np.array([values.max()]))[0] == 0
    power = float((values.astype(np.float64) ** 2).sum())
    assert sqnr(found, grid)[0] == pytest.approx(10 * np.log10(power / exact), abs=0.05)


@given(arrays(np.float32, st.integers(2, 200), elements=st.floats(-1e4, 1e4, width=32)), st.booleans())
@settings(deadline=None, max_examples=20)
def test_every_method_gives_a_range_around_zero_within_the_values(values, symmetric):
    found = histogram_of(values, 512)
    for method in METHODS:
        low, high = ranges_of(found, RangeConfig(method, symmetric))
        most = max(abs(values.min()), abs(values.max()))
        assert -most <= low[0] <= 0 <= high[0] <= most
        if symmetric:
            assert low[0] == -high[0]
        else:
            assert low[0] >= min(values.min(), 0)
            assert high[0] <= max(values.max(), 0)


@given(arrays(np.float32, st.integers(20, 300), elements=st.floats(-100, 100, width=32)), st.booleans())
@settings(deadline=None, max_examples=30)
def test_mse_never_errs_more_than_minmax(values, symmetric):
    found = histogram_of(values)
    errors = {}
    for method in ("minmax", "mse"):
        grid = grid_of(*ranges_of(found, RangeConfig(method, symmetric)), symmetric)
        errors[method] = squared_error(found, grid)[0]
    assert errors["mse"] <= errors["minmax"]


@pytest.mark.parametrize("symmetric", [True, False])
def test_mse_finds_what_a_search_over_the_values_finds(symmetric):
    generator = np.random.default_rng(2)
    values = np.concatenate([generator.normal(size=50_000), [80.0]]).astype(np.float32)
    values = np.maximum(values, -2).astype(np.float32)
    low, high = ranges_of(histogram_of(values), RangeConfig("mse", symmetric))
    found = real_error(values, low[0], high[0], symmetric)
    shares = np.geomspace(1e-2, 1, 300)
    best = min(real_error(values, -(80 * s) if symmetric else -2.0, 80 * s, symmetric) for s in shares)
    assert found <= 1.02 * best
    assert found < real_error(values, -80.0 if symmetric else -2.0, 80.0, symmetric)


def test_percentiles_are_those_of_the_values():
    values = np.random.default_rng(3).normal(2, 1, 100_000).astype(np.float32)
    found = histogram_of(values)
    low, high = ranges_of(found, RangeConfig("percentile", True, 99.0))
    assert high[0] == pytest.approx(np.percentile(np.abs(values), 99), abs=0.01)
    assert low[0] == -high[0]
    low, high = ranges_of(found, RangeConfig("percentile", False, 99.0))
    assert (low[0], high[0]) == pytest.approx(np.percentile(values, [0.5, 99.5]), abs=0.01)
    everything = ranges_of(found, RangeConfig("percentile", True, 100.0))
    assert everything[1][0] == pytest.approx(np.abs(values).max(), abs=0.01)
    with pytest.raises(KilnError, match="percentile is 40"):
        RangeConfig("percentile", True, 40)


def test_entropy_clips_tails_and_keeps_what_is_even():
    """TensorRT's known cases: a normal distribution is cut at a few sigmas, a uniform one is kept."""
    generator = np.random.default_rng(4)
    normal = np.append(generator.normal(size=200_000), [40.0]).astype(np.float32)
    _, high = ranges_of(histogram_of(normal), RangeConfig("entropy"))
    assert 3 < high[0] < 6
    uniform = generator.uniform(-1, 1, 200_000).astype(np.float32)
    _, high = ranges_of(histogram_of(uniform), RangeConfig("entropy"))
    assert high[0] > 0.95
    sparse = np.append(np.abs(generator.normal(size=4000)), np.zeros(200_000)).astype(np.float32)
    for symmetric in (True, False):  # zeros by the thousand do not draw the end to zero
        assert ranges_of(histogram_of(sparse), RangeConfig("entropy", symmetric))[1][0] > 2
    positive = np.maximum(normal, 0)
    low, high = ranges_of(histogram_of(positive), RangeConfig("entropy", symmetric=False))
    assert low[0] == 0
    assert 3 < high[0] < 6


def test_entropy_of_channels_is_that_of_each():
    rows = np.random.default_rng(5).normal(size=(3000, 3)).astype(np.float32) * np.float32([1, 10, 0])
    found = histogram_of(rows, 256, 3)
    for symmetric in (True, False):
        together = ranges_of(found, RangeConfig("entropy", symmetric))
        for channel in range(3):
            alone = ranges_of(histogram_of(rows[:, channel], 256), RangeConfig("entropy", symmetric))
            assert (together[0][channel], together[1][channel]) == pytest.approx((alone[0][0], alone[1][0]))


def test_zeros_and_nothing_have_empty_ranges():
    for found in (histogram_of(np.zeros(10)), Histogram()):
        for method in METHODS:
            for symmetric in (True, False):
                low, high = ranges_of(found, RangeConfig(method, symmetric))
                assert (low[0], high[0]) == (0, 0)


def test_asymmetric_grids_hold_zero():
    grid = grid_of(np.array([-0.3, 0.0]), np.array([1.0, 5.0]), symmetric=False)
    assert (grid.least == np.rint(grid.least)).all()
    assert (grid.most - grid.least == 255).all()
    assert grid.least.tolist() == [-59, 0]


def test_magnitudes_join_both_sides():
    counts, edges = magnitudes_of(histogram_of([-3.0, 3.0, 0.0, 1.0], 4))
    assert counts.tolist() == [[1, 1, 0, 2]]
    assert edges.tolist() == [[0, 1, 2, 3, 4]]


def test_weights_by_channel():
    weights = np.random.default_rng(6).normal(size=(8, 5)).astype(np.float32)
    low, high = weight_ranges(weights, 1, RangeConfig())
    assert high == pytest.approx(np.abs(weights).max(axis=0))
    assert low == pytest.approx(-high)
    low, high = weight_ranges(weights, None, RangeConfig(symmetric=False))
    assert (low[0], high[0]) == pytest.approx((weights.min(), weights.max()))
