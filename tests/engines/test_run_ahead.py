"""Engines that launch the next step before this one's tokens are known: the same answers, outcomes and blocks."""

from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.runtime.engine import Engine
from engines.runtime.request import Completion, Request, RequestError, SamplingParams
from engines.runtime.scheduler import SchedulerConfig
from engines.runtime.stream import Stream
from passes.onnx_model import DecoderSpec

from .conftest import EOS, FakeBackend
from .launching_fake import LaunchingFake

PROMPT = (5, 6, 7, 8, 9, 10)
GREEDY = SamplingParams(max_tokens=12)


@contextmanager
def engine_over(backend, max_context: int = 200, **options):
    config = SchedulerConfig(**{"max_running": 4, "tokens_per_step": 16, **options})
    with Engine.from_decoder(backend, DecoderSpec(backend.kv, 97, max_context, (EOS,)), config=config) as engine:
        yield engine
        # The outcome of a last request comes when all steps before have landed, and none follows its own.
        engine.generate([(3, 4)], SamplingParams(max_tokens=2))
        assert engine.free_blocks == backend.num_blocks
        engine._worker.scheduler.check()


def sampled(**options) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 3, "max_tokens": 12, **options})


def outcome_of(stream: Stream) -> Completion:
    """Also of a request that failed for lack of room."""
    try:
        return stream.result(20)
    except RequestError as error:
        if "no room" not in str(error):
            raise
        return error.completion


