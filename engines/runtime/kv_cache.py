"""What the scheduler asks of the cache: room for tokens, forks, and giving room up. Numbers only, no memory.

Two kinds: `PagedKv` shares and moves blocks, `RingKv` gives every running sequence a ring of its own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engines.runtime.block_pool import BlockHash
from engines.runtime.sequence import Sequence as Running

Move = tuple[int, int]
"""Copy a block's content, (from, to). Block numbers from the cache's `num_blocks` on are in host memory."""


@dataclass
class KvStatistics:
    """Counted since the start, in sequences, tokens and blocks."""

    prefix_lookups: int = 0
    prefix_hits: int = 0
    prefix_saved_tokens: int = 0
    copied_blocks: int = 0
    swapped_blocks: int = 0


class KvCache(Protocol):
    """Owns the block numbers of all sequences. One thread calls.

    Moves that a call makes necessary are left for `take_moves`; the caller carries them out in that order before the
    next step's writes.
    """

    block_size: int
    statistics: KvStatistics

    @property
    def free(self) -> int:
        """Blocks without an owner and without known content."""
        ...

    @property
    def cached(self) -> int:
        """Blocks without an owner whose content can be asked for."""
        ...

    @property
    def held(self) -> int:
        """Blocks with an owner."""
        ...

    @property
    def total(self) -> int: ...

    def longest(self, max_context: int) -> int:
        """Most tokens that one sequence may have in a model of `max_context`."""
        ...

    def require_possible(self, sequence: Running) -> None:
        """Raise KilnError when the whole cache could not hold a sequence. Any thread may call."""
        ...

    def next_unknown(self, sequence: Running) -> BlockHash | None:
        """Name of the first block that a waiting sequence could share but that is not known; None if there is none."""
        ...

    def coming(self, sequence: Running) -> Sequence[BlockHash]:
        """Names of the blocks that will be known once a running sequence's known tokens are computed."""
        ...

    def admit(self, sequence: Running, spare: float) -> bool:
        """Room for all known tokens beside a share of `spare`, with `computed` set to what is there already.

        False, and no change, if the room is not there.
        """
        ...

    def grow(self, sequence: Running, tokens: int) -> bool:
        """Room for `tokens` more than are computed, which only this sequence writes to; False if it is not there."""
        ...

    def advance(self, sequence: Running, start: int, end: int) -> None:
        """Note that positions from `start` to `end` are in the cache, and their tokens known."""
        ...

    def fork(self, parent: Running, child: Running) -> bool:
        """Give `child`, without room of its own, what `parent` has computed; False, and no change, if it cannot."""
        ...

    def give_up(self, sequence: Running, *, resumes: bool) -> None:
        """Take all room from a sequence. One that `resumes` may find part of what it computed at `admit`."""
        ...

    def take_moves(self) -> list[Move]:
        """The moves that have become necessary, which the caller now carries out."""
        ...

    def verify(self) -> None:
        """Raise AssertionError when blocks were lost or made up. Cheap: meant for every step."""
        ...

    def check(self, running: Iterable[Running], waiting: Iterable[Running]) -> None:
        """Verify the whole account, given everyone who may own blocks. For tests."""
        ...
