"""Tokens of the engine over a fake backend: batched or alone, streamed or waited for, preempted, shared, limited."""

import asyncio

import pytest

from engines.runtime.opening import default_kv_blocks
from engines.runtime.request import Request, SamplingParams
from engines.runtime.stream import Stream
from passes.onnx_model import DecoderSpec
from plugins.errors import KilnError
from plugins.paged_attention.schema import KvLayer, KvSpec
from tests.engines.engine_requests import PROMPTS, request


def test_together_gives_what_each_gives_alone(fake_engine):
    sampling = [SamplingParams(max_tokens=5 + 3 * i, temperature=i % 2, seed=i) for i in range(len(PROMPTS))]
    requests = [Request(tuple(p), s) for p, s in zip(PROMPTS, sampling, strict=True)]
    engine = fake_engine(num_blocks=80)
    together = engine.generate(requests)
    steps = len(engine.backend.steps)
    assert max(len(s.past_seqlens) for s in engine.backend.steps) == 4
    assert max(len(s.input_ids) for s in engine.backend.steps) <= 16
    alone = [fake_engine(num_blocks=80, tokens_per_step=200).generate([r])[0] for r in requests]
    assert together == alone
    assert [len(c.token_ids) for c in together] == [s.max_tokens for s in sampling]
    assert all(
        c.finish_reason == "length" and c.prompt_tokens == len(p) for c, p in zip(together, PROMPTS, strict=True)
    )
    assert steps < sum(s.max_tokens for s in sampling)
    assert engine.free_blocks == 80


def test_a_prompt_pays_for_one_row_of_logits(fake_engine):
    engine = fake_engine(tokens_per_step=16)
    engine.generate([request(range(2, 42), max_tokens=3)])
    assert [len(s.logits_indices) for s in engine.backend.steps] == [0, 0, 1, 1, 1]


def test_same_seed_same_tokens_whatever_else_runs(fake_engine):
    engine = fake_engine()
    sampled = request([5, 6, 7], temperature=1.5, seed=11, max_tokens=12)
    alone = engine.generate([sampled])[0]
    others = [request(p, temperature=1.0, max_tokens=9) for p in PROMPTS]
    assert engine.generate([*others[:3], sampled, *others[3:]])[3] == alone
    assert engine.generate([request([5, 6, 7], temperature=1.5, seed=12, max_tokens=12)])[0] != alone
    unseeded = [request([5, 6, 7], temperature=1.5, max_tokens=12)] * 2
    first, second = engine.generate(unseeded)
    assert first != second


def test_streaming_gives_the_same_as_waiting(fake_engine):
    engine = fake_engine()
    chunks = list(engine.submit(request([3, 4], max_tokens=6)))
    whole = engine.generate([[3, 4]], SamplingParams(max_tokens=6))[0]
    assert tuple(t for c in chunks for t in c.token_ids) == whole.token_ids
    assert [c.finish_reason for c in chunks] == [None] * 5 + ["length"]


def test_a_stream_can_be_forwarded_those_chunks_first_that_nobody_read(fake_engine):
    engine = fake_engine()
    whole = engine.generate([[3, 4]], SamplingParams(max_tokens=12))[0]
    stream, handed = engine.submit(request([3, 4], max_tokens=12)), []
    first = next(stream)
    stream.forward(handed.append)
    stream.result(20)
    assert first.token_ids + tuple(t for chunk in handed for t in chunk.token_ids) == whole.token_ids
    assert [chunk.finish_reason for chunk in handed if chunk.finish_reason] == ["length"]


def test_async_streams_run_side_by_side(fake_engine):
    engine = fake_engine()

    async def read(stream: Stream) -> list[int]:
        return [token async for chunk in stream for token in chunk.token_ids]

    async def main() -> list[list[int]]:
        streams = [engine.submit(request(p, max_tokens=8)) for p in PROMPTS]
        return await asyncio.gather(*(read(s) for s in streams))

    expected = [list(c.token_ids) for c in engine.generate([request(p, max_tokens=8) for p in PROMPTS])]
    assert asyncio.run(main()) == expected


def test_async_reading_waits_without_blocking_its_loop(fake_engine):
    engine = fake_engine()
    engine.backend.gate.clear()

    async def main():
        stream = engine.submit(request([3], max_tokens=2))
        reader = asyncio.create_task(stream.__anext__())
        await asyncio.sleep(0.02)
        assert not reader.done()
        engine.backend.gate.set()
        assert len((await reader).token_ids) == 1
        engine.backend.gate.clear()
        abandoned = engine.submit(request([3], max_tokens=2))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(abandoned.__anext__(), 0.02)
        engine.backend.gate.set()
        return abandoned

    assert asyncio.run(main()).result(5).finish_reason == "length"


def test_end_of_sequence(fake_engine):
    engine = fake_engine()
    engine.backend.force = {6: 1}
    done = engine.generate([[3, 4, 5]], SamplingParams(max_tokens=20))[0]
    assert done.finish_reason == "stop"
    assert len(done.token_ids) == 4
    assert done.token_ids[-1] == 1
    ignored = engine.generate([[3, 4, 5]], SamplingParams(max_tokens=20, ignore_eos=True))[0]
    assert ignored.finish_reason == "length"
    assert ignored.token_ids[:4] == done.token_ids
    assert len(ignored.token_ids) == 20


