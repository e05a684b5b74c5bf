"""Which cache blocks are free, and how many owners each held one has.

Knows block numbers only: no memory, no sequences, no prefixes. `free + held == total` after every call.
A freed block is the next one handed out, so that a lightly used pool touches little memory.
"""

from collections.abc import Iterable

from plugins.errors import KilnError


class BlockPool:
    """Reference-counted block numbers 0 .. total - 1. Not thread-safe: one thread owns it."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise KilnError(f"the block pool has {total} blocks; expected at least 1: give the engine more kv_blocks")
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._owners = [0] * total

    @property
    def free(self) -> int:
        """Blocks without an owner."""
        return len(self._free)

    @property
    def held(self) -> int:
        """Blocks with at least one owner."""
        return self.total - len(self._free)

    def owners(self, block: int) -> int:
        """How many owners a block has; 0 for a free one. Raises IndexError outside the pool."""
        self._check_number(block)
        return self._owners[block]

    def allocate(self, count: int) -> list[int] | None:
        """`count` free blocks, each with one owner from now on; None, and no change, when so many are not free."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} blocks")
        if count > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._owners[block] = 1
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        """Add one owner to each of `blocks`. Raises ValueError, and changes nothing, if one of them is free."""
        held = list(blocks)
        for block in held:
            if not self.owners(block):
                raise ValueError(f"block {block} is free; only a held block can be shared")
        for block in held:
            self._owners[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Take one owner from each of `blocks`; those without owners become free.

        Raises ValueError, and changes nothing, if that would take more owners than there are.
        """
        given = list(blocks)
        taken: dict[int, int] = {}
        for block in given:
            taken[block] = taken.get(block, 0) + 1
        for block, count in taken.items():
            if self.owners(block) < count:
                raise ValueError(f"block {block} has {self._owners[block]} owners; cannot release it {count} times")
        # Last in, first out: releasing in reverse makes the next allocation reuse the same order.
        for block in reversed(given):
            self._owners[block] -= 1
            if not self._owners[block]:
                self._free.append(block)

    def check(self) -> None:
        """Verify the whole account: every block is free without owners, or held with some. For tests."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert all((block in free) == (not owners) for block, owners in enumerate(self._owners)), "an owned free block"
        assert self.free + self.held == self.total

    def _check_number(self, block: int) -> None:
        if not 0 <= block < self.total:
            raise IndexError(f"block {block} is outside the pool of {self.total} blocks")
