"""Finding again what was computed: blocks are named by a chain of hashes over their tokens and all before them.

The name of block n of a sequence is H(name of block n - 1, the block's tokens); the first one's parent is the tenant's
salt, so tenants never share blocks and cannot probe each other's prompts by timing. H is BLAKE2b with 16 bytes: names
that collide would mix up answers, so it is a cryptographic hash. Only full blocks have names.
"""

import hashlib
from array import array
from collections.abc import Iterable

from engines.runtime.block_pool import BlockHash, BlockPool
from engines.runtime.sequence import Sequence


def salt_of_tenant(tenant: str) -> bytes:
    """The parent of a tenant's first blocks; empty for no tenant."""
    return hashlib.blake2b(tenant.encode(), digest_size=16).digest() if tenant else b""


def name_blocks(names: list[BlockHash], token_ids: array, block_size: int, salt: bytes, count: int) -> None:
    """Add names to those of a sequence's first blocks until there are `count`; `token_ids` are int32."""
    while len(names) < count:
        start = len(names) * block_size
        tokens = token_ids[start : start + block_size].tobytes()
        parent = names[-1] if names else salt
        names.append(hashlib.blake2b(tokens, key=parent, digest_size=16).digest())


def names_of_prompt(token_ids: Iterable[int], block_size: int, tenant: str) -> list[BlockHash]:
    """Names of the blocks of a prompt that an engine may know already: at least one token is left to compute."""
    tokens, names = array("i", token_ids), list[BlockHash]()
    name_blocks(names, tokens, block_size, salt_of_tenant(tenant), (len(tokens) - 1) // block_size)
    return names


class PrefixCache:
    """Names full blocks and gives sequences the blocks of a prefix that is known. Not thread-safe."""

    def __init__(self, pool: BlockPool, block_size: int, enabled: bool = True) -> None:
        self.pool = pool
        self.block_size = block_size
        self.enabled = enabled

    def known_blocks(self, sequence: Sequence) -> int:
        """Leading blocks of a sequence that are known and held by others, so that taking them takes none away."""
        return self.pool.held_prefix(self._reusable(sequence)) if self.enabled else 0

    def next_unknown(self, sequence: Sequence) -> BlockHash | None:
        """Name of the first block that could be shared but is not known; None if there is none."""
        if not self.enabled:
            return None
        return next((name for name in self._reusable(sequence) if not self.pool.knows(name)), None)

    def coming(self, sequence: Sequence) -> list[BlockHash]:
        """Names of the blocks that will be known once a running sequence's known tokens are computed."""
        if not self.enabled:
            return []
        last = len(sequence.token_ids) // self.block_size
        return self._names(sequence, last)[sequence.computed // self.block_size :]

    def attach(self, sequence: Sequence) -> int:
        """Give a sequence without blocks those of its known prefix; returns the tokens that are so computed already."""
        assert not sequence.blocks
        if not self.enabled:
            return 0
        blocks = self.pool.take(self._reusable(sequence))
        sequence.blocks = array("i", blocks)
        sequence.computed = len(blocks) * self.block_size
        return sequence.computed

    def publish(self, sequence: Sequence, start: int, end: int) -> None:
        """Name the blocks that filled up when tokens from `start` to `end` were computed."""
        if not self.enabled:
            return
        first, last = start // self.block_size, end // self.block_size
        if first == last:
            return
        names = self._names(sequence, last)
        for number in range(first, last):
            self.pool.name(sequence.blocks[number], names[number])

    def _reusable(self, sequence: Sequence) -> list[BlockHash]:
        """Names of the blocks that may be taken: at least one token is left to compute, for its logits."""
        return self._names(sequence, (len(sequence.token_ids) - 1) // self.block_size)

    def _names(self, sequence: Sequence, count: int) -> list[BlockHash]:
        names = sequence.block_names
        name_blocks(names, sequence.token_ids, self.block_size, sequence.salt, count)
        return names[:count]
