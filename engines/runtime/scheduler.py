"""Which tokens the next step computes: continuous batching, first come first served.

Pure Python over `Sequence` and `BlockPool`; no tensors, no clock, no text. Rules:

1. Waiting sequences are admitted in order of arrival while fewer than `max_running` run and the first of them
   gets all blocks that it can ever need (prompt + max_tokens), so a running sequence never lacks a block.
2. A step takes one token of every decoding sequence, then prompt chunks in order of arrival, within
   `tokens_per_step`. A prompt that does not fit is continued in the next step.
"""

from array import array
from dataclasses import dataclass

from engines.runtime.block_pool import BlockPool
from engines.runtime.sequence import Sequence, blocks_for
from plugins.errors import KilnError


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step. Raises KilnError when they contradict each other."""

    max_running: int = 16
    """Sequences that run at a time."""
    tokens_per_step: int = 512
    """Tokens that one step computes at most."""

    def __post_init__(self) -> None:
        if self.max_running < 1:
            raise KilnError(f"max_running is {self.max_running}; expected at least 1")
        if self.tokens_per_step < self.max_running:
            raise KilnError(
                f"tokens_per_step is {self.tokens_per_step}, max_running {self.max_running}; a step holds one token of "
                "every running sequence: raise tokens_per_step or lower max_running"
            )


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, start + length) of one sequence."""

    sequence: Sequence
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def samples(self) -> bool:
        """Whether the chunk ends with the sequence's last known token, so that its logits choose the next one."""
        return self.end == len(self.sequence.token_ids)


Batch = tuple[Chunk, ...]
"""One step: at most one chunk per sequence, decode tokens first."""


class Scheduler:
    """Queue and running set. The caller runs `schedule`, computes, calls `advance`, appends, and calls `finish`."""

    def __init__(self, pool: BlockPool, block_size: int, config: SchedulerConfig) -> None:
        self.pool = pool
        self.block_size = block_size
        self.config = config
        self._waiting: dict[int, Sequence] = {}  # by id, in order of arrival
        self._running: dict[int, Sequence] = {}  # by id, in order of admission, which is that of arrival

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        return tuple(self._waiting.values())

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running.values())

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def blocks_needed(self, sequence: Sequence) -> int:
        """Blocks that a sequence reserves while it runs."""
        return blocks_for(sequence.cached_length_limit, self.block_size)

    def submit(self, sequence: Sequence) -> None:
        """Queue a new sequence. Raises KilnError when it could never run, ValueError for an id already here."""
        if sequence.id in self._waiting or sequence.id in self._running:
            raise ValueError(f"sequence {sequence.id} was submitted already")
        self.require_possible(sequence)
        self._waiting[sequence.id] = sequence

    def require_possible(self, sequence: Sequence) -> None:
        """Raise KilnError when the whole pool could not hold a sequence. Reads constants only: any thread may call."""
        needed = self.blocks_needed(sequence)
        if needed > self.pool.total:
            raise KilnError(
                f"a request of {sequence.prompt_length} prompt tokens and {sequence.max_tokens} to generate needs "
                f"{needed} cache blocks of {self.block_size} tokens, the engine has {self.pool.total}; "
                "lower max_tokens, shorten the prompt or open the engine with more kv_blocks"
            )

    def schedule(self) -> Batch:
        """Admit what fits and return the next step; empty only when there is no work."""
        self._admit()
        chunks = [Chunk(s, s.computed, s.pending) for s in self._running.values() if s.decoding]
        budget = self.config.tokens_per_step - len(chunks)
        for sequence in self._running.values():
            if budget == 0:
                break
            if not sequence.decoding:
                length = min(budget, sequence.pending)
                chunks.append(Chunk(sequence, sequence.computed, length))
                budget -= length
        return tuple(chunks)

    def advance(self, batch: Batch) -> None:
        """Note that a step's keys and values are in the cache."""
        for chunk in batch:
            assert chunk.sequence.computed == chunk.start
            chunk.sequence.computed = chunk.end

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence, waiting or running, at any moment between steps; its blocks are free afterwards.

        Raises ValueError for one that is not here.
        """
        if self._waiting.pop(sequence.id, None) is None and self._running.pop(sequence.id, None) is None:
            raise ValueError(f"sequence {sequence.id} is neither waiting nor running")
        self.pool.release(sequence.blocks)
        sequence.blocks = array("i")

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.config.max_running:
            sequence = next(iter(self._waiting.values()))
            blocks = self.pool.allocate(self.blocks_needed(sequence))
            if blocks is None:
                return  # first come first served: nobody overtakes the one that waits for blocks
            del self._waiting[sequence.id]
            sequence.blocks = array("i", blocks)
            self._running[sequence.id] = sequence
