"""Serving graphs that sample by themselves, in ONNX Runtime on the CPU: steps are launched to a thread of their own.

What CUDA's stream does on a device, the thread does here: steps and moves run in the order in which they were asked
for, and a step reads the tokens that the one before it chose. Knows nothing of requests.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.backends.base import MOST_IN_FLIGHT, Int32Array, SamplingInputs, StepInputs, StepResult, launched_step
from engines.backends.onnxruntime import OnnxRuntimeDecoder
from plugins.sampling.schema import FEED, NO_TOKEN, PREVIOUS_TOKENS, TOKENS


class LaunchingDecoder(OnnxRuntimeDecoder):
    """As `OnnxRuntimeDecoder`, for graphs that `passes.bind_sampling` has changed. Implements `LaunchingBackend`."""

    _samples = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._thread = ThreadPoolExecutor(1, "kiln-launched")
        self._launched: deque[Future[StepResult]] = deque()
        self._previous = _no_tokens(1)  # the thread's

    def launch(self, inputs: StepInputs, sampling: SamplingInputs, feed: Int32Array, *, logits: bool) -> None:
        if self._session is None:
            raise RuntimeError("the backend is closed")
        assert len(self._launched) < MOST_IN_FLIGHT, "a step must be collected first"
        self._launched.append(self._thread.submit(self._sampled, inputs, sampling, feed, logits))

    def collect(self) -> StepResult:
        return self._launched.popleft().result()

    def step(self, inputs: StepInputs) -> NDArray[np.float32]:
        return launched_step(self, inputs)

    def move_blocks(self, moves: Sequence[tuple[int, int]]) -> None:
        self._thread.submit(super().move_blocks, moves).result()

    def close(self) -> None:
        self._thread.shutdown()
        super().close()

    def _sampled(self, inputs: StepInputs, sampling: SamplingInputs, feed: Int32Array, logits: bool) -> StepResult:
        """One step, on the thread."""
        for field in fields(sampling):
            self._binding.bind_cpu_input(field.name, getattr(sampling, field.name))
        self._binding.bind_cpu_input(FEED, feed)
        self._binding.bind_cpu_input(PREVIOUS_TOKENS, self._previous)
        tokens = _no_tokens(len(inputs.logits_indices))
        self._binding.bind_output(TOKENS, "cpu", 0, np.int32, tokens.shape, tokens.ctypes.data)
        try:
            found = self._run(inputs)
        finally:  # of a step that failed, the next one is fed some token
            self._previous = tokens if len(tokens) else _no_tokens(1)
        return StepResult(tokens, found if logits else None)


def samples(outputs: Iterable[str]) -> bool:
    """Whether a serving graph whose outputs have these names chooses tokens by itself."""
    return TOKENS in outputs


def _no_tokens(count: int) -> Int32Array:
    return np.full(count, NO_TOKEN, np.int32)
