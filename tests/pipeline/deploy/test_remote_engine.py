"""What the HTTP side makes of replicas that answer, refuse and die; the handle is scripted: no cluster is needed."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from engines.runtime.info import EngineInfo
from engines.runtime.request import Completion, Request, RequestError, SamplingParams, TokenChunk
from engines.runtime.scheduler import QueueFullError
from engines.server.served import EngineDiedError
from pipeline.deploy.remote_engine import RemoteEngine
from pipeline.deploy.replica import _batches
from pipeline.deploy.rollout import Side, Traffic
from pipeline.deploy.wire import Accepted, Chunks, Refused, Route
from plugins.errors import KilnError

INFO = EngineInfo("m", "decoder", max_length=256, vocab_size=100, block_size=4, num_blocks=64)
ONE, LAST = TokenChunk((5,), "a"), TokenChunk((6,), "b", "length")
DIED = EngineDiedError("the replica r1 died")
"""Stands for what Ray raises; `translated` leaves Kiln's own errors as they are."""

Step = Any
"""A message, or an error that is raised, or an asyncio.Event that is waited for."""


@dataclass
class Response:
    """What a call of a generator method gives."""

    steps: Sequence[Step]
    cancelled: bool = False

    async def __aiter__(self):
        for step in self.steps:
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif isinstance(step, Exception):
                raise step
            else:
                yield step

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class Handle:
    """A version's handle; its calls take the scripts one after the other."""

    scripts: list[Sequence[Step]] = field(default_factory=list)
    calls: list[tuple[Request, Route]] = field(default_factory=list)
    responses: list[Response] = field(default_factory=list)

    def options(self, stream: bool) -> "Handle":
        assert stream
        return self

    @property
    def generate(self) -> "Handle":
        return self

    def remote(self, request: Request, route: Route) -> Response:
        self.calls.append((request, route))
        self.responses.append(Response(self.scripts.pop(0)))
        return self.responses[-1]


def answered(*items: Any, replica: str = "r2") -> list[Step]:
    return [Accepted(replica), *(Chunks(((0, item),)) for item in items)]


def engine_over(retries: int = 3, **handles: Handle) -> RemoteEngine:
    engine = RemoteEngine(INFO, handles.__getitem__, retries)
    engine.direct(Traffic(1, tuple(Side(app, 1 / len(handles)) for app in handles)))
    return engine


async def read(engine: RemoteEngine, **options: Any) -> list[TokenChunk]:
    request = Request(tuple(range(1, 12)), SamplingParams(max_tokens=2), **options)
    (stream,) = await engine.submit(request)
    return [chunk async for chunk in stream]


def test_an_answer_comes_through_with_its_prompts_blocks_for_the_router():
    handle = Handle([answered(ONE, LAST)])
    engine = engine_over(v1=handle)
    assert asyncio.run(read(engine, tenant="t")) == [ONE, LAST]
    request, route = handle.calls[0]
    assert request.prompt == tuple(range(1, 12))
    assert (len(route.names), route.more, route.avoid) == (2, 2, frozenset())
    assert engine.take_figures()["v1"].latencies
    assert engine.take_figures() == {}


@pytest.mark.parametrize(
    "lost",
    [
        [Refused("r1", DIED)],
        [Accepted("r1"), DIED],
        [Accepted("r1"), Chunks(((0, DIED),))],
        [Accepted("r1")],
    ],
)
def test_what_had_no_output_is_sent_to_another_replica(lost):
    handle = Handle([lost, answered(ONE, LAST)])
    engine = engine_over(v1=handle)
    assert asyncio.run(read(engine)) == [ONE, LAST]
    assert [route.avoid for _, route in handle.calls] == [frozenset(), frozenset({"r1"})]
    figures = engine.take_figures()["v1"]
    assert (figures.requests, figures.failures) == (2, 1)


def test_a_stream_that_had_begun_fails_and_says_so():
    handle = Handle([[Accepted("r1"), Chunks(((0, ONE),)), DIED]])
    engine = engine_over(v1=handle)

    async def first_and_rest() -> None:
        (stream,) = await engine.submit(Request((1, 2), SamplingParams(max_tokens=9)))
        chunks = aiter(stream)
        assert await anext(chunks) == ONE
        with pytest.raises(EngineDiedError, match="1 tokens of the answer had been sent"):
            await anext(chunks)

    asyncio.run(first_and_rest())
    assert len(handle.calls) == 1


