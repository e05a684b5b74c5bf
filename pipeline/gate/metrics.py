"""Plain arithmetic of the gate: errors summed over a stream, repetition, agreement of two texts, figures by position.

Knows nothing of models.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


class ErrorSums:
    """Errors of a tensor against a reference, summed part by part: memory does not grow with what is added.

    snr_db     10 log10(sum r^2 / sum (r - c)^2), dB; infinite where nothing differs
    cosine     sum r c / sqrt(sum r^2 sum c^2); 1 where both are zero
    max_error  largest |r - c|
    """

    def __init__(self) -> None:
        self.elements = 0
        self.signal = self.noise = self.other = self.product = self.max_error = self.peak = 0.0

    def add(self, reference: NDArray, candidate: NDArray) -> None:
        """Both of one shape, any float dtype. Equal infinities are no error; a NaN makes every figure NaN."""
        if not reference.size:
            return
        r, c = (np.asarray(x, np.result_type(reference, candidate, np.float32)).ravel() for x in (reference, candidate))
        with np.errstate(invalid="ignore", over="ignore"):
            difference = r - c
            noise = float(difference @ difference)
            if not math.isfinite(noise):  # perhaps masked-out words
                finite = ~(np.isinf(r) & (r == c))
                r, c, difference = r[finite], c[finite], difference[finite]
                noise = float(difference @ difference)
        self.elements += r.size
        self.noise += noise
        self.signal += float(r @ r)
        self.other += float(c @ c)
        self.product += float(r @ c)
        largest = np.maximum(difference.max(initial=0), -difference.min(initial=0))
        self.max_error = float(np.maximum(self.max_error, largest))  # keeps a NaN
        self.peak = float(np.maximum(self.peak, np.maximum(r.max(initial=0), -r.min(initial=0))))

    @property
    def noise_ratio(self) -> float:
        """Noise power over signal power."""
        if self.noise == 0.0:
            return 0.0
        return self.noise / self.signal if self.signal else math.inf

    @property
    def snr_db(self) -> float:
        return db_from_ratio(self.noise_ratio)

    @property
    def cosine(self) -> float:
        r, c = math.sqrt(self.signal), math.sqrt(self.other)
        if not r * c:
            return float(self.noise == 0.0)
        if self.noise > 0.01 * self.signal:
            return self.product / (r * c)
        # From |r - c|^2 = |r|^2 + |c|^2 - 2 r c: exact near 1, where sums in float32 would not tell cosines apart.
        return 1.0 + ((r - c) ** 2 - self.noise) / (2.0 * r * c)


def db_from_ratio(noise_ratio: float) -> float:
    """Signal-to-noise ratio in dB of noise power over signal power."""
    if noise_ratio == 0.0:
        return math.inf
    return -10.0 * math.log10(noise_ratio) if math.isfinite(noise_ratio) else -noise_ratio


def ratio_from_db(snr_db: float) -> float:
    """Noise power over signal power."""
    return 0.0 if snr_db == math.inf else 10.0 ** (-snr_db / 10.0)


def repetition(tokens: Sequence[int], n: int) -> float:
    """Share of a text's n-grams that occurred in it before; 0 for a text shorter than n."""
    grams = [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


@dataclass(frozen=True)
class Agreement:
    """Two texts of one length, token by token."""

    tokens: int
    equal: int
    """Tokens that are the same at their place."""
    first_divergence: int | None
    """Place of the first that differs; None where none does."""

    @property
    def agreed(self) -> int:
        """Tokens before the first that differs."""
        return self.tokens if self.first_divergence is None else self.first_divergence


def agreement(a: Sequence[int], b: Sequence[int], tokens: int) -> Agreement:
    """Compare the first `tokens` of both."""
    same = [x == y for x, y in zip(a[:tokens], b[:tokens], strict=True)]
    return Agreement(len(same), sum(same), same.index(False) if False in same else None)


def expected_agreement(hazard: float, tokens: int) -> float:
    """Share of `tokens` before the first difference, on average, where each token differs with probability `hazard`."""
    if hazard <= 0.0:
        return 1.0
    return (1.0 - math.exp(-hazard * tokens)) / (hazard * tokens)


@dataclass(frozen=True)
class Bin:
    """Figures of the tokens at positions `start` to `end` of their contexts, over all texts of a stratum."""

    start: int
    end: int
    tokens: int
    perplexity_reference: float
    perplexity_candidate: float
    kl_mean: float
    top1_agreement: float


def bins_by_position(
    positions: NDArray[np.integer],
    kl: FloatArray,
    agree: NDArray[np.bool_],
    nll_positions: NDArray[np.integer],
    nll_reference: FloatArray,
    nll_candidate: FloatArray,
    width: int,
) -> tuple[Bin, ...]:
    """Group tokens by `position // width`; the nll arrays, nats, have their own positions: a last token has none."""
    found = []
    for index in range(int(positions.max()) // width + 1):
        here, scored = positions // width == index, nll_positions // width == index
        if not scored.any():
            continue
        found.append(
            Bin(
                start=index * width,
                end=int(positions[here].max()) + 1,
                tokens=int(here.sum()),
                perplexity_reference=float(np.exp(nll_reference[scored].mean())),
                perplexity_candidate=float(np.exp(nll_candidate[scored].mean())),
                kl_mean=float(kl[here].mean()),
                top1_agreement=float(agree[here].mean()),
            )
        )
    return tuple(found)
