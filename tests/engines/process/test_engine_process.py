"""Engines in real processes of their own: what they give, how they die, and what happens then."""

import asyncio
import gc
import logging
import os
import shutil
import signal
from contextlib import asynccontextmanager

import numpy as np
import psutil
import pytest

from engines.runtime.engine import Engine
from engines.runtime.info import EngineInfo
from engines.runtime.request import Request, RequestError, SamplingParams
from engines.runtime.scheduler import QueueFullError, SchedulerConfig
from engines.server.engine_link import EngineLink
from engines.server.engine_process import EngineProcess, SupervisionConfig
from engines.server.messages import EngineSpec
from engines.server.served import EngineDiedError
from plugins.errors import KilnError

POISONED = 3000
LONG = 2900  # tokens of an answer that no test waits for
RNG = np.random.default_rng(5)
PROMPTS = [tuple(int(t) for t in RNG.integers(1, 61, length)) for length in (1, 3, 8, 15, 16, 33, 64, 90)]


def spec_of(bundle, max_running: int = 8, **config) -> EngineSpec:
    return EngineSpec(bundle.path, config=SchedulerConfig(max_running, 64, **config), threads=1)


@asynccontextmanager
async def running(spec: EngineSpec, **config):
    engine = await EngineProcess.start(spec, SupervisionConfig(**config))
    try:
        async with asyncio.timeout(120):
            yield engine
    finally:
        await engine.close()


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def shared(runner, poisoned_bundle):
    """An engine for the tests that leave it as it was, on the loop of `runner`."""
    engine = runner.run(EngineProcess.start(spec_of(poisoned_bundle)))
    yield engine
    runner.run(engine.close())


def request(prompt=(1, 2, 3), **sampling) -> Request:
    return Request(tuple(prompt), SamplingParams(ignore_eos=True, **sampling))


async def tokens_of(stream) -> list[int]:
    return [token async for chunk in stream for token in chunk.token_ids]


async def generate(engine, requests) -> list[list[int]]:
    streams = [stream for each in requests for stream in await engine.submit(each)]
    return await asyncio.gather(*(tokens_of(stream) for stream in streams))


async def until_ready(engine) -> None:
    while not engine.ready:
        await asyncio.sleep(0.01)


def restarts(families) -> float:
    return next(s.value for f in families for s in f.samples if s.name == "kiln_engine_restarts_total")


def test_it_gives_what_the_engine_gives_in_this_process(runner, shared, poisoned_bundle):
    requests = [
        *(request(prompt, max_tokens=20) for prompt in PROMPTS),
        *(request(prompt, max_tokens=9, temperature=0.8, seed=i) for i, prompt in enumerate(PROMPTS)),
        request(PROMPTS[5], max_tokens=9, temperature=0.8, seed=3, n=4),
    ]
    detailed = request(PROMPTS[2], max_tokens=6, logprobs=2)

    async def chunks_twice():
        (stream,) = await shared.submit(detailed)
        return [chunk async for chunk in stream], [chunk async for chunk in stream]

    with Engine.open(poisoned_bundle.path, config=SchedulerConfig(8, 64), threads=1) as engine:
        expected = [list(c.token_ids) for c in engine.generate(requests)]
        chunks = list(engine.submit(detailed))
        assert shared.info == engine.info
    assert runner.run(generate(shared, requests)) == expected
    assert runner.run(chunks_twice()) == (chunks, [])
    assert [len(chunk.logprobs) for chunk in chunks] == [1] * 6
    assert shared.ready


def test_hundreds_of_streams_at_a_time(runner, shared):
    requests = [request(PROMPTS[i % len(PROMPTS)], max_tokens=5 + i % 3) for i in range(400)]
    alone = runner.run(generate(shared, [request(prompt, max_tokens=7) for prompt in PROMPTS]))
    together = runner.run(generate(shared, requests))
    assert together == [alone[i % len(PROMPTS)][: 5 + i % 3] for i in range(400)]


def test_a_refused_request_raises_the_childs_error(runner, shared):
    with pytest.raises(KilnError, match=r"the prompt has 5000 tokens, the engine holds 4096"):
        runner.run(shared.submit(request([1] * 5000)))
    with pytest.raises(KilnError, match="the prompt has token id 99; expected 0 to 60"):
        runner.run(shared.submit(request([99])))
    with pytest.raises(KilnError, match="is a language model with a KV cache"):
        runner.run(shared.infer({"x": np.ones(3, np.float32)}))
    assert runner.run(shared._link.ping()).outstanding == 0


def test_a_request_that_fails_keeps_its_error_and_what_it_gave(runner, shared, caplog):
    async def main():
        (stream,) = await shared.submit(request([5] * (POISONED - 3), max_tokens=50))
        got = [(await anext(stream)).token_ids[0] for _ in range(4)]
        with pytest.raises(RequestError, match="highest logit is nan") as caught:
            await anext(stream)
        return got, caught.value

    got, error = runner.run(main())
    assert list(error.completion.token_ids) == got
    assert error.completion.finish_reason == "error"
    assert any(
        "NonFiniteLogitsError" in record.getMessage() for record in caplog.records if record.name == "kiln.engine"
    )


