"""Dynamic batching of real models: what a request gets in a batch is what it gets alone, but for rounding."""

import numpy as np
import pytest

from engines.bundle import EngineBundle
from engines.runtime.engine import Engine
from engines.runtime.tokenizer import Tokenizer
from pipeline.build import build
from pipeline.config import BuildConfig
from pipeline.progress import Progress

pytestmark = pytest.mark.slow

ROUNDING = 2e-5
"""Of an output's largest value."""


@pytest.fixture(scope="module")
def efficientnet_bundle(tmp_path_factory: pytest.TempPathFactory) -> EngineBundle:
    """EfficientNet-Lite0 in FP32, built for this CPU."""
    out = tmp_path_factory.mktemp("bundles") / "efficientnet"
    return build("efficientnet-lite0", ["cpu"], BuildConfig(out=out), Progress())[0].bundle


def rows_and_calls(engine: Engine) -> tuple[float, float]:
    read, labels = engine.metrics.registry.get_sample_value, {"model": engine.info.name}
    return read("kiln_batch_size_sum", labels) or 0.0, read("kiln_batch_size_count", labels) or 0.0


def assert_batches_change_nothing(engine: Engine, requests: list[dict]) -> None:
    alone = [engine.infer(request) for request in requests]  # one after the other
    for _ in range(3):  # the first batches are judged
        rows, calls = rows_and_calls(engine)
        futures = [engine.submit_infer(request) for request in requests]
        together = [future.result(120) for future in futures]
        for found, expected in zip(together, alone, strict=True):
            for name, array in expected.items():
                assert found[name].shape == array.shape
                np.testing.assert_allclose(found[name], array, rtol=0, atol=ROUNDING * np.abs(array).max())
    rows_after, calls_after = rows_and_calls(engine)
    assert rows_after - rows == sum(len(next(iter(request.values()))) for request in requests)
    assert calls_after - calls <= len(requests) / 2, "batches were trusted, and used"


def test_texts_of_different_length(minilm_bundle: EngineBundle) -> None:
    texts = [
        "Bread.",
        "A man eats bread.",
        "Someone is having food.",
        "The stock market fell sharply today.",
        "Nothing in particular happened between the two villages, although everybody had expected it for a long time.",
        " ".join(["A long report about the weather of last week."] * 9),
    ]
    assert minilm_bundle.tokenizer_path is not None
    tokenizer = Tokenizer(minilm_bundle.tokenizer_path)
    requests = []
    for text in texts * 4:
        token_ids = np.array([tokenizer.encode(text)], np.int64)
        ones, zeros = np.ones_like(token_ids), np.zeros_like(token_ids)
        requests.append({"input_ids": token_ids, "attention_mask": ones, "token_type_ids": zeros})
    requests.append({name: np.repeat(array, 3, axis=0) for name, array in requests[1].items()})
    with Engine.open(minilm_bundle.path) as engine:
        assert_batches_change_nothing(engine, requests)


def test_images(efficientnet_bundle: EngineBundle) -> None:
    rng = np.random.default_rng(0)
    rows = (1, 1, 2, 1, 1, 3, 1, 1, 1)
    requests = [{"inputs": rng.normal(size=(count, 3, 224, 224)).astype(np.float32)} for count in rows]
    with Engine.open(efficientnet_bundle.path) as engine:
        assert_batches_change_nothing(engine, requests)
