"""The scheduler where steps are launched before those before them have ended: any order of operations.

As in `test_scheduler_machine`, the cache is modelled; a launched step's copies, writes and reads happen when it lands,
which is the latest that they can: so blocks that are given away too early, tokens that are asked for before they are
known, or a prefix that is shared before it is computed show.
"""

from collections import Counter, deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from engines.runtime.packing import step_inputs_from_batch

from .test_scheduler_machine import BUDGET, SIZE, PagedMachine, RingMachine, SchedulerMachine, SwapMachine, next_token

SEEN: Counter[str] = Counter()


class AheadMachine(SchedulerMachine):
    """Launches and lands instead of steps."""

    def __init__(self):
        super().__init__()
        self.flight = deque()
        self.broken: set[int] = set()  # sequences of a step that failed

    @precondition(lambda self: self.live or self.flight)
    @rule(seconds=st.sampled_from([0.0, 1.0, 30.0]))
    def step(self, seconds):
        """Schedule and launch."""
        self.now += seconds
        for sequence in self.scheduler.expired(self.now):
            self.end(sequence)
        if len(self.flight) == 2:
            self.land(False)
        batch = self.scheduler.schedule(self.now)
        if batch is None:
            SEEN["had to wait for landings"] += 1
            assert self.flight
            self.land_all()
        elif any(chunk.rows and chunk.sequence.id in self.forks for chunk in batch):
            self.land_all()
            if left := tuple(chunk for chunk in batch if chunk.sequence.id in self.live):
                self.compute(left, False)
        elif batch:
            self.launch(batch)
        else:
            assert self.flight or not self.live, "work is there and nothing runs"
            self.land_all()

    def launch(self, batch):
        SEEN["launched"] += 1
        SEEN["launched ahead"] += any(chunk.sequence.unknown for chunk in batch)
        assert sum(chunk.length for chunk in batch) <= BUDGET
        inputs = step_inputs_from_batch(batch, SIZE)
        assert len(set(inputs.slot_mapping.tolist())) == len(inputs.slot_mapping), "two tokens in one slot"
        rows = [chunk.sequence for chunk in batch if chunk.rows]
        slots = {
            chunk.sequence.id: [self.slot(chunk.sequence, position) for position in range(chunk.end)] for chunk in batch
        }
        moves = self.kv.take_moves()
        self.scheduler.launch(batch)
        self.flight.append((batch, rows, slots, moves))

    @precondition(lambda self: self.flight)
    @rule(fails=st.sampled_from([False] * 9 + [True]))
    def land(self, fails):
        batch, rows, slots, moves = self.flight.popleft()
        self.move(moves)
        for chunk in batch:
            history = tuple(chunk.sequence.token_ids[: chunk.end])
            for position in range(chunk.start, chunk.end):
                self.content[slots[chunk.sequence.id][position]] = history[: position + 1]
        if fails:
            self.scheduler.abandon()
            self.broken |= {chunk.sequence.id for chunk in batch}
            for chunk in batch:
                if chunk.sequence.id in self.live:
                    self.end(chunk.sequence)
                for position in range(chunk.start, chunk.end):
                    self.content[slots[chunk.sequence.id][position]] = ("garbage",)
            return
        for chunk in batch:
            if chunk.sequence.id not in self.broken:
                history = tuple(chunk.sequence.token_ids[: chunk.end])
                for position in range(max(0, chunk.start - self.window + 1), chunk.end):
                    assert self.content[slots[chunk.sequence.id][position]] == history[: position + 1]
        for sequence in rows:
            known = sequence.token_ids[: len(sequence.token_ids) - sequence.unknown]
            sequence.learn(next_token(known))
        self.scheduler.settle(0.01)
        for sequence in rows:
            if sequence.id not in self.live:
                SEEN["thrown away"] += 1
            elif sequence.used_up or sequence.token_ids[-1 - sequence.unknown] % 11 == 0:
                self.end(sequence)
        self.kv.verify()

    def land_all(self):
        while self.flight:
            self.land(False)

    def end(self, sequence):
        del self.live[sequence.id]
        self.scheduler.finish(sequence)
        if sequence.in_flight:
            assert sequence.blocks, "a launched step writes to them"
        else:
            assert not sequence.blocks
        assert not sequence.host_blocks

    @invariant()
    def flight_is_accounted_for(self):
        writers = Counter(chunk.sequence.id for batch, *_ in self.flight for chunk in batch)
        for batch, _, slots, _ in self.flight:
            for chunk in batch:
                assert chunk.sequence.in_flight == writers[chunk.sequence.id]
                kept = [self.slot(chunk.sequence, position) for position in range(chunk.end)]
                assert kept == slots[chunk.sequence.id], "its blocks are its own until it lands"

    def plain_step(self):
        self.step(0.0)

    def unfinished(self):
        return self.live or self.flight


class AheadPaged(AheadMachine, PagedMachine):
    pass


class AheadSwap(AheadMachine, SwapMachine):
    pass


class AheadRing(AheadMachine, RingMachine):
    pass


LONG = settings(max_examples=24, stateful_step_count=100, deadline=None)
TestAheadPaged = AheadPaged.TestCase
TestAheadSwap = AheadSwap.TestCase
TestAheadRing = AheadRing.TestCase
TestAheadPaged.settings = LONG
TestAheadSwap.settings = settings(LONG, max_examples=16)
TestAheadRing.settings = settings(LONG, max_examples=8)


def test_the_machines_ran_ahead():
    """Runs after them; less means that they tested little."""
    assert SEEN["launched ahead"] > 200
    assert SEEN["had to wait for landings"] > 10
    assert SEEN["thrown away"] > 50
