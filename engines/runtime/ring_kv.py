"""The static cache for small devices: one ring of blocks per slot, fixed at the start.

A sequence attends to its last `window` tokens, older ones are overwritten. Its ring holds these and the tokens of one
step, so that a step never overwrites what it still reads. The block table of a slot is made once: logical block n lies
in ring block n modulo the length of the ring, so it never changes. Nothing is shared; places run out, blocks do not.

The backend must run the graph with a sliding window of `window` tokens (`OnnxRuntimeDecoder(window=)`).
"""

from array import array
from collections.abc import Iterable

from engines.runtime.block_pool import BlockHash
from engines.runtime.kv_cache import KvStatistics, Move
from engines.runtime.sequence import Sequence, blocks_for
from plugins.errors import KilnError


def ring_blocks(window: int, tokens_per_step: int, block_size: int) -> int:
    """Blocks of one ring."""
    return blocks_for(window + tokens_per_step - 1, block_size)


class RingKv:
    """Rings for `slots` sequences of at most `max_context` tokens. Implements `KvCache`."""

    def __init__(self, slots: int, window: int, tokens_per_step: int, max_context: int, block_size: int) -> None:
        if window < 1:
            raise KilnError(f"the window is {window}; expected at least 1 token")
        self.block_size = block_size
        self.statistics = KvStatistics()
        self._ring = ring_blocks(window, tokens_per_step, block_size)
        logical = blocks_for(max_context, block_size)
        self._tables = [
            array("i", (slot * self._ring + number % self._ring for number in range(logical))) for slot in range(slots)
        ]
        self._free = list(range(slots - 1, -1, -1))
        self._slot_of: dict[int, int] = {}  # by sequence id

    @property
    def free(self) -> int:
        return len(self._free) * self._ring

    @property
    def cached(self) -> int:
        return 0

    @property
    def held(self) -> int:
        return len(self._slot_of) * self._ring

    @property
    def total(self) -> int:
        return len(self._tables) * self._ring

    def longest(self, max_context: int) -> int:
        return max_context

    def require_possible(self, sequence: Sequence) -> None:
        pass  # a ring holds any sequence

    def next_unknown(self, sequence: Sequence) -> BlockHash | None:
        return None

    def coming(self, sequence: Sequence) -> tuple[BlockHash, ...]:
        return ()

    def admit(self, sequence: Sequence, spare: float) -> bool:
        if not self._free:
            return False
        self._slot_of[sequence.id] = slot = self._free.pop()
        sequence.blocks = self._tables[slot]
        return True

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        return True

    def advance(self, sequence: Sequence, start: int, end: int) -> None:
        pass

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        return False  # the child waits for a slot and computes its tokens: a ring cannot be shared

    def give_up(self, sequence: Sequence, *, resumes: bool) -> None:
        if sequence.id in self._slot_of:
            self._free.append(self._slot_of.pop(sequence.id))
        sequence.blocks = array("i")
        sequence.computed = 0

    def take_moves(self) -> list[Move]:
        return []

    def verify(self) -> None:
        assert self.free + self.held == self.total, f"{self.free} free and {self.held} held are not {self.total}"

    def check(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        self.verify()
        assert {sequence.id for sequence in running} == set(self._slot_of)
        assert len(set(self._slot_of.values()) | set(self._free)) == len(self._tables)
        assert not any(sequence.blocks for sequence in waiting)
