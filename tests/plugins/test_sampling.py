"""The sampling operators through onnxruntime: to the bit as the reference, and distributed as the filters say."""

import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray
from scipy import stats

from engines.runtime.request import SamplingParams
from engines.runtime.sampler import generator_from_seed, sample_row
from plugins.sampling import reference
from plugins.sampling.reference import ONE, philox, weights_of
from plugins.sampling.schema import FEED_TOKENS, NO_TOKEN, SAMPLE

from .one_node import run
from .sampling_rows import ROWS, Rows, random_rows, same_row

LOGITS = np.log(np.array([0.05, 0.3, 0.1, 0.1, 0.2, 0.1, 0.15]))
FILTERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 3},
    {"top_k": 1},
    {"top_p": 0.499},
    {"top_p": 0.501},
    {"top_p": 0.45},
    {"top_p": 0.7},  # the three of 0.1 are equals
    {"top_p": 1e-6},
    {"min_p": 0.4},
    {"min_p": 1.0},
    {"top_k": 5, "top_p": 0.8},
    {"temperature": 2.0, "top_k": 6, "top_p": 0.9, "min_p": 0.2},
]


def sample(rows: Rows, threads: int = 2) -> NDArray[np.int32]:
    return run(SAMPLE, *rows.operands(), threads=threads)[0]


def test_philox_gives_the_known_answers() -> None:
    """Vectors of the Random123 distribution (Salmon et al., 2011)."""
    assert philox(0, 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox(2**64 - 1, 2**128 - 1) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    counter = 0x03707344_13198A2E_85A308D3_243F6A88
    assert philox(0x299F31D0_A4093822, counter) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_weights_are_powers_of_two_and_never_rise() -> None:
    octave = weights_of(np.arange(1 << 20, dtype=np.float32) / (1 << 20), np.float32(1.4426950408889634))
    assert octave[0] == ONE
    assert octave[-1] >= ONE // 2
    assert (np.diff(octave.astype(np.int64)) <= 0).all()
    distances = np.linspace(0, 45, 100_001).astype(np.float32)
    for temperature in (0.3, 1.0, 1.7):
        weights = weights_of(distances, np.float32(temperature)) / ONE
        expected = np.exp(-distances.astype(np.float64) / np.float32(temperature))
        assert np.abs(weights - expected).max() < 1e-7
        assert (np.diff(weights) <= 0).all()


@settings(max_examples=80, deadline=None)
@given(ROWS)
def test_tokens_are_the_references(rows: Rows) -> None:
    np.testing.assert_array_equal(sample(rows), reference.sample(*rows.operands()))


def test_a_row_depends_on_nothing_but_itself() -> None:
    rows = random_rows(5, 60, 700, 0.25)
    together = sample(rows)
    np.testing.assert_array_equal(sample(rows, threads=1), together)
    order = np.random.default_rng(1).permutation(60)
    np.testing.assert_array_equal(sample(rows.chosen(order)), together[order])
    np.testing.assert_array_equal([sample(rows.row(n))[0] for n in range(60)], together)


@pytest.mark.parametrize("filters", FILTERS)
def test_draws_follow_the_filtered_distribution(filters: dict[str, float]) -> None:
    draws = 6000
    found = np.bincount(sample(same_row(LOGITS, draws, **filters)), minlength=7)
    params = SamplingParams(**{"temperature": 1.0, **filters})
    generator = generator_from_seed(3)
    on_host = np.bincount([sample_row(LOGITS.astype(np.float32), params, generator) for _ in range(draws)], minlength=7)
    if filters.get("top_k", 0) != 5:  # of equals at the border, the host keeps any
        np.testing.assert_array_equal(found > 0, on_host > 0)
    weights = np.exp(LOGITS / filters.get("temperature", 1.0)) * (found > 0)
    expected = weights / weights.sum() * draws
    kept = expected > 0
    if kept.sum() > 1:
        assert stats.chisquare(found[kept], expected[kept]).pvalue > 1e-3


def test_long_rows_are_uniform_where_all_are_equal() -> None:
    found = np.bincount(sample(same_row(np.zeros(1000), 20_000)), minlength=1000)
    assert stats.chisquare(found).pvalue > 1e-3


def test_of_equals_the_first_ones_are_kept() -> None:
    row = np.array([1, 5, 2, 5, 5, 5, 1])
    assert set(sample(same_row(row, 400, top_k=2)).tolist()) == {1, 3}
    assert set(sample(same_row(row, 400, top_p=0.1)).tolist()) == {1, 3, 4, 5}
    assert sample(same_row(row, 1, temperature=0.0)).tolist() == [1]
    zeros = np.array([-0.0, 0.0, -0.0])
    assert sample(same_row(zeros, 1, temperature=0.0)).tolist() == [0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_finite_best_have_no_token(temperature: float) -> None:
    inf, nan = np.inf, np.nan
    rows = [[0, nan, 1], [nan, 0, 1], [0, 1, nan], [inf, 0, 0], [-inf] * 3, [inf, nan, 0], [-inf, nan, 0]]
    for row in rows:
        assert sample(same_row(np.array(row), 1, temperature)).tolist() == [NO_TOKEN], row
        assert reference.sample(*same_row(np.array(row), 1, temperature).operands()).tolist() == [NO_TOKEN]
    assert sample(same_row(np.array([-inf, 2, -inf]), 1, temperature)).tolist() == [1]


def test_no_rows_give_no_tokens() -> None:
    assert sample(same_row(np.zeros(5), 0)).shape == (0,)


def test_ids_are_fed_from_what_was_chosen_before() -> None:
    ids, previous = np.array([7, 8, 9, 10], np.int32), np.array([40, 50, -1], np.int32)
    feed = np.array([-1, 1, 2, 0], np.int32)
    assert run(FEED_TOKENS, ids, feed, previous)[0].tolist() == [7, 50, 0, 40]
    assert reference.feed_tokens(ids, feed, previous).tolist() == [7, 50, 0, 40]
    with pytest.raises(Exception, match="feed is out of range: found 3 at token 1, expected less than 3"):
        run(FEED_TOKENS, ids, np.array([-1, 3, 0, 0], np.int32), previous)
    with pytest.raises(Exception, match=r"feed has the wrong shape: found \[2\], expected \[4\]"):
        run(FEED_TOKENS, ids, feed[:2], previous)


def test_wrong_shapes_are_named() -> None:
    rows = same_row(np.zeros(5), 2)
    with pytest.raises(Exception, match=r"kiln::Sample: top_p has the wrong shape: found \[1\], expected \[2\]"):
        run(SAMPLE, *rows.operands()[:3], rows.top_p[:1], *rows.operands()[4:])
    with pytest.raises(Exception, match=r"logits has the wrong rank: found \[5\]"):
        run(SAMPLE, rows.logits[0], *rows.operands()[1:])
