"""The scheduler by itself: a state machine over submits, steps and cancellations, and its rules one by one."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engines.runtime.packing import step_inputs_from_batch
from engines.runtime.paged_kv import PagedKv
from engines.runtime.scheduler import QueueFullError, Scheduler, SchedulerConfig
from engines.runtime.sequence import Sequence
from plugins.errors import KilnError

BLOCKS, SIZE, RUNNING, BUDGET = 10, 4, 3, 7


def next_token(sequence: Sequence) -> int:
    """What a deterministic model would say after these tokens."""
    return (sum(sequence.token_ids) * 31 + len(sequence.token_ids)) % 97


def run_step(scheduler: Scheduler, now: float = 0.0) -> list[Sequence]:
    """Compute one step; returns what finished."""
    batch = scheduler.schedule(now)
    sampling = [chunk.sequence for chunk in batch if chunk.rows]
    scheduler.advance(batch)
    for sequence in sampling:
        sequence.append(next_token(sequence))
        if sequence.used_up:
            scheduler.finish(sequence)
    return [sequence for sequence in sampling if sequence.used_up]


class SchedulerMachine(RuleBasedStateMachine):
    """Submits, steps and cancels in any order; the end runs everything that is left to its outcome.

    The cache is modelled: every slot remembers the whole history of the token that was written to it, so a wrong block,
    a stale prefix or a token computed twice shows.
    """

    def __init__(self):
        super().__init__()
        config = SchedulerConfig(RUNNING, BUDGET, interactive_share=0.6, ageing=50.0, headroom=0.2, max_waiting=40)
        self.kv = PagedKv(BLOCKS, SIZE)
        self.scheduler = Scheduler(self.kv, config)
        self.live: dict[int, Sequence] = {}
        self.cache: dict[int, tuple[int, ...]] = {}
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
            self.next_id, prompt, max_tokens, lane=lane, arrival=self.now, salt=tenant, deadline=deadline
        )
        self.next_id += 1
        if -(-(len(prompt) + max_tokens - 1) // SIZE) > BLOCKS:
            with pytest.raises(KilnError, match=r"needs \d+ cache blocks of 4 tokens, the engine has 10"):
                self.scheduler.submit(sequence)
        elif len(self.scheduler.waiting) >= 40:
            with pytest.raises(QueueFullError, match="40 requests wait already"):
                self.scheduler.require_room()
        else:
            self.scheduler.submit(sequence)
            self.live[sequence.id] = sequence

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data):
        self.end(self.live[data.draw(st.sampled_from(sorted(self.live)))])

    def end(self, sequence):
        del self.live[sequence.id]
        self.scheduler.finish(sequence)
        assert not sequence.blocks
        with pytest.raises(ValueError, match="neither waiting nor running"):
            self.scheduler.finish(sequence)

    @precondition(lambda self: self.live)
    @rule(seconds=st.sampled_from([0.0, 1.0, 30.0]))
    def step(self, seconds):
        self.now += seconds
        for sequence in self.scheduler.expired(self.now):
            assert sequence.deadline <= self.now
            self.end(sequence)
        if not self.live:
            assert not self.scheduler.has_work
            return
        before = {s.id: s.generated for s in self.scheduler.running}
        batch = self.scheduler.schedule(self.now)
        assert batch, "work is there and nothing runs"
        running = {s.id for s in self.scheduler.running}
        assert {chunk.sequence.id for chunk in batch} <= running
        assert len({chunk.sequence.id for chunk in batch}) == len(batch)
        assert sum(chunk.length for chunk in batch) <= BUDGET
        assert all(chunk.length >= 1 for chunk in batch)
        kinds = [chunk.sequence.decoding for chunk in batch]
        assert kinds == sorted(kinds, reverse=True), "decode tokens come first"
        assert {s.id for s in self.scheduler.running if s.decoding} <= {chunk.sequence.id for chunk in batch}
        gone = [generated for id, generated in before.items() if id not in running]
        assert all(self.live[id].generated == before[id] for id in before), "no step takes a token away"
        assert len(gone) <= len(before)
        self.compute(batch)

    def compute(self, batch):
        inputs = step_inputs_from_batch(batch, SIZE)
        assert len(set(inputs.slot_mapping.tolist())) == len(inputs.slot_mapping), "two tokens in one slot"
        for chunk in batch:
            sequence = chunk.sequence
            for position in range(chunk.start, chunk.end):
                slot = sequence.blocks[position // SIZE] * SIZE + position % SIZE
                self.cache[slot] = tuple(sequence.token_ids[: position + 1])
        for chunk in batch:  # everything that the step reads is there, shared prefixes included
            sequence = chunk.sequence
            for position in range(chunk.end):
                slot = sequence.blocks[position // SIZE] * SIZE + position % SIZE
                assert self.cache[slot] == tuple(sequence.token_ids[: position + 1])
        sampling = [chunk.sequence for chunk in batch if chunk.rows]
        self.scheduler.advance(batch)
        for sequence in sampling:
            sequence.append(next_token(sequence))
            if sequence.used_up:
                del self.live[sequence.id]
                self.scheduler.finish(sequence)

    @invariant()
    def conserved(self):
        self.scheduler.check()
        assert self.kv.free + self.kv.cached + self.kv.held == BLOCKS
        running, waiting = self.scheduler.running, self.scheduler.waiting
        assert len(running) <= RUNNING
        assert {s.id for s in running} | {s.id for s in waiting} == set(self.live)
        for sequence in running:
            assert sequence.computed <= len(sequence.token_ids)
            assert len(sequence.blocks) * SIZE >= sequence.computed
        for lane in ("interactive", "batch"):
            fresh = [s.id for s in waiting if s.lane == lane and not s.preemptions]
            assert fresh == sorted(fresh), "first come, first served within a lane"

    def teardown(self):
        steps = 0
        while self.live:
            self.step(0.0)
            self.conserved()
            steps += 1
            assert steps < 10_000, "somebody never comes to an end"
        assert self.kv.held == 0
        assert not self.scheduler.has_work
        assert self.scheduler.schedule(self.now) == ()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


def scheduler_of(blocks: int = 64, **options) -> Scheduler:
    return Scheduler(PagedKv(blocks, SIZE), SchedulerConfig(**{"max_running": 4, "tokens_per_step": 64, **options}))


def lengths(batch) -> list[tuple[int, int]]:
    return [(chunk.sequence.id, chunk.length) for chunk in batch]


def test_a_long_prompt_is_cut_to_the_budget_beside_decoding():
    scheduler = scheduler_of(tokens_per_step=8)
    scheduler.submit(Sequence(0, [1, 2], 10))
    scheduler.submit(Sequence(1, list(range(20)), 2))
    found = []
    for _ in range(4):
        found.append(lengths(scheduler.schedule(0.0)))
        run_step(scheduler)
    assert found == [[(0, 2), (1, 6)], [(0, 1), (1, 7)], [(0, 1), (1, 7)], [(0, 1), (1, 1)]]


def test_the_first_waiting_sequence_is_not_overtaken_by_one_that_would_fit():
    scheduler = scheduler_of(blocks=4, headroom=0.0)
    for sequence in (Sequence(0, [1] * 8, 1), Sequence(1, [2] * 16, 1), Sequence(2, [3], 1)):
        scheduler.submit(sequence)
    assert lengths(scheduler.schedule(0.0)) == [(0, 8)]
    assert [s.id for s in scheduler.waiting] == [1, 2]
    run_step(scheduler)
    assert lengths(scheduler.schedule(0.0)) == [(1, 16)]


def test_interactive_goes_first_until_batch_has_aged():
    scheduler = scheduler_of(max_running=1, ageing=10.0)
    scheduler.submit(Sequence(0, [1], 1, lane="batch", arrival=0.0))
    for number in (1, 2):
        scheduler.submit(Sequence(number, [1], 1, arrival=float(number)))
    assert [s.id for s in run_step(scheduler, now=3.0)] == [1]
    assert [s.id for s in run_step(scheduler, now=11.0)] == [0]
    assert [s.id for s in run_step(scheduler, now=11.0)] == [2]


def test_an_interactive_request_takes_a_place_that_batch_has_beyond_its_share():
    scheduler = scheduler_of(max_running=4, interactive_share=0.5)
    for number in range(4):
        scheduler.submit(Sequence(number, [number] * 3, 50, lane="batch"))
    run_step(scheduler)
    scheduler.submit(Sequence(9, [1], 5))
    run_step(scheduler)
    assert {s.id for s in scheduler.running} == {0, 1, 2, 9}
    assert [s.id for s in scheduler.waiting] == [3], "the latest of those that generated least gave way"
    for number in (10, 11):
        scheduler.submit(Sequence(number, [1], 5))
    run_step(scheduler)
    assert {s.id for s in scheduler.running} == {0, 1, 9, 10}, "batch keeps its share"


def test_both_lanes_get_their_share_of_a_step_and_what_one_leaves_goes_to_the_other():
    scheduler = scheduler_of(tokens_per_step=10, interactive_share=0.8)
    scheduler.submit(Sequence(0, list(range(100, 130)), 1, lane="batch"))
    scheduler.submit(Sequence(1, list(range(12)), 1))
    assert sorted(lengths(scheduler.schedule(0.0))) == [(0, 2), (1, 8)]
    run_step(scheduler)
    assert sorted(lengths(scheduler.schedule(0.0))) == [(0, 6), (1, 4)]


def test_the_cheapest_to_repeat_gives_up_its_blocks_and_resumes_without_losing_a_token():
    scheduler = scheduler_of(blocks=6, headroom=0.0)
    old, young = Sequence(0, [1] * 8, 13, arrival=0.0), Sequence(1, [2] * 8, 9, arrival=1.0)
    alone = [Sequence(s.id, s.token_ids, s.max_tokens) for s in (old, young)]
    for sequence in (old, young):
        scheduler.submit(sequence)
    finished = []
    while len(finished) < 2:
        finished += run_step(scheduler)
        scheduler.check()
    assert [s.id for s in finished] == [0, 1]
    assert (old.preemptions, young.preemptions, scheduler.preemptions) == (0, 1, 1)
    for sequence, reference in zip((old, young), alone, strict=True):
        while not reference.used_up:
            reference.computed = len(reference.token_ids)
            reference.append(next_token(reference))
        assert sequence.token_ids == reference.token_ids


def test_headroom_is_left_for_those_that_run():
    scheduler = scheduler_of(blocks=10, headroom=0.3)
    scheduler.submit(Sequence(0, [1] * 16, 4))
    scheduler.submit(Sequence(1, [2] * 16, 4))
    run_step(scheduler)
    assert [s.id for s in scheduler.running] == [0], "4 + 4 of 10 blocks leave less than 3"
    tight = scheduler_of(blocks=5, headroom=0.3)
    tight.submit(Sequence(0, [1] * 20, 1))
    assert lengths(tight.schedule(0.0)) == [(0, 20)], "one that runs alone needs no headroom"


def test_a_known_prefix_is_not_computed_again_and_not_across_tenants():
    scheduler = scheduler_of()
    prompt = list(range(11))
    for number, salt in ((0, b"a"), (1, b"a"), (2, b"b")):
        scheduler.submit(Sequence(number, [*prompt, number], 1, salt=salt))
        batch = scheduler.schedule(0.0)
        assert [(chunk.start, chunk.length) for chunk in batch] == [(8, 4) if number == 1 else (0, 12)]
        run_step(scheduler)
    statistics = scheduler.kv.prefixes.statistics
    assert (statistics.lookups, statistics.hits, statistics.saved_tokens) == (3, 1, 8)


def test_of_a_prompt_that_is_known_as_a_whole_its_last_block_is_computed():
    scheduler = scheduler_of()
    for number in range(2):
        scheduler.submit(Sequence(number, list(range(8)), 1))
        (chunk,) = scheduler.schedule(0.0)
        expected = 4 if number else 8
        assert (chunk.start, chunk.length, bool(chunk.rows)) == (8 - expected, expected, True)
        run_step(scheduler)


def test_lone_requests_wait_for_company_but_not_for_ever():
    scheduler = scheduler_of(batch_wait=0.5, max_running=2)
    assert scheduler.wait(0.0) == 0.0
    scheduler.submit(Sequence(0, [1], 2, arrival=10.0))
    assert scheduler.wait(10.1) == pytest.approx(0.4)
    assert scheduler.wait(10.6) == 0.0
    scheduler.submit(Sequence(1, [1], 2, arrival=10.2))
    assert scheduler.wait(10.2) == 0.0, "all places are taken"
    run_step(scheduler, 10.2)
    scheduler.submit(Sequence(2, [1], 2, arrival=10.3))
    assert scheduler.wait(10.3) == 0.0, "a step runs anyway"


def test_packing_gives_positions_slots_and_rows():
    decoding, prompt = Sequence(0, [5, 6, 7, 8, 9], 8), Sequence(1, [1, 2, 3, 4, 5, 6, 7], 2)
    scheduler = scheduler_of(max_running=2, tokens_per_step=6)
    scheduler.submit(decoding)
    run_step(scheduler)
    decoding.token_ids[5] = 7
    scheduler.submit(prompt)
    batch = scheduler.schedule(0.0)
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_running": 8, "tokens_per_step": 4}, "raise tokens_per_step or lower max_running"),
        ({"max_running": 0}, "max_running is 0; expected at least 1"),
        ({"interactive_share": 1.2}, "interactive_share is 1.2; expected 0 to 1"),
        ({"headroom": 1.0}, r"headroom is 1.0; expected 0 to 0\.95"),
        ({"ageing": -1.0}, "ageing is -1.0; expected 0 or more seconds"),
        ({"batch_wait": float("nan")}, "batch_wait is nan"),
        ({"max_waiting": 0}, "max_waiting is 0"),
    ],
)
def test_limits_that_make_no_sense_are_refused(options, message):
    with pytest.raises(KilnError, match=message):
        SchedulerConfig(**options)


def test_those_that_share_a_prefix_with_one_that_is_just_computed_wait_for_it():
    scheduler = scheduler_of(tokens_per_step=16, max_running=8)
    prompt = list(range(20))
    for number in range(4):
        scheduler.submit(Sequence(number, [*prompt, 50 + number], 2))
    scheduler.submit(Sequence(9, [1, 2, 3], 2))
    assert sorted(lengths(scheduler.schedule(0.0))) == [(0, 16)]
    assert {s.id for s in scheduler.running} == {0, 9}, "one with another prompt is not held up"
    computed = 0
    while scheduler.has_work:
        computed += sum(chunk.length for chunk in scheduler.schedule(0.0))
        run_step(scheduler)
    assert computed == 21 + 3 + 3 * 1 + 5, "the prefix once, one token of each other, and one decode step each"


def test_nobody_waits_for_a_prefix_whose_owner_is_gone():
    scheduler = scheduler_of(tokens_per_step=4)
    first, second = (Sequence(number, [*range(20), number], 2) for number in range(2))
    for sequence in (first, second):
        scheduler.submit(sequence)
    run_step(scheduler)
    assert scheduler.waiting == (second,)
    scheduler.finish(first)
    assert lengths(scheduler.schedule(0.0)) == [(1, 4)]
    assert second.computed == 4, "what was computed is shared"
