"""Which tokens the next step computes: continuous batching over two lanes, with preemption and shared prefixes.

Pure Python over `Sequence` and `KvCache`; no tensors, no text, and no clock: `now` is passed in, in
seconds of any monotonic clock. Rules:

1. Lanes: `interactive` goes before `batch`; within a lane, first come first served, and one that was preempted before
   all that wait. A batch sequence that has waited longer than `ageing` goes with the interactive ones, by arrival,
   while its lane has less than its share of the places, so that nothing starves.
2. Admission: the next waiting sequence runs when fewer than `max_running` run and its known tokens fit into the pool
   beside `headroom`, which is left for those that run to grow (a sequence that would run alone needs none). Blocks of a
   known prefix are shared and count as computed; one whose next block is just being computed by another waits for
   that, and does not hold up those behind it. When all places are taken, an interactive sequence that waits takes
   one that the batch lane has beyond its share.
3. A step takes one token of every decoding sequence, then pieces of prompts, within `tokens_per_step`; beside
   interactive sequences that decode, no more than make it `step_stretch` times as long as without. While an interactive
   prompt is being computed, the batch lane takes part in its share of the steps only, and in those goes first.
4. A decoding sequence that needs a block when none is available takes it from the running sequence that is cheapest
   to repeat: in the lowest lane, with the fewest generated tokens, the latest to arrive. That one gives up all of its
   blocks and waits; later it computes its known tokens again, or brings them back from host memory. No token is lost,
   and none is sampled twice.
5. While nothing runs and fewer than `max_running` wait, a first step may be put off by up to `batch_wait` seconds
   after the oldest arrival, so that requests that arrive together start together.
6. Where steps are launched before those before them have ended, nobody has to give way meanwhile: what would take
   that is asked for again when none is in flight.
7. Drafted tokens are computed along where a step has no prompts, within `tokens_per_step`, and where blocks are there
   without preemption.
"""

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from engines.runtime.batch import Batch, Chunk
from engines.runtime.block_pool import BlockHash
from engines.runtime.kv_cache import KvCache
from engines.runtime.launched import LaunchedSteps, StepLoad, load_of_batch
from engines.runtime.sequence import LANES, Lane, Sequence
from engines.runtime.step_cost import StepCost
from plugins.errors import KilnError

_MOST_SHARE = 0.95
"""Of any share: who gets none of something starves."""


class QueueFullError(KilnError):
    """As many requests wait as may: try again later."""


def require_room(waiting: int, max_waiting: int) -> None:
    """Raise QueueFullError when so many wait that nobody else may."""
    if waiting >= max_waiting:
        raise QueueFullError(f"{max_waiting} requests wait already, which is the limit (max_waiting); try again later")


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits and shares. Raises KilnError when they contradict each other."""

    max_running: int = 16
    """Sequences that run at a time."""
    tokens_per_step: int = 128
    """Tokens that one step computes at most: the longest that anybody waits for a step to end."""
    step_stretch: float | None = 2.5
    """How much longer pieces of prompts may make a step for interactive sequences that decode in it; None: any."""
    interactive_share: float = 0.8
    """Of places, and of steps while an interactive prompt is computed, where both lanes want them."""
    ageing: float = 30.0
    """Seconds of waiting after which a batch sequence goes with the interactive ones."""
    headroom: float = 0.2
    """Share of the pool that admission leaves to those that run."""
    max_waiting: int = 4096
    """Sequences that may wait."""
    batch_wait: float = 0.0
    """Seconds that a first request may wait for company."""
    share_prefixes: bool = True
    """Whether requests of one tenant that begin alike share what is computed."""
    speculate: int = 0
    """Most tokens of an answer that a step tries ahead, found by looking up the last ones before; 0: off."""
    overlap: bool = True
    """Whether a step's text and readers are served while the next one computes."""
    run_ahead: bool = True
    """Whether the next step is launched before this one's tokens are known, where the backend takes it; with
    `speculate`, it never is."""

    def __post_init__(self) -> None:
        if self.max_running < 1:
            raise KilnError(f"max_running is {self.max_running}; expected at least 1")
        if self.tokens_per_step < self.max_running:
            raise KilnError(
                f"tokens_per_step is {self.tokens_per_step}, max_running {self.max_running}; a step holds one token of "
                "every running sequence: raise tokens_per_step or lower max_running"
            )
        for name in ("interactive_share", "headroom"):
            if not 0 <= getattr(self, name) <= _MOST_SHARE:
                raise KilnError(f"{name} is {getattr(self, name)}; expected 0 to {_MOST_SHARE}")
        if self.step_stretch is not None and not self.step_stretch > 1:
            raise KilnError(f"step_stretch is {self.step_stretch}; expected more than 1, or None for no limit")
        for name in ("ageing", "batch_wait"):
            if not getattr(self, name) >= 0:
                raise KilnError(f"{name} is {getattr(self, name)}; expected 0 or more seconds")
        if self.speculate < 0:
            raise KilnError(f"speculate is {self.speculate}; expected 0 (off) or a number of tokens")
        if self.max_waiting < 1:
            raise KilnError(f"max_waiting is {self.max_waiting}; expected at least 1")


