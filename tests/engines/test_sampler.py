from array import array
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.runtime.request import SamplingParams
from engines.runtime.sampler import (
    NonFiniteLogitsError,
    adjusted,
    choose,
    generator_from_seed,
    logprobs_of,
    sample_row,
)


@dataclass
class Past:
    token_ids: array
    prompt_length: int


NOTHING = Past(array("i", [0]), 1)


def sample_rows(logits, params, generators, histories):
    """One token, or the error instead of it, per row."""
    rows = []
    for row, param, generator, history in zip(logits, params, generators, histories, strict=True):
        try:
            rows.append(choose(row, int(np.argmax(row)), param, generator, history))
        except NonFiniteLogitsError as error:
            rows.append(error)
    return rows


def expected_distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The textbook form, with a full sort: temperature, top_k, top_p."""
    scaled = logits.astype(np.float64) / params.temperature
    probabilities = np.exp(scaled - scaled.max())
    order = np.argsort(-probabilities, kind="stable")
    if params.top_k is not None:
        probabilities[order[params.top_k :]] = 0
    probabilities /= probabilities.sum()
    before = np.cumsum(probabilities[order]) - probabilities[order]
    probabilities[order[before >= params.top_p]] = 0
    probabilities[probabilities < params.min_p * probabilities.max()] = 0
    return probabilities / probabilities.sum()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=1.0, top_k=4),
        SamplingParams(temperature=1.3, top_p=0.7),
        SamplingParams(temperature=2.0, top_k=10, top_p=0.6),
        SamplingParams(temperature=1.5, min_p=0.2),
    ],
)
def test_frequencies_follow_the_distribution(params):
    logits = np.random.default_rng(1).normal(size=20).astype(np.float32) * 2
    expected = expected_distribution(logits, params)
    generator = generator_from_seed(2)
    draws = 20_000
    counts = np.bincount([sample_row(logits, params, generator) for _ in range(draws)], minlength=20)
    assert not counts[expected == 0].any(), "a filtered token was drawn"
    error = np.abs(counts / draws - expected)
    assert (error < 5 * np.sqrt(expected * (1 - expected) / draws) + 1e-9).all()


@given(
    st.integers(1, 3000),
    st.floats(0.05, 3),
    st.one_of(st.none(), st.integers(1, 4000)),
    st.floats(0.01, 1),
    st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None)
def test_only_tokens_of_the_kept_set_are_drawn(size, temperature, top_k, top_p, seed):
    logits = np.random.default_rng(seed).normal(size=size).astype(np.float32) * 3
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    # A hair above top_p, because two ways of summing may differ in the last place.
    wider = SamplingParams(temperature=temperature, top_k=top_k, top_p=min(1.0, top_p + 1e-9))
    kept = expected_distribution(logits, wider) > 0
    generator = generator_from_seed(seed)
    assert all(kept[sample_row(logits, params, generator)] for _ in range(10))


def test_a_wide_nucleus_equals_the_textbook_one():
    logits = np.random.default_rng(3).normal(size=20_000).astype(np.float32) * 0.1
    params = SamplingParams(temperature=1.0, top_p=0.9)
    kept = expected_distribution(logits, params) > 0
    assert kept.sum() > 10_000
    generator = generator_from_seed(0)
    drawn = {sample_row(logits, params, generator) for _ in range(200)}
    assert all(kept[token] for token in drawn)


def test_greedy_takes_the_lowest_id_among_equals_and_draws_nothing():
    logits = np.array([[0, 5, 5, 1], [9, 0, 0, 9]], np.float32)
    generator = generator_from_seed(1)
    state = generator.bit_generator.state
    assert sample_rows(logits, [SamplingParams()] * 2, [generator] * 2, [NOTHING] * 2) == [1, 0]
    assert generator.bit_generator.state == state


def test_top_k_1_and_a_tiny_temperature_are_greedy():
    logits = np.random.default_rng(0).normal(size=1000).astype(np.float32) * 50
    for params in (SamplingParams(temperature=1.0, top_k=1), SamplingParams(temperature=1e-300)):
        assert sample_row(logits, params, generator_from_seed(0)) == int(logits.argmax())


def test_a_row_is_independent_of_the_other_rows():
    rows = np.random.default_rng(0).normal(size=(5, 300)).astype(np.float32)
    params = [SamplingParams(temperature=0.7 + i / 10, top_p=0.9, seed=i) for i in range(5)]
    together = sample_rows(rows, params, [generator_from_seed(p.seed) for p in params], [NOTHING] * 5)
    alone = [
        sample_rows(rows[i : i + 1], [p], [generator_from_seed(p.seed)], [NOTHING])[0] for i, p in enumerate(params)
    ]
    assert together == alone


def test_masked_tokens_are_never_drawn_and_rows_without_a_finite_maximum_are_errors():
    masked = np.full(50, -np.inf, np.float32)
    masked[[3, 7]] = 0
    generator = generator_from_seed(5)
    assert {sample_row(masked, SamplingParams(temperature=1.0), generator) for _ in range(50)} == {3, 7}
    rows = np.stack([masked, np.full(50, -np.inf, np.float32), masked])
    rows[2, 20] = np.nan
    first, *others = sample_rows(rows, [SamplingParams()] * 3, [generator] * 3, [NOTHING] * 3)
    assert first == 3
    assert all(isinstance(other, NonFiniteLogitsError) for other in others)


def test_no_rows_give_no_tokens():
    assert sample_rows(np.empty((0, 10), np.float32), [], [], []) == []


def test_bias_and_penalties_follow_their_formulas():
    logits = np.array([1.0, -2.0, 3.0, 0.5, -0.25], np.float32)
    past = Past(array("i", [1, 2, 2, 4, 2]), 2)  # prompt 1, 2; generated 2, 4, 2
    params = SamplingParams(
        logit_bias={0: 5.0, 3: -1.0, 99: 7.0}, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25
    )
    before = logits.copy()
    found = adjusted(logits, params, past)
    np.testing.assert_allclose(found, [6.0, -4.0, 1.5 - 1.0 - 0.25, -0.5, -0.5 - 0.5 - 0.25])
    np.testing.assert_array_equal(logits, before)
    assert sample_rows(logits[None], [params], [generator_from_seed(0)], [past]) == [0]


def test_penalties_change_only_rows_that_ask_for_them():
    logits = np.zeros((2, 6), np.float32)
    logits[:, 4] = 1
    params = [SamplingParams(), SamplingParams(presence_penalty=2.0)]
    past = Past(array("i", [0, 4]), 1)
    assert sample_rows(logits, params, [generator_from_seed(0)] * 2, [past] * 2) == [4, 0]


@given(st.integers(1, 200), st.integers(0, 20), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_logprobs_are_those_of_the_model(size, most_likely, seed):
    generator = np.random.default_rng(seed)
    logits = generator.integers(-3, 4, size).astype(np.float32)  # with equals
    token, most_likely = int(generator.integers(size)), min(most_likely, size)
    found = logprobs_of(logits, token, most_likely)
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum())
    assert found.token == token
    assert found.logprob == pytest.approx(expected[token])
    order = sorted(range(size), key=lambda one: (-logits[one], one))[:most_likely]
    assert [one for one, _ in found.top] == order
    assert [value for _, value in found.top] == pytest.approx(expected[order].tolist())
