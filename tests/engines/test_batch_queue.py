"""The queue of dynamic batching: rules one by one, then random operations against what the rules promise."""

from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engines.runtime.batch_queue import BatchingConfig, BatchQueue, Waiting
from engines.runtime.scheduler import QueueFullError
from plugins.errors import KilnError

CONFIG = BatchingConfig(max_batch=4, max_wait=1.0, ageing=10.0, interactive_share=0.5, max_waiting=8)


def queue_of(*requests: Waiting, config: BatchingConfig = CONFIG) -> BatchQueue:
    queue = BatchQueue(config)
    for request in requests:
        queue.add(request)
    return queue


_numbers = count()


def waiting(name="a", rows=1, lane="interactive", arrival=0.0, limit=4) -> Waiting:
    return Waiting(next(_numbers), name, rows, limit, lane, arrival)


def numbers(batch) -> list[int]:
    return [request.number for request in batch]


def test_like_requests_share_a_batch_in_turns():
    first, other, second, third = waiting(), waiting("b"), waiting(rows=2), waiting(rows=2)
    queue = queue_of(first, other, second, third)
    assert queue.select(0) == (first, second)  # third does not fit
    queue.take((first, second))
    assert queue.select(0) == (other,)
    queue.take((other,))
    assert queue.select(0) == (third,)
    assert len(queue) == 1
    assert queue.rows == 2


def test_nobody_overtakes_one_that_does_not_fit():
    first, large, small = waiting(rows=2), waiting(rows=3), waiting()
    assert queue_of(first, large, small).select(0) == (first,)


def test_what_shares_with_nobody_or_fills_a_batch_runs_alone():
    for alone in (waiting(None), waiting(rows=9)):
        queue = queue_of(alone, waiting(None), waiting(rows=1))
        assert queue.select(0) == (alone,)
        assert queue.due(0) == 0


def test_interactive_goes_first_and_aged_requests_within_their_share():
    old = waiting("x", lane="batch", arrival=0)
    new = waiting("y", lane="batch", arrival=5)
    interactive = waiting("z", arrival=6)
    queue = queue_of(old, new, interactive)
    assert queue.select(9) == (interactive,)
    assert queue.select(10) == (old,)
    queue.take((old,))
    assert queue.select(16) == (interactive,)  # the other lane has had its turn
    queue.take((interactive,))
    queue.add(waiting("z", arrival=16))
    assert queue.select(16) == (new,)


def test_lanes_get_their_shares_of_the_rows_that_both_want():
    interactive = [waiting() for _ in range(4)]
    batch = [waiting(lane="batch") for _ in range(4)]
    assert queue_of(*batch, *interactive).select(0) == (*interactive[:2], *batch[:2])
    assert queue_of(*batch, *interactive[:1]).select(0) == (interactive[0], *batch[:3])
    assert queue_of(*batch[:1], *interactive).select(0) == (*interactive[:3], batch[0])
    assert queue_of(*batch).select(0) == tuple(batch)


def test_who_is_alone_does_not_wait_for_company():
    queue = queue_of(only := waiting(arrival=3))
    assert queue.due(3) == 3
    queue.take((only,))
    queue.ended(5)
    queue.add(waiting(arrival=6))  # came back, as the only one that was here
    assert queue.due(6) == 6


def test_who_had_company_waits_for_it_to_come_back():
    pair = (waiting(), waiting())
    queue = queue_of(*pair)
    assert queue.due(0) == 0
    queue.take(pair)
    late = waiting(arrival=2)
    queue.add(late)
    queue.ended(5)  # three were here
    assert queue.due(5) == 6  # max_wait from the moment when the engine became free
    queue.add(waiting(arrival=5.1))
    assert queue.due(5.1) == 6
    queue.add(waiting(arrival=5.2))
    assert queue.due(5.2) <= 5.2  # everyone is here
    queue.take(queue.select(6))
    queue.ended(7)
    queue.add(waiting(arrival=8))
    assert queue.due(8) == 9


def test_a_full_batch_waits_for_nobody():
    queue = queue_of(*(crowd := [waiting() for _ in range(8)]))
    queue.take(tuple(crowd))
    queue.ended(1)
    for number in range(3):
        queue.add(waiting(arrival=1))
        assert queue.due(1) == 2, number
    queue.add(waiting("b", arrival=1))
    assert queue.due(1) == 1


def test_a_full_queue_refuses():
    queue = queue_of(*(waiting() for _ in range(7)))
    queue.require_room()
    queue.add(last := waiting())
    with pytest.raises(QueueFullError, match=r"8 requests wait already, which is the limit \(max_waiting\)"):
        queue.require_room()
    queue.remove(last)
    queue.require_room()


