"""The scheduler over each kind of cache: submits, forks, drafts, steps and cancellations in any order.

The cache is modelled: every slot remembers the whole history of the token that was written to it, so a wrong block, a
stale prefix, a missing copy, an overwritten ring or a token that is lost or computed twice shows.
"""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engines.runtime.packing import step_inputs_from_batch
from engines.runtime.paged_kv import PagedKv
from engines.runtime.ring_kv import RingKv
from engines.runtime.scheduler import QueueFullError, Scheduler, SchedulerConfig
from engines.runtime.sequence import Sequence, blocks_for
from plugins.errors import KilnError

SIZE, RUNNING, BUDGET, WAITING, WINDOW, CONTEXT = 4, 6, 9, 40, 10, 64


def next_token(token_ids) -> int:
    """What a deterministic model would say after these tokens; few different ones, so that prefixes meet."""
    return (sum(token_ids) * 31 + len(token_ids)) % 97


OPERATIONS: Counter[str] = Counter()


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of operations; the end runs everything that is left to its outcome. Subclasses have a `cache`."""

    window = CONTEXT  # tokens before a position that must be readable

    def __init__(self):
        super().__init__()
        config = SchedulerConfig(
            RUNNING, BUDGET, interactive_share=0.6, ageing=50.0, headroom=0.2, max_waiting=WAITING, speculate=3
        )
        self.kv = self.cache()
        self.scheduler = Scheduler(self.kv, config)
        self.live: dict[int, Sequence] = {}
        self.forks: dict[int, int] = {}  # children that a sequence gets with its next token
        self.content: dict[int, tuple[int, ...]] = {}
        self.next_id = 0
        self.now = 0.0

    @rule(
        shared=st.integers(0, 12),
        own=st.integers(1, 18),
        max_tokens=st.integers(1, 12),
        lane=st.sampled_from(["interactive", "batch"]),
        tenant=st.sampled_from([b"", b"a"]),
        seed=st.integers(0, 3),
        patience=st.sampled_from([None, None, None, 5.0]),
    )
    def submit(self, shared, own, max_tokens, lane, tenant, seed, patience):
        prompt = [*range(shared), *(50 + seed + n for n in range(own))]
        deadline = None if patience is None else self.now + patience
        sequence = Sequence(
            self.new_id(), prompt, max_tokens, lane=lane, arrival=self.now, salt=tenant, deadline=deadline
        )
        if blocks_for(sequence.cached_length_limit, SIZE) > self.most_blocks():
            with pytest.raises(KilnError, match=r"needs \d+ cache blocks of 4 tokens.*lower max_tokens"):
                self.scheduler.submit(sequence)
        elif len(self.scheduler.waiting) >= WAITING:
            with pytest.raises(QueueFullError, match=f"{WAITING} requests wait already"):
                self.scheduler.require_room()
        else:
            self.scheduler.submit(sequence)
            self.live[sequence.id] = sequence

    def most_blocks(self) -> int:
        return self.kv.total

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data):
        self.end(self.live[data.draw(st.sampled_from(sorted(self.live)))])

    @precondition(lambda self: self.live)
    @rule(data=st.data(), children=st.integers(1, 3))
    def fork_soon(self, data, children):
        self.forks[data.draw(st.sampled_from(sorted(self.live)))] = children

    def end(self, sequence):
        del self.live[sequence.id]
        self.scheduler.finish(sequence)
        assert not sequence.blocks
        assert not sequence.host_blocks
        with pytest.raises(ValueError, match="neither waiting nor running"):
            self.scheduler.finish(sequence)

    @precondition(lambda self: self.live)
    @rule(
        seconds=st.sampled_from([0.0, 1.0, 30.0]),
        drafted=st.integers(0, 4),
        right=st.integers(0, 4),
        fails=st.sampled_from([False] * 9 + [True]),
    )
    def step(self, seconds, drafted, right, fails):
        self.now += seconds
        for sequence in self.scheduler.expired(self.now):
            assert sequence.deadline <= self.now
            self.end(sequence)
        if not self.live:
            assert not self.scheduler.has_work
            return
        self.draft(drafted, right)
        generated = {s.id: s.generated for s in self.scheduler.running}
        batch = self.scheduler.schedule(self.now)
        self.check_batch(batch)
        assert all(self.live[id].generated == count for id, count in generated.items()), "no step takes a token away"
        self.compute(batch, fails)

    def draft(self, drafted, right):
        """Propose tokens, the first `right` of which the model will confirm."""
        for sequence in self.scheduler.running:
            history = list(sequence.token_ids)
            for n in range(min(drafted, sequence.max_tokens - sequence.generated - 1)):
                history.append(next_token(history) if n < right else 98)
            sequence.draft = tuple(history[len(sequence.token_ids) :])

    def check_batch(self, batch):
        assert batch, "work is there and nothing runs"
        chunks = {chunk.sequence.id: chunk for chunk in batch}
        running = {s.id for s in self.scheduler.running}
        assert chunks.keys() <= running
        assert len(chunks) == len(batch)
        assert sum(chunk.length for chunk in batch) <= BUDGET
        assert all(chunk.length >= 1 for chunk in batch)
        kinds = [chunk.sequence.decoding for chunk in batch]
        assert kinds == sorted(kinds, reverse=True), "decode tokens come first"
        prompts = {s.lane for s in self.scheduler.running if not s.decoding}
        for sequence in self.scheduler.running:
            if sequence.decoding and (sequence.lane == "interactive" or "interactive" not in prompts):
                assert sequence.id in chunks, "who decodes takes part"

    def move(self, moves):
        for source, target in moves:
            for offset in range(SIZE):
                self.content[target * SIZE + offset] = self.content.get(source * SIZE + offset, ())

    def compute(self, batch, fails):
        self.move(self.kv.take_moves())
        inputs = step_inputs_from_batch(batch, SIZE)
        assert len(set(inputs.slot_mapping.tolist())) == len(inputs.slot_mapping), "two tokens in one slot"
        assert len(inputs.logits_indices) == sum(chunk.rows for chunk in batch)
        histories = {}
        for chunk in batch:
            histories[chunk.sequence.id] = history = (*chunk.sequence.token_ids[: chunk.known_end], *chunk.draft)
            for position in range(chunk.start, chunk.end):
                self.content[self.slot(chunk.sequence, position)] = history[: position + 1]
        for chunk in batch:  # everything that the step reads is there, shared prefixes included
            history = histories[chunk.sequence.id]
            for position in range(max(0, chunk.start - self.window + 1), chunk.end):
                assert self.content[self.slot(chunk.sequence, position)] == history[: position + 1]
        if fails:
            for chunk in batch:
                self.end(chunk.sequence)
            return
        sampling = [(chunk, chunk.rows) for chunk in batch if chunk.rows]
        self.scheduler.advance(batch)
        for chunk, rows in sampling:
            assert rows == 1 + len(chunk.draft)
            self.take_tokens(chunk)
        self.kv.verify()

    def slot(self, sequence, position):
        return sequence.blocks[position // SIZE] * SIZE + position % SIZE

    def take_tokens(self, chunk):
        sequence = chunk.sequence
        self.fork(sequence)
        for drafted in (*chunk.draft, None):
            token = next_token(sequence.token_ids)
            sequence.append(token)
            if sequence.used_up:
                self.end(sequence)
                return
            if token != drafted:
                return
            self.scheduler.confirm(sequence)

    def fork(self, parent):
        for number in range(self.forks.pop(parent.id, 0)):
            left = parent.max_tokens - parent.generated
            child = Sequence(
                self.new_id(), parent.token_ids, left, lane=parent.lane, arrival=self.now, salt=parent.salt
            )
            self.scheduler.fork(parent, child, 100 + number)
            self.live[child.id] = child
            if child.used_up:
                self.end(child)

    @invariant()
    def conserved(self):
        OPERATIONS[type(self).__name__] += 1
        self.scheduler.check()
        self.kv.verify()
        assert self.kv.free + self.kv.cached + self.kv.held == self.kv.total
        running, waiting = self.scheduler.running, self.scheduler.waiting
        assert len(running) <= RUNNING
        assert {s.id for s in running} | {s.id for s in waiting} == set(self.live)
        for sequence in running:
            assert sequence.computed <= len(sequence.token_ids)
            assert len(sequence.blocks) * SIZE >= sequence.computed
        for lane in ("interactive", "batch"):
            fresh = [s.id for s in waiting if s.lane == lane and not s.resumes]
            assert fresh == sorted(fresh), "first come, first served within a lane"

    def plain_step(self):
        self.step(0.0, 0, 0, False)

    def unfinished(self):
        return self.live

    def teardown(self):
        self.forks.clear()
        steps = 0
        while self.unfinished():
            self.plain_step()
            self.conserved()
            steps += 1
            assert steps < 10_000, "somebody never comes to an end"
        assert self.kv.held == 0
        assert not self.scheduler.has_work
        assert self.scheduler.schedule(self.now) == ()


class PagedMachine(SchedulerMachine):
    """Shared prefixes, copies on write, preemption by recomputation."""

    def cache(self):
        return PagedKv(12, SIZE)


class SwapMachine(SchedulerMachine):
    """Preemption into host memory that is too small for everybody."""

    def cache(self):
        return PagedKv(11, SIZE, host_blocks=6)

    @invariant()
    def host_conserved(self):
        host = self.kv.host
        assert host.free + host.held == host.total


class RingMachine(SchedulerMachine):
    """Rings that are overwritten."""

    window = WINDOW

    def most_blocks(self) -> int:
        return CONTEXT  # a ring holds any sequence

    def cache(self):
        return RingKv(RUNNING, WINDOW, BUDGET, CONTEXT, SIZE)


LONG = settings(max_examples=300, stateful_step_count=200, deadline=None)
TestPaged = PagedMachine.TestCase
TestSwap = SwapMachine.TestCase
TestRing = RingMachine.TestCase
TestPaged.settings = TestSwap.settings = LONG
TestRing.settings = settings(LONG, max_examples=100)


def test_so_many_operations_were_run():
    """Runs after the machines; less means that they were cut short."""
    assert OPERATIONS["PagedMachine"] + OPERATIONS["SwapMachine"] > 100_000
    assert OPERATIONS["RingMachine"] > 15_000
