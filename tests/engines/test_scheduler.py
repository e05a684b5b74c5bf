"""The rules of the scheduler, one by one. tests/engines/test_scheduler_machine.py runs them in any order."""

import numpy as np
import pytest

from engines.runtime.packing import step_inputs_from_batch
from engines.runtime.paged_kv import PagedKv
from engines.runtime.scheduler import Scheduler, SchedulerConfig
from engines.runtime.sequence import Sequence
from plugins.errors import KilnError

SIZE = 4


def next_token(token_ids) -> int:
    """What a deterministic model would say after these tokens."""
    return (sum(token_ids) * 31 + len(token_ids)) % 97


def run_step(scheduler: Scheduler, now: float = 0.0, batch=None) -> list[Sequence]:
    """Compute one step, of `batch` if given; returns what finished."""
    batch = scheduler.schedule(now) if batch is None else batch
    sampling = [chunk.sequence for chunk in batch if chunk.rows]
    scheduler.advance(batch)
    for sequence in sampling:
        sequence.append(next_token(sequence.token_ids))
        if sequence.used_up:
            scheduler.finish(sequence)
    return [sequence for sequence in sampling if sequence.used_up]


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


def test_an_aged_backlog_of_batch_takes_no_more_than_its_share_of_places():
    scheduler = scheduler_of(max_running=4, interactive_share=0.75, ageing=10.0)
    for number in range(20):
        scheduler.submit(Sequence(number, [number], 50, lane="batch", arrival=0.0))
    run_step(scheduler, now=1.0)
    for number in range(30, 34):
        scheduler.submit(Sequence(number, [number], 50, arrival=50.0))
    run_step(scheduler, now=50.0)
    assert {s.id for s in scheduler.running} == {0, 30, 31, 32}
    scheduler.finish(next(s for s in scheduler.running if s.id == 0))
    run_step(scheduler, now=51.0)
    assert {s.id for s in scheduler.running} == {1, 30, 31, 32}, "the oldest of batch has its turn, not the newest"


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


def test_while_an_interactive_prompt_is_computed_batch_takes_part_in_its_share_of_steps():
    scheduler = scheduler_of(tokens_per_step=10, interactive_share=0.75, step_stretch=None)
    decoding = Sequence(0, [200], 40, lane="batch")
    scheduler.submit(decoding)
    run_step(scheduler)
    scheduler.submit(Sequence(1, list(range(100, 130)), 1, lane="batch"))
    scheduler.submit(Sequence(2, list(range(60)), 1))
    found = []
    for _ in range(8):
        batch = scheduler.schedule(0.0)
        found.append(lengths(batch))
        run_step(scheduler, batch=batch)
    alone, shared = [(2, 10)], [(0, 1), (1, 9)]
    assert found == [alone] * 3 + [shared] + [alone] * 3 + [shared]


def test_pieces_of_prompts_stretch_the_steps_of_interactive_sequences_only_so_far():
    scheduler = scheduler_of(tokens_per_step=64, step_stretch=3.0)
    for number in (0, 1):
        scheduler.submit(Sequence(number, [number], 40))
    run_step(scheduler)
    for _ in range(3):
        scheduler.observe(scheduler.schedule(0.0), 0.020)
        run_step(scheduler)
    scheduler.submit(Sequence(2, list(range(100)), 1))
    first = scheduler.schedule(0.0)
    assert lengths(first)[-1] == (2, 32), "before it knows what a prompt token costs"
    scheduler.observe(first, 0.020 + 32 * 0.002)
    run_step(scheduler)
    second = scheduler.schedule(0.0)
    assert lengths(second)[-1] == (2, 20), "two more times 20 ms, of 2 ms a token"