@dataclass(frozen=True)
class Asked:
    """A request, and when it is cancelled: after so many tokens, or never."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    lane: str
    cancel_after: int | None


def asked() -> st.SearchStrategy[Asked]:
    prompts = st.tuples(st.integers(0, 9), st.integers(1, 14), st.integers(0, 3)).map(
        lambda x: (*range(2, 2 + x[0]), *(50 + x[2] + n for n in range(x[1])))
    )
    sampling = st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 14),
        logprobs=st.sampled_from([None, None, None, None, 2]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.0, 1.3]),
        ignore_eos=st.booleans(),
        n=st.sampled_from([1, 1, 1, 2]),
    )
    cancels = st.sampled_from([None, None, None, 0, 1, 4])
    return st.builds(Asked, prompts, sampling, st.sampled_from(["interactive", "batch"]), cancels)


@settings(max_examples=20, deadline=None)
@given(
    requests=st.lists(asked(), min_size=1, max_size=9),
    blocks=st.sampled_from([9, 12, 64]),
    host_blocks=st.sampled_from([0, 4]),
    late=st.booleans(),
    ends=st.sets(st.integers(3, 30), max_size=4),
)
def test_answers_are_those_of_an_engine_that_waits(requests, blocks, host_blocks, late, ends):
    """Arrivals, cancellations, ends and a pool so small that sequences give way; greedy, so one answer is right."""
    size = {"num_blocks": blocks, "host_blocks": host_blocks}
    plain = FakeBackend(num_blocks=256)
    plain.force = dict.fromkeys(ends, EOS)
    with engine_over(plain, run_ahead=False) as engine:
        expected = [[s.result(20) for s in engine.submit_choices(Request(r.prompt, r.sampling))] for r in requests]
    backend = LaunchingFake(late, **size)
    backend.force = plain.force
    with engine_over(backend) as engine:
        streams = [engine.submit_choices(Request(r.prompt, r.sampling, r.lane)) for r in requests]
        for request, choices in zip(requests, streams, strict=True):
            if request.cancel_after is not None:
                for _ in zip(range(request.cancel_after), choices[0], strict=False):
                    pass
                choices[0].cancel()
        for request, choices, right in zip(requests, streams, expected, strict=True):
            for number, (stream, one) in enumerate(zip(choices, right, strict=True)):
                found = stream.result(20)
                if found.finish_reason == "cancelled":
                    assert request.cancel_after is not None
                    assert number == 0
                    assert found.token_ids == one.token_ids[: len(found.token_ids)]
                else:
                    assert (found.token_ids, found.finish_reason) == (one.token_ids, one.finish_reason)
                    assert found.logprobs == one.logprobs


@pytest.mark.parametrize("late", [True, False])
def test_steps_run_ahead_and_are_fed_on_the_device(late):
    backend = LaunchingFake(late)
    with engine_over(backend) as engine:
        completion = engine.generate([PROMPT], GREEDY)[0]
        assert len(completion.token_ids) == 12
        assert len(backend.steps) == 12, "the last token is known beforehand: none is computed for nothing"
        assert backend.most_in_flight == 2
        assert backend.fed == 11
        assert backend.with_logits == 0


def test_a_seed_gives_the_same_tokens_whatever_else_runs():
    others = [tuple(range(2 + n, 20 + n)) for n in range(5)]
    with engine_over(LaunchingFake()) as engine:
        alone = engine.generate([PROMPT], sampled())[0].token_ids
        assert engine.generate([PROMPT], sampled(seed=4))[0].token_ids != alone
        together = engine.generate([*others, PROMPT], sampled())
        assert together[-1].token_ids == alone
        beside = engine.generate([Request(others[0], sampled(logprobs=2, max_tokens=9)), Request(PROMPT, sampled())])
        assert beside[1].token_ids == alone
    with engine_over(LaunchingFake(num_blocks=11)) as engine:
        assert engine.generate([*others, PROMPT], sampled())[-1].token_ids == alone
        assert engine._worker.scheduler.preemptions > 0
    for options in ({"run_ahead": False}, {"overlap": False}, {"speculate": 3}):
        backend = LaunchingFake()
        with engine_over(backend, **options) as engine:
            assert engine.generate([PROMPT], sampled())[0].token_ids == alone, options
            assert (backend.most_in_flight == 2) == ("overlap" in options)


def test_several_answers_are_each_their_own_and_again_the_same():
    with engine_over(LaunchingFake()) as engine:
        answers = [s.result(20).token_ids for s in engine.submit_choices(Request(PROMPT, sampled(n=3)))]
        assert len(set(answers)) == 3
        assert engine.generate([PROMPT], sampled())[0].token_ids == answers[0], "the first is that of n=1"
        again = engine.generate([(9, 9, 9), PROMPT], sampled(n=3))
        assert [c.token_ids for c in again[3:]] == answers


def test_logits_on_the_host_make_steps_wait():
    backend = LaunchingFake()
    with engine_over(backend) as engine:
        completion = engine.generate([PROMPT], SamplingParams(max_tokens=8, logprobs=2))[0]
        assert len(completion.logprobs) == 8
        assert backend.most_in_flight == 1
        assert backend.with_logits == 8
        engine.generate([PROMPT], GREEDY)
        assert backend.with_logits == 8
        assert backend.most_in_flight == 2


@pytest.mark.parametrize("late", [True, False])
def test_what_comes_after_the_end_is_thrown_away(late):
    backend = LaunchingFake(late)
    backend.force = {10: EOS}
    with engine_over(backend) as engine:
        completion = engine.generate([PROMPT], GREEDY)[0]
        assert completion.finish_reason == "stop"
        assert completion.token_ids[-1] == EOS
        assert len(completion.token_ids) == 5
        assert 'kiln_generated_tokens_total{model="model"} 5.0' in engine.metrics.text()


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("where", ["fail_steps", "fail_launches"])
def test_an_error_fails_who_is_in_the_step_and_nobody_else(late, where):
    backend = LaunchingFake(late)
    with engine_over(backend, max_running=2) as engine:
        expected = [c.token_ids for c in engine.generate([PROMPT, (8, 9), (20, 21)], GREEDY)]
        backend.gate.clear()
        first = [engine.submit(Request(prompt, GREEDY)) for prompt in (PROMPT, (8, 9), (20, 21))]
        getattr(backend, where).append(MemoryError("no room"))
        backend.gate.set()
        outcomes = [outcome_of(stream) for stream in first]
        for found, right in zip(outcomes, expected, strict=True):
            assert found.token_ids == right[: len(found.token_ids)]
            assert (found.finish_reason == "error") == (len(found.token_ids) < 12)
        assert 1 <= sum(found.finish_reason == "error" for found in outcomes) <= 2
        assert [c.token_ids for c in engine.generate([PROMPT, (8, 9)], GREEDY)] == expected[:2], "and goes on"


def test_rows_without_finite_logits_fail_alone():
    backend = LaunchingFake()
    with engine_over(backend) as engine:
        backend.nan_rows = True
        with pytest.raises(RequestError, match="the logits have a NaN or no finite maximum"):
            engine.generate([PROMPT], GREEDY)
        backend.nan_rows = False
        assert len(engine.generate([PROMPT], GREEDY)[0].token_ids) == 12


def test_deadlines_and_closing_end_what_is_in_flight():
    backend = LaunchingFake()
    with engine_over(backend) as engine:
        late = engine.submit(Request(PROMPT, SamplingParams(max_tokens=100), timeout=1e-9))
        assert late.result(20).finish_reason == "timeout"
    backend = LaunchingFake()
    engine = Engine.from_decoder(backend, DecoderSpec(backend.kv, 97, 200, (EOS,)), config=SchedulerConfig(2, 16))
    streams = [engine.submit(Request(PROMPT, SamplingParams(max_tokens=100))) for _ in range(4)]
    next(streams[0])
    engine.close()
    assert [stream.result(20).finish_reason for stream in streams] == ["cancelled"] * 4
    assert backend.closed
    assert backend.in_flight == 0
