"""The gate's arithmetic against plain definitions: errors, repetition, agreement, positions, the classifier."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pipeline.gate.downstream import fit, split
from pipeline.gate.metrics import (
    ErrorSums,
    agreement,
    bins_by_position,
    db_from_ratio,
    expected_agreement,
    ratio_from_db,
    repetition,
)
from plugins.errors import KilnError

FLOATS = st.floats(-100, 100, width=32)
ARRAYS = hnp.arrays(np.float32, st.integers(1, 40), elements=FLOATS)


@given(ARRAYS, st.integers(0, 5))
def test_errors_do_not_depend_on_how_the_stream_is_cut(values: np.ndarray, seed: int) -> None:
    other = values + np.random.default_rng(seed).normal(size=values.shape)
    whole, parts = ErrorSums(), ErrorSums()
    whole.add(values, other)
    for cut in np.array_split(np.arange(len(values)), 3):
        parts.add(values[cut], other[cut])
    noise = np.square(values.astype(np.float64) - other).sum()
    assert parts.noise == pytest.approx(noise)
    assert parts.snr_db == pytest.approx(whole.snr_db)
    assert parts.max_error == whole.max_error == np.abs(values.astype(np.float64) - other).max()
    assert parts.cosine == pytest.approx(whole.cosine, abs=1e-9)
    assert -1 - 1e-9 <= whole.cosine <= 1 + 1e-9


@given(ARRAYS)
def test_equal_arrays_have_no_noise(values: np.ndarray) -> None:
    sums = ErrorSums()
    sums.add(values, values.copy())
    assert sums.snr_db == math.inf
    assert sums.max_error == 0.0
    assert sums.cosine == pytest.approx(1.0)


@given(st.floats(1e-12, 1e12), st.floats(0.01, 100))
def test_snr_does_not_depend_on_the_unit_and_falls_by_20_db_a_decade(noise: float, unit: float) -> None:
    reference = np.array([3.0, -4.0])
    sums, scaled, tenfold = ErrorSums(), ErrorSums(), ErrorSums()
    error = np.array([noise, noise])
    sums.add(reference, reference + error)
    scaled.add(unit * reference, unit * (reference + error))
    tenfold.add(reference, reference + 10 * error)
    assert scaled.snr_db == pytest.approx(sums.snr_db, abs=0.1)
    assert tenfold.snr_db == pytest.approx(sums.snr_db - 20, abs=0.1)
    assert ratio_from_db(db_from_ratio(noise)) == pytest.approx(noise)


def test_nan_stays_visible() -> None:
    sums = ErrorSums()
    sums.add(np.ones(3), np.array([1.0, np.nan, 1.0]))
    sums.add(np.ones(3), np.ones(3))
    assert np.isnan([sums.max_error, sums.noise, sums.cosine, sums.snr_db]).all()
    assert ErrorSums().cosine == 1.0


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 5))
def test_repetition_is_the_share_of_ngrams_seen_before(tokens: list[int], n: int) -> None:
    seen, again, total = set(), 0, 0
    for start in range(len(tokens) - n + 1):
        gram = tuple(tokens[start : start + n])
        again += gram in seen
        total += 1
        seen.add(gram)
    assert repetition(tokens, n) == pytest.approx(again / total if total else 0.0)


def test_repetition_of_extremes() -> None:
    assert repetition(range(100), 4) == 0.0
    assert repetition([7] * 103, 4) == pytest.approx(0.99)
    assert repetition([1, 2], 4) == 0.0


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.lists(st.integers(0, 2), min_size=30, max_size=30))
def test_agreement_counts(a: list[int], b: list[int]) -> None:
    found = agreement(a, b[: len(a)], len(a))
    assert found.equal == sum(x == y for x, y in zip(a, b, strict=False))
    assert a[: found.agreed] == b[: found.agreed]
    if found.first_divergence is not None:
        assert a[found.agreed] != b[found.agreed]


def test_expected_agreement_falls_with_the_hazard() -> None:
    values = [expected_agreement(hazard, 64) for hazard in (0.0, 1e-9, 0.001, 0.01, 0.1, 1.0)]
    assert values[0] == 1.0
    assert values == sorted(values, reverse=True)
    generator = np.random.default_rng(0)
    lengths = np.minimum(generator.exponential(1 / 0.02, 100_000), 64)
    assert expected_agreement(0.02, 64) == pytest.approx(lengths.mean() / 64, rel=0.01)


def test_bins_put_every_token_at_its_position() -> None:
    generator = np.random.default_rng(0)
    positions = np.concatenate([np.arange(25), np.arange(13)])
    kl, agree = generator.random(38), generator.random(38) < 0.5
    scored = np.concatenate([np.arange(24), np.arange(12)])
    a, b = generator.random(36), generator.random(36)
    bins = bins_by_position(positions, kl, agree, scored, a, b, 10)
    assert [(part.start, part.end, part.tokens) for part in bins] == [(0, 10, 20), (10, 20, 13), (20, 25, 5)]
    here = (positions >= 10) & (positions < 20)
    assert bins[1].kl_mean == pytest.approx(kl[here].mean())
    assert bins[1].top1_agreement == agree[here].mean()
    assert bins[2].perplexity_candidate == pytest.approx(np.exp(b[scored >= 20].mean()))


def test_the_downstream_classifier_learns_what_can_be_learnt() -> None:
    generator = np.random.default_rng(1)
    labels = generator.integers(0, 3, 600)
    centres = generator.normal(size=(3, 16))
    vectors = centres[labels] + 0.4 * generator.normal(size=(600, 16))
    parts = split(labels, 0.5, seed=3)
    assert not set(parts.train) & set(parts.test)
    assert len(parts.train) + len(parts.test) == 600
    model = fit(vectors[parts.train], labels[parts.train])
    found = model.accuracy(vectors[parts.test], labels[parts.test])
    distances = ((vectors[parts.test][:, None] - centres) ** 2).sum(-1)
    best = (distances.argmin(1) == labels[parts.test]).mean()
    assert found >= best - 0.02
    assert fit(vectors[parts.train], labels[parts.train]).weights.tolist() == model.weights.tolist()
    shuffled = generator.permutation(labels)
    assert fit(vectors[:300], shuffled[:300]).accuracy(vectors[300:], shuffled[300:]) < 0.5


def test_a_split_keeps_the_classes_shares_and_refuses_what_cannot_be_split() -> None:
    labels = np.array([0] * 90 + [1] * 10)
    parts = split(labels, 0.5, seed=0)
    assert labels[parts.train].sum() == labels[parts.test].sum() == 5
    with pytest.raises(KilnError, match="of 1 classes"):
        split(np.zeros(5, np.int64), 0.5, 0)
    with pytest.raises(KilnError, match="the smallest of 1"):
        split(np.array([0, 0, 1]), 0.5, 0)
