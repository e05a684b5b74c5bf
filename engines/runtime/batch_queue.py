"""Which waiting requests of a model without a KV cache run next, and when: dynamic batching over two lanes.

Pure Python: no tensors, no threads, and no clock; `now` is passed in, in seconds of any monotonic clock. What makes two
requests alike enough to share a batch is `engines.runtime.shape_buckets`' business. Rules:

1. Lanes: `interactive` goes before `batch`; within a lane, first come first served. Where both wait, a batch request
   that has waited longer than `ageing` goes first as often as its lane's share allows, so that nothing starves and a
   backlog does not hold up the interactive lane.
2. A batch is the request whose turn it is and, in turns, those like it that fit into its limit of rows. Where both
   lanes want more rows than that, each gets its share; what one lane does not need, the other gets.
3. It starts as soon as the engine is free, with one exception: while fewer wait than were here when the last batch
   ended (those who were served then are likely to come back), and less than `max_batch` rows wait, it is put off by up
   to `max_wait` from the moment the first request found the engine free. So a caller who is alone never waits for
   company, callers who come back together run together, and a backlog runs at once.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from engines.runtime.scheduler import require_room
from engines.runtime.sequence import LANES, Lane
from plugins.errors import KilnError


@dataclass(frozen=True)
class BatchingConfig:
    """How requests to a model without a KV cache share it. Raises KilnError for values without a meaning."""

    max_batch: int = 16
    """Rows of one batch, which an interactive request may have to wait for; 1: no batching."""
    max_wait: float = 0.002
    """Seconds that a request may wait for company while the engine is free."""
    buckets: tuple[int, ...] = tuple(sorted(half << power for power in range(2, 14) for half in (2, 3)))
    """Lengths of token sequences: those between the same two share a batch, padded to the longest of them. By default
    8, 12, 16, 24, 32, 48 and so on, so that above 8 at most a third of a row is padding."""
    tokens_per_batch: int = 4096
    """Rows times the upper end of the bucket, at most, for a batch of token sequences; one row always runs."""
    interactive_share: float = 0.8
    """Of a batch's rows, and of the first turns, where both lanes want them; at most 0.95."""
    ageing: float = 30.0
    """Seconds of waiting after which a batch request may go before interactive ones, within its lane's share."""
    max_waiting: int = 4096
    """Requests that may wait."""
    tolerance: float = 1e-3
    """How far a request's results may be from those it has alone, relative to their largest value, for a model to be
    run in batches: rounding is far below, an operator that mixes rows or counts padding far above."""

    def __post_init__(self) -> None:
        for name in ("max_batch", "tokens_per_batch", "max_waiting"):
            if getattr(self, name) < 1:
                raise KilnError(f"{name} is {getattr(self, name)}; expected at least 1")
        for name in ("max_wait", "ageing", "tolerance"):
            if not getattr(self, name) >= 0:
                raise KilnError(f"{name} is {getattr(self, name)}; expected 0 or more")
        if not 0 <= self.interactive_share <= 0.95:
            raise KilnError(f"interactive_share is {self.interactive_share}; expected 0 to 0.95")
        if any(length < 1 for length in self.buckets) or list(self.buckets) != sorted(set(self.buckets)):
            raise KilnError(
                f"buckets are {self.buckets}; expected ascending lengths of at least 1, such as (16, 32, 64)"
            )


@dataclass(frozen=True, eq=False)
class Waiting:
    """One request in the queue."""

    number: int
    key: Hashable | None
    """Requests with the same key may share a batch; None shares with nobody."""
    rows: int
    limit: int
    """Rows of a batch with this key; a request with more runs alone."""
    lane: Lane
    arrival: float
    deadline: float | None = None


class BatchQueue:
    """The caller adds requests in order of arrival, runs what `select` gives after `take`, and then calls `ended`."""

    def __init__(self, config: BatchingConfig) -> None:
        self.config = config
        self._waiting: dict[Lane, dict[int, Waiting]] = {lane: {} for lane in LANES}  # by number, by arrival
        self._rows = 0  # of all that wait
        self._running = 0  # requests in the batch that was taken
        self._expected = 0  # requests that were here when the last batch ended
        self._free_since = float("-inf")
        self._batch_credit = 1.0  # grows by its share of turns where both lanes wait; 1 lets an aged one go first

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __contains__(self, number: int) -> bool:
        return any(number in queue for queue in self._waiting.values())

    @property
    def rows(self) -> int:
        return self._rows

    def require_room(self) -> None:
        """Raise QueueFullError when as many wait as may."""
        require_room(len(self), self.config.max_waiting)

    def add(self, request: Waiting) -> None:
        """Queue a request. Raises ValueError for a number already here."""
        if request.number in self:
            raise ValueError(f"request {request.number} waits already")
        self._waiting[request.lane][request.number] = request
        self._rows += request.rows

    def remove(self, request: Waiting) -> None:
        """Take out a request that waits. Raises KeyError for one that does not."""
        del self._waiting[request.lane][request.number]
        self._rows -= request.rows

    def due(self, now: float) -> float | None:
        """When the next batch should start if nobody else comes and the engine is free; None when nobody waits."""
        if not len(self):
            return None
        first = next(iter(self._turns(now)[0].values()))
        oldest = min(next(iter(queue.values())).arrival for queue in self._waiting.values() if queue)
        settled = first.key is None or first.rows >= first.limit
        if settled or self._rows >= self.config.max_batch or len(self) >= self._expected:
            return oldest
        return max(oldest, self._free_since) + self.config.max_wait

    def select(self, now: float) -> tuple[Waiting, ...]:
        """The next batch, in turns; empty only when nobody waits. Changes nothing."""
        if not len(self):
            return ()
        turns = self._turns(now)
        first = next(iter(turns[0].values()))
        if first.key is None or first.rows >= first.limit:
            return (first,)
        leading, following = ([other for other in lane.values() if other.key == first.key] for lane in turns)
        wanted, others = (sum(request.rows for request in lane) for lane in (leading, following))
        interactive = self.config.interactive_share
        share = max(int(first.limit * (interactive if first.lane == "interactive" else 1 - interactive)), first.rows)
        room = min(wanted, max(share, first.limit - others))
        return (*_fitting(leading, room), *_fitting(following, first.limit - room))

    def take(self, batch: tuple[Waiting, ...]) -> None:
        """A batch starts: its requests wait no longer."""
        if all(self._waiting.values()):
            spent = 1.0 if batch[0].lane == "batch" else 0.0
            self._batch_credit = min(self._batch_credit - spent + 1 - self.config.interactive_share, 1.0)
        for request in batch:
            self.remove(request)
        self._running = len(batch)

    def ended(self, now: float) -> None:
        """The batch that was taken has ended; the engine is free."""
        self._expected = self._running + len(self)
        self._running = 0
        self._free_since = now

    def _turns(self, now: float) -> tuple[dict[int, Waiting], dict[int, Waiting]]:
        """The lane whose turn it is, which is not empty unless both are, and the other one."""
        interactive, batch = (self._waiting[lane] for lane in LANES)
        if not interactive:
            return batch, interactive
        aged = batch and now - next(iter(batch.values())).arrival >= self.config.ageing
        return (batch, interactive) if aged and self._batch_credit >= 1 else (interactive, batch)


def _fitting(requests: list[Waiting], room: int) -> list[Waiting]:
    """As many as fit, none of them past one that does not."""
    taken: list[Waiting] = []
    for request in requests:
        room -= request.rows
        if room < 0:
            break
        taken.append(request)
    return taken
