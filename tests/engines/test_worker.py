"""Several answers to one prompt, swapping, the static cache, overlap and metrics."""

from contextlib import contextmanager

import numpy as np
import pytest

from engines.backends.onnxruntime import OnnxRuntimeDecoder
from engines.runtime.engine import Engine
from engines.runtime.request import Request, RequestError, SamplingParams
from engines.runtime.scheduler import QueueFullError, SchedulerConfig
from passes.onnx_model import DecoderSpec
from plugins.errors import KilnError

PROMPT = (5, 6, 7, 8, 9, 10)


@contextmanager
def engine_over(backend, max_context: int = 200, **options):
    config = SchedulerConfig(**{"max_running": 4, "tokens_per_step": 16, **options})
    with Engine.from_decoder(
        backend, DecoderSpec(backend.kv, backend.vocabulary, max_context, (1,)), config=config
    ) as engine:
        yield engine
        assert engine.free_blocks == backend.num_blocks


def sampled(n: int = 1, **options) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 3, "max_tokens": 12, "n": n, **options})


def test_n_answers_share_the_prompt_and_each_is_its_own(fake_backend):
    backend = fake_backend()
    with engine_over(backend) as engine:
        answers = [s.result(20).token_ids for s in engine.submit_choices(Request(PROMPT, sampled(3)))]
        prompt_tokens = sum(len(step.input_ids) for step in backend.steps) - 3 * 11
        assert prompt_tokens == len(PROMPT), "computed once"
        assert len(set(answers)) == 3
        assert engine.generate([PROMPT], sampled())[0].token_ids == answers[0], "the first is that of n=1"
        again = engine.generate([PROMPT, (9, 9, 9), PROMPT], sampled(3))
        assert [c.token_ids for c in again[:3]] == answers, "whatever else runs"
        assert len(again) == 9


def test_more_answers_than_places_all_come(fake_backend):
    with engine_over(fake_backend(), max_running=2) as engine:
        together = [s.result(20).token_ids for s in engine.submit_choices(Request(PROMPT, sampled(5)))]
    with engine_over(fake_backend(), max_running=8) as engine:
        assert together == [s.result(20).token_ids for s in engine.submit_choices(Request(PROMPT, sampled(5)))]


@pytest.mark.parametrize("cancelled", [0, 1])
def test_one_of_several_answers_can_be_cancelled_before_the_prompt_is_computed(fake_backend, cancelled):
    backend = fake_backend()
    with engine_over(backend) as engine:
        expected = [s.result(20).token_ids for s in engine.submit_choices(Request(PROMPT, sampled(3)))]
        backend.gate.clear()
        blocker = engine.submit(Request((2,), SamplingParams(max_tokens=2)))
        streams = engine.submit_choices(Request(PROMPT, sampled(3)))
        streams[cancelled].cancel()
        backend.gate.set()
        results = [stream.result(20) for stream in streams]
        blocker.result(20)
        assert results[cancelled].finish_reason == "cancelled"
        assert results[cancelled].token_ids == ()
        for number, result in enumerate(results):
            assert number == cancelled or result.token_ids == expected[number]


def test_when_the_prompt_fails_all_its_answers_fail_and_when_it_times_out_all_time_out(fake_backend):
    backend = fake_backend()
    with engine_over(backend) as engine:
        backend.fail_steps.append(MemoryError("no room"))
        for stream in engine.submit_choices(Request(PROMPT, sampled(3))):
            with pytest.raises(RequestError, match="no room"):
                stream.result(20)
        backend.gate.clear()
        blocker = engine.submit(Request((2,), SamplingParams(max_tokens=2)))
        streams = engine.submit_choices(Request(PROMPT, sampled(2), timeout=1e-6))
        backend.gate.set()
        assert [stream.result(20).finish_reason for stream in streams] == ["timeout"] * 2
        blocker.result(20)


def test_closing_gives_every_answer_its_outcome(fake_backend):
    backend = fake_backend()
    engine = Engine.from_decoder(backend, DecoderSpec(backend.kv, 97, 200, (1,)), config=SchedulerConfig(2, 16))
    backend.gate.clear()
    streams = [s for _ in range(3) for s in engine.submit_choices(Request(PROMPT, sampled(3)))]
    backend.gate.set()
    engine.close()
    assert {stream.result(20).finish_reason for stream in streams} <= {"cancelled", "length"}
    assert len(streams) == 9


def test_every_answer_counts_in_the_queue(fake_backend):
    backend = fake_backend()
    with engine_over(backend, max_waiting=4) as engine:
        with pytest.raises(QueueFullError, match="4 requests wait already"):
            engine.submit_choices(Request(PROMPT, sampled(5)))
        assert 'kiln_requests_total{model="model",outcome="refused"} 1.0' in engine.metrics.text()
        assert len(engine.submit_choices(Request(PROMPT, sampled(4)))) == 4
        with pytest.raises(KilnError, match="asks for 2 answers; use submit_choices"):
            engine.submit(Request(PROMPT, sampled(2)))


