"""The whole runtime on real ONNX Runtime: a bundle with the tiny serving graph, opened and served."""

import asyncio
import dataclasses
import subprocess
import sys
import threading

import numpy as np
import pytest

from engines.backends.onnxruntime import OnnxRuntimeDecoder
from engines.bundle import open_bundle
from engines.runtime.engine import Engine
from engines.runtime.request import Request, SamplingParams
from engines.runtime.scheduler import SchedulerConfig
from engines.runtime.score import score
from plugins.errors import KilnError

LENGTHS = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 90, 120, 150)
RNG = np.random.default_rng(11)
PROMPTS = [
    [int(t) for t in RNG.integers(1, 61, length)]
    for length in (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 90, 120, 150)
]


@pytest.fixture(scope="module")
def engine(tiny_bundle):
    with Engine.open(tiny_bundle.path, config=SchedulerConfig(16, 64)) as engine:
        yield engine


def greedy_by_numpy(model, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model.logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_16_prompts_together_give_token_by_token_what_each_gives_alone(engine, tiny_model):
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    together = engine.generate(PROMPTS, sampling)
    alone = [engine.generate([prompt], sampling)[0] for prompt in PROMPTS]
    assert together == alone
    model = tiny_model()
    for prompt, completion in list(zip(PROMPTS, together, strict=True))[::3]:
        assert list(completion.token_ids) == greedy_by_numpy(model, prompt, 20)
    assert engine.free_blocks == engine.backend.num_blocks


def test_seeds_give_the_same_alone_and_together(engine):
    requests = [
        Request(tuple(p), SamplingParams(temperature=0.9, top_k=20, top_p=0.95, seed=i, max_tokens=15))
        for i, p in enumerate(PROMPTS)
    ]
    together = engine.generate(requests)
    assert together == [engine.generate([request])[0] for request in requests]
    reseeded = [Request(r.prompt, dataclasses.replace(r.sampling, seed=99)) for r in requests]
    assert engine.generate(reseeded) != together


def test_text_streams_and_stops_at_a_string_over_token_borders(engine):
    whole = engine.generate(["HELLO"], SamplingParams(max_tokens=30, ignore_eos=True))[0]
    assert len(whole.text) == sum(token != 0 for token in whole.token_ids)
    stop = whole.text[7:10]
    at = whole.text.index(stop)
    chunks = list(engine.submit(Request("HELLO", SamplingParams(max_tokens=30, ignore_eos=True, stop=(stop,)))))
    assert "".join(chunk.text for chunk in chunks) == whole.text[:at]
    assert chunks[-1].finish_reason == "stop"
    assert sum(len(chunk.token_ids) for chunk in chunks) < 30


def test_async_streams(engine):
    async def main():
        streams = [engine.submit(Request(tuple(p), SamplingParams(max_tokens=5, ignore_eos=True))) for p in PROMPTS]
        return [[t async for chunk in stream for t in chunk.token_ids] for stream in streams]

    expected = engine.generate(PROMPTS, SamplingParams(max_tokens=5, ignore_eos=True))
    assert asyncio.run(main()) == [list(c.token_ids) for c in expected]


def test_cancel_in_the_middle(engine):
    stream = engine.submit(Request(tuple(PROMPTS[3]), SamplingParams(ignore_eos=True)))
    first = next(stream)
    stream.cancel()
    completion = stream.result(10)
    assert completion.finish_reason == "cancelled"
    assert completion.token_ids[:1] == first.token_ids
    assert len(completion.token_ids) < 256 - 5
    assert engine.free_blocks == engine.backend.num_blocks


def test_a_prompt_beyond_the_context(engine):
    assert engine.max_length == 256
    with pytest.raises(KilnError, match=r"the prompt has 300 tokens, the engine holds 256"):
        engine.generate([[1] * 300])
    last = engine.generate([[1] * 255], SamplingParams(max_tokens=100))[0]
    assert len(last.token_ids) == 1
    assert last.finish_reason in ("length", "stop")


def test_few_blocks_make_requests_wait_but_change_no_token(tiny_bundle, engine):
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    expected = engine.generate(PROMPTS, sampling)
    with Engine.open(tiny_bundle.path, kv_blocks=24, config=SchedulerConfig(4, 5), threads=1) as small:
        assert small.generate(PROMPTS, sampling) == expected
        assert small.free_blocks == 24


def test_default_pool_holds_max_running_contexts(engine):
    assert engine.backend.num_blocks == 16 * 256 // 8


def test_a_bundle_without_a_cache_infers_and_generates_nothing(twice_bundle):
    with Engine.open(twice_bundle.path) as engine:
        assert engine.infer({"x": np.ones(3, np.float32)})["twice"].tolist() == [2, 2, 2]
        for use in (lambda: engine.generate([[1]]), lambda: engine.submit(Request((1,))), lambda: engine.backend):
            with pytest.raises(KilnError, match="has no KV cache and generates no tokens; use infer"):
                use()
        with pytest.raises(KilnError, match="tiny has no tokenizer"):
            _ = engine.tokenizer
    with pytest.raises(KilnError, match="closed"):
        engine.infer({"x": np.ones(3, np.float32)})


def test_a_program_may_end_while_requests_run(tiny_bundle):
    code = (
        "from engines.runtime.engine import Engine\n"
        "from engines.runtime.request import Request, SamplingParams\n"
        f"engine = Engine.open({str(tiny_bundle.path)!r}, threads=1)\n"
        "streams = [engine.submit(Request((1, 2, 3), SamplingParams(ignore_eos=True))) for _ in range(40)]\n"
        "print(len(next(streams[0]).token_ids))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_a_plugin_of_another_abi_is_refused(make_bundle, tiny_model, cpu_plugin):
    model = tiny_model()
    other = make_bundle(model.path, model.decoder, cpu_plugin, abi="f" * 64)
    assert open_bundle(other.path)
    with pytest.raises(KilnError, match="implements kiln::PagedAttention with ABI ffffffffffff, this Kiln expects"):
        Engine.open(other.path)


class Watched:
    """A session that says when it is inside a step."""

    def __init__(self, session):
        self.session = session
        self.inside = False

    def run_with_iobinding(self, binding):
        self.inside = True
        self.session.run_with_iobinding(binding)
        self.inside = False


def test_other_threads_run_while_a_step_computes(tiny_model, cpu_plugin):
    """The step must not hold Python's lock, or nothing could be tokenised or sent meanwhile."""
    model = tiny_model()
    backend = OnnxRuntimeDecoder(model.path, model.kv, 32, plugins=[cpu_plugin], threads=1)
    backend._session = watched = Watched(backend._session)
    thread = threading.Thread(target=lambda: [list(score(backend, [1] * 256, 256)) for _ in range(40)])
    thread.start()
    counted = 0
    while thread.is_alive():
        counted += watched.inside
    assert counted > 100
    backend.close()
