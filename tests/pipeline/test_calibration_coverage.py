"""Strata cover every length once; the gate refuses empty and thin ones, and what it says to add is enough."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.calibration.coverage import CoverageLimits, coverage_of, traffic_lengths
from pipeline.calibration.strata import UNSIZED, Strata, strata_from_text, strata_of_limit
from plugins.errors import KilnError

LIMIT = 8192
STRATA = strata_of_limit(LIMIT)
FULL = [10, 20, 30, 300] + [64] * 4 + [500] * 4 + [3000] * 4 + [8000] * 4


def test_default_strata():
    assert dict(zip(STRATA.names, STRATA.bounds, strict=True)) == {
        "short": 64,
        "medium": 512,
        "long": 4096,
        "near-limit": 8192,
    }
    assert strata_of_limit(512).bounds == (64, 128, 256, 512)
    assert strata_of_limit(256).bounds == (32, 64, 128, 256)
    assert strata_of_limit(1) == Strata(("near-limit",), (1,))


@given(st.integers(1, 10_000), st.data())
def test_every_length_lies_in_one_stratum(limit, data):
    strata = strata_of_limit(limit)
    length = data.draw(st.integers(1, limit))
    inside = [stratum.name for stratum in strata if stratum.shortest <= length <= stratum.longest]
    assert inside == [strata.of(length)]
    with pytest.raises(KilnError, match="more than"):
        strata.of(limit + 1)


def test_strata_from_text():
    assert strata_from_text("64,512,4096", LIMIT) == STRATA
    assert strata_from_text("chat=512,documents=8192", LIMIT) == Strata(("chat", "documents"), (512, 8192))
    assert strata_from_text("100", 200) == Strata(("up to 100", "up to 200"), (100, 200))
    for text, words in (
        ("a,b", "expected bounds"),
        ("10,10", "rise"),
        ("9000", "the model takes 8192"),
        ("", "bounds"),
    ):
        with pytest.raises(KilnError, match=words):
            strata_from_text(text, LIMIT)


def test_a_full_set_is_covered():
    coverage = coverage_of(FULL, STRATA)
    assert coverage.faults == ()
    assert coverage.sentence == ""
    coverage.require()
    assert "near-limit  4097 to 8192 tokens  set" in coverage.histogram()


def test_short_lines_alone_are_refused_with_what_to_add():
    coverage = coverage_of([12] * 40, STRATA)
    assert [(row.stratum.name, row.fault) for row in coverage.rows] == [
        ("short", ""),
        ("medium", "empty"),
        ("long", "empty"),
        ("near-limit", "empty"),
    ]
    with pytest.raises(KilnError, match="add 4 samples of 4097 to 8192 tokens") as refusal:
        coverage.require()
    assert "40 samples, 480 tokens" in str(refusal.value)
    assert "--override-coverage" in str(refusal.value)
    assert str(refusal.value).count("<- empty") == 3


def test_thin_by_samples_tokens_and_the_traffics_share():
    few = coverage_of([n for n in FULL if n != 3000] + [3000], STRATA)
    assert [(row.stratum.name, row.fault, row.missing_samples) for row in few.faults] == [("long", "thin", 3)]
    tiny = coverage_of([2] * 10 + FULL[4:], STRATA, limits=CoverageLimits(min_tokens=1000))
    assert tiny.faults[0].advice == "add 12 samples of 1 to 64 tokens, 724 tokens or more in all"
    many_short = FULL + [10] * 100
    assert not coverage_of(many_short, STRATA).faults
    long_traffic = coverage_of(many_short, STRATA, traffic=[3000] * 80 + [10] * 20)
    assert [(row.stratum.name, row.fault) for row in long_traffic.faults] == [("long", "thin")]
    assert "traffic" in long_traffic.histogram()


def test_what_the_traffic_never_asks_is_not_needed():
    only_short = coverage_of([12] * 40, STRATA, traffic=[15, 30, 60])
    assert not only_short.faults
    rare = coverage_of([12] * 40, STRATA, traffic=[15] * 999 + [20_000])  # beyond the limit counts as near it
    assert [row.stratum.name for row in rare.faults] == ["near-limit"]


@given(
    st.lists(st.integers(1, LIMIT), max_size=60),
    st.none() | st.lists(st.integers(1, LIMIT), min_size=1, max_size=60),
    st.integers(1, 20),
    st.integers(0, 5000),
    st.floats(0, 0.5),
)
def test_the_advice_is_enough(lengths, traffic, samples, tokens, share):
    limits = CoverageLimits(samples, tokens, share)
    coverage = coverage_of(lengths, STRATA, traffic, limits=limits)
    added = list(lengths)
    for row in coverage.faults:
        each = max(row.stratum.shortest, min(row.stratum.longest, -(-row.missing_tokens // row.missing_samples)))
        added += [each] * row.missing_samples
    assert not coverage_of(added, STRATA, traffic, limits=limits).faults


def test_images_need_a_number_of_samples_only():
    assert not coverage_of([1] * 4, UNSIZED).faults
    with pytest.raises(KilnError, match="the set is thin: 2 samples; add 2"):
        coverage_of([1] * 2, UNSIZED).require()


def test_limits_are_checked():
    for wrong in ((0, 1, 0.1), (1, -1, 0.1), (1, 1, 0.6)):
        with pytest.raises(KilnError, match="coverage limits"):
            CoverageLimits(*wrong)


def test_lengths_of_a_trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"prompt_tokens": 100, "output_tokens": 20}\n'
        '{"prompt": [1, 2, 3], "output_tokens": 4}\n'
        '{"prompt": "four words of text", "output_tokens": 1}\n'
        '{"messages": [{"role": "user", "content": "two words"}], "output_tokens": 1}\n'
    )

    def chat(messages):
        return [0, *messages[0]["content"].split()]

    assert traffic_lengths(path, str.split, chat) == [120, 7, 5, 4]
    with pytest.raises(KilnError, match="without a tokenizer"):
        traffic_lengths(path, None, None)
    path.write_text('{"prompt_tokens": 0, "output_tokens": 20}\n')
    with pytest.raises(KilnError, match="line 1"):
        traffic_lengths(path, None, None)
