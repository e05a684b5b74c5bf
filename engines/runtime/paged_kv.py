"""The paged cache: blocks that are counted, shared by content, copied when shared ones are written, and swapped.

- A sequence that begins like an earlier one of its tenant shares the full blocks of that beginning (`PrefixCache`).
- A forked sequence shares all of its parent's blocks. Whoever writes to the last one, which both have filled in part,
  gets a copy of it while another owns it, or when its content has become known.
- With `host_blocks`, a sequence that gives way takes what it computed along to host memory, if there is room, and
  brings it back when it runs again instead of computing it again.
"""

from array import array
from collections.abc import Iterable

from engines.runtime.block_pool import BlockHash, BlockPool
from engines.runtime.kv_cache import KvStatistics, Move
from engines.runtime.prefix_cache import PrefixCache
from engines.runtime.sequence import Sequence, blocks_for
from plugins.errors import KilnError


class PagedKv:
    """Block tables of running sequences. Implements `KvCache`."""

    def __init__(self, blocks: int, block_size: int, *, host_blocks: int = 0, share_prefixes: bool = True) -> None:
        self.pool = BlockPool(blocks)
        self.block_size = block_size
        self.statistics = KvStatistics()
        self.prefixes = PrefixCache(self.pool, block_size, share_prefixes)
        self.host = BlockPool(host_blocks) if host_blocks else None
        self._moves: list[Move] = []

    @property
    def free(self) -> int:
        return self.pool.free

    @property
    def cached(self) -> int:
        return self.pool.cached

    @property
    def held(self) -> int:
        return self.pool.held

    @property
    def total(self) -> int:
        return self.pool.total

    def longest(self, max_context: int) -> int:
        return min(max_context, self.total * self.block_size)

    def require_possible(self, sequence: Sequence) -> None:
        needed = blocks_for(sequence.cached_length_limit, self.block_size)
        if needed > self.total:
            raise KilnError(
                f"a request of {sequence.prompt_length} prompt tokens and {sequence.max_tokens} to generate needs "
                f"{needed} cache blocks of {self.block_size} tokens, the engine has {self.total}; "
                "lower max_tokens, shorten the prompt or open the engine with more kv_blocks"
            )

    def next_unknown(self, sequence: Sequence) -> BlockHash | None:
        return None if sequence.host_blocks else self.prefixes.next_unknown(sequence)

    def coming(self, sequence: Sequence) -> list[BlockHash]:
        return self.prefixes.coming(sequence)

    def admit(self, sequence: Sequence, spare: float) -> bool:
        wanted = blocks_for(len(sequence.token_ids), self.block_size)
        if wanted - self.prefixes.known_blocks(sequence) + int(spare * self.total) > self.pool.available:
            return False
        saved = self.prefixes.attach(sequence)
        shared = len(sequence.blocks)
        self.statistics.prefix_lookups += self.prefixes.enabled
        self.statistics.prefix_hits += saved > 0
        self.statistics.prefix_saved_tokens += saved
        blocks = self.pool.allocate(wanted - shared)
        assert blocks is not None, "taking cached blocks took more than counted"
        sequence.blocks.extend(blocks)
        self._swap_in(sequence, shared)
        return True

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        writable = self._may_write(sequence)
        missing = blocks_for(sequence.computed + tokens, self.block_size) - len(sequence.blocks)
        if writable and missing <= 0:
            return True
        blocks = self.pool.allocate(max(missing, 0) + (not writable))
        if blocks is None:
            return False
        if not writable:
            last = sequence.computed // self.block_size
            self._moves.append((sequence.blocks[last], blocks[0]))
            self.pool.release([sequence.blocks[last]])
            sequence.blocks[last] = blocks.pop(0)
            self.statistics.copied_blocks += 1
        sequence.blocks.extend(blocks)
        return True

    def advance(self, sequence: Sequence, start: int, end: int) -> None:
        self.prefixes.publish(sequence, start, end)

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        shared = parent.blocks[: blocks_for(parent.computed, self.block_size)]
        self.pool.retain(shared)
        child.blocks = shared
        child.computed = parent.computed
        return True

    def give_up(self, sequence: Sequence, *, resumes: bool) -> None:
        if resumes:
            self._swap_out(sequence)
        elif sequence.host_blocks:
            self._release_host(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks = array("i")
        sequence.computed = 0

    def take_moves(self) -> list[Move]:
        moves, self._moves = self._moves, []
        return moves

    def verify(self) -> None:
        for pool in (self.pool, self.host):
            assert pool is None or pool.balanced, (
                f"{pool.free} free, {pool.cached} cached and {pool.held} held blocks are not {pool.total}"
            )

    def check(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        self.pool.check()
        waiting = list(waiting)
        _check_owners(self.pool, [sequence.blocks for sequence in running])
        assert not any(sequence.blocks for sequence in waiting)
        if self.host is not None:
            self.host.check()
            _check_owners(self.host, [sequence.host_blocks for sequence in waiting])
        assert not any(sequence.host_blocks for sequence in running)

    def _may_write(self, sequence: Sequence) -> bool:
        last, filled = divmod(sequence.computed, self.block_size)
        return not filled or self.pool.writable(sequence.blocks[last])

    def _swap_out(self, sequence: Sequence) -> None:
        """Take what is computed along to host memory, as a whole or not at all."""
        assert not sequence.host_blocks
        used = blocks_for(sequence.computed, self.block_size)
        blocks = self.host.allocate(used) if self.host is not None else None
        if not blocks:
            return
        self._moves.extend(zip(sequence.blocks, (self.total + block for block in blocks), strict=False))
        sequence.host_blocks = array("i", blocks)
        sequence.saved = sequence.computed
        self.statistics.swapped_blocks += used

    def _swap_in(self, sequence: Sequence, shared: int) -> None:
        """Bring back what is in host memory and is not among the first `shared` blocks."""
        if not sequence.host_blocks:
            return
        if sequence.saved > sequence.computed:
            pairs = zip(sequence.host_blocks[shared:], sequence.blocks[shared:], strict=False)
            self._moves.extend((self.total + source, target) for source, target in pairs)
            known, sequence.computed = sequence.computed, sequence.saved
            self.prefixes.publish(sequence, known, sequence.computed)
        self._release_host(sequence)

    def _release_host(self, sequence: Sequence) -> None:
        assert self.host is not None
        self.host.release(sequence.host_blocks)
        sequence.host_blocks = array("i")
        sequence.saved = 0


def _check_owners(pool: BlockPool, tables: Iterable[Iterable[int]]) -> None:
    owners: dict[int, int] = {}
    for table in tables:
        for block in table:
            owners[block] = owners.get(block, 0) + 1
    assert pool.held == len(owners)
    assert all(pool.owners(block) == count for block, count in owners.items())