def test_max_tokens_is_clipped_to_the_context(fake_engine):
    engine = fake_engine(max_context=20)
    for wanted in (None, 1000):
        assert len(engine.generate([[3] * 12], SamplingParams(max_tokens=wanted))[0].token_ids) == 8
    small = fake_engine(max_context=200, num_blocks=4)
    assert small.max_length == 16
    assert len(small.generate([[3] * 12])[0].token_ids) == 4


def test_bad_requests_are_refused_at_submit(fake_engine):
    engine = fake_engine(max_context=20)
    cases = [
        ([3] * 20, "the prompt has 20 tokens, the engine holds 20 .* shorten the prompt to at most 19$"),
        ([], "the prompt is empty"),
        ([3, 97], "token id 97; expected 0 to 96"),
        ([-1], "token id -1"),
    ]
    for prompt, message in cases:
        with pytest.raises(KilnError, match=message):
            engine.submit(request(prompt))
    with pytest.raises(KilnError, match="no tokenizer; give token ids"):
        engine.submit(Request("text"))
    with pytest.raises(KilnError, match="leave stop out"):
        engine.submit(request([3], stop=("x",)))
    with pytest.raises(KilnError, match=r"write generate\(\[prompt\]\)"):
        engine.generate("text")
    with pytest.raises(KilnError, match="use submit or generate, not infer"):
        engine.infer({})
    with pytest.raises(KilnError, match="more kv_blocks"):
        fake_engine(num_blocks=2).submit(request([3] * 9))
    assert engine.backend.steps == []


def test_one_bad_prompt_in_a_list_starts_nothing(fake_engine):
    engine = fake_engine()
    with pytest.raises(KilnError, match="empty"):
        engine.generate([[3], [4], []])
    assert engine.backend.steps == []


def test_default_blocks_hold_full_contexts_within_a_quarter_of_memory(monkeypatch):
    kv = KvSpec((KvLayer(1, 64),), 16, "float32")
    decoder = DecoderSpec(kv, 10, 1000, ())
    monkeypatch.setattr("engines.runtime.opening.host_memory", lambda: 2**40)
    assert default_kv_blocks(decoder, 4) == 4 * 63
    monkeypatch.setattr("engines.runtime.opening.host_memory", lambda: 4 * 100 * kv.bytes_per_block)
    assert default_kv_blocks(decoder, 4) == 100
    monkeypatch.setattr("engines.runtime.opening.host_memory", lambda: 1000)
    with pytest.raises(KilnError, match="more than a quarter"):
        default_kv_blocks(decoder, 4)


def test_preempted_requests_give_the_same_tokens(fake_engine):
    prompts = [tuple(range(10 * n + 2, 10 * n + 12)) for n in range(5)]
    roomy = fake_engine(num_blocks=200, max_running=5)
    sampling = SamplingParams(max_tokens=30)
    expected = [c.token_ids for c in roomy.generate(prompts, sampling)]
    tight = fake_engine(num_blocks=14, max_running=5)
    assert [c.token_ids for c in tight.generate(prompts, sampling)] == expected
    assert tight._worker.scheduler.preemptions > 0
    assert tight.free_blocks == 14


def test_a_shared_prefix_is_computed_once_and_tenants_do_not_share(fake_engine):
    engine = fake_engine(tokens_per_step=64)
    prefix = tuple(range(2, 34))
    tokens = []
    for tenant in ("a", "a", "b"):
        before = sum(len(step.input_ids) for step in engine.backend.steps)
        engine.generate([Request((*prefix, 50), SamplingParams(max_tokens=1), tenant=tenant)])
        tokens.append(sum(len(step.input_ids) for step in engine.backend.steps) - before)
    assert tokens == [33, 1, 33]


def test_logprobs_come_with_the_tokens(fake_engine):
    engine = fake_engine()
    (completion,) = engine.generate([(5, 6, 7)], SamplingParams(max_tokens=4, logprobs=2))
    assert [entry.token for entry in completion.logprobs] == list(completion.token_ids)
    assert all(len(entry.top) == 2 and entry.top[0] == (entry.token, entry.logprob) for entry in completion.logprobs)
    (without,) = engine.generate([(5, 6, 7)], SamplingParams(max_tokens=4))
    assert without.logprobs == ()


def test_penalties_see_the_whole_history_also_after_preemption(fake_engine):
    prompts = [tuple(range(10 * n + 2, 10 * n + 12)) for n in range(5)]
    sampling = SamplingParams(max_tokens=30, presence_penalty=2.0, repetition_penalty=1.5, temperature=0.8, seed=3)
    expected = [c.token_ids for c in fake_engine(num_blocks=200, max_running=5).generate(prompts, sampling)]
    tight = fake_engine(num_blocks=14, max_running=5)
    assert [c.token_ids for c in tight.generate(prompts, sampling)] == expected
    assert tight._worker.scheduler.preemptions > 0
