"""Steps launched on a real serving graph with the sampling operators, in ONNX Runtime on the CPU."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.backends.base import LaunchingBackend, SamplingInputs, StepInputs
from engines.backends.launching import LaunchingDecoder, samples
from engines.backends.onnxruntime import OnnxRuntimeDecoder
from engines.runtime.engine import Engine
from engines.runtime.request import Request, SamplingParams
from engines.runtime.scheduler import SchedulerConfig
from passes.onnx_model import onnx_model_from_path
from plugins.errors import KilnError

GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def launching(sampling_graph, tiny_model, cpu_plugin) -> LaunchingDecoder:
    backend = LaunchingDecoder(sampling_graph, tiny_model().kv, 64, plugins=[cpu_plugin], threads=1)
    yield backend
    backend.close()


def step_of(tokens: list[int], past: int = 0) -> StepInputs:
    """One sequence in blocks 0, 1, ..."""
    positions = np.arange(past, past + len(tokens), dtype=np.int32)
    return StepInputs(
        np.array(tokens, np.int32),
        positions,
        np.array([len(tokens) - 1], np.int32),
        np.array([0, len(tokens)], np.int32),
        np.array([past], np.int32),
        np.arange(8, dtype=np.int32)[None],
        positions,
    )


def test_two_steps_in_flight_are_those_of_a_model_that_waits(launching, tiny_model):
    assert isinstance(launching, LaunchingBackend)
    history = [5, 6, 7]
    launching.launch(step_of(history), SamplingInputs.greedy(1), np.full(3, -1, np.int32), logits=False)
    for past in range(3, 12):
        launching.launch(step_of([0], past), SamplingInputs.greedy(1), np.zeros(1, np.int32), logits=past % 2 == 0)
        history.append(int(launching.collect().tokens[0]))
    result = launching.collect()
    expected = tiny_model().logits(history)
    np.testing.assert_array_equal(expected.argmax(axis=1)[2:-1], history[3:])
    assert result.tokens[0] == expected[-1].argmax()
    assert result.logits is None
    np.testing.assert_allclose(launching.step(step_of(history))[0], expected[-1], rtol=1e-3, atol=1e-3)


def test_a_step_that_fails_fails_alone(launching):
    inputs = step_of([5, 6])
    bad = np.array([-1, 5], np.int32)
    launching.launch(inputs, SamplingInputs.greedy(1), bad, logits=False)
    launching.launch(inputs, SamplingInputs.greedy(1), np.full(2, -1, np.int32), logits=False)
    with pytest.raises(Exception, match="feed is out of range"):
        launching.collect()
    assert launching.collect().tokens[0] >= 0


def test_graphs_are_told_apart(sampling_graph, tiny_model, cpu_plugin):
    plain = tiny_model()
    assert samples(tensor.name for tensor in onnx_model_from_path(sampling_graph).outputs)
    assert not samples(tensor.name for tensor in onnx_model_from_path(plain.path).outputs)
    with pytest.raises(KilnError, match=r"is not a serving graph .* has feed, min_p"):
        OnnxRuntimeDecoder(sampling_graph, plain.kv, 4, plugins=[cpu_plugin])
    with pytest.raises(KilnError, match=r"is not a serving graph .* lacks feed, min_p"):
        LaunchingDecoder(plain.path, plain.kv, 4, plugins=[cpu_plugin])


PROMPTS = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=30), min_size=1, max_size=6)


@settings(max_examples=6, deadline=None)
@given(prompts=PROMPTS, blocks=st.sampled_from([8, 12, 40]), cancelled=st.sets(st.integers(0, 5), max_size=2))
def test_an_engine_that_runs_ahead_answers_as_one_that_waits(tiny_model, cpu_plugin, sampling_graph, **drawn):
    model, prompts = tiny_model(), [tuple(prompt) for prompt in drawn["prompts"]]
    plain = OnnxRuntimeDecoder(model.path, model.kv, 64, plugins=[cpu_plugin], threads=1)
    with Engine.from_decoder(plain, model.decoder, config=SchedulerConfig(4, 16, run_ahead=False)) as engine:
        expected = engine.generate(prompts, GREEDY)
    backend = LaunchingDecoder(sampling_graph, model.kv, drawn["blocks"], plugins=[cpu_plugin], threads=1)
    with Engine.from_decoder(backend, model.decoder, config=SchedulerConfig(4, 16)) as engine:
        streams = [engine.submit(Request(prompt, GREEDY)) for prompt in prompts]
        for number in drawn["cancelled"]:
            if number < len(streams):
                streams[number].cancel()
        for number, (stream, right) in enumerate(zip(streams, expected, strict=True)):
            found = stream.result(30)
            assert found.token_ids == right.token_ids[: len(found.token_ids)]
            assert found.finish_reason == "length" or number in drawn["cancelled"]
        engine.generate([(1,)], SamplingParams(max_tokens=2))
        assert engine.free_blocks == drawn["blocks"]


def test_a_bundle_whose_graph_samples_runs_ahead_and_stops_at_strings(
    make_bundle, sampling_graph, tiny_model, cpu_plugin
):
    bundle = make_bundle(
        sampling_graph,
        tiny_model().decoder,
        cpu_plugin,
        tokenizer=True,
        outputs=onnx_model_from_path(sampling_graph).outputs,
    )
    plain = make_bundle(tiny_model().path, tiny_model().decoder, cpu_plugin, tokenizer=True)
    with Engine.open(plain.path, threads=1) as engine:
        text = engine.generate(["HELLO"], GREEDY)[0].text
        stopping = SamplingParams(max_tokens=10, ignore_eos=True, stop=(text[4:6],))
        expected = engine.generate(["HELLO", "AB"], stopping)
    with Engine.open(bundle.path, threads=1) as engine:
        assert isinstance(engine.backend, LaunchingDecoder)
        found = engine.generate(["HELLO", "AB"], stopping)
        assert found == expected
        assert found[0].finish_reason == "stop"
        drawn = SamplingParams(temperature=1.0, seed=5, max_tokens=10, top_p=0.9)
        assert engine.generate(["HELLO"], drawn) == engine.generate(["A", "HELLO"], drawn)[1:]