@pytest.mark.parametrize("host_blocks", [0, 6])
def test_who_gives_way_loses_no_token(fake_backend, host_blocks):
    prompts = [tuple(range(2 + n, 12 + n)) for n in range(6)]
    with engine_over(fake_backend(num_blocks=256)) as engine:
        expected = [c.token_ids for c in engine.generate(prompts, sampled(2, max_tokens=30))]
    tight = fake_backend(num_blocks=14, host_blocks=host_blocks)
    with engine_over(tight) as engine:
        assert [c.token_ids for c in engine.generate(prompts, sampled(2, max_tokens=30))] == expected
        worker = engine._worker
        assert worker.scheduler.preemptions > 0
        assert (worker.kv.statistics.swapped_blocks > 0) == bool(host_blocks)
        worker.scheduler.check()


def test_overlap_changes_no_answer(fake_backend):
    prompts = [tuple(range(2 + n, 9 + 3 * n)) for n in range(8)]
    results = []
    for overlap in (True, False):
        with engine_over(fake_backend(), overlap=overlap) as engine:
            results.append(engine.generate(prompts, sampled(2, logprobs=3)))
    assert results[0] == results[1]


def test_the_metrics_of_a_run_add_up(fake_backend):
    backend = fake_backend(num_blocks=14)
    with engine_over(backend) as engine:
        engine.generate([tuple(range(2 + n, 12 + n)) for n in range(6)], sampled(2, max_tokens=30))
        values = {
            sample.name: sample.value
            for family in engine.metrics.families()
            for sample in family.samples
            if not sample.name.endswith(("_bucket", "_created")) and "outcome" not in sample.labels
        }
        outcomes = {
            sample.labels["outcome"]: sample.value
            for family in engine.metrics.families()
            for sample in family.samples
            if sample.name == "kiln_requests_total"
        }
    assert outcomes == {"length": 12}
    assert values["kiln_generated_tokens_total"] == 12 * 30
    assert values["kiln_prompt_tokens_total"] == 6 * 10
    assert values["kiln_first_token_seconds_count"] == 12
    assert values["kiln_inter_token_seconds_count"] == 12 * 29
    assert values["kiln_queue_seconds_count"] == 6
    assert values["kiln_request_seconds_count"] == 12
    assert values["kiln_step_seconds_count"] == len(backend.steps) == values["kiln_batch_size_count"]
    assert values["kiln_step_tokens_sum"] == sum(len(step.input_ids) for step in backend.steps)
    assert values["kiln_preemptions_total"] > 0
    assert values["kiln_copied_blocks_total"] > 0
    assert values["kiln_running"] == values["kiln_waiting_batch"] == values["kiln_blocks_held"] == 0
    assert values["kiln_blocks_free"] + values["kiln_blocks_cached"] == 14


@pytest.fixture
def decoder_of(tiny_model, cpu_plugin):
    backends = []

    def make(dtype: str = "float32", **options) -> OnnxRuntimeDecoder:
        model = tiny_model(dtype)
        backend = OnnxRuntimeDecoder(model.path, model.kv, plugins=[cpu_plugin], threads=1, **options)
        backend.vocabulary = model.vocabulary
        backends.append(backend)
        return backend

    yield make
    for backend in backends:
        backend.close()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_blocks_move_within_the_cache_and_to_the_host_and_back(decoder_of, dtype):
    backend = decoder_of(dtype, num_blocks=4, host_blocks=3)
    for number, cache in enumerate(backend._arrays.values()):
        for block in range(4):
            cache[block] = 10 * number + block
    backend.move_blocks([(1, 4), (2, 1), (4, 6), (0, 2), (6, 0)])
    for number, cache in enumerate(backend._arrays.values()):
        assert [np.unique(cache[block]).tolist() for block in range(4)] == [
            [10 * number + content] for content in (1, 2, 0, 3)
        ]


def test_n_answers_and_swaps_on_a_real_graph(decoder_of):
    prompts = [tuple(range(1 + n, 20 + n)) for n in range(5)]
    params = sampled(3, max_tokens=40)
    with engine_over(decoder_of(num_blocks=200), 256, max_running=6) as engine:
        expected = [c.token_ids for c in engine.generate(prompts, params)]
    with engine_over(decoder_of(num_blocks=24, host_blocks=12), 256, max_running=6) as engine:
        assert [c.token_ids for c in engine.generate(prompts, params)] == expected
        assert engine._worker.kv.statistics.swapped_blocks > 0
        assert engine._worker.kv.statistics.copied_blocks > 0


def test_the_static_cache_attends_to_its_window_and_never_runs_out(tiny_model, cpu_plugin, decoder_of):
    from engines.runtime.ring_kv import ring_blocks

    model, window, running, step = tiny_model(), 20, 2, 12
    blocks = running * ring_blocks(window, step, model.block_size)
    backend = decoder_of(num_blocks=blocks, window=window)
    config = SchedulerConfig(running, step)
    with Engine.from_decoder(backend, model.decoder, config=config, window=window) as engine:
        assert engine.max_length == model.max_context
        greedy = SamplingParams(max_tokens=120, ignore_eos=True)
        prompts = [tuple(range(1, 40)), (7, 8, 9), tuple(range(3, 60))]
        for prompt, completion in zip(prompts, engine.generate(prompts, greedy), strict=True):
            expected = model.logits([*prompt, *completion.token_ids[:-1]], window)[len(prompt) - 1 :]
            chosen = expected[np.arange(120), completion.token_ids]
            assert (chosen >= expected.max(axis=1) - 1e-3).all()
        assert [len(s.result(20).token_ids) for s in engine.submit_choices(Request((4, 5), sampled(3)))] == [12] * 3
        engine._worker.scheduler.check()
        assert engine.free_blocks == blocks
