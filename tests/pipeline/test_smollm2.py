"""The main job on a real model: SmolLM2-135M in FP32 against torch, and many requests against one at a time."""

from itertools import islice

import pytest

from engines.bundle import EngineBundle
from engines.runtime.engine import Engine
from engines.runtime.request import Request, SamplingParams
from pipeline.compare import CompareConfig, compare
from pipeline.compare.material import default_text
from pipeline.progress import Progress

pytestmark = pytest.mark.slow


def test_agrees_with_torch_in_logits_perplexity_and_greedy_tokens(smollm2_bundle: EngineBundle) -> None:
    report = compare("smollm2", str(smollm2_bundle.path), CompareConfig(), Progress())
    values = {check.name: check for check in report.checks}
    assert values["output:logits"].value <= 2e-3
    assert values["logit_error_max"].value <= 2e-3
    assert values["perplexity_difference"].value <= 1e-3
    assert [(row.agreed, row.tokens) for row in report.prompts] == [(64, 64)] * 8
    assert [row.prompt_tokens for row in report.prompts] == [5, 16, 48, 128, 320, 640, 1280, 2000]
    assert report.passed


@pytest.fixture(scope="module")
def engine(smollm2_bundle: EngineBundle) -> Engine:
    with Engine.open(smollm2_bundle.path) as opened:
        yield opened


def test_answers_like_the_reference(engine: Engine) -> None:
    chat = engine.tokenizer.chat_prompt([{"role": "user", "content": "What is the capital of France?"}])
    (answer,) = engine.generate([chat], SamplingParams(max_tokens=32))
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason == "stop"


def test_together_as_alone(engine: Engine) -> None:
    """16 prompts of different lengths, submitted at once, give token by token what each gives alone."""
    text = engine.tokenizer.encode(default_text())
    lengths = [1, 2, 5, 9, 16, 17, 31, 48, 64, 100, 150, 220, 300, 411, 512, 700]
    requests = [
        Request(tuple(text[i * 7 : i * 7 + length]), SamplingParams(max_tokens=24, ignore_eos=True))
        for i, length in enumerate(lengths)
    ]
    together = engine.generate(requests)
    alone = [engine.generate([request])[0] for request in requests]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert engine.free_blocks == engine.backend.num_blocks


def test_seeded_sampling_ignores_its_neighbours(engine: Engine) -> None:
    sampling = SamplingParams(temperature=0.9, top_k=50, top_p=0.95, seed=7, max_tokens=24, ignore_eos=True)
    (alone,) = engine.generate(["Once upon a time"], sampling)
    crowd = engine.generate(["A list of fruit:", "Once upon a time", "In the beginning"], sampling)
    assert crowd[1].token_ids == alone.token_ids
    assert crowd[0].token_ids != crowd[2].token_ids


def test_a_cancelled_stream_frees_its_blocks(engine: Engine) -> None:
    stream = engine.submit(Request("Count to one thousand:", SamplingParams(max_tokens=500, ignore_eos=True)))
    assert len(list(islice(stream, 3))) == 3
    stream.cancel()
    assert stream.result(timeout=30).finish_reason == "cancelled"
    assert engine.free_blocks == engine.backend.num_blocks
