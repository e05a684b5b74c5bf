"""Steps that were launched and have not ended: what they compute, and who waits for their end.

Numbers only, like the scheduler whose part this is. A sequence that ends while a launched step writes to its blocks
keeps them until that step has ended: it is `leaving`.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from engines.runtime.batch import Batch
from engines.runtime.block_pool import BlockHash
from engines.runtime.sequence import Sequence


@dataclass(frozen=True)
class StepLoad:
    """What makes a step take its time."""

    decoding: int
    """Sequences that decode."""
    tokens: int
    """Tokens of prompts."""
    depth: int
    """Tokens before the first of those."""
    drafted: int


def load_of_batch(batch: Batch) -> StepLoad:
    """Before the step is counted as computed."""
    prompts = [chunk for chunk in batch if not chunk.sequence.decoding]
    return StepLoad(
        len(batch) - len(prompts),
        sum(chunk.length for chunk in prompts),
        prompts[0].start if prompts else 0,
        sum(len(chunk.draft) for chunk in batch),
    )


@dataclass(frozen=True)
class LaunchedStep:
    """One of them."""

    batch: Batch
    load: StepLoad
    coming: frozenset[BlockHash]
    """Names of the blocks that will be known once the prompts in it are computed."""


class LaunchedSteps:
    """In the order of their launch, which is that of their end."""

    def __init__(self) -> None:
        self._steps: deque[LaunchedStep] = deque()
        self._leaving: dict[int, Sequence] = {}

    def __bool__(self) -> bool:
        return bool(self._steps)

    @property
    def coming(self) -> set[BlockHash]:
        return {name for step in self._steps for name in step.coming}

    @property
    def leaving(self) -> tuple[Sequence, ...]:
        return tuple(self._leaving.values())

    def launch(self, batch: Batch, coming: Iterable[BlockHash]) -> None:
        """Count a step's tokens as computed, and expect what it chooses."""
        self._steps.append(LaunchedStep(batch, load_of_batch(batch), frozenset(coming)))
        for chunk in batch:
            assert chunk.sequence.computed == chunk.start
            assert not chunk.draft, "what is drafted must be known before the next step"
            chunk.sequence.computed = chunk.end
            chunk.sequence.in_flight += 1
            if chunk.rows:
                chunk.sequence.expect()

    def leave(self, sequence: Sequence) -> None:
        """Keep a sequence that has ended until no step writes to its blocks."""
        assert sequence.in_flight
        self._leaving[sequence.id] = sequence

    def land(self) -> tuple[LaunchedStep, list[Sequence]]:
        """Take out the oldest step, with the sequences that nothing keeps any more."""
        step = self._steps.popleft()
        gone = []
        for chunk in step.batch:
            sequence = chunk.sequence
            sequence.in_flight -= 1
            if not sequence.in_flight and self._leaving.pop(sequence.id, None) is not None:
                gone.append(sequence)
        return step, gone
