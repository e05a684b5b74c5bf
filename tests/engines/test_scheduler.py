import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engines.runtime.block_pool import BlockPool
from engines.runtime.packing import step_inputs_from_batch
from engines.runtime.scheduler import Scheduler, SchedulerConfig
from engines.runtime.sequence import Sequence
from plugins.errors import KilnError

BLOCKS, SIZE, RUNNING, BUDGET = 10, 4, 3, 7


def run_step(scheduler: Scheduler) -> list[Sequence]:
    """Compute one step with made-up tokens; returns what finished."""
    batch = scheduler.schedule()
    sampling = [chunk.sequence for chunk in batch if chunk.samples]
    scheduler.advance(batch)
    for sequence in sampling:
        sequence.append(7)
        if sequence.used_up:
            scheduler.finish(sequence)
    return [sequence for sequence in sampling if sequence.used_up]


class SchedulerMachine(RuleBasedStateMachine):
    """Submits, steps and cancels in any order; the end runs everything that is left to its outcome."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.scheduler = Scheduler(self.pool, SIZE, SchedulerConfig(RUNNING, BUDGET))
        self.live: dict[int, Sequence] = {}
        self.admitted: list[int] = []
        self.next_id = 0

    @rule(prompt=st.integers(1, 30), max_tokens=st.integers(1, 12))
    def submit(self, prompt, max_tokens):
        sequence = Sequence(self.next_id, list(range(prompt)), max_tokens)
        self.next_id += 1
        if -(-(prompt + max_tokens - 1) // SIZE) > BLOCKS:
            with pytest.raises(KilnError, match=r"needs \d+ cache blocks of 4 tokens, the engine has 10"):
                self.scheduler.submit(sequence)
        else:
            self.scheduler.submit(sequence)
            self.live[sequence.id] = sequence

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data):
        sequence = self.live.pop(data.draw(st.sampled_from(sorted(self.live))))
        held = len(sequence.blocks)
        free = self.pool.free
        self.scheduler.finish(sequence)
        assert self.pool.free == free + held
        with pytest.raises(ValueError, match="neither waiting nor running"):
            self.scheduler.finish(sequence)

    @precondition(lambda self: self.live)
    @rule()
    def step(self):
        before = {s.id for s in self.scheduler.running}
        batch = self.scheduler.schedule()
        assert batch, "work is there and nothing runs"
        self.admitted += [s.id for s in self.scheduler.running if s.id not in before]
        assert sum(chunk.length for chunk in batch) <= BUDGET
        assert all(chunk.length >= 1 for chunk in batch)
        kinds = [chunk.sequence.decoding for chunk in batch]
        assert kinds == sorted(kinds, reverse=True), "decode tokens come first"
        decoding = {s.id for s in self.scheduler.running if s.decoding}
        assert decoding <= {chunk.sequence.id for chunk in batch}, "a decoding sequence was left out"
        prompts = [chunk.sequence.id for chunk in batch if not chunk.sequence.decoding]
        assert prompts == sorted(prompts), "prompts go in order of arrival"
        self.check_slots(batch)
        sampling = [chunk.sequence for chunk in batch if chunk.samples]
        self.scheduler.advance(batch)
        for sequence in sampling:
            sequence.append(1)
            if sequence.used_up:
                self.scheduler.finish(sequence)
                del self.live[sequence.id]

    def check_slots(self, batch):
        inputs = step_inputs_from_batch(batch, SIZE)
        slots = inputs.slot_mapping
        assert len(set(slots.tolist())) == len(slots), "two tokens in one slot"
        assert slots.min() >= 0
        assert slots.max() < BLOCKS * SIZE

    @invariant()
    def conserved(self):
        running = self.scheduler.running
        self.pool.check()
        assert self.pool.held == sum(len(s.blocks) for s in running)
        assert len(running) <= RUNNING
        assert {s.id for s in running} | {s.id for s in self.scheduler.waiting} == set(self.live)
        assert not any(len(s.blocks) for s in self.scheduler.waiting)
        assert self.admitted == sorted(self.admitted), "someone was overtaken"
        assert all(s.computed <= len(s.token_ids) for s in running)

    def teardown(self):
        steps = 0
        while self.live:
            self.step()
            self.conserved()
            steps += 1
            assert steps < 10_000
        assert self.pool.free == BLOCKS
        assert not self.scheduler.has_work
        assert self.scheduler.schedule() == ()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_long_prompt_is_cut_to_the_budget_beside_decoding():
    scheduler = Scheduler(BlockPool(64), SIZE, SchedulerConfig(max_running=4, tokens_per_step=8))
    short, long = Sequence(0, [1, 2], 10), Sequence(1, list(range(20)), 2)
    scheduler.submit(short)
    scheduler.submit(long)
    lengths = []
    for _ in range(4):
        lengths.append([(c.sequence.id, c.length) for c in scheduler.schedule()])
        run_step(scheduler)
    assert lengths == [[(0, 2), (1, 6)], [(0, 1), (1, 7)], [(0, 1), (1, 7)], [(0, 1), (1, 1)]]


def test_the_first_waiting_sequence_is_not_overtaken_by_one_that_would_fit():
    scheduler = Scheduler(BlockPool(4), SIZE, SchedulerConfig(max_running=4, tokens_per_step=64))
    for sequence in (Sequence(0, [1] * 8, 1), Sequence(1, [1] * 16, 1), Sequence(2, [1], 1)):
        scheduler.submit(sequence)
    assert [c.sequence.id for c in scheduler.schedule()] == [0]
    assert [s.id for s in scheduler.waiting] == [1, 2]
    run_step(scheduler)
    assert [c.sequence.id for c in scheduler.schedule()] == [1]


def test_packing_gives_positions_slots_and_rows():
    decoding, prompt = Sequence(0, [5, 6, 7, 8, 9], 8), Sequence(1, [1, 2, 3, 4, 5, 6, 7], 2)
    scheduler = Scheduler(BlockPool(64), SIZE, SchedulerConfig(max_running=2, tokens_per_step=6))
    scheduler.submit(decoding)
    run_step(scheduler)
    scheduler.submit(prompt)
    batch = scheduler.schedule()
    decoding.blocks[1], prompt.blocks[0], prompt.blocks[1] = 11, 9, 4
    inputs = step_inputs_from_batch(batch, SIZE)
    expected = {
        "input_ids": [7, 1, 2, 3, 4, 5],
        "position_ids": [5, 0, 1, 2, 3, 4],
        "logits_indices": [0],
        "cumulative_sequence_length": [0, 1, 6],
        "past_seqlens": [5, 0],
        "block_table": [[0, 11], [9, 4]],
        "slot_mapping": [11 * 4 + 1, 36, 37, 38, 39, 16],
    }
    for name, value in expected.items():
        array = getattr(inputs, name)
        assert array.tolist() == value, name
        assert array.dtype == np.int32
        assert array.flags.c_contiguous


def test_limits_that_contradict_each_other_are_refused():
    with pytest.raises(KilnError, match="raise tokens_per_step or lower max_running"):
        SchedulerConfig(max_running=8, tokens_per_step=4)
    with pytest.raises(KilnError, match="expected at least 1"):
        SchedulerConfig(max_running=0)


def test_a_step_holds_256_decoding_sequences():
    scheduler = Scheduler(BlockPool(256 * 64), 16, SchedulerConfig(max_running=256, tokens_per_step=2048))
    for number in range(256):
        scheduler.submit(Sequence(number, list(range(8)), 500))
    run_step(scheduler)
    for _ in range(30):
        batch = scheduler.schedule()
        inputs = step_inputs_from_batch(batch, 16)
        scheduler.advance(batch)
        for chunk in batch:
            chunk.sequence.append(3)
        assert len(batch) == len(inputs.input_ids) == 256
