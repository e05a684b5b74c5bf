"""Which cache blocks are free, cached or held, and how many owners each held one has.

Knows block numbers and content hashes only: no memory, no sequences. A block is in exactly one state:

- held: it has owners;
- cached: nobody owns it, but its content is known by a hash, and whoever asks for that hash may have it again;
- free: neither.

`free + cached + held == total` after every call. A freed block is the next one handed out, so that a lightly used pool
touches little memory; when no block is free, the cached one that was used longest ago gives way.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from plugins.errors import KilnError

BlockHash = bytes
"""Identifies a block's content and everything before it (`engines.runtime.prefix_cache`)."""


class BlockPool:
    """Reference-counted block numbers 0 .. total - 1. Not thread-safe: one thread owns it."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise KilnError(f"the block pool has {total} blocks; expected at least 1: give the engine more kv_blocks")
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._owners = [0] * total
        self._held = 0
        self._hash_of: dict[int, BlockHash] = {}  # held or cached blocks with known content
        self._block_of: dict[BlockHash, int] = {}  # the inverse
        self._cached: OrderedDict[int, None] = OrderedDict()  # without owners, least recently used first

    @property
    def free(self) -> int:
        """Blocks without an owner and without known content."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks without an owner whose content can be asked for."""
        return len(self._cached)

    @property
    def held(self) -> int:
        """Blocks with at least one owner."""
        return self._held

    @property
    def balanced(self) -> bool:
        """Whether every block is accounted for; cheap enough to be asked after every step."""
        return len(self._free) + len(self._cached) + self._held == self.total

    @property
    def available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free) + len(self._cached)

    def owners(self, block: int) -> int:
        """How many owners a block has. Raises IndexError outside the pool."""
        self._check_number(block)
        return self._owners[block]

    def writable(self, block: int) -> bool:
        """Whether its one owner may change its content: nobody shares it, and nobody can ask for it."""
        return self._owners[block] == 1 and block not in self._hash_of

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks of undefined content, each with one owner; None, and no change, when so many are not there."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} blocks")
        if count > self.available:
            return None
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._owners[block] = 1
        self._held += count
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        """Add one owner to each of `blocks`. Raises ValueError, and changes nothing, if one of them is not held."""
        held = list(blocks)
        for block in held:
            if not self.owners(block):
                raise ValueError(f"block {block} is not held; only a held block can be shared")
        for block in held:
            self._owners[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Take one owner from each of `blocks`; one without owners becomes cached if its content is known, else free.

        Raises ValueError, and changes nothing, if that would take more owners than there are.
        """
        given = list(blocks)
        taken: dict[int, int] = {}
        for block in given:
            taken[block] = taken.get(block, 0) + 1
        for block, count in taken.items():
            if self.owners(block) < count:
                raise ValueError(f"block {block} has {self._owners[block]} owners; cannot release it {count} times")
        # In reverse: the next allocation reuses the same order, and of a prefix the end is forgotten first.
        for block in reversed(given):
            self._owners[block] -= 1
            if not self._owners[block]:
                self._held -= 1
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def name(self, block: int, content: BlockHash) -> None:
        """Make a held block's content known. Without effect where another block has the same content already.

        Raises ValueError for a block that is not held or has another name.
        """
        if not self.owners(block):
            raise ValueError(f"block {block} is not held; only a held block's content can be known")
        if self._hash_of.get(block, content) != content:
            raise ValueError(f"block {block} has another content already")
        if content not in self._block_of:
            self._block_of[content] = block
            self._hash_of[block] = content

    def take(self, contents: Sequence[BlockHash]) -> list[int]:
        """The blocks of the longest leading part of `contents` that is known, each with one more owner."""
        blocks = []
        for content in contents:
            block = self._block_of.get(content)
            if block is None:
                break
            if not self._owners[block]:
                del self._cached[block]
                self._held += 1
            self._owners[block] += 1
            blocks.append(block)
        return blocks

    def knows(self, content: BlockHash) -> bool:
        return content in self._block_of

    def held_prefix(self, contents: Sequence[BlockHash]) -> int:
        """How many of the leading known `contents` lie in held blocks: sharing those leaves `available` as it is."""
        held = 0
        for content in contents:
            block = self._block_of.get(content)
            if block is None:
                break
            held += self._owners[block] > 0
        return held

    def check(self) -> None:
        """Verify the whole account: every block is in exactly one state. For tests."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        for block, owners in enumerate(self._owners):
            states = (block in free) + (block in self._cached) + (owners > 0)
            assert states == 1, f"block {block} is in {states} states"
        assert all(block in self._hash_of for block in self._cached), "a cached block without a name"
        assert not free & self._hash_of.keys(), "a free block with a name"
        assert {content: block for block, content in self._hash_of.items()} == self._block_of
        assert self.held == sum(owners > 0 for owners in self._owners)
        assert self.balanced

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self._block_of[self._hash_of.pop(block)]
        return block

    def _check_number(self, block: int) -> None:
        if not 0 <= block < self.total:
            raise IndexError(f"block {block} is outside the pool of {self.total} blocks")
