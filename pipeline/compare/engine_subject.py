"""An opened `Engine` as one side of a comparison; bundles and ONNX files become one.

Greedy text goes through the runtime that serves requests; a text is scored on the engine's backend.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from engines.runtime.engine import Engine
from engines.runtime.request import Request, SamplingParams
from engines.runtime.scheduler import SchedulerConfig
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


def scheduling(max_running: int) -> SchedulerConfig:
    """Texts are scored in the cache's blocks between requests, so no block may be kept for its content."""
    return SchedulerConfig(max_running=max_running, share_prefixes=False)


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
        return self.generate_together([token_ids], [tokens])[0]

    def generate_together(self, prompts: Sequence[Sequence[int]], tokens: Sequence[int]) -> list[list[int]]:
        """Greedy continuations, of so many tokens each, computed at the same time as far as the engine has places."""
        requests = [
            Request(tuple(prompt), SamplingParams(max_tokens=count, ignore_eos=True))
            for prompt, count in zip(prompts, tokens, strict=True)
        ]
        return [list(completion.token_ids) for completion in self._engine.generate(requests)]

    def close(self) -> None:
        self._engine.close()
