"""How far a candidate graph is from the float one, by stratum: cheap enough to ask for every layer.

A decoder is judged at some positions of some texts, so that the reference's logits fit into memory; any other model
on given inputs. With `optimized` False ONNX Runtime runs the graphs as they stand. The verdict on a whole engine is the
gate's (`pipeline.gate`), on more data and in more ways.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engines.backends.onnxruntime import OnnxRuntimeDecoder, OnnxRuntimeModel
from engines.runtime.score import score
from engines.runtime.sequence import blocks_for
from passes.onnx_model import DecoderSpec
from pipeline.compare.language import statistics_from_logits
from plugins.errors import KilnError

Feeds = Mapping[str, NDArray]
Stratum = str
_CHUNK = 1024


@dataclass(frozen=True)
class Difference:
    """A candidate against the float graph on one stratum."""

    error: float
    """||candidate - reference|| / ||reference|| over all scored outputs."""
    kl: float | None
    """Mean KL(reference || candidate) in nats of the softmax over the last dimension; None where that means nothing."""


@dataclass(frozen=True)
class Text:
    """Tokens of one text [n] and the positions, ascending, at which it is judged."""

    stratum: Stratum
    tokens: tuple[int, ...]
    positions: tuple[int, ...]


class Judge(Protocol):
    def __call__(self, candidate: Path) -> dict[Stratum, Difference]:
        """Raises KilnError for a candidate that does not run, or gives NaN or infinity where the reference does not."""
        ...


class DecoderJudge:
    """Keeps the reference's logits, [positions, vocabulary] float32 of every text."""

    def __init__(
        self,
        reference: Path,
        decoder: DecoderSpec,
        plugins: Sequence[Path],
        texts: Sequence[Text],
        threads: int | None = None,
        optimized: bool = True,
    ) -> None:
        self._decoder, self._plugins, self._texts = decoder, tuple(plugins), tuple(texts)
        self._threads, self._optimized = threads, optimized
        self._reference = list(self._logits(reference))

    def __call__(self, candidate: Path) -> dict[Stratum, Difference]:
        totals = _Totals()
        for text, expected, found in zip(self._texts, self._reference, self._logits(candidate), strict=True):
            where = f"the logits of a text of {len(text.tokens)} tokens"
            totals.add(text.stratum, found, expected, distributions=True, where=where)
        return totals.differences()

    def _logits(self, path: Path) -> Iterator[NDArray[np.float32]]:
        longest = max(len(text.tokens) for text in self._texts)
        backend = OnnxRuntimeDecoder(
            path,
            self._decoder.kv,
            blocks_for(longest, self._decoder.kv.block_size),
            plugins=self._plugins,
            threads=self._threads,
            optimized=self._optimized,
        )
        try:
            for text in self._texts:
                yield np.concatenate(list(score(backend, text.tokens, _CHUNK, text.positions)))
        finally:
            backend.close()


class PlainJudge:
    """For models without a KV cache. `samples`: stratum and inputs; `distributions`: their outputs are logits."""

    def __init__(
        self,
        reference: Path,
        plugins: Sequence[Path],
        samples: Sequence[tuple[Stratum, Feeds]],
        distributions: bool = False,
        threads: int | None = None,
        optimized: bool = True,
    ) -> None:
        self._plugins, self._samples, self._distributions = tuple(plugins), tuple(samples), distributions
        self._threads, self._optimized = threads, optimized
        self._reference = list(self._outputs(reference))

    def __call__(self, candidate: Path) -> dict[Stratum, Difference]:
        totals = _Totals()
        for (stratum, _), expected, found in zip(self._samples, self._reference, self._outputs(candidate), strict=True):
            for name, values in expected.items():
                if values.dtype.kind == "f":
                    totals.add(stratum, found[name], values, self._distributions, f"the output '{name}'")
        return totals.differences()

    def _outputs(self, path: Path) -> Iterator[dict[str, NDArray]]:
        model = OnnxRuntimeModel(path, plugins=self._plugins, threads=self._threads, optimized=self._optimized)
        try:
            for _, feeds in self._samples:
                yield model.infer(feeds)
        finally:
            model.close()


class _Totals:
    """Sums by stratum."""

    def __init__(self) -> None:
        self._squares: dict[Stratum, NDArray[np.float64]] = {}  # of the difference, of the reference
        self._kl: dict[Stratum, list[float]] = {}

    def add(self, stratum: Stratum, found: NDArray, expected: NDArray, distributions: bool, where: str) -> None:
        if not np.isfinite(found[np.isfinite(expected)]).all():
            raise KilnError(f"{where} are not finite in the candidate, but are in the float graph")
        finite = np.isfinite(expected)
        difference = found[finite].astype(np.float64) - expected[finite]
        squares = np.array([difference @ difference, np.square(expected[finite], dtype=np.float64).sum()])
        self._squares[stratum] = self._squares.get(stratum, np.zeros(2)) + squares
        if distributions:
            rows = [values.reshape(-1, values.shape[-1]) for values in (expected, found)]
            kl = statistics_from_logits(rows[0], rows[1], np.zeros(0, np.int64)).kl
            self._kl.setdefault(stratum, []).extend(kl.tolist())

    def differences(self) -> dict[Stratum, Difference]:
        return {
            stratum: Difference(
                error=float(np.sqrt(squares[0] / max(squares[1], float(np.finfo(np.float32).tiny)))),
                kl=float(np.mean(self._kl[stratum])) if stratum in self._kl else None,
            )
            for stratum, squares in self._squares.items()
        }
