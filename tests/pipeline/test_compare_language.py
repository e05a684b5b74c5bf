"""Per-token statistics against plain formulas, and texts of hand-made language models."""

import math
import tracemalloc
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.compare.greedy import Prompt, compare_greedy
from pipeline.compare.language import compare_text, statistics_from_logits
from pipeline.compare.report import Side
from pipeline.compare.subjects import DecoderSubject
from pipeline.compare.tolerance import tolerances_from_precisions
from plugins.errors import KilnError

TOLERANCES = tolerances_from_precisions("decoder", ("fp32", "fp32"))


class TableModel:
    """A language model whose logits depend on the last token alone; remembers the largest chunk it gave."""

    def __init__(self, table: NDArray) -> None:
        self.side = Side("torch", "table", "", "", "fp32", {})
        self.table = table.astype(np.float32)
        self.vocab_size = len(table)
        self.max_context = 64
        self.encode = None
        self.largest = 0

    def logits(self, token_ids: Sequence[int], chunk: int) -> Iterator[NDArray[np.float32]]:
        for start in range(0, len(token_ids), chunk):
            rows = self.table[np.asarray(token_ids[start : start + chunk])]
            self.largest = max(self.largest, len(rows))
            yield rows

    def generate_greedy(self, token_ids: Sequence[int], tokens: int) -> list[int]:
        generated: list[int] = []
        last = token_ids[-1]
        for _ in range(tokens):
            last = int(self.table[last].argmax())
            generated.append(last)
        return generated

    def close(self) -> None:
        pass


def softmax(row: NDArray) -> NDArray:
    values = np.exp(row.astype(np.float64) - row.max())
    return values / values.sum()


def test_statistics_equal_their_definitions() -> None:
    generator = np.random.default_rng(3)
    a, b = (generator.normal(0, 4, (6, 11)).astype(np.float32) for _ in range(2))
    following = np.array([1, 0, 10, 4, 5])
    found = statistics_from_logits(a, b, following)
    for i in range(6):
        p, q = softmax(a[i]), softmax(b[i])
        assert found.kl[i] == pytest.approx(np.sum(p * np.log(p / q)), rel=1e-9)
        assert found.error_max[i] == pytest.approx(np.abs(a[i] - b[i]).max(), rel=1e-6)
        assert found.error_mean[i] == pytest.approx(np.abs(a[i] - b[i]).mean(), rel=1e-6)
        assert found.agree[i] == (a[i].argmax() == b[i].argmax())
        if i < 5:
            assert found.nll_a[i] == pytest.approx(-np.log(p[following[i]]), rel=1e-9)
            assert found.nll_b[i] == pytest.approx(-np.log(q[following[i]]), rel=1e-9)
    assert len(found.nll_a) == 5


def test_equal_infinities_are_no_error_and_nan_is_never_agreement() -> None:
    a = np.array([[0.0, -np.inf, 1.0], [0.0, np.nan, 1.0]], np.float32)
    found = statistics_from_logits(a, a.copy(), np.array([2]))
    assert found.error_max[0] == 0.0
    assert found.kl[0] == 0.0
    assert found.agree[0]
    assert np.isnan(found.error_max[1])
    assert np.isnan(found.kl[1])
    assert not found.agree[1]


def test_a_uniform_model_has_its_vocabulary_as_perplexity_in_any_window_and_chunk() -> None:
    model = TableModel(np.zeros((7, 7)))
    tokens = np.random.default_rng(0).integers(0, 7, 41).tolist()
    for window, chunk in ((64, 64), (8, 3), (5, 64), (40, 7), (2, 1)):
        result = compare_text(model, model, tokens, window, chunk, TOLERANCES)
        assert result.figures["perplexity_a"] == pytest.approx(7.0, rel=1e-9)
        assert all(check.passed for check in result.checks)


def test_scoring_takes_at_most_one_chunk_at_a_time_and_windows_predict_from_their_own_tokens() -> None:
    generator = np.random.default_rng(1)
    a, b = TableModel(generator.normal(0, 1, (9, 9))), TableModel(generator.normal(0, 1, (9, 9)))
    tokens = generator.integers(0, 9, 30).tolist()
    result = compare_text(a, b, tokens, 8, 3, TOLERANCES)
    assert a.largest == b.largest == 3
    pairs = [(tokens[i], tokens[i + 1]) for i in range(29) if (i + 1) % 8]
    nll = [-np.log(softmax(a.table[token])[following]) for token, following in pairs]
    assert result.figures["perplexity_a"] == pytest.approx(math.exp(np.mean(nll)), rel=1e-6)
    assert result.curves.window_starts == (0, 8, 16, 24)
    assert not all(check.passed for check in result.checks)


class NoisyModel(TableModel):
    """Fresh random logits for every token: nothing that grows with the text but what the comparison keeps."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(np.zeros((1, 1)))
        self.vocab_size = vocabulary

    def logits(self, token_ids: Sequence[int], chunk: int) -> Iterator[NDArray[np.float32]]:
        generator = np.random.default_rng(0)
        for start in range(0, len(token_ids), chunk):
            yield generator.random((min(chunk, len(token_ids) - start), self.vocab_size), dtype=np.float32)


def test_memory_does_not_grow_with_the_text() -> None:
    def peak(tokens: int) -> int:
        model = NoisyModel(4000)
        tracemalloc.start()
        try:
            compare_text(model, model, [0] * tokens, 512, 16, TOLERANCES)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    short, long = peak(100), peak(3000)  # all logits of one side of the long text would take 48 MB
    assert long < short + 1_000_000


def test_nan_logits_fail_every_check_they_reach() -> None:
    good = TableModel(np.eye(5))
    bad = TableModel(np.eye(5))
    bad.table[3, 2] = np.nan
    failed = {c.name for c in compare_text(good, bad, [0, 3, 1, 3, 4], 5, 2, TOLERANCES).checks if not c.passed}
    assert failed == {"logit_error_max", "logit_error_mean", "kl_mean", "top1_agreement", "perplexity_difference"}


def test_logits_of_different_shapes_are_an_error_that_names_them() -> None:
    with pytest.raises(KilnError, match=r"different shapes: \(2, 5\) against \(2, 6\)"):
        compare_text(TableModel(np.eye(5)), TableModel(np.eye(6)), [0, 1], 5, 2, TOLERANCES)


def test_greedy_agreement_counts_up_to_the_first_difference_and_says_how_close_it_was() -> None:
    a = TableModel(np.roll(np.eye(6), 1, axis=1))  # 0 1 2 3 4 5 0 ...
    b = TableModel(np.roll(np.eye(6), 1, axis=1))
    b.table[3, 0] = 1.5  # after 3 comes 0 instead of 4
    row = compare_greedy(a, b, Prompt("p", (5, 0)), 8, 4)
    assert (row.agreed, row.tokens, row.prompt_tokens) == (3, 8, 2)
    assert row.note == "A chose 4, B chose 0; A's logits differ by 1 there"
    assert compare_greedy(a, a, Prompt("p", (5, 0)), 8, 4).agreed == 8


def test_the_table_model_is_a_decoder_subject() -> None:
    assert isinstance(TableModel(np.eye(3)), DecoderSubject)