class Scheduler:
    """Queues and running set.

    The caller runs `schedule`, moves what `kv.take_moves` says, computes, and calls `advance`; then for each sequence
    with logits it appends tokens, calls `confirm` for those that were drafted, and `fork` and `finish` as it likes.

    Or it launches the step, calls `launch`, and goes on to schedule the next one, in which sequences take part whose
    tokens are being chosen. `settle` follows, or `abandon`, when the oldest launched step has ended.
    """

    def __init__(self, kv: KvCache, config: SchedulerConfig) -> None:
        self.kv = kv
        self.config = config
        self.preemptions = 0
        self.cost = StepCost()
        self._launched = LaunchedSteps()
        self._batch_credit = 0.0  # steps that are due to the batch lane
        self._waiting: dict[Lane, dict[int, Sequence]] = {lane: {} for lane in LANES}  # by id, in the order of turns
        self._running: dict[int, Sequence] = {}  # by id, in order of admission

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        return tuple(sequence for lane in LANES for sequence in self._waiting[lane].values())

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running.values())

    @property
    def running_count(self) -> int:
        return len(self._running)

    def waiting_count(self, lane: Lane) -> int:
        return len(self._waiting[lane])

    @property
    def has_work(self) -> bool:
        return bool(self._running or any(self._waiting.values()))

    def submit(self, sequence: Sequence) -> None:
        """Queue a new sequence; `require_room` is the caller's to ask, when the request arrives.

        Raises KilnError when it could never run, ValueError for an id already here.
        """
        if sequence.id in self._running or any(sequence.id in queue for queue in self._waiting.values()):
            raise ValueError(f"sequence {sequence.id} was submitted already")
        self.kv.require_possible(sequence)
        self._waiting[sequence.lane][sequence.id] = sequence

    def require_room(self, arriving: int = 0) -> None:
        """Raise QueueFullError when, with `arriving` others, as many wait as may. Any thread may call."""
        require_room(sum(map(len, self._waiting.values())) + arriving, self.config.max_waiting)

    def expired(self, now: float) -> list[Sequence]:
        """Sequences whose deadline has passed; the caller finishes them."""
        everyone = (*self._running.values(), *self.waiting)
        return [sequence for sequence in everyone if sequence.deadline is not None and now >= sequence.deadline]

    def wait(self, now: float) -> float:
        """Seconds until `schedule` should be asked: 0 unless rule 5 applies."""
        waiting = self.waiting
        if self._running or not waiting or len(waiting) >= self.config.max_running:
            return 0.0
        return max(0.0, min(sequence.arrival for sequence in waiting) + self.config.batch_wait - now)

    def schedule(self, now: float) -> Batch | None:
        """Admit what fits and return the next step; empty only when there is no work that is not launched already.

        None: somebody has to give way, which takes that no launched step is left.
        """
        credit = self._batch_credit
        try:
            return self._next_step(now)
        except _StepsInFlight:
            self._batch_credit = credit
            return None

    def _next_step(self, now: float) -> Batch:
        self._admit(now)
        lanes = self._lanes_of_step()
        decoding = self._decoding_with_blocks(lanes)
        prompts = [s for lane in lanes for s in self._running.values() if s.lane == lane and not s.decoding]
        budget = self.config.tokens_per_step - len(decoding)
        if not prompts:
            return tuple(self._decode_chunks(decoding, budget))
        stretch = self.config.step_stretch
        if stretch is not None and any(sequence.lane == "interactive" for sequence in decoding):
            budget = min(budget, self.cost.tokens_beside(len(decoding), prompts[0].computed, stretch))
        chunks = [Chunk(sequence, sequence.computed, 1) for sequence in decoding]
        return (*chunks, *_prompt_chunks(prompts, budget))

    def observe(self, batch: Batch, seconds: float) -> None:
        """Learn what a step took, before `advance`."""
        self._learn(load_of_batch(batch), seconds)

    def _learn(self, load: StepLoad, seconds: float) -> None:
        if not load.drafted:
            self.cost.observe(load.decoding, load.tokens, load.depth, seconds)

    def advance(self, batch: Batch) -> None:
        """Note that the known tokens of a step are in the cache."""
        for chunk in batch:
            assert chunk.sequence.computed == chunk.start
            chunk.sequence.computed = chunk.known_end
            self.kv.advance(chunk.sequence, chunk.start, chunk.known_end)

    def launch(self, batch: Batch) -> None:
        """Note that a step was launched."""
        prompts = (chunk.sequence for chunk in batch if not chunk.sequence.decoding)
        self._launched.launch(batch, (name for sequence in prompts for name in self.kv.coming(sequence)))

    def settle(self, seconds: float) -> None:
        """Note that the oldest launched step has ended, all of whose tokens are known, and took so long."""
        step, gone = self._launched.land()
        self._learn(step.load, seconds)
        for chunk in step.batch:
            if chunk.sequence.id in self._running:  # of one that has ended, an earlier step may have failed
                self.kv.advance(chunk.sequence, chunk.start, chunk.end)
        self._release(gone)

    def abandon(self) -> None:
        """Note that the oldest launched step has failed; the caller has finished its sequences, or does so now."""
        self._release(self._launched.land()[1])

    def _release(self, gone: list[Sequence]) -> None:
        for sequence in gone:
            self.kv.give_up(sequence, resumes=False)

    def confirm(self, sequence: Sequence) -> None:
        """Note that the token just appended is the drafted one, which the step has computed along."""
        assert sequence.pending == 1
        sequence.computed += 1
        self.kv.advance(sequence, sequence.computed - 1, sequence.computed)

    def fork(self, parent: Sequence, child: Sequence, token: int) -> None:
        """Start `child`, which has the parent's tokens, and then `token`, the first of its own.

        It runs beside its parent, whose cache it shares, if there is a place; else it waits as one that was preempted.
        Raises ValueError unless the parent runs and everything that it knows is computed.
        """
        if parent.id not in self._running or parent.pending:
            raise ValueError(f"sequence {parent.id} cannot be forked: {parent.pending} tokens are pending")
        assert child.token_ids == parent.token_ids
        if len(self._running) < self.config.max_running and self.kv.fork(parent, child):
            self._running[child.id] = child
            child.append(token)
        else:
            child.token_ids.append(token)
            self._requeue(child)

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence, waiting or running, at any moment between steps; it owns no blocks afterwards.

        One that launched steps write for keeps its blocks until they have ended. Raises ValueError if it is not here.
        """
        if self._running.pop(sequence.id, None) is None and self._waiting[sequence.lane].pop(sequence.id, None) is None:
            raise ValueError(f"sequence {sequence.id} is neither waiting nor running")
        if sequence.in_flight:
            self._launched.leave(sequence)
        else:
            self.kv.give_up(sequence, resumes=False)

    def check(self) -> None:
        """Verify the whole account of the cache. For tests."""
        self.kv.check((*self.running, *self._launched.leaving), self.waiting)

    def _admit(self, now: float) -> None:
        coming = {name for running in self._running.values() for name in self._coming(running)} | self._launched.coming
        deferred = 0
        for sequence in self._turns(now):
            if coming and self.kv.next_unknown(sequence) in coming:
                deferred += 1
                if deferred > self.config.max_running:
                    return  # enough to fill every place when that prefix is there
                continue
            if len(self._running) >= self.config.max_running and not self._yield_place(sequence):
                return
            if not self.kv.admit(sequence, self.config.headroom if self._running else 0.0):
                return  # nobody overtakes the one that waits for blocks
            del self._waiting[sequence.lane][sequence.id]
            self._running[sequence.id] = sequence
            coming.update(self._coming(sequence))

    def _coming(self, sequence: Sequence) -> SequenceOf[BlockHash]:
        return () if sequence.decoding else self.kv.coming(sequence)

    def _turns(self, now: float) -> Iterator[Sequence]:
        """Who waits, in the order of turns: interactive ones first, but after aged batch sequences that came before."""
        interactive, batch = (deque(self._waiting[lane].values()) for lane in LANES)
        while interactive or batch:
            aged = batch and now - batch[0].arrival >= self.config.ageing and self._batch_running < self._batch_share
            if not interactive or (aged and batch[0].arrival < interactive[0].arrival):
                yield batch.popleft()
            else:
                yield interactive.popleft()

    @property
    def _batch_running(self) -> int:
        return sum(sequence.lane == "batch" for sequence in self._running.values())

    @property
    def _batch_share(self) -> float:
        """Places that are the batch lane's where both want more than there are."""
        return max(self.config.max_running * (1 - self.config.interactive_share), 1.0)

    def _yield_place(self, sequence: Sequence) -> bool:
        """Take a place from the batch lane for an interactive sequence, if that lane has more than its share."""
        if sequence.lane != "interactive":
            return False
        if self._batch_running <= self._batch_share:
            return False
        batch = (running for running in self._running.values() if running.lane == "batch")
        self._preempt(min(batch, key=_cost_to_repeat))
        return True

    def _lanes_of_step(self) -> tuple[Lane, ...]:
        """Who takes part in the next step, in the order in which prompts get its tokens."""
        running = self._running.values()
        if not any(sequence.lane == "interactive" and not sequence.decoding for sequence in running):
            return LANES
        self._batch_credit += 1 - self.config.interactive_share
        if self._batch_credit < 1:
            return ("interactive",)
        self._batch_credit -= 1
        return ("batch", "interactive")

    def _decoding_with_blocks(self, lanes: tuple[Lane, ...]) -> list[Sequence]:
        """Running sequences that take one token, each with a block for it; some may be preempted for that."""
        kept: list[Sequence] = []
        order = sorted(
            (s for s in self._running.values() if s.decoding and s.lane in lanes and not s.awaits_end),
            key=_cost_to_repeat,
            reverse=True,
        )
        for sequence in order:
            if sequence.id in self._running and self._grow(sequence):
                kept.append(sequence)
        return [sequence for sequence in kept if sequence.id in self._running]

    def _grow(self, sequence: Sequence) -> bool:
        """Room for the next token; False if the sequence had to give up its own place for lack of it."""
        while not self.kv.grow(sequence, 1):
            victim = min(self._running.values(), key=_cost_to_repeat)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        if self._launched:
            raise _StepsInFlight
        del self._running[sequence.id]
        self.kv.give_up(sequence, resumes=True)
        sequence.preemptions += 1
        self.preemptions += 1
        self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        """To the front of its lane, among others that were there before by arrival."""
        queue = self._waiting[sequence.lane]
        queue[sequence.id] = sequence
        self._waiting[sequence.lane] = dict(
            sorted(queue.items(), key=lambda item: (not item[1].resumes, item[1].arrival, item[0]))
        )

    def _decode_chunks(self, decoding: list[Sequence], budget: int) -> Iterator[Chunk]:
        """One token of each sequence, and what was drafted for it, in equal parts of the budget."""
        for left, sequence in zip(range(len(decoding), 0, -1), decoding, strict=True):
            draft = sequence.draft[: budget // left]
            if draft and not self.kv.grow(sequence, 1 + len(draft)):
                draft = ()
            budget -= len(draft)
            yield Chunk(sequence, sequence.computed, 1 + len(draft), draft)


class _StepsInFlight(Exception):  # noqa: N818 (no error: the caller lands them and asks again)
    """Somebody would have to give way while launched steps write for it."""


def _prompt_chunks(prompts: list[Sequence], budget: int) -> Iterator[Chunk]:
    """Pieces of prompts, in their order, as far as the budget goes."""
    for sequence in prompts:
        length = min(budget, sequence.pending)
        if length > 0:
            budget -= length
            yield Chunk(sequence, sequence.computed, length)


def _cost_to_repeat(sequence: Sequence) -> tuple[bool, int, float, int]:
    """What goes first when somebody has to give way sorts lowest."""
    return (sequence.lane == "interactive", sequence.generated, -sequence.arrival, -sequence.id)