def test_batch_sequences_are_not_spared():
    scheduler = scheduler_of(tokens_per_step=64, step_stretch=3.0)
    scheduler.submit(Sequence(0, [1], 40, lane="batch"))
    run_step(scheduler)
    scheduler.submit(Sequence(2, list(range(100)), 1, lane="batch"))
    assert lengths(scheduler.schedule(0.0))[-1] == (2, 63)


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
            reference.append(next_token(reference.token_ids))
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
    statistics = scheduler.kv.statistics
    assert (statistics.prefix_lookups, statistics.prefix_hits, statistics.prefix_saved_tokens) == (3, 1, 8)


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
        ({"interactive_share": 1.0}, r"interactive_share is 1.0; expected 0 to 0\.95"),
        ({"step_stretch": 1.0}, "step_stretch is 1.0; expected more than 1, or None"),
        ({"speculate": -1}, "speculate is -1; expected 0"),
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


def test_a_forked_sequence_writes_to_a_copy_of_the_block_that_both_have_begun():
    scheduler = scheduler_of()
    parent, child = Sequence(0, [1, 2, 3, 4, 5, 6], 10), Sequence(1, [1, 2, 3, 4, 5, 6], 10)
    scheduler.submit(parent)
    scheduler.advance(scheduler.schedule(0.0))
    scheduler.fork(parent, child, 50)
    parent.append(60)
    assert child.blocks == parent.blocks
    before = parent.blocks[1]
    assert lengths(scheduler.schedule(0.0)) == [(0, 1), (1, 1)]
    assert child.blocks[0] == parent.blocks[0]
    assert child.blocks[1] != parent.blocks[1]
    copy = next(block for block in (child.blocks[1], parent.blocks[1]) if block != before)
    assert scheduler.kv.take_moves() == [(before, copy)]
    assert scheduler.kv.take_moves() == []
    assert scheduler.kv.statistics.copied_blocks == 1


def test_a_fork_without_a_place_waits_and_loses_nothing():
    scheduler = scheduler_of(max_running=1)
    parent = Sequence(0, [1, 2, 3, 4, 5], 3)
    scheduler.submit(parent)
    scheduler.submit(Sequence(5, [9], 1))
    scheduler.advance(scheduler.schedule(0.0))
    child = Sequence(1, parent.token_ids, 3)
    scheduler.fork(parent, child, 50)
    parent.append(60)
    assert [s.id for s in scheduler.waiting] == [1, 5], "one that has begun goes before those that have not"
    finished = []
    while scheduler.has_work:
        finished += run_step(scheduler)
    assert [s.id for s in finished] == [0, 1, 5]
    assert child.token_ids[:6].tolist() == [1, 2, 3, 4, 5, 50]
    assert child.generated == 3
    assert scheduler.kv.statistics.prefix_saved_tokens == 4


def test_a_block_whose_content_became_known_is_copied_before_a_fork_writes_to_it():
    """Found by the machine: the parent's draft filled and named the shared block, the parent ended, the child wrote."""
    scheduler = scheduler_of(speculate=3)
    parent = Sequence(0, [1, 2, 3, 4, 5], 10)
    scheduler.submit(parent)
    run_step(scheduler)
    first = next_token(parent.token_ids)
    parent.draft = (first, next_token([*parent.token_ids, first]))
    (chunk,) = scheduler.schedule(0.0)
    assert chunk.rows == 3
    scheduler.advance((chunk,))
    child = Sequence(1, parent.token_ids, 5)
    scheduler.fork(parent, child, 99)
    for drafted in chunk.draft:
        parent.append(drafted)
        scheduler.confirm(parent)
    block = child.blocks[1]
    assert block == parent.blocks[1]
    assert parent.computed == 8
    scheduler.finish(parent)
    assert lengths(scheduler.schedule(0.0)) == [(1, 1)]
    assert child.blocks[1] != block, "what others may ask for stays as it is"
    assert scheduler.kv.take_moves() == [(block, child.blocks[1])]


def test_who_gives_way_takes_its_content_along_and_brings_it_back():
    scheduler = Scheduler(PagedKv(6, SIZE, host_blocks=4, share_prefixes=False), SchedulerConfig(4, 64, headroom=0.0))
    old, young = Sequence(0, [1] * 8, 13, arrival=0.0), Sequence(1, [2] * 8, 9, arrival=1.0)
    for sequence in (old, young):
        scheduler.submit(sequence)
    steps, moves = 0, []
    while scheduler.has_work:
        steps += sum(chunk.length for chunk in scheduler.schedule(0.0))
        moves += scheduler.kv.take_moves()
        run_step(scheduler)
        scheduler.check()
    assert (old.generated, young.generated, young.preemptions) == (13, 9, 1)
    assert steps == 8 + 12 + 8 + 8, "nothing was computed twice"
    out = [(source, target) for source, target in moves if target >= 6]
    back = [(source, target) for source, target in moves if source >= 6]
    assert [target for _, target in out] == [source for source, _ in back]
    assert len(moves) == len(out) + len(back)


