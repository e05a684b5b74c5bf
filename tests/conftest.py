"""Models that many tests share, built once per session from real parts."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from engines.bundle import EngineBundle
from pipeline.build import build
from pipeline.config import BuildConfig
from pipeline.progress import Progress

settings.register_profile("long", max_examples=1000)  # pytest --hypothesis-profile=long FILE


@pytest.fixture(scope="session", autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands record into a ledger of the tests, not the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def tiny_llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama with random weights and grouped heads, saved as a Hugging Face folder without tokenizer."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_llama_bundle(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineBundle:
    """That model, built for this CPU."""
    out = tmp_path_factory.mktemp("bundles") / "tiny-llama"
    return build(str(tiny_llama_folder), ["cpu"], BuildConfig(out=out), Progress())[0].bundle


@pytest.fixture(scope="session")
def smollm2_bundle(tmp_path_factory: pytest.TempPathFactory) -> EngineBundle:
    """SmolLM2-135M-Instruct in FP32, built for this CPU."""
    out = tmp_path_factory.mktemp("bundles") / "smollm2"
    return build("smollm2", ["cpu"], BuildConfig(out=out), Progress())[0].bundle


@pytest.fixture(scope="session")
def minilm_bundle(tmp_path_factory: pytest.TempPathFactory) -> EngineBundle:
    """all-MiniLM-L6-v2, an encoder of sentences, in FP32, built for this CPU."""
    out = tmp_path_factory.mktemp("bundles") / "minilm"
    return build("minilm", ["cpu"], BuildConfig(out=out), Progress())[0].bundle
