"""Each request to the engine, over a fake backend, has an outcome: cancelled, failed, late, refused, closed."""

import gc
import threading
import time

import pytest

from engines.runtime.engine import Engine
from engines.runtime.request import Request, RequestError, SamplingParams, TokenChunk
from engines.runtime.stream import Stream
from passes.onnx_model import DecoderSpec
from plugins.errors import KilnError
from tests.engines.engine_requests import PROMPTS, request


@pytest.mark.parametrize("forwarded_first", [True, False])
def test_forwarding_hands_a_failure_over_as_reading_would_raise_it(forwarded_first):
    stream, handed = Stream(2, lambda: None), []
    stream.push(TokenChunk((5,), "a"))
    if forwarded_first:
        stream.forward(handed.append)
    stream.fail(RuntimeError("out of memory"))
    if not forwarded_first:
        stream.forward(handed.append)
    chunk, error = handed
    assert chunk == TokenChunk((5,), "a")
    assert isinstance(error, RequestError)
    assert error.completion.token_ids == (5,)
    assert "failed after 1 tokens: out of memory" in str(error)


def wait_until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.001)


def test_cancel_frees_blocks_and_lets_others_go_on(fake_engine):
    engine = fake_engine(max_running=2, num_blocks=60)
    running = engine.submit(request([3, 4], max_tokens=100))
    other = engine.submit(request([5], max_tokens=10))
    waiting = engine.submit(request([6], max_tokens=10))
    next(running)
    waiting.cancel()
    running.cancel()
    cancelled = running.result(5)
    assert cancelled.finish_reason == "cancelled"
    assert 1 <= len(cancelled.token_ids) < 100
    assert waiting.result(5).finish_reason in ("cancelled", "length")
    assert len(other.result(5).token_ids) == 10
    chunks = list(running)
    assert chunks[-1].finish_reason == "cancelled"
    assert engine.free_blocks == 60
    running.cancel()  # again: no effect
    assert engine.generate([[3]], SamplingParams(max_tokens=2))[0].finish_reason == "length"


def test_cancel_before_the_first_step(fake_engine):
    engine = fake_engine()
    engine.backend.gate.clear()
    streams = [engine.submit(request([3], max_tokens=5)) for _ in range(8)]
    for stream in streams:
        stream.cancel()
    engine.backend.gate.set()
    assert {s.result(5).finish_reason for s in streams[1:]} == {"cancelled"}
    assert engine.free_blocks == engine.backend.num_blocks


def test_a_failing_step_fails_its_requests_and_the_engine_goes_on(fake_engine):
    engine = fake_engine(max_running=2)
    engine.backend.gate.clear()
    engine.backend.fail_steps = [RuntimeError("out of\n memory")]
    streams = [engine.submit(request([3, i], max_tokens=4)) for i in range(4)]
    engine.backend.gate.set()
    wait_until(lambda: all(stream.done for stream in streams))
    failed = streams[: len(engine.backend.steps[0].past_seqlens)]  # one or two were in the first step
    for stream in failed:
        with pytest.raises(RequestError, match="failed after 0 tokens: out of memory; the engine goes on") as caught:
            stream.result(0)
        assert caught.value.completion.finish_reason == "error"
        assert isinstance(caught.value.__cause__, RuntimeError)
        with pytest.raises(RequestError):
            next(stream)
    assert {stream.result(0).finish_reason for stream in streams[len(failed) :]} == {"length"}
    assert engine.free_blocks == engine.backend.num_blocks


def test_logits_that_are_not_numbers_fail_the_request(fake_engine):
    engine = fake_engine()
    engine.backend.nan_rows = True
    with pytest.raises(RequestError, match="highest logit is nan"):
        engine.generate([[3]])
    engine.backend.nan_rows = False
    assert len(engine.generate([[3]], SamplingParams(max_tokens=3))[0].token_ids) == 3