def test_misuse_is_an_error():
    queue = queue_of(here := waiting())
    with pytest.raises(ValueError, match="waits already"):
        queue.add(here)
    queue.remove(here)
    with pytest.raises(KeyError):
        queue.remove(here)
    assert queue.due(0) is None
    assert queue.select(0) == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, "max_batch is 0; expected at least 1"),
        ({"max_waiting": 0}, "max_waiting is 0"),
        ({"tokens_per_batch": -1}, "tokens_per_batch is -1"),
        ({"max_wait": -0.1}, "max_wait is -0.1; expected 0 or more"),
        ({"ageing": float("nan")}, "ageing is nan"),
        ({"tolerance": -1.0}, "tolerance is -1.0"),
        ({"interactive_share": 1.5}, "interactive_share is 1.5; expected 0 to 0.95"),
        ({"buckets": (16, 8)}, "expected ascending lengths"),
        ({"buckets": (0, 8)}, "expected ascending lengths"),
    ],
)
def test_contradictions_are_named(options, message):
    with pytest.raises(KilnError, match=message):
        BatchingConfig(**options)


class Batching(RuleBasedStateMachine):
    """Requests come, go and run; the model keeps those that wait in two lists and the batch that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.config = BatchingConfig(max_batch=6, max_wait=2.0, ageing=20.0, interactive_share=0.7)
        self.queue = BatchQueue(self.config)
        self.lanes: dict[str, list[Waiting]] = {"interactive": [], "batch": []}
        self.running: tuple[Waiting, ...] = ()
        self.now = 0.0
        self.free_since = 0.0
        self.number = 0
        self.contested = self.batch_first = self.passed_over = 0

    @property
    def everyone(self) -> list[Waiting]:
        return [*self.lanes["interactive"], *self.lanes["batch"]]

    @rule(
        key=st.sampled_from(["a", "b", None]),
        rows=st.integers(1, 8),
        lane=st.sampled_from(["interactive", "interactive", "batch"]),
    )
    def add(self, key: str | None, rows: int, lane: str) -> None:
        limit = {"a": 6, "b": 3, None: 1}[key]
        request = Waiting(self.number, key, rows, limit, lane, self.now)
        self.number += 1
        self.queue.add(request)
        self.lanes[lane].append(request)

    @rule(seconds=st.floats(0.01, 8))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.everyone)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.everyone))
        self.queue.remove(request)
        self.lanes[request.lane].remove(request)

    @precondition(lambda self: self.running)
    @rule()
    def end(self) -> None:
        self.queue.ended(self.now)
        self.running = ()
        self.free_since = self.now

    @precondition(lambda self: self.everyone and not self.running)
    @rule()
    def start(self) -> None:
        self.now = max(self.now, self.queue.due(self.now))
        batch = self.queue.select(self.now)
        first = batch[0]
        assert first is self.lanes[first.lane][0], "first come, first served"
        self.check_lane(first)
        if len(batch) > 1:
            assert {request.key for request in batch} == {first.key} != {None}
            assert sum(request.rows for request in batch) <= first.limit
            self.check_nobody_was_overtaken(batch)
        self.queue.take(batch)
        self.running = batch
        for request in batch:
            self.lanes[request.lane].remove(request)

    def check_lane(self, first: Waiting) -> None:
        """Where both lanes wait, the batch lane goes first only with an aged request, within its share, and often
        enough."""
        if not all(self.lanes.values()):
            return
        share = 1 - self.config.interactive_share
        aged = self.now - self.lanes["batch"][0].arrival >= self.config.ageing
        self.contested += 1
        if first.lane == "batch":
            assert aged
            self.batch_first += 1
            self.passed_over = 0
            assert self.batch_first <= 1 + self.contested * share
        elif aged:
            self.passed_over += 1
            assert self.passed_over <= 1 / share + 1

    def check_nobody_was_overtaken(self, batch: tuple[Waiting, ...]) -> None:
        """Of each lane, those that run are the first; one of the other lane runs beside the leading one only within
        what that leaves or its lane's share."""
        leading, following = batch[0].lane, "batch" if batch[0].lane == "interactive" else "interactive"
        like = {lane: [r for r in self.lanes[lane] if r.key == batch[0].key] for lane in self.lanes}
        taken = {lane: [r for r in batch if r.lane == lane] for lane in self.lanes}
        assert all(like[lane][: len(some)] == some for lane, some in taken.items())
        if taken[following] and len(taken[leading]) < len(like[leading]):
            left = like[leading][len(taken[leading])]
            rows = sum(request.rows for request in taken[leading])
            share = self.config.interactive_share if leading == "interactive" else 1 - self.config.interactive_share
            assert rows + left.rows > int(batch[0].limit * share)

    @invariant()
    def all_are_counted(self) -> None:
        assert len(self.queue) == len(self.everyone)
        assert self.queue.rows == sum(request.rows for request in self.everyone)
        assert all(request.number in self.queue for request in self.everyone)
        assert all(request.number not in self.queue for request in self.running)

    @invariant()
    def nobody_waits_long_for_company(self) -> None:
        due = self.queue.due(self.now)
        if not self.everyone:
            assert due is None
        elif not self.running:
            oldest = min(request.arrival for request in self.everyone)
            assert due is not None
            assert due <= max(oldest, self.free_since) + self.config.max_wait


TestBatching = Batching.TestCase
TestBatching.settings = settings(stateful_step_count=60, deadline=None)