def test_drafts_are_cut_to_the_budget_and_left_out_beside_prompts():
    scheduler = scheduler_of(max_running=4, tokens_per_step=8, speculate=5)
    for number in range(2):
        scheduler.submit(Sequence(number, [number], 20))
    run_step(scheduler)
    for sequence in scheduler.running:
        sequence.draft = (1, 2, 3, 4, 5)
    assert lengths(scheduler.schedule(0.0)) == [(0, 4), (1, 4)]
    scheduler.submit(Sequence(2, [7] * 9, 1))
    assert lengths(scheduler.schedule(0.0)) == [(0, 1), (1, 1), (2, 6)]


def moved(moves, content: dict[int, str]) -> dict[int, str]:
    """Block content after moves, one after the other."""
    for source, target in moves:
        content[target] = content.get(source, "")
    return content


def test_a_block_goes_to_the_host_and_becomes_a_copy_in_one_step():
    """The order of moves matters here: the block is read for its old owner before it is written for the new one."""
    kv = PagedKv(6, SIZE, host_blocks=4, share_prefixes=False)
    scheduler = Scheduler(kv, SchedulerConfig(4, 64, headroom=0.0))
    parent = Sequence(0, [1, 2, 3, 4, 5, 6], 6, arrival=0.0)
    victim = Sequence(9, list(range(50, 65)), 2, arrival=5.0)
    for sequence in (parent, victim):
        scheduler.submit(sequence)
    batch = scheduler.schedule(0.0)
    scheduler.advance(batch)
    child = Sequence(1, parent.token_ids, 6, arrival=1.0)
    scheduler.fork(parent, child, 70)
    parent.append(71)
    victim.append(72)
    content = {block: f"{name}{n}" for name, s in (("p", parent), ("v", victim)) for n, block in enumerate(s.blocks)}
    assert kv.free == 0
    shared, taken = parent.blocks[1], victim.blocks[0]
    assert lengths(scheduler.schedule(0.0)) == [(0, 1), (1, 1)]
    moves = kv.take_moves()
    moved(moves, content)
    assert victim.preemptions == 1
    assert [content[6 + block] for block in victim.host_blocks] == ["v0", "v1", "v2", "v3"]
    assert {parent.blocks[1], child.blocks[1]} == {shared, taken}
    assert content[shared] == content[taken] == "p1"
    moved([moves[-1], *moves[:-1]], wrong := {taken: "v0", shared: "p1"})
    assert wrong[6 + victim.host_blocks[0]] != "v0", "in another order the victim would get somebody else's content"


def test_of_two_forks_the_last_owner_of_a_block_needs_no_copy_even_if_the_other_gives_way_in_that_step():
    kv = PagedKv(3, SIZE, share_prefixes=False)
    scheduler = Scheduler(kv, SchedulerConfig(4, 64, headroom=0.0))
    parent, other = Sequence(0, [1, 2, 3, 4, 5], 8, arrival=0.0), Sequence(5, [9, 9], 3, arrival=9.0)
    for sequence in (parent, other):
        scheduler.submit(sequence)
    scheduler.advance(scheduler.schedule(0.0))
    child = Sequence(1, parent.token_ids, 8, arrival=20.0, lane="batch")
    scheduler.fork(parent, child, 70)
    parent.append(71)
    other.append(72)
    assert (kv.free, child.blocks) == (0, parent.blocks)
    assert lengths(scheduler.schedule(0.0)) == [(0, 1), (5, 1)]
    assert (child.preemptions, kv.take_moves(), kv.statistics.copied_blocks) == (1, [], 0)
    scheduler.check()
