"""The rules of the scheduler on steps, one by one: who takes part, with how many tokens, and how they are packed."""

import numpy as np
import pytest

from engines.runtime.packing import step_inputs_from_batch
from engines.runtime.scheduler import SchedulerConfig
from engines.runtime.sequence import Sequence
from plugins.errors import KilnError
from tests.engines.small_scheduler import SIZE, lengths, run_step, scheduler_of


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
