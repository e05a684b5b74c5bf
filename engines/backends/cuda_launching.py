"""Serving graphs that choose tokens on the device: a step is queued before the one ahead of it has ended.

Tokens stay on the device, where the next step reads them, and reach the host by a copy behind each step. Knows nothing
of requests.
"""

from collections import deque
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.backends.base import MOST_IN_FLIGHT, Int32Array, SamplingInputs, StepInputs, StepResult, launched_step
from engines.backends.cuda_decoder import CudaDecoder
from engines.backends.cuda_memory import PinnedMemory
from engines.backends.cuda_session import MOST_ROWS
from engines.backends.cuda_staging import TURNS
from plugins.sampling.schema import FEED

assert TURNS >= MOST_IN_FLIGHT, "every step in flight has pinned memory of its own"


@dataclass(frozen=True)
class _InFlight:
    turn: int
    rows: int
    logits: bool


class LaunchingCudaDecoder(CudaDecoder):
    """As `CudaDecoder`, for graphs that `passes.bind_sampling` has changed. Implements `LaunchingBackend`."""

    _samples = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._turn = 0
        self._in_flight: deque[_InFlight] = deque()
        try:
            self._chosen = [
                self._kept(PinnedMemory(self._runtime, MOST_ROWS * 4, "chosen tokens on the host"))
                for _ in range(TURNS)
            ]
        except BaseException:
            self.close()
            raise

    def launch(self, inputs: StepInputs, sampling: SamplingInputs, feed: Int32Array, *, logits: bool) -> None:
        """Queue a step and return. Raises KilnError; the step is then not in flight."""
        self._enter()
        assert len(self._in_flight) < MOST_IN_FLIGHT, "a step must be collected first"
        assert self._tokens is not None
        extras: dict[str, NDArray] = {FEED: feed}
        extras |= {field.name: getattr(sampling, field.name) for field in fields(sampling)}
        turn, rows = self._turn, len(inputs.logits_indices)
        address = self._queue(inputs, extras, turn)
        if rows:
            self._runtime.copy(self._chosen[turn].address, self._tokens.address, rows * 4)
        if logits:
            self._fetch_logits(address, rows, turn)
        self._runtime.record(self._events[turn])
        self._in_flight.append(_InFlight(turn, rows, logits))
        self._turn = (turn + 1) % TURNS

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight. Raises CudaError for one that failed on the device."""
        self._enter()
        step = self._in_flight.popleft()
        self._runtime.wait(self._events[step.turn])
        tokens = np.array(self._chosen[step.turn].bytes[: step.rows * 4].view(np.int32))
        return StepResult(tokens, self._fetched_logits(step.rows, step.turn) if step.logits else None)

    def step(self, inputs: StepInputs) -> NDArray[np.float32]:
        """Run one step and update the caches in place. Returns logits [rows, vocabulary], owned by the caller."""
        return launched_step(self, inputs)
