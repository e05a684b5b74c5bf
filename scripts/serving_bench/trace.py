"""When the tokens of an answer came: requests of an engine, read on one event loop as a server reads them."""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from engines.runtime.engine import Engine
from engines.runtime.request import Request


@dataclass
class Trace:
    """Seconds of `time.perf_counter`; one time for each token."""

    arrival: float
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def first_token(self) -> float:
        return self.times[0] - self.arrival

    @property
    def gaps(self) -> list[float]:
        return np.diff(self.times).tolist()

    def gaps_within(self, start: float, end: float) -> list[float]:
        """Gaps that overlap [start, end]."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [after - before for before, after in pairs if after > start and before < end]


class Reader:
    """Submits a request and reads it in a task of the running loop."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.trace = Trace(time.perf_counter())
        self._stream = engine.submit(request)
        self._grown = asyncio.Condition()
        self._task = asyncio.create_task(self._read())

    async def reached(self, tokens: int) -> None:
        """Return when so many tokens are there, or the answer is done."""
        async with self._grown:
            await self._grown.wait_for(lambda: len(self.trace.times) >= tokens or self._stream.done)

    async def done(self) -> Trace:
        await self._task
        return self.trace

    def cancel(self) -> None:
        self._stream.cancel()

    async def _read(self) -> None:
        async for chunk in self._stream:
            self.trace.times.extend([time.perf_counter()] * len(chunk.token_ids))
            self.trace.tokens.extend(chunk.token_ids)
            async with self._grown:
                self._grown.notify_all()


async def follow(engine: Engine, requests: Iterable[Request]) -> list[Trace]:
    """Submit all at once and read all to the end."""
    readers = [Reader(engine, request) for request in requests]
    return [await reader.done() for reader in readers]


def all_gaps(traces: Iterable[Trace]) -> list[float]:
    return [gap for trace in traces for gap in trace.gaps]


def seconds_of(traces: list[Trace]) -> float:
    """From the first arrival to the last token."""
    return max(trace.times[-1] for trace in traces) - min(trace.arrival for trace in traces)


def tokens_of(traces: list[Trace]) -> int:
    return sum(len(trace.times) for trace in traces)
