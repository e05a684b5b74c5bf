from collections import Counter, OrderedDict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engines.runtime.block_pool import BlockPool
from plugins.errors import KilnError

TOTAL = 12


class PoolMachine(RuleBasedStateMachine):
    """The pool against a model: a multiset of owners, names, and the order in which cached blocks were last used."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.owned: list[list[int]] = []  # one list per owner
        self.names: dict[bytes, int] = {}
        self.cached: OrderedDict[int, None] = OrderedDict()

    @property
    def counts(self) -> Counter[int]:
        return Counter(block for owner in self.owned for block in owner)

    @rule(count=st.integers(0, TOTAL + 2))
    def allocate(self, count):
        free, available = self.pool.free, self.pool.available
        held = set(self.counts)
        blocks = self.pool.allocate(count)
        if count > available:
            assert blocks is None
            assert self.pool.available == available
            return
        assert len(set(blocks)) == count
        assert not set(blocks) & held, "handed out a held block"
        evicted = [self.cached.popitem(last=False)[0] for _ in range(max(0, count - free))]
        assert set(evicted) <= set(blocks), "the least recently used are evicted, and only when nothing is free"
        assert not set(blocks) & set(self.cached)
        self.names = {name: block for name, block in self.names.items() if block not in evicted}
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
        left = self.counts
        for block in reversed(blocks):
            if not left[block] and block in self.names.values():
                self.cached[block] = None

    @precondition(lambda self: self.counts)
    @rule(data=st.data(), name=st.integers(0, 20))
    def name(self, data, name):
        block, content = data.draw(st.sampled_from(sorted(self.counts))), bytes([name])
        named = {block: name for name, block in self.names.items()}
        if block in named and named[block] != content:
            with pytest.raises(ValueError, match=f"block {block} has another content"):
                self.pool.name(block, content)
            return
        self.pool.name(block, content)
        self.names.setdefault(content, block)

    @rule(names=st.lists(st.integers(0, 20), max_size=5, unique=True))
    def take(self, names):
        contents = [bytes([name]) for name in names]
        expected = []
        for content in contents:
            if content not in self.names:
                break
            expected.append(self.names[content])
        held = self.pool.held_prefix(contents)
        assert held == sum(block in self.counts for block in expected)
        available = self.pool.available
        assert self.pool.take(contents) == expected
        assert self.pool.available == available - (len(expected) - held)
        for block in expected:
            self.cached.pop(block, None)
        self.owned.append(expected)

    @rule(data=st.data())
    def misuse_changes_nothing(self, data):
        counts = self.counts
        block = data.draw(st.integers(0, TOTAL - 1))
        before = (self.pool.free, self.pool.cached, [self.pool.owners(b) for b in range(TOTAL)])
        with pytest.raises(ValueError, match=f"block {block}"):
            self.pool.release([block] * (counts[block] + 1))
        if not counts[block]:
            with pytest.raises(ValueError, match=f"block {block} is not held"):
                self.pool.retain([*counts, block])
            with pytest.raises(ValueError, match=f"block {block} is not held"):
                self.pool.name(block, b"x")
        assert before == (self.pool.free, self.pool.cached, [self.pool.owners(b) for b in range(TOTAL)])

    @invariant()
    def conserved(self):
        self.pool.check()
        counts = self.counts
        assert self.pool.free + self.pool.cached + self.pool.held == TOTAL
        assert self.pool.held == len(counts)
        assert self.pool.cached == len(self.cached)
        assert all(self.pool.owners(b) == counts[b] for b in range(TOTAL))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=450, stateful_step_count=200, deadline=None)


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


def test_of_a_prefix_the_end_is_evicted_first():
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    for number, block in enumerate(blocks):
        pool.name(block, bytes([number]))
    pool.release(blocks)
    assert (pool.free, pool.cached, pool.held) == (1, 3, 0)
    pool.allocate(2)
    assert pool.take([b"\0", b"\1", b"\2"]) == blocks[:2]