def test_cancel_ends_one_stream_at_once_and_no_other(runner, shared):
    async def main():
        (long,), (short,) = await shared.submit(request(max_tokens=LONG)), await shared.submit(request(max_tokens=5))
        first = await anext(long)
        long.cancel()
        last = [chunk async for chunk in long][-1]
        long.cancel()
        return first, last, await tokens_of(short), await shared._link.ping()

    first, last, short, pong = runner.run(main())
    assert first.finish_reason is None
    assert last.finish_reason == "cancelled"
    assert len(short) == 5
    assert pong.outstanding == 0


def test_a_caller_that_leaves_before_the_answer_leaves_nothing_behind(runner, shared):
    async def main():
        callers = [asyncio.create_task(shared.submit(request(max_tokens=LONG))) for _ in range(20)]
        await asyncio.sleep(0)  # they have sent their requests, and no reply can be there yet
        for caller in callers:
            caller.cancel()
        assert {type(e) for e in await asyncio.gather(*callers, return_exceptions=True)} == {asyncio.CancelledError}
        while (await shared._link.ping()).outstanding:
            pass

    runner.run(asyncio.wait_for(main(), 60))
    assert not shared._link._streams
    assert not shared._link._calls


def test_the_terminal_and_the_service_manager_do_not_end_it(runner, shared):
    async def main():
        pid = shared.pid
        (stream,) = await shared.submit(request(max_tokens=200))
        await anext(stream)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
        return pid, await tokens_of(stream)

    pid, tokens = runner.run(main())
    assert len(tokens) == 199
    assert shared.pid == pid


def test_metrics_are_the_engines_and_the_supervisors(runner, shared):
    families = {family.name: family for family in runner.run(shared.metrics())}
    assert "kiln_generated_tokens" in families
    assert {s.labels["model"] for family in families.values() for s in family.samples} == {"tiny"}
    assert restarts(families.values()) == 0


def test_a_full_queue_refuses_with_its_own_error(bundle):
    async def main():
        async with running(spec_of(bundle, max_running=1, max_waiting=1)) as engine:
            (first,) = await engine.submit(request(max_tokens=LONG))
            await anext(first)  # it runs
            (second,) = await engine.submit(request(max_tokens=3))
            with pytest.raises(QueueFullError):
                await engine.submit(request(max_tokens=3))
            first.cancel()
            assert len(await tokens_of(second)) == 3

    asyncio.run(main())


def test_killed_with_8_streams_running(bundle, caplog):
    async def main():
        async with running(spec_of(bundle), first_pause=0.2) as engine:
            before = await generate(engine, [request(prompt, max_tokens=20) for prompt in PROMPTS])
            streams = [(await engine.submit(request(prompt, max_tokens=LONG)))[0] for prompt in PROMPTS]
            for stream in streams:
                await anext(stream)
            victim = engine.pid
            os.kill(victim, signal.SIGKILL)
            outcomes = await asyncio.gather(*(tokens_of(stream) for stream in streams), return_exceptions=True)
            assert not engine.ready
            with pytest.raises(EngineDiedError, match="SIGKILL"):
                await engine.submit(request())
            assert [f.name for f in await engine.metrics()] == ["kiln_engine_restarts", "kiln_engine_up"]
            await until_ready(engine)
            assert engine.pid != victim
            after = await generate(engine, [request(prompt, max_tokens=20) for prompt in PROMPTS])
            return outcomes, before, after, await engine.metrics()

    outcomes, before, after, families = asyncio.run(main())
    assert len({id(outcome) for outcome in outcomes}) == 8
    for outcome in outcomes:
        assert isinstance(outcome, EngineDiedError)
        assert "the engine of tiny died: its process" in str(outcome)
        assert "was ended by SIGKILL" in str(outcome)
        assert "it is being restarted: send the request again in a moment" in str(outcome)
    assert after == before
    assert restarts(families) == 1
    assert "the engine of tiny is back" in caplog.text


def test_a_stopped_process_is_killed_and_replaced(bundle):
    async def main():
        async with running(spec_of(bundle), hang_seconds=2, ping_seconds=0.05, first_pause=0.05) as engine:
            (stream,) = await engine.submit(request(max_tokens=LONG))
            await anext(stream)
            os.kill(engine.pid, signal.SIGSTOP)
            with pytest.raises(EngineDiedError, match="killed by the server, because it gave no sign of life for 2 s"):
                await tokens_of(stream)
            await until_ready(engine)
            assert len(await tokens_of((await engine.submit(request(max_tokens=4)))[0])) == 4

    asyncio.run(main())


def test_a_model_that_never_ends_is_killed(endless_bundle):
    async def main():
        spec = EngineSpec(endless_bundle.path, name="endless", threads=1)
        async with running(spec, hang_seconds=2, ping_seconds=0.05, first_pause=0.05) as engine:
            assert (await engine.infer({"times": np.array(3)}))["y"] == 24
            with pytest.raises(EngineDiedError, match=r"endless died: .* none of its 1 requests got on for 2 s"):
                await engine.infer({"times": np.array(2**62)})
            await until_ready(engine)
            assert (await engine.infer({"times": np.array(4)}))["y"] == 64

    asyncio.run(main())


