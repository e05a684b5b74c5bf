"""Intervals of ratios of times: what they hold, how often they are wrong, and when they decide."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.paired import LEAST_PAIRS, Interval, interval_of, ratios_of
from plugins.errors import KilnError


@given(st.lists(st.floats(0.1, 10), min_size=8, max_size=60), st.floats(0.6, 0.99))
def test_the_interval_holds_the_median_and_shifts_with_the_ratios(ratios, confidence):
    found = interval_of(ratios, confidence)
    assert found.lowest <= found.median <= found.highest
    assert {found.lowest, found.highest} <= set(ratios)
    shifted = interval_of([2 * ratio for ratio in ratios], confidence)
    assert shifted.lowest == 2 * found.lowest


def test_the_interval_covers_as_often_as_it_says():
    """Of 2000 draws with median 1, at most the allowed share lies outside; a heavy-tailed distribution."""
    random = np.random.default_rng(5)
    missed = 0
    for _ in range(2000):
        found = interval_of(np.exp(random.standard_t(1.5, 11)).tolist(), 0.95)
        missed += not found.lowest <= 1 <= found.highest
    assert missed / 2000 <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 2000)


@given(st.integers(0, 2**32 - 1))
def test_noise_that_meets_both_members_of_a_pair_hides_nothing(seed):
    """Times of a machine that is up to ten times as slow for a while, and a form that takes 2 % less."""
    random = np.random.default_rng(seed)
    first = np.exp(random.uniform(0, np.log(10), 40))
    found = interval_of(ratios_of(first.tolist(), (first * 0.98 * np.exp(random.normal(0, 1e-3, 40))).tolist()))
    assert found.decided
    assert found.highest < 1
    assert found.noise < 0.01


def test_few_pairs_decide_nothing():
    with pytest.raises(KilnError, match=r"5 pairs are too few for a confidence of 0\.95"):
        interval_of([0.5] * (LEAST_PAIRS - 1))
    assert interval_of([0.5] * LEAST_PAIRS).decided
    assert not Interval(0.9, 0.8, 1.0, 9).decided
