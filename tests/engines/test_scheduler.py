"""The rules of the scheduler on blocks, one by one: headroom, shared prefixes, forks, and who gives way.

Its rules on steps are in test_scheduler_steps.py; test_scheduler_machine.py runs them all in any order.
"""

from engines.runtime.paged_kv import PagedKv
from engines.runtime.scheduler import Scheduler, SchedulerConfig
from engines.runtime.sequence import Sequence
from tests.engines.small_scheduler import SIZE, lengths, next_token, run_step, scheduler_of


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