def test_a_process_that_cannot_say_how_it_is_is_replaced(bundle):
    async def main():
        link = await EngineLink.start(spec_of(bundle))  # nobody opens the bundle there, so that it has nothing to say
        config = SupervisionConfig(first_pause=0.05)
        engine = EngineProcess(spec_of(bundle), config, link, EngineInfo("tiny", "decoder"))
        while engine.pid == link.pid or not engine.ready:
            await asyncio.sleep(0.01)
        assert restarts(await engine.metrics()) == 1
        assert engine.info.max_length == 4096
        await engine.close()
        return await link.ended()

    how = asyncio.run(asyncio.wait_for(main(), 60))
    assert "was killed by the server, because it cannot say how it is: AssertionError: the parent asks" in how


def test_it_gives_up_when_the_bundle_is_no_more(bundle, tmp_path):
    copy = shutil.copytree(bundle.path, tmp_path / "copy")

    async def main():
        async with running(EngineSpec(copy), first_pause=0.01, most_failures=2) as engine:
            shutil.rmtree(copy)
            os.kill(engine.pid, signal.SIGKILL)
            await asyncio.wait([engine._supervising])
            assert not engine.ready
            with pytest.raises(EngineDiedError, match=r"not be opened: .*copy.*; after 2 failures in a row"):
                await engine.submit(request())

    asyncio.run(main())


def test_a_bundle_that_cannot_be_opened_says_why_and_leaves_no_process(tmp_path):
    before = set(psutil.Process().children())

    async def main():
        with pytest.raises(KilnError, match="nothing-here") as caught:
            await EngineProcess.start(EngineSpec(tmp_path / "nothing-here"))
        with pytest.raises(type(caught.value)) as here:
            Engine.open(tmp_path / "nothing-here")
        assert str(caught.value) == str(here.value)

    asyncio.run(main())
    assert set(psutil.Process().children()) == before


def test_closing_gives_every_request_an_outcome_and_ends_the_process(bundle):
    problems = []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
        engine = await EngineProcess.start(spec_of(bundle, max_running=2), SupervisionConfig(ping_seconds=0.001))
        streams = [(await engine.submit(request(max_tokens=LONG)))[0] for _ in range(6)]
        await anext(streams[0])
        child = psutil.Process(engine.pid)
        closing = asyncio.gather(engine.close(), engine.close())
        await asyncio.sleep(0)
        streams[3].cancel()
        await closing
        lasts = [[chunk async for chunk in stream][-1].finish_reason for stream in streams]
        with pytest.raises(EngineDiedError, match="is closed"):
            await engine.submit(request())
        assert not engine.ready
        return lasts, child.is_running()

    assert asyncio.run(main()) == (["cancelled"] * 6, False)
    gc.collect()  # tasks and futures whose errors nobody saw complain when they go
    assert problems == []


def test_closing_ends_a_process_that_does_not_listen(bundle):
    async def main():
        engine = await EngineProcess.start(spec_of(bundle), SupervisionConfig(close_seconds=0.3))
        (stream,) = await engine.submit(request(max_tokens=LONG))
        child = psutil.Process(engine.pid)
        child.suspend()
        await engine.close()
        with pytest.raises(EngineDiedError, match="was closed"):
            await tokens_of(stream)
        return child.is_running()

    assert not asyncio.run(main())


def test_closing_while_it_is_away_ends_the_restart(bundle):
    async def main():
        async with running(spec_of(bundle), first_pause=1000.0, longest_pause=1000.0) as engine:
            os.kill(engine.pid, signal.SIGKILL)
            while engine.ready:
                await asyncio.sleep(0.01)
        assert engine._supervising.done()

    asyncio.run(main())


def test_log_records_of_the_child_reach_this_processs_loggers(twice_bundle, caplog):
    caplog.set_level(logging.INFO, "kiln")

    async def main():
        async with running(EngineSpec(twice_bundle.path)) as engine:
            outputs = await engine.infer({"x": np.arange(3, dtype=np.float32)}, lane="batch")
            with pytest.raises(KilnError, match="has no KV cache and generates no tokens"):
                await engine.submit(request())
            return engine.pid, outputs

    pid, outputs = asyncio.run(main())
    assert outputs["twice"].tolist() == [0, 2, 4]
    assert outputs["twice"].dtype == np.float32
    (record,) = (record for record in caplog.records if record.process == pid)
    assert record.getMessage() == f"opening {twice_bundle.path}"
    assert f"in process {pid}" in caplog.text


def test_pauses_grow_to_a_limit():
    config = SupervisionConfig(first_pause=0.5, pause_factor=3, longest_pause=10)
    assert [config.pause(failures) for failures in range(1, 6)] == [0.5, 1.5, 4.5, 10, 10]
    with pytest.raises(KilnError, match="hang_seconds is 0; expected a number above 0"):
        SupervisionConfig(hang_seconds=0)
