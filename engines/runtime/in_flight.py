"""Steps on a backend that samples by itself: launched one ahead of the tokens of the one before, or one at a time.

Between the scheduler, whose account of launched steps it keeps, and the backend. Knows no answers: who calls says how
each row is sampled, and what a token means.
"""

import time
from collections import deque
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import dataclass

from engines.backends.base import LaunchingBackend, StepInputs, StepResult
from engines.runtime.batch import Batch
from engines.runtime.packing import RowSampling, feed_from_batch, sampling_inputs
from engines.runtime.scheduler import Scheduler
from engines.runtime.sequence import Sequence


@dataclass(frozen=True)
class Landed:
    """A launched step that has ended."""

    batch: Batch
    tokens: tuple[tuple[Sequence, int], ...]
    """What it chose, -1 where the logits were not finite; nothing if it failed."""
    seconds: float
    """Since its launch, or since the step before it ended."""
    error: Exception | None = None


@dataclass(frozen=True)
class _Launched:
    batch: Batch
    rows: tuple[Sequence, ...]
    begun: float


class StepsInFlight:
    """Launches and lands steps, oldest first. One thread calls."""

    def __init__(self, backend: LaunchingBackend, scheduler: Scheduler) -> None:
        self._backend = backend
        self._scheduler = scheduler
        self._steps: deque[_Launched] = deque()
        self._row_of: dict[int, int] = {}  # of a sequence in the step launched last
        self._landed = 0.0

    def __len__(self) -> int:
        return len(self._steps)

    def launch(self, batch: Batch, inputs: StepInputs, sampling: SequenceOf[RowSampling]) -> None:
        """Launch a step that samples one token for each chunk with a row, and count it as computed.

        Raises what the backend raises; the step is not counted then.
        """
        rows = tuple(chunk.sequence for chunk in batch if chunk.rows)
        feed = feed_from_batch(batch, inputs, self._row_of)
        begun = time.monotonic()
        self._backend.launch(inputs, sampling_inputs(sampling, inputs), feed, logits=False)
        self._scheduler.launch(batch)
        self._steps.append(_Launched(batch, rows, begun))
        self._row_of = {sequence.id: row for row, sequence in enumerate(rows)}

    def land(self) -> Landed:
        """Wait for the oldest step and note its tokens; or that it failed: the caller ends its sequences."""
        step = self._steps.popleft()
        try:
            tokens = self._backend.collect().tokens.tolist()
        except Exception as error:
            self._scheduler.abandon()
            return Landed(step.batch, (), 0.0, error)
        now = time.monotonic()
        for sequence, token in zip(step.rows, tokens, strict=True):
            sequence.learn(token)
        seconds, self._landed = now - max(step.begun, self._landed), now
        self._scheduler.settle(seconds)
        return Landed(step.batch, tuple(zip(step.rows, tokens, strict=True)), seconds)

    def compute(self, inputs: StepInputs, sampling: SequenceOf[RowSampling]) -> StepResult:
        """Run one step with nothing in flight, and wait for its tokens and logits."""
        assert not self._steps
        feed = feed_from_batch((), inputs, {})
        self._backend.launch(inputs, sampling_inputs(sampling, inputs), feed, logits=True)
        return self._backend.collect()

    def drop(self) -> None:
        """Wait for what is in flight and forget it."""
        while self._steps:
            with suppress(Exception):
                self.land()
