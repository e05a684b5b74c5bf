"""Sends a trace's requests to a target, in time or as answers come, and notes when what arrived.

Open loop: each request is sent when it is due, whether or not earlier ones are answered, as independent users do; its
times count from when it was due, so that a late generator cannot hide a wait. Closed loop: so many users, each of whom
sends the next request when the last is answered. Knows nothing of percentiles.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from engines.runtime.sequence import Lane
from pipeline.load_test.targets import LoadError, LoadRequest, Target, Usage
from pipeline.load_test.trace import Trace, TraceRequest
from plugins.errors import KilnError


@dataclass(frozen=True)
class LoadConfig:
    """How to replay. `concurrency` None: open loop. Each request gets `timeout` seconds."""

    concurrency: int | None = None
    timeout: float = 600.0
    warmup: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise KilnError(f"concurrency is {self.concurrency}; expected at least 1, or none for an open loop")
        if not self.timeout > 0:
            raise KilnError(f"timeout is {self.timeout}; expected a positive number of seconds")
        if self.warmup < 0:
            raise KilnError(f"warmup is {self.warmup}; expected 0 requests or more")
        if not 0 <= self.seed < 2**63:
            raise KilnError(f"seed is {self.seed}; expected an integer from 0 to 2**63 - 1")


@dataclass
class Outcome:
    """What became of one request. Times in seconds after the start of the run; `deliveries` are those of new tokens."""

    index: int
    lane: Lane
    due: float
    planned_output: int
    planned_prompt: int | None
    sent: float = 0.0
    deliveries: list[float] = field(default_factory=list)
    end: float | None = None
    """None: still running when the run was interrupted."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    error: str | None = None
    """Kind of the error, None without."""
    message: str = ""

    @property
    def answered(self) -> bool:
        return self.end is not None and self.error is None and bool(self.deliveries)

    @property
    def first_token(self) -> float:
        return self.deliveries[0] - self.due

    @property
    def gaps(self) -> list[float]:
        """Seconds between deliveries: usually of one token each."""
        return [after - before for before, after in zip(self.deliveries, self.deliveries[1:], strict=False)]

    @property
    def time_per_token(self) -> float | None:
        """Mean seconds a token after the first, None for an answer of one."""
        count = (self.output_tokens or len(self.deliveries)) - 1
        return (self.deliveries[-1] - self.deliveries[0]) / count if count > 0 else None


@dataclass(frozen=True)
class Run:
    """Everything that was noted. `seconds` from the start to the last end, or to the interrupt."""

    outcomes: tuple[Outcome, ...]
    seconds: float
    interrupted: bool


Observe = Callable[[tuple[Outcome, ...]], None]


async def replay(target: Target, trace: Trace, config: LoadConfig, observe: Observe = lambda outcomes: None) -> Run:
    """Replay a trace; cancelling the call ends what runs and returns what was noted so far.

    `observe` is called about twice a second with the outcomes so far, those of running requests too.
    """
    for index in range(config.warmup):
        await _warm_up(target, index, config)
    player = Player(target, config)
    watch = asyncio.create_task(_watch(player.outcomes, observe))
    interrupted = False
    try:
        if config.concurrency is None:
            await player.open_loop(trace)
        else:
            await player.closed_loop(trace, config.concurrency)
    except asyncio.CancelledError:
        interrupted = True
    watch.cancel()
    ends = [outcome.end for outcome in player.outcomes if outcome.end is not None]
    seconds = player.now() if interrupted else max(ends, default=0.0)
    return Run(tuple(player.outcomes), seconds, interrupted)


async def _warm_up(target: Target, index: int, config: LoadConfig) -> None:
    """One request that nobody measures: the first one pays for what is done once. Its failure is the run's to show."""
    request = TraceRequest(prompt_tokens=16, output_tokens=4)
    with suppress(LoadError, TimeoutError):
        async with asyncio.timeout(config.timeout):
            ids = request.token_ids(2**32 + index, config.seed, target.vocabulary)
            await target.answer(LoadRequest(ids, 4), lambda: None)


async def _watch(outcomes: list[Outcome], observe: Observe) -> None:
    while True:
        observe(tuple(outcomes))
        await asyncio.sleep(0.5)


class Player:
    """One run: its clock, which starts now, and its outcomes in the order of sending."""

    def __init__(self, target: Target, config: LoadConfig) -> None:
        self.outcomes: list[Outcome] = []
        self._target = target
        self._config = config
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    async def open_loop(self, trace: Trace) -> None:
        """Send each request when it is due; returns when all have ended."""
        async with asyncio.TaskGroup() as group:
            for index, request in enumerate(trace):
                prepared = self._prepared(index, request)
                await asyncio.sleep(request.arrival - self.now())  # in the past: lets others go on
                group.create_task(self._send(index, request, prepared, request.arrival))

    async def closed_loop(self, trace: Iterable[TraceRequest], concurrency: int) -> None:
        """Keep `concurrency` requests in flight until the trace ends, which it need not."""
        queue = iter(enumerate(trace))
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(self._user(queue))

    async def _user(self, queue: Iterator[tuple[int, TraceRequest]]) -> None:
        for index, request in queue:
            await self._send(index, request, self._prepared(index, request), None)

    def _prepared(self, index: int, request: TraceRequest) -> LoadRequest:
        if request.messages is not None:
            messages = tuple(message.model_dump() for message in request.messages)
            return LoadRequest(messages, request.output_tokens, request.lane)
        prompt = request.prompt
        if prompt is None:
            prompt = request.token_ids(index, self._config.seed, self._target.vocabulary)
        return LoadRequest(prompt, request.output_tokens, request.lane)

    async def _send(self, index: int, request: TraceRequest, prepared: LoadRequest, due: float | None) -> None:
        planned = len(prepared.prompt) if prepared.prompt and isinstance(prepared.prompt[0], int) else None
        now = self.now()
        outcome = Outcome(index, request.lane, now if due is None else due, request.output_tokens, planned, now)
        self.outcomes.append(outcome)
        answer = self._target.answer(prepared, lambda: outcome.deliveries.append(self.now()))
        await self._note(outcome, answer)
        outcome.end = self.now()

    async def _note(self, outcome: Outcome, answer: Coroutine[Any, Any, Usage]) -> None:
        """Wait for an answer and note its counts, or why there is none."""
        try:
            async with asyncio.timeout(self._config.timeout):
                usage = await answer
        except TimeoutError:
            outcome.error, outcome.message = "timeout", f"no whole answer within {self._config.timeout:g} s"
        except LoadError as error:
            outcome.error, outcome.message = error.kind, str(error)
        else:
            outcome.prompt_tokens, outcome.output_tokens = usage.prompt_tokens, usage.output_tokens
            if not outcome.deliveries:
                outcome.error, outcome.message = "no tokens", "the answer ended without a token"
