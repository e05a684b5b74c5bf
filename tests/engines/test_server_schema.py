"""schemathesis asks everything that the server's own OpenAPI document allows, and much that it does not."""

from collections import Counter
from contextlib import suppress

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import positive_data_acceptance
from transformers import AutoTokenizer

from engines.runtime.engine import Engine
from engines.runtime.scheduler import SchedulerConfig
from engines.runtime.tokenizer import Tokenizer
from engines.server.served import LocalEngine
from passes.onnx_model import DecoderSpec

EXAMPLES = 15
"""For each operation."""
CHECKS = list(HealthCheck)


@pytest.fixture(scope="module")
def document(tiny_bundle, twice_bundle, fake_backend, recorded_engine, served_on, tmp_path_factory):
    """Of a server with a fake language model, which ends after a few tokens, and a real model without a cache."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tiny_bundle.tokenizer_path)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}A"
    tokenizer.backend_tokenizer.model.unk_token = "|"  # any text is some tokens
    tokenizer.save_pretrained(folder)
    backend = fake_backend(vocabulary=61)
    decoder = DecoderSpec(backend.kv, backend.vocabulary, 60, (1,))
    with (
        Engine.from_decoder(backend, decoder, Tokenizer(folder), SchedulerConfig(64, 512)) as fake,
        Engine.open(twice_bundle.path) as twice,
    ):
        server = served_on({"fake": recorded_engine(fake, folder), "twice": LocalEngine(twice)})
        document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        yield document
        assert server.context.limiter.running == 0
        assert fake.free_blocks == backend.num_blocks


def name_what_is_served(case) -> None:
    """Mostly: random names would only ever find that there is no such model."""
    for place, key, name in (
        (case.body, "model", "fake"),
        (case.path_parameters, "model", "fake"),
        (case.path_parameters, "name", "twice"),
    ):
        if isinstance(place, dict) and isinstance(place.get(key), str) and len(place[key]) % 8 != 7:
            place[key] = name


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_request_makes_the_server_fail(document, mode):
    statuses = Counter()
    for operation in (result.ok() for result in document.get_all_operations()):

        @settings(max_examples=EXAMPLES, derandomize=True, deadline=None, database=None, suppress_health_check=CHECKS)
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case):
            name_what_is_served(case)
            answer = case.call_and_validate(excluded_checks=[positive_data_acceptance])  # a schema knows no vocabulary
            statuses[answer.status_code] += 1

        with suppress(Unsatisfiable):  # some operations take nothing that could be wrong
            ask()
    assert statuses[200 if mode == GenerationMode.POSITIVE else 400] > 40
