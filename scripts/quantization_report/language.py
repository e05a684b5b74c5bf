"""How far a language model is from its float form: perplexity by length of window, KL divergence, greedy tokens.

The float model runs once: the likelihood of every token is kept, and whole logits of a part of the positions.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engines.runtime.tokenizer import Tokenizer
from pipeline.compare.bundle_subject import bundle_subject_from_path
from pipeline.compare.engine_subject import EngineDecoder
from pipeline.compare.language import statistics_from_logits
from pipeline.gate.metrics import agreement
from quantization_report.corpora import Corpora

GREEDY = 64
_CHUNK = 256
"""Tokens a step while texts are scored: 256 rows of 49152 words are 50 MB."""
_KEPT = 320
"""Positions of each length whose whole logits are kept."""

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Material:
    """`windows`: texts by their length in tokens, each from an empty context; `prompts` are continued greedily."""

    windows: Mapping[int, tuple[Tokens, ...]]
    prompts: tuple[Tokens, ...]
    greedy: int = GREEDY

    @property
    def sentence(self) -> str:
        windows = ", ".join(f"{len(texts)} of {length}" for length, texts in self.windows.items())
        lengths = sorted({len(prompt) for prompt in self.prompts})
        return f"windows: {windows} tokens; {len(self.prompts)} prompts of {lengths[0]} to {lengths[-1]} tokens"


def material_from_corpora(corpora: Corpora, tokenizer: Tokenizer, context: int, quick: bool) -> Material:
    """Windows of 64, 512, 2048 and 8000 tokens, or what a shorter context holds of them, the longest of one speech."""
    counts = {64: 48, 512: 12, 2048: 3, 8000: 1}
    if context < 8000:
        counts = {max(2, context // 8): 8, context // 2: 2, context: 1}
    if quick:
        counts = {length: min(2, count) for length, count in counts.items()}
    prose, novel, speech = (tokenizer.encode(text) for text in (corpora.brown, corpora.novel, corpora.speech))
    windows = {}
    for length, count in counts.items():
        sources = (speech,) if count == 1 else (prose, novel)
        windows[length] = tuple(_cut(sources[i % len(sources)], i // len(sources), length) for i in range(count))
    greedy = min(GREEDY, context // 4)
    lengths = [min(length, context - greedy) for length in (8, 16, 32, 64, 128, 256, 512, 1024)]
    prompts = tuple(_cut(novel, 100 + 2 * i, length) for i, length in enumerate(lengths[:2] if quick else lengths))
    return Material(windows, prompts, greedy)


def _cut(source: Sequence[int], number: int, length: int) -> Tokens:
    """The `number`th piece of a text, which starts again where it is too short."""
    start = number * length
    return tuple(source[(start + i) % len(source)] for i in range(length))


@dataclass(frozen=True)
class Figures:
    """`perplexity` and `change`, relative to the float model's, by length; `kl` in nats; `greedy`: tokens equal."""

    perplexity: Mapping[int, float]
    change: Mapping[int, float]
    kl: Mapping[int, float]
    greedy: tuple[int, ...]

    @property
    def kl_mean(self) -> float:
        return float(np.mean(list(self.kl.values())))


class LanguageMeasure:
    """Holds the float model's results: at most _KEPT rows of logits for each length."""

    def __init__(self, reference: Path, material: Material, threads: int) -> None:
        self.material, self._threads = material, threads
        with closing(self._opened(reference)) as subject:
            scored = {length: self._scored(subject, length) for length in material.windows}
            self._nll = {length: nll for length, (nll, _) in scored.items()}
            self._logits = {length: logits for length, (_, logits) in scored.items()}
            self._greedy = self._continued(subject)

    @property
    def perplexity(self) -> dict[int, float]:
        return {length: float(np.exp(nll.mean())) for length, nll in self._nll.items()}

    def __call__(self, candidate: Path) -> Figures:
        perplexity, change, kl = {}, {}, {}
        with closing(self._opened(candidate)) as subject:
            for length, reference in self._logits.items():
                nll, logits = self._scored(subject, length)
                perplexity[length] = float(np.exp(nll.mean()))
                change[length] = float(np.exp(nll.mean() - self._nll[length].mean())) - 1
                kl[length] = float(statistics_from_logits(reference, logits, np.zeros(0, np.int64)).kl.mean())
            texts = self._continued(subject)
        pairs = zip(self._greedy, texts, strict=True)
        return Figures(perplexity, change, kl, tuple(agreement(a, b, len(a)).agreed for a, b in pairs))

    def _opened(self, bundle: Path) -> EngineDecoder:
        subject = bundle_subject_from_path(bundle, self._threads, len(self.material.prompts))
        assert isinstance(subject, EngineDecoder)
        return subject

    def _continued(self, subject: EngineDecoder) -> list[list[int]]:
        prompts = self.material.prompts
        return subject.generate_together(prompts, [self.material.greedy] * len(prompts))

    def _scored(self, subject: EngineDecoder, length: int) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
        """Negative log-likelihood of every token but each window's first, nats; and the logits that are kept."""
        windows = self.material.windows[length]
        step = max(1, length * len(windows) // _KEPT)
        nll, kept = [], []
        for window in windows:
            for start, rows in _rows(subject, window):
                following = window[start + 1 : start + 1 + len(rows)]
                nll.append(_negative_log_likelihood(rows[: len(following)], following))
                kept.append(rows[(-start) % step :: step].copy())
        return np.concatenate(nll), np.concatenate(kept)


def _rows(subject: EngineDecoder, window: Tokens) -> Iterator[tuple[int, NDArray[np.float32]]]:
    start = 0
    for rows in subject.logits(window, _CHUNK):
        yield start, rows
        start += len(rows)


def _negative_log_likelihood(logits: NDArray[np.float32], following: Sequence[int]) -> NDArray[np.float64]:
    """Of each row [vocabulary], one after the other: what is computed on the way stays in the cache."""
    found = np.empty(len(following))
    for row, token in enumerate(following):
        shifted = logits[row] - logits[row].max()
        found[row] = np.log(np.exp(shifted).sum(dtype=np.float64)) - shifted[token]
    return found
