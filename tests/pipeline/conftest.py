"""Tiny models that the pipeline's tests share: a Llama with a tokenizer of its own, as a folder and as a bundle."""

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline.progress import Progress
from plugins import cuda_build
from plugins.build import cpu_library

VOCABULARY = 512


@pytest.fixture(scope="session")
def silent() -> Progress:
    """Progress that prints nowhere."""
    return Progress(Console(file=io.StringIO()))


MakeLlama = Callable[..., Path]


@pytest.fixture(scope="session")
def make_llama(tmp_path_factory: pytest.TempPathFactory) -> MakeLlama:
    """Writes a Hugging Face folder with a random Llama; `noise` perturbs one weight matrix of the same model.

    Weights have the standard deviation `spread`; by default logits lie far apart, so that greedy choices are no ties,
    and rounding tells as much. `sizes` are of its configuration.
    """
    torch = pytest.importorskip("torch")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from pipeline.compare.material import default_text

    torch.set_num_threads(1)  # these models are too small to share out

    def make(
        noise: float = 0.0,
        vocabulary: int = VOCABULARY,
        positions: int = 512,
        reverse_text: bool = False,
        spread: float = 0.2,
        **sizes: int,
    ) -> Path:
        folder = tmp_path_factory.mktemp("llama")
        torch.manual_seed(0)
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = LlamaConfig(
            vocab_size=vocabulary,
            num_hidden_layers=2,
            **{**shape, **sizes},
            max_position_embeddings=positions,
            tie_word_embeddings=True,
            initializer_range=spread,
            eos_token_id=0,
            bos_token_id=0,
        )
        model = LlamaForCausalLM(config).eval()
        if noise:
            weight = model.model.layers[1].mlp.up_proj.weight
            with torch.no_grad():
                weight += noise * torch.randn_like(weight)
        model.save_pretrained(folder)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=min(vocabulary, VOCABULARY),
            special_tokens=["<eos>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        text = default_text()
        tokenizer.train_from_iterator([text[::-1] if reverse_text else text], trainer)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def llama_folder(make_llama: MakeLlama) -> Path:
    return make_llama()


@pytest.fixture(scope="session")
def llama_bundle(llama_folder: Path, silent: Progress, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`llama_folder` as build-engine makes it."""
    pytest.importorskip("onnxruntime")
    from pipeline.build import build
    from pipeline.config import BuildConfig

    path = tmp_path_factory.mktemp("bundles") / "llama"
    build(str(llama_folder), ["cpu"], BuildConfig(out=path), silent)
    return path


@pytest.fixture
def world(tmp_path: Path) -> Callable[..., Any]:
    """Makes a folder for nightly runs over tiny models: `world(*models, skus, settings)`."""
    from tests.pipeline.nightly_material import SKU, World

    return lambda *models, skus=(SKU,), settings="": World(tmp_path / "world", models, skus, settings)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The CPU's library, while the CUDA library is a text that names its architectures.

    Compiling that takes minutes, and tests/plugins has its own tests of it: here the compiler is not called.
    """
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    patch.setattr(cuda_build, "find_nvcc", lambda: ["true"])
    patch.setattr(cuda_build, "_compile", lambda nvcc, architectures, library: library.write_text(str(architectures)))
    library = cpu_library  # compiled where the real cache is
    patch.delenv("XDG_CACHE_HOME")
    real = library()
    patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    for module in ("plugins.build", "pipeline.gpu_build", "pipeline.build", "pipeline.optimize"):
        patch.setattr(f"{module}.cpu_library", lambda: real)
    yield real
    patch.undo()
