"""Prompt lookup by itself, and that answers are the same with it."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.runtime.engine import Engine
from engines.runtime.request import Guidance, Request, SamplingParams
from engines.runtime.scheduler import SchedulerConfig
from engines.runtime.speculation import PromptLookup
from passes.onnx_model import DecoderSpec


def naive(tokens: list[int], limit: int) -> tuple[int, ...]:
    """What followed the latest earlier occurrence of the longest end, by looking everywhere."""
    for order in (4, 3, 2):
        end = tokens[-order:]
        if len(end) < order:
            continue
        for start in range(len(tokens) - order - 1, -1, -1):
            if tokens[start : start + order] == end:
                return tuple(tokens[start + order :][k % (len(tokens) - start - order)] for k in range(limit))
    return ()


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    cuts=st.lists(st.integers(1, 9)),
    limit=st.integers(1, 6),
)
def test_it_finds_what_a_search_of_everything_finds(tokens, cuts, limit):
    lookup, end = PromptLookup(6), 0
    for cut in [*cuts, len(tokens)]:
        end = min(end + cut, len(tokens))
        assert lookup.propose(tokens[:end], limit) == naive(tokens[:end], limit)


def test_who_guesses_wrong_guesses_less_and_less_often():
    tokens, lookup = [1, 2, 3, 4, 5, 6] * 20, PromptLookup(8)
    assert len(lookup.propose(tokens, 99)) == 8
    lookup.record(len(tokens), 8, 3)
    assert len(lookup.propose(tokens, 99)) == 4
    lookup.record(len(tokens), 4, 4)
    assert len(lookup.propose(tokens, 99)) == 8
    pauses = []
    for _ in range(8):
        lookup.record(len(tokens), 8, 0)
        pause = 0
        while not lookup.propose(tokens, 99):
            tokens.append(tokens[-6])
            pause += 1
        pauses.append(pause)
    assert pauses == [1, 2, 4, 8, 8, 8, 8, 8]
    assert len(lookup.propose(tokens, 99)) == 1
    lookup.record(len(tokens), 1, 1)
    assert len(lookup.propose(tokens, 99)) == 2
    assert lookup.propose(tokens, 0) == ()


def answers(backend, speculate: int, prompts, params, **config) -> tuple[list, int, int]:
    decoder = DecoderSpec(backend.kv, backend.vocabulary, 200, (1,))
    scheduling = SchedulerConfig(**{"max_running": 4, "tokens_per_step": 32, "speculate": speculate, **config})
    with Engine.from_decoder(backend, decoder, config=scheduling) as engine:
        found = engine.generate(prompts, params)
        assert engine.free_blocks == backend.num_blocks
        engine._worker.scheduler.check()
        drafted, accepted = (
            sample.value
            for name in ("drafted", "accepted")
            for family in engine.metrics.families()
            for sample in family.samples
            if sample.name == f"kiln_{name}_tokens_total"
        )
    return found, drafted, accepted


def repeating(backend, period: int):
    """Make the backend repeat its last tokens most of the time."""
    step = backend.step

    def repeat(inputs):
        logits = step(inputs)
        for row, token in enumerate(inputs.logits_indices):
            position = inputs.position_ids[token]
            if position % 7:
                logits[row] *= 0.1
                logits[row, 10 + (position + 1) % period] += 50
        return logits

    backend.step = repeat
    return backend


@pytest.mark.parametrize("blocks", [200, 30])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0, "seed": 5, "n": 2}, {"presence_penalty": 1.5, "logprobs": 2}, {"stop": ()}]
)
def test_answers_are_the_same_and_steps_are_fewer(fake_backend, options, blocks):
    prompts = [tuple(10 + (n + k) % 5 for k in range(12)) for n in range(5)]
    params = SamplingParams(max_tokens=60, **options)
    plain = repeating(fake_backend(num_blocks=blocks), 5)
    expected, drafted, _ = answers(plain, 0, prompts, params)
    assert drafted == 0
    backend = repeating(fake_backend(num_blocks=blocks), 5)
    found, drafted, accepted = answers(backend, 4, prompts, params)
    assert found == expected
    assert 0 < accepted <= drafted
    assert len(backend.steps) < len(plain.steps)


def test_text_that_never_repeats_costs_nothing(fake_backend):
    backend = fake_backend()
    _, drafted, accepted = answers(backend, 4, [tuple(range(2, 40))], SamplingParams(max_tokens=100))
    assert accepted <= drafted < 40


def test_an_end_within_a_draft_ends_the_answer(fake_backend):
    backend = repeating(fake_backend(num_blocks=200), 5)
    backend.force = {36: 1}
    plain = repeating(fake_backend(num_blocks=200), 5)
    plain.force = {36: 1}
    prompts, params = [tuple(10 + k % 5 for k in range(12))], SamplingParams(max_tokens=60)
    found, _, accepted = answers(backend, 4, prompts, params)
    assert found == answers(plain, 0, prompts, params)[0]
    assert found[0].finish_reason == "stop"
    assert accepted > 0


def test_what_guidance_requires_is_drafted(tiny_bundle):
    with Engine.open(tiny_bundle.path, config=SchedulerConfig(4, 64, speculate=8)) as engine:
        guidance = Guidance("regex", "ABCDEFGHIJKLMNOPQ(A|B)")
        stream = engine.submit(Request("ABC", SamplingParams(guidance=guidance, max_tokens=40)))
        assert stream.result(20).text[:-1] == "ABCDEFGHIJKLMNOPQ"
        chunks = [len(chunk.token_ids) for chunk in stream]
        assert max(chunks) > 2


@pytest.mark.parametrize("speculate", [0, 6])
@pytest.mark.parametrize("overlap", [True, False])
def test_guided_answers_do_not_depend_on_how_they_are_computed(tiny_bundle, speculate, overlap):
    guidance = Guidance("regex", "([A-F]{3}[G-K]{2}){2,4}Z")
    params = SamplingParams(temperature=1.0, seed=4, n=3, max_tokens=40, guidance=guidance)
    with Engine.open(tiny_bundle.path, config=SchedulerConfig(4, 64)) as engine:
        expected = engine.generate(["ABC", "DEF"], params)
    config = SchedulerConfig(4, 64, speculate=speculate, overlap=overlap)
    with Engine.open(tiny_bundle.path, config=config) as engine:
        found = engine.generate(["ABC", "DEF"], params)
    assert found == expected
    assert all(re.fullmatch("([A-F]{3}[G-K]{2}){2,4}Z", completion.text) for completion in found)
    assert {completion.finish_reason for completion in found} == {"stop"}
