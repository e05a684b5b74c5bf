"""What is compared between two language models: logits, distributions, perplexity, greedy text.

A text is scored in windows: each starts with an empty context, and every token but the window's first
is predicted from those before it. The logits of both sides are taken chunk by chunk and reduced to a few
numbers a token at once, so memory does not grow with the text.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.compare.report import Check, Curves, check_from_limit
from pipeline.compare.subjects import DecoderSubject
from pipeline.compare.tolerance import Tolerances
from plugins.errors import KilnError

FloatArray = NDArray[np.float64]
_BINS = 128


@dataclass(frozen=True)
class TokenStatistics:
    """Per scored token, all arrays [tokens]: what two rows of logits say about each other.

    error_max, error_mean   max and mean over the vocabulary of |a - b|
    kl                      KL(softmax(a) || softmax(b)), nats
    agree                   both rows prefer the same token
    nll_a, nll_b            [scored] -log probability of the token that follows, nats; a window's last token has none
    """

    error_max: FloatArray
    error_mean: FloatArray
    kl: FloatArray
    agree: NDArray[np.bool_]
    nll_a: FloatArray
    nll_b: FloatArray


def statistics_from_logits(a: NDArray, b: NDArray, next_tokens: NDArray[np.integer]) -> TokenStatistics:
    """Compare logits [tokens, vocabulary] of both sides; `next_tokens` [n <= tokens] follow the first n of them.

    Equal infinities (masked-out vocabulary) count as equal; any NaN makes that token's figures NaN.
    """
    tokens = len(a)
    error_max, error_mean, kl, nll_a, nll_b = (np.empty(tokens) for _ in range(5))
    agree = np.empty(tokens, np.bool_)
    for row in range(tokens):  # one at a time: what is computed on the way stays in the cache
        a64, b64 = a[row].astype(np.float64), b[row].astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            error = np.abs(a64 - b64)
            error[a64 == b64] = 0.0
            (log_a, probability), (log_b, _) = _log_softmax(a64), _log_softmax(b64)
            terms = probability * (log_a - log_b)
            terms[probability == 0.0] = 0.0
            kl[row] = np.maximum(terms.sum(), 0.0)  # rounding can make it negative; NaN stays NaN
        error_max[row], error_mean[row] = error.max(), error.mean()
        agree[row] = not np.isnan(error_max[row]) and a64.argmax() == b64.argmax()
        if row < len(next_tokens):
            nll_a[row], nll_b[row] = -log_a[next_tokens[row]], -log_b[next_tokens[row]]
    scored = slice(len(next_tokens))
    return TokenStatistics(error_max, error_mean, kl, agree, nll_a[scored], nll_b[scored])


def _log_softmax(logits: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Of one row, and its exponentials."""
    shifted = logits - logits.max()
    powers = np.exp(shifted)
    total = powers.sum()
    shifted -= np.log(total)
    powers /= total
    return shifted, powers


@dataclass(frozen=True)
class TextResult:
    """A text's checks, the figures behind them and the curves to draw."""

    checks: tuple[Check, ...]
    figures: dict[str, float]
    curves: Curves


def compare_text(
    a: DecoderSubject, b: DecoderSubject, token_ids: Sequence[int], window: int, chunk: int, tolerances: Tolerances
) -> TextResult:
    """Score a text with both sides and hold the differences against the limits."""
    if len(token_ids) < 2:
        raise KilnError(f"the text has {len(token_ids)} tokens; scoring needs at least 2")
    starts = list(range(0, len(token_ids) - 1, window))  # a last window of one token has nothing to predict
    windows = [_joined(list(_window_statistics(a, b, token_ids[start : start + window], chunk))) for start in starts]
    whole = _joined(windows)
    perplexity_a, perplexity_b = _perplexity(whole.nll_a), _perplexity(whole.nll_b)
    worst = int(np.argmax(np.where(np.isnan(whole.error_max), np.inf, whole.error_max)))
    found = {
        "logit_error_max": float(whole.error_max.max()),
        "logit_error_mean": float(whole.error_mean.mean()),
        "kl_mean": float(whole.kl.mean()),
        "kl_max": float(whole.kl.max()),
        "top1_agreement": float(whole.agree.mean()),
        "perplexity_a": perplexity_a,
        "perplexity_b": perplexity_b,
    }
    difference = abs(perplexity_b / perplexity_a - 1.0)
    checks = (
        check_from_limit(
            "logit_error_max",
            "largest logit error",
            found["logit_error_max"],
            "at most",
            tolerances.atol,
            f"at token {worst} of the text",
        ),
        check_from_limit(
            "logit_error_mean", "mean logit error", found["logit_error_mean"], "at most", tolerances.logit_mean
        ),
        check_from_limit("kl_mean", "mean KL(A || B) in nats", found["kl_mean"], "at most", tolerances.kl),
        check_from_limit("top1_agreement", "top-1 agreement", found["top1_agreement"], "at least", tolerances.top1),
        check_from_limit(
            "perplexity_difference",
            "relative difference of perplexity",
            difference,
            "at most",
            tolerances.perplexity,
            f"A {perplexity_a:.4f}, B {perplexity_b:.4f}",
        ),
    )
    return TextResult(checks, found, _curves(whole, windows, starts))


def _window_statistics(
    a: DecoderSubject, b: DecoderSubject, tokens: Sequence[int], chunk: int
) -> Iterator[TokenStatistics]:
    done = 0
    for logits_a, logits_b in itertools.zip_longest(a.logits(tokens, chunk), b.logits(tokens, chunk)):
        if logits_a is None or logits_b is None or logits_a.shape != logits_b.shape:
            shapes = " against ".join("nothing" if x is None else str(x.shape) for x in (logits_a, logits_b))
            raise KilnError(f"{a.side.name} and {b.side.name} gave logits of different shapes: {shapes}")
        following = np.asarray(tokens[done + 1 : done + 1 + len(logits_a)], dtype=np.int64)
        yield statistics_from_logits(logits_a, logits_b, following)
        done += len(logits_a)
    if done != len(tokens):
        raise KilnError(f"{a.side.name} and {b.side.name} gave {done} rows of logits for {len(tokens)} tokens")


def _joined(parts: Sequence[TokenStatistics]) -> TokenStatistics:
    return TokenStatistics(
        *(
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("error_max", "error_mean", "kl", "agree", "nll_a", "nll_b")
        )
    )


def _perplexity(nll: FloatArray) -> float:
    """exp of the mean negative log-likelihood in nats."""
    return float(np.exp(nll.mean()))


def _curves(whole: TokenStatistics, windows: Sequence[TokenStatistics], starts: Sequence[int]) -> Curves:
    parts = np.array_split(np.arange(len(whole.kl)), min(_BINS, len(whole.kl)))
    finite = whole.kl[np.isfinite(whole.kl)]
    counts, edges = np.histogram(np.log10(np.maximum(finite, 1e-16)), bins=32)
    return Curves(
        positions=tuple(int(part[0]) for part in parts),
        error_max=tuple(float(whole.error_max[part].max()) for part in parts),
        kl_mean=tuple(float(whole.kl[part].mean()) for part in parts),
        kl_edges=tuple(map(float, edges)),
        kl_counts=tuple(map(int, counts)),
        window_starts=tuple(starts),
        window_perplexity_a=tuple(_perplexity(part.nll_a) for part in windows),
        window_perplexity_b=tuple(_perplexity(part.nll_b) for part in windows),
    )
