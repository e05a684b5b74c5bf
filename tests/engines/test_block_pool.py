from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engines.runtime.block_pool import BlockPool
from plugins.errors import KilnError

TOTAL = 12


class PoolMachine(RuleBasedStateMachine):
    """The pool against a multiset of owners."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.owned: list[list[int]] = []  # one list per owner

    @rule(count=st.integers(0, TOTAL + 2))
    def allocate(self, count):
        free = self.pool.free
        blocks = self.pool.allocate(count)
        if count > free:
            assert blocks is None
            assert self.pool.free == free
        else:
            assert len(set(blocks)) == count
            assert not set(blocks) & {b for owner in self.owned for b in owner}, "handed out a held block"
            self.owned.append(blocks)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def share(self, data):
        blocks = data.draw(st.sampled_from(self.owned))
        part = blocks[: data.draw(st.integers(0, len(blocks)))]
        self.pool.retain(part)
        self.owned.append(list(part))

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data):
        blocks = self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1)))
        self.pool.release(blocks)

    @rule(data=st.data())
    def misuse_changes_nothing(self, data):
        counts = Counter(b for owner in self.owned for b in owner)
        block = data.draw(st.integers(0, TOTAL - 1))
        before = (self.pool.free, [self.pool.owners(b) for b in range(TOTAL)])
        with pytest.raises(ValueError, match=f"block {block}"):
            self.pool.release([block] * (counts[block] + 1))
        if not counts[block]:
            with pytest.raises(ValueError, match=f"block {block} is free"):
                self.pool.retain([*counts, block])
        assert before == (self.pool.free, [self.pool.owners(b) for b in range(TOTAL)])

    @invariant()
    def conserved(self):
        self.pool.check()
        counts = Counter(b for owner in self.owned for b in owner)
        assert self.pool.free + self.pool.held == TOTAL
        assert self.pool.held == len(counts)
        assert all(self.pool.owners(b) == counts[b] for b in range(TOTAL))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_out_of_range_and_negative_raise():
    pool = BlockPool(2)
    with pytest.raises(IndexError, match="outside the pool of 2"):
        pool.release([2])
    with pytest.raises(IndexError):
        pool.retain([-1])
    with pytest.raises(ValueError, match="-1 blocks"):
        pool.allocate(-1)
    with pytest.raises(KilnError, match="expected at least 1"):
        BlockPool(0)


def test_freed_blocks_are_reused_first_in_the_same_order():
    pool = BlockPool(100)
    first = pool.allocate(3)
    assert first == [0, 1, 2]
    pool.release(first)
    assert pool.allocate(3) == first