def test_tries_end_and_the_last_reason_is_told():
    handle = Handle([[Refused(f"r{number}", DIED)] for number in range(3)])
    with pytest.raises(EngineDiedError, match="the replica r1 died"):
        asyncio.run(read(engine_over(retries=2, v1=handle)))
    assert handle.calls[2][1].avoid == {"r0", "r1"}


@pytest.mark.parametrize("error", [KilnError("the prompt is empty"), QueueFullError("full")])
def test_a_refusal_for_the_requests_own_sake_is_not_tried_again(error):
    handle = Handle([[Refused("r1", error)]])
    with pytest.raises(type(error), match=str(error)):
        asyncio.run(read(engine_over(v1=handle)))


def test_answers_that_the_engine_failed_count_against_their_version_and_refused_requests_do_not():
    pytest.importorskip("ray")  # whose errors are told from others
    broken = RequestError("the step failed", Completion((), "", "error", 11))
    handle = Handle([answered(broken), [Refused("r1", KilnError("too long"))], [RuntimeError("a bug")]])
    engine = engine_over(v1=handle)
    for problem in (RequestError, KilnError, RuntimeError):
        with pytest.raises(problem):
            asyncio.run(read(engine))
    figures = engine.take_figures()["v1"]
    assert (figures.requests, figures.failures) == (2, 2)


def test_a_time_limit_counts_over_all_tries():
    handle = Handle([[Refused("r1", DIED)], answered(ONE, LAST)])
    asyncio.run(read(engine_over(v1=handle), timeout=100.0))
    first, second = (request.timeout for request, _ in handle.calls)
    assert first is not None
    assert second is not None
    assert second < first <= 100.0
    late = Handle([[Refused("r1", DIED)]])
    with pytest.raises(TimeoutError, match="time limit passed"):
        asyncio.run(read(engine_over(v1=late), timeout=0.02))


def test_a_reader_that_leaves_ends_the_call():
    handle = Handle([[Accepted("r1"), Chunks(((0, ONE),)), asyncio.Event()]])
    engine = engine_over(v1=handle)

    async def leave() -> None:
        (stream,) = await engine.submit(Request((1, 2), SamplingParams(max_tokens=9)))
        chunks = aiter(stream)
        await anext(chunks)
        stream.cancel()
        assert (await anext(chunks)).finish_reason == "cancelled"
        while not handle.responses[0].cancelled:
            await asyncio.sleep(0)

    asyncio.run(leave())


def test_versions_get_their_shares_and_the_trusted_one_what_another_failed():
    good = Handle([answered(ONE, LAST) for _ in range(100)])
    bad = Handle([[Refused("b", DIED)] for _ in range(100)])
    engine = RemoteEngine(INFO, {"good": good, "bad": bad}.__getitem__, 3)
    engine.direct(Traffic(2, (Side("good", 0.75), Side("bad", 0.25))))

    async def many() -> None:
        for _ in range(40):
            assert await read(engine) == [ONE, LAST]

    asyncio.run(many())
    counts = Counter(good=len(good.calls), bad=len(bad.calls))
    assert counts == {"good": 40, "bad": 10}
    assert engine.take_figures()["bad"].failures == 10


def test_without_a_version_requests_are_told_to_come_again():
    with pytest.raises(EngineDiedError, match="no version of m serves yet"):
        asyncio.run(read(RemoteEngine(INFO, {}.__getitem__, 0)))


# The replica's side


async def batches(streams: Sequence[Callable], whole: bool) -> list[Any]:
    return [items async for items in _batches([stream() for stream in streams], whole)]


async def two_chunks():
    yield ONE
    await asyncio.sleep(0)
    yield LAST


async def breaks():
    yield ONE
    raise KilnError("the step failed")


def test_a_whole_answer_travels_as_one_message():
    ((first, second),) = asyncio.run(batches([two_chunks, two_chunks], True))
    assert first == (0, TokenChunk((5, 6), "ab", "length"))
    assert second == (1, TokenChunk((5, 6), "ab", "length"))


def test_a_stream_travels_as_it_comes_and_an_error_is_its_end():
    items = [item for batch in asyncio.run(batches([two_chunks, breaks], False)) for item in batch]
    assert [item for choice, item in items if choice == 0] in ([ONE, LAST], [TokenChunk((5, 6), "ab", "length")])
    *_, error = [item for choice, item in items if choice == 1]
    assert str(error) == "the step failed"
