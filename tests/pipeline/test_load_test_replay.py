"""When `kiln load` sends its requests, open and closed loop, over a target that answers when it is told to."""

import asyncio
import json
from collections.abc import Callable

from pipeline.load_test.report import Slo, remarks, report_from_run
from pipeline.load_test.run import LoadConfig, Outcome, Run, replay
from pipeline.load_test.targets import LoadError, LoadRequest, Usage
from pipeline.load_test.trace import TraceRequest, Workload


class Gated:
    """A target that answers when it is told to, and knows how many it has."""

    name, vocabulary = "gated", 100

    def __init__(self, release_at: int) -> None:
        self.running = self.most = self.seen = 0
        self.prompts: list[LoadRequest] = []
        self._release_at = release_at
        self._gate = asyncio.Event()

    async def answer(self, request: LoadRequest, deliver: Callable[[], None]) -> Usage:
        self.prompts.append(request)
        self.seen += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if self.running >= self._release_at:
                self._gate.set()
            await self._gate.wait()
            await asyncio.sleep(0)
            deliver()
            return Usage(len(request.prompt), request.output_tokens)
        finally:
            self.running -= 1

    async def close(self) -> None:
        pass


def test_an_open_loop_does_not_wait_for_answers() -> None:
    async def run() -> tuple[Gated, Run]:
        target = Gated(release_at=8)  # answers nobody before all eight are there
        trace = Workload(rate=1000.0).draw(8, 0)
        return target, await replay(target, trace, LoadConfig(warmup=0, timeout=60))

    target, result = asyncio.run(run())
    assert target.most == 8
    assert sum(outcome.answered for outcome in result.outcomes) == 8
    assert all(outcome.sent >= outcome.due for outcome in result.outcomes)


def test_a_closed_loop_has_as_many_requests_in_flight_as_users() -> None:
    async def run() -> tuple[Gated, Run]:
        target = Gated(release_at=3)
        return target, await replay(target, Workload().draw(20, 0), LoadConfig(3, warmup=0, timeout=60))

    target, result = asyncio.run(run())
    assert (target.most, target.seen) == (3, 20)
    assert sorted(outcome.index for outcome in result.outcomes) == list(range(20))
    assert len({request.prompt for request in target.prompts}) == 20


def test_warm_up_is_not_measured() -> None:
    async def run() -> tuple[Gated, Run]:
        target = Gated(release_at=1)
        return target, await replay(target, Workload(rate=1e3).draw(2, 0), LoadConfig(warmup=3))

    target, result = asyncio.run(run())
    assert (target.seen, len(result.outcomes)) == (5, 2)


def test_an_interrupt_returns_what_was_measured() -> None:
    async def run() -> Run:
        target = Gated(release_at=10**9)
        target._gate.set()
        trace = (*Workload(rate=1e3).draw(2, 0), TraceRequest(arrival=1e6, prompt_tokens=1, output_tokens=1))
        answered = asyncio.Event()

        def observe(outcomes: tuple[Outcome, ...]) -> None:
            if sum(outcome.answered for outcome in outcomes) == 2:
                answered.set()

        task = asyncio.create_task(replay(target, trace, LoadConfig(warmup=0), observe))
        await asyncio.wait_for(answered.wait(), 60)
        task.cancel()
        return await task

    result = asyncio.run(run())
    assert result.interrupted
    assert [outcome.answered for outcome in result.outcomes] == [True, True]


class Failing(Gated):
    """Each request fails in its own way."""

    async def answer(self, request: LoadRequest, deliver: Callable[[], None]) -> Usage:
        self.seen += 1
        if self.seen == 1:
            raise LoadError("HTTP 429", "too many")
        if self.seen == 2:
            await asyncio.Event().wait()
        return Usage(1, 0)


def test_failures_are_counted_by_kind() -> None:
    async def run() -> Run:
        return await replay(Failing(1), Workload(rate=1e4).draw(3, 0), LoadConfig(warmup=0, timeout=0.2))

    report = report_from_run(asyncio.run(run()), target="t", model="m", workload="w", loop="open", slo=Slo(1.0))
    assert {error.kind: error.count for error in report.errors} == {"HTTP 429": 1, "timeout": 1, "no tokens": 1}
    assert report.answered == 0
    assert report.goodput == 0
    assert report.latencies["first_token"].p50 is None
    assert "too many" in " ".join(remarks(report))
    json.loads(report.to_json())