def test_a_bug_in_the_worker_leaves_nobody_waiting(fake_engine, monkeypatch):
    engine = fake_engine()
    monkeypatch.setattr(engine._worker.scheduler, "schedule", lambda now: 1 / 0)
    stream = engine.submit(request([3]))
    with pytest.raises(RequestError, match="division by zero"):
        stream.result(5)
    wait_until(lambda: engine._worker.backend.closed)
    with pytest.raises(KilnError, match="has stopped"):
        engine.submit(request([3]))


def test_closing_gives_every_request_an_outcome(fake_engine):
    engine = fake_engine(max_running=2)
    engine.backend.gate.clear()
    streams = [engine.submit(request([3, i], max_tokens=50)) for i in range(6)]
    backend = engine.backend
    closer = threading.Thread(target=engine.close)
    closer.start()
    backend.gate.set()
    closer.join(5)
    assert not closer.is_alive()
    assert all(s.done for s in streams)
    assert {s.result(0).finish_reason for s in streams} == {"cancelled"}
    assert backend.closed
    engine.close()
    for use in (lambda: engine.submit(request([3])), lambda: engine.generate([[3]]), lambda: engine.backend):
        with pytest.raises(KilnError, match="closed; open it again"):
            use()


def test_a_forgotten_engine_ends_its_thread(fake_backend):
    backend = fake_backend()
    engine = Engine.from_decoder(backend, DecoderSpec(backend.kv, backend.vocabulary, 100, (1,)))
    thread = engine._worker._thread
    del engine
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()
    assert backend.closed


def test_result_can_time_out(fake_engine):
    engine = fake_engine()
    engine.backend.gate.clear()
    stream = engine.submit(request([3], max_tokens=1))
    with pytest.raises(TimeoutError, match=r"not done after 0\.01 s"):
        stream.result(0.01)
    engine.backend.gate.set()
    assert stream.result(5).finish_reason == "length"


def test_submits_and_cancels_from_many_threads(fake_engine):
    engine = fake_engine(num_blocks=100)
    outcomes: list[str] = []

    def client(number: int) -> None:
        for i in range(15):
            with_cancel = (number + i) % 3 == 0
            stream = engine.submit(request(PROMPTS[(number + i) % 8], max_tokens=5, seed=i, temperature=1))
            if with_cancel:
                stream.cancel()
            outcomes.append(stream.result(20).finish_reason)

    threads = [threading.Thread(target=client, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(outcomes) == 120
    assert set(outcomes) <= {"length", "cancelled"}
    assert engine.free_blocks == 100


def test_a_request_ends_at_its_deadline_with_what_it_has(fake_engine):
    engine = fake_engine()
    engine.backend.gate.clear()
    stream = engine.submit(Request((5, 6, 7), SamplingParams(max_tokens=50), timeout=0.2))
    waiting = [engine.submit(Request((8, 9), SamplingParams(max_tokens=1))) for _ in range(2)]
    time.sleep(0.3)
    engine.backend.gate.set()
    completion = stream.result(10)
    assert completion.finish_reason == "timeout"
    assert len(completion.token_ids) <= 1
    assert [other.result(10).finish_reason for other in waiting] == ["length", "length"]
    assert engine.free_blocks == engine.backend.num_blocks


def test_a_full_queue_refuses_clearly_and_loses_nobody(fake_backend):
    from engines.runtime.scheduler import QueueFullError, SchedulerConfig
    from passes.onnx_model import DecoderSpec

    backend = fake_backend()
    backend.gate.clear()
    decoder = DecoderSpec(backend.kv, backend.vocabulary, 100, (1,))
    config = SchedulerConfig(max_running=1, tokens_per_step=8, max_waiting=3)
    with Engine.from_decoder(backend, decoder, config=config) as engine:
        streams, refused = [], []
        for number in range(12):
            try:
                streams.append(engine.submit(Request((2 + number,), SamplingParams(max_tokens=2))))
            except QueueFullError as error:
                refused.append(str(error))
        backend.gate.set()
        assert len(refused) >= 7
        assert all("3 requests wait already" in message for message in refused)
        assert all(stream.result(10).finish_reason == "length" for stream in streams)
