"""An opened `Engine` as one side of a comparison; bundles and ONNX files become one.

Greedy text goes through the runtime that serves requests; a text is scored on the engine's backend.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from engines.runtime.engine import Engine
from engines.runtime.request import SamplingParams
from engines.runtime.score import score
from passes.onnx_model import DecoderSpec
from pipeline.compare.inputs import InputSpec
from pipeline.compare.report import Side
from pipeline.compare.subjects import Encode
from pipeline.io_layout import Permutations, from_model, original_specs, to_model


class EnginePlain:
    """Owns the engine. Takes and gives images as the model did before `--io-layout` changed it."""

    def __init__(
        self, side: Side, engine: Engine, inputs: tuple[InputSpec, ...], permutations: Permutations | None = None
    ) -> None:
        self.side = side
        self._permutations = permutations or {}
        self.inputs = original_specs(inputs, self._permutations)
        self._engine = engine

    def infer(self, feeds: Mapping[str, NDArray]) -> dict[str, NDArray]:
        return from_model(self._engine.infer(to_model(feeds, self._permutations)), self._permutations)

    def close(self) -> None:
        self._engine.close()


class EngineDecoder:
    """Owns the engine."""

    def __init__(self, side: Side, engine: Engine, spec: DecoderSpec, encode: Encode | None) -> None:
        self.side = side
        self.vocab_size = spec.vocab_size
        self.max_context = engine.max_length
        self.encode = encode
        self._engine = engine

    def logits(self, token_ids: Sequence[int], chunk: int) -> Iterator[NDArray[np.float32]]:
        return score(self._engine.backend, token_ids, chunk)

    def generate_greedy(self, token_ids: Sequence[int], tokens: int) -> list[int]:
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        return list(self._engine.generate([token_ids], sampling)[0].token_ids)

    def close(self) -> None:
        self._engine.close()
