"""The distribution of next tokens on texts: perplexity, KL divergence and first choices, by stratum and position."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from pipeline.compare.language import TokenStatistics, statistics_from_logits
from pipeline.compare.subjects import DecoderSubject
from pipeline.gate.metrics import Bin, ErrorSums, bins_by_position
from plugins.errors import KilnError

POSITIONS = 1000
"""Width of the bins that are judged by themselves."""
_LEAST = 200
"""Tokens without which a bin is too small to be judged."""
_CURVE = 40
"""Points of a curve along the positions."""


@dataclass(frozen=True)
class TextFigures:
    """Metrics by name of `pipeline.gate.limits.METRICS`, perplexities, and figures along the positions."""

    values: Mapping[str, float]
    events: Mapping[str, float]
    """First choices that agree, with one less than do: what limits may be derived from, for it is never all of them."""
    perplexity_reference: float
    perplexity_candidate: float
    thousands: tuple[Bin, ...]
    curve: tuple[Bin, ...]


def score_texts(
    a: DecoderSubject, b: DecoderSubject, texts: Sequence[Sequence[int]], chunk: int, b_chunk: int | None = None
) -> TextFigures:
    """Score texts, each from an empty context, with reference `a` and candidate `b`.

    Logits are taken `chunk` tokens at a time and reduced at once; the candidate computes `b_chunk` a step, where given.
    Raises KilnError for logits that are no numbers, naming the side and position.
    """
    sums = ErrorSums()
    parts = [_text_statistics(a, b, text, chunk, b_chunk or chunk, sums) for text in texts]
    whole = joined(parts)
    positions = np.concatenate([np.arange(len(part.kl)) for part in parts])
    scored = np.concatenate([np.arange(len(part.nll_a)) for part in parts])
    reference, candidate = (float(np.exp(nll.mean())) for nll in (whole.nll_a, whole.nll_b))

    def bins(width: int) -> tuple[Bin, ...]:
        return bins_by_position(positions, whole.kl, whole.agree, scored, whole.nll_a, whole.nll_b, width)

    thousands = bins(POSITIONS)
    values = {
        "output_max_error": sums.max_error,
        "output_cosine": sums.cosine,
        "output_snr_db": sums.snr_db,
        "perplexity": abs(candidate / reference - 1.0),
        "kl_mean": float(whole.kl.mean()),
        "kl_p99": float(np.quantile(whole.kl, 0.99)),
        "kl_max": float(whole.kl.max()),
        "top1_agreement": float(whole.agree.mean()),
    }
    judged = [part for part in thousands if part.tokens >= _LEAST]
    if len(judged) > 1:
        ratios = (part.perplexity_candidate / part.perplexity_reference for part in judged)
        values["perplexity_worst"] = max(abs(ratio - 1.0) for ratio in ratios)
        values["kl_worst"] = max(part.kl_mean for part in judged)
    longest = int(positions.max()) + 1
    agreed = (int(whole.agree.sum()) - 1) / len(whole.agree)
    return TextFigures(
        values, {"top1_agreement": agreed}, reference, candidate, thousands, bins(max(1, -(-longest // _CURVE)))
    )


def joined(parts: Sequence[TokenStatistics]) -> TokenStatistics:
    """One after the other."""
    names = [field.name for field in fields(TokenStatistics)]
    return TokenStatistics(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def _text_statistics(
    a: DecoderSubject, b: DecoderSubject, text: Sequence[int], chunk: int, b_chunk: int, sums: ErrorSums
) -> TokenStatistics:
    parts, done = [], 0
    rows_a, rows_b = _rows(a, text, chunk), _rows(b, text, b_chunk)
    for start in range(0, len(text), chunk):
        size = min(chunk, len(text) - start)
        logits_a, logits_b = (np.stack(list(itertools.islice(rows, size))) for rows in (rows_a, rows_b))
        for subject, logits in ((a, logits_a), (b, logits_b)):
            if np.isnan(logits).any():
                row = int(np.argmax(np.isnan(logits).any(axis=1)))
                raise KilnError(
                    f"{subject.side.name} gives NaN as logits after token {start + row} of a text of {len(text)}; "
                    "find the layer with `kiln bisect`, or calibrate again"
                )
        following = np.asarray(text[start + 1 : start + 1 + size], np.int64)
        parts.append(statistics_from_logits(logits_a, logits_b, following))
        sums.add(logits_a, logits_b)
        done += size
    return joined(parts)


def _rows(subject: DecoderSubject, text: Sequence[int], chunk: int) -> Iterator[NDArray[np.float32]]:
    for logits in subject.logits(text, chunk):
        yield from logits
