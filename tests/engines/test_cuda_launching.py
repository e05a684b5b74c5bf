"""Steps launched ahead by the CUDA decoder, over a stand-in device in host memory: no GPU needed."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from engines.backends.base import LaunchingBackend, SamplingInputs
from engines.backends.cuda_decoder import CudaDecoder
from engines.backends.cuda_launching import LaunchingCudaDecoder
from engines.backends.launching import LaunchingDecoder
from engines.runtime.engine import Engine
from engines.runtime.request import Request, SamplingParams
from engines.runtime.scheduler import SchedulerConfig
from plugins.cuda_runtime import CudaError
from plugins.errors import KilnError

from .cuda_steps import ints, one_more, prompt
from .host_runtime import HostRuntime

BLOCKS = 60
greedy = SamplingInputs.greedy


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model()


@pytest.fixture
def decoder(sampling_graph, model, cpu_plugin) -> Iterator[Callable[..., LaunchingCudaDecoder]]:
    made = []

    def make(ladder=(1, 2, 4), **options) -> LaunchingCudaDecoder:
        options = {"plugins": [cpu_plugin], "max_context": model.max_context, "runtime": HostRuntime(), **options}
        made.append(LaunchingCudaDecoder(sampling_graph, model.kv, BLOCKS, ladder=ladder, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("ladder", [(), (4,)])
def test_a_step_takes_the_tokens_of_the_one_before(decoder, model, ladder) -> None:
    """Two in flight, in another order of rows than before, with padding in between; logits where they are asked for."""
    backend, size = decoder(ladder), model.block_size
    texts, blocks = [[5, 6, 7], [9, 8, 7, 6]], [[3, 4], [1, 2]]
    assert isinstance(backend, LaunchingBackend)
    for text, own in zip(texts, blocks, strict=True):
        step = prompt(text, own, size)
        backend.launch(step, greedy(len(text)), np.full(len(text), -1, np.int32), logits=False)
        text.append(int(backend.collect().tokens[-1]))
    lengths = [len(text) for text in texts]
    step = one_more([text[-1] for text in texts], [n - 1 for n in lengths], blocks, size)
    backend.launch(step, greedy(2), ints(-1, -1), logits=False)
    step = one_more([0, 0], [lengths[1], lengths[0]], blocks[::-1], size)
    backend.launch(step, greedy(2), ints(1, 0), logits=True)
    first = backend.collect()
    assert first.logits is None
    for text, token in zip(texts, first.tokens, strict=True):
        text.append(int(token))
    last = backend.collect()
    for text, row, token in zip(texts[::-1], last.logits, last.tokens, strict=True):
        expected = model.logits(text)
        np.testing.assert_array_equal(expected[3:-1].argmax(axis=1)[-1:], text[-1:])
        np.testing.assert_allclose(row, expected[-1], rtol=1e-4, atol=1e-4)
        assert token == expected[-1].argmax()


def test_draws_are_those_of_the_cpu_backend(decoder, sampling_graph, model, cpu_plugin) -> None:
    """In batches of any size: a row's draw depends on its seed and position alone."""
    prompts = [tuple(np.random.default_rng(n).integers(1, 61, 3 + 5 * n).tolist()) for n in range(6)]
    config = SchedulerConfig(4, 16)
    drawn = [SamplingParams(temperature=1.0, seed=n, max_tokens=12, top_p=0.9, ignore_eos=True) for n in range(6)]
    answers = []
    on_cpu = LaunchingDecoder(sampling_graph, model.kv, BLOCKS, plugins=[cpu_plugin], threads=1)
    for backend in (on_cpu, decoder((1, 3, 4))):
        with Engine.from_decoder(backend, model.decoder, config=config) as engine:
            streams = [engine.submit(Request(one, how)) for one, how in zip(prompts, drawn, strict=True)]
            answers.append([stream.result(30).token_ids for stream in streams])
            assert engine.free_blocks == BLOCKS
    assert answers[0] == answers[1]


def test_step_gives_logits_on_a_graph_that_samples(decoder, model) -> None:
    text = [4, 8, 15, 16, 23, 42]
    found = decoder().step(prompt(text, [7], model.block_size))
    np.testing.assert_allclose(found, model.logits(text), rtol=1e-4, atol=1e-4)


def test_a_step_without_rows(decoder, model) -> None:
    backend = decoder()
    step = replace(prompt([1, 2], [0], model.block_size), logits_indices=ints())
    backend.launch(step, greedy(0), ints(-1, -1), logits=True)
    result = backend.collect()
    assert result.tokens.shape == (0,)
    assert result.logits.shape == (0, model.vocabulary)


class Failing(HostRuntime):
    """Its device fails at a given wait."""

    fails = False

    def wait(self, event: int) -> None:
        if self.fails:
            raise CudaError("a step failed on the device: an illegal memory access (CUDA error 700)")


def test_a_step_that_fails_on_the_device_fails_its_requests(decoder, model) -> None:
    runtime = Failing()
    backend = decoder(runtime=runtime)
    with Engine.from_decoder(backend, model.decoder, config=SchedulerConfig(4, 16)) as engine:
        assert engine.submit(Request((1, 2), SamplingParams(max_tokens=2))).result(30).token_ids
        runtime.fails = True
        stream = engine.submit(Request((1, 2), SamplingParams(max_tokens=2)))
        with pytest.raises(KilnError, match="CUDA error 700"):
            stream.result(30)


def test_graphs_are_told_apart(sampling_graph, model, cpu_plugin) -> None:
    options = {"plugins": [cpu_plugin], "max_context": 64}
    with pytest.raises(KilnError, match=r"is not a serving graph .* has feed, min_p"):
        CudaDecoder(sampling_graph, model.kv, 4, runtime=HostRuntime(), **options)
    with pytest.raises(KilnError, match=r"is not a serving graph .* lacks feed, min_p"):
        LaunchingCudaDecoder(model.path, model.kv, 4, runtime=HostRuntime(), **options)


def test_closing_gives_all_memory_back(decoder, model) -> None:
    runtime = HostRuntime()
    backend = decoder(runtime=runtime)
    backend.step(prompt([1, 2, 3], [0], model.block_size))
    backend.close()
    assert not runtime.live
    assert runtime.closed
