"""A bundle of the shape of Llama 3 8B on random weights, made by Kiln's own build within about a minute.

`build-engine` gets a model of three layers of full width and few tokens; `gpu_bench.deepen` repeats the last layer, and
`gpu_bench.widen` adds the other tokens. What the engine reads in a step is as much as with 32 different layers; the
file holds three.
"""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from engines.bundle import EngineBundle, file_records, write_bundle
from engines.manifest import Manifest, TensorRecord
from gpu_bench.deepen import FEWEST, deepen
from gpu_bench.quantise import quantise
from gpu_bench.widen import random_values, widen
from passes.manager import link_or_copy
from passes.onnx_model import load_structure, onnx_model_from_path
from pipeline.build import build
from pipeline.config import BuildConfig
from pipeline.progress import Progress
from plugins.quant_matmul.cuda_choice import recorded
from plugins.quant_matmul.cuda_schema import WeightFormat

BUILT_VOCABULARY = 1280
"""Tokens of the model that is built; no other size of it."""


@dataclass(frozen=True)
class Shape:
    """Of a Llama; Llama 3 8B's by default."""

    hidden: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    intermediate: int = 14336
    vocabulary: int = 128256
    context: int = 8192


def random_bundle(
    shape: Shape, sku: str, config: BuildConfig, progress: Progress, form: WeightFormat | None = None
) -> EngineBundle:
    """Build it for a machine type into `config.out`, with weights of `form` for a GPU. Raises KilnError as it does."""
    assert config.out is not None
    with tempfile.TemporaryDirectory(prefix="kiln-bench-", dir=config.out.parent) as folder:
        model, shallow = Path(folder) / "model", Path(folder) / "bundle"
        with progress.stage("draw random weights"):
            save_model(shape, model)
        built = build(str(model), [sku], replace(config, out=shallow), progress)[0].bundle
        with progress.stage(f"make {shape.layers} layers and {shape.vocabulary} tokens of it"):
            return enlarged(built, config.out, shape, form)


def save_model(shape: Shape, folder: Path) -> None:
    """A Hugging Face folder of three layers and `BUILT_VOCABULARY` tokens, its weights in bfloat16."""
    import torch
    import transformers
    from safetensors.torch import save_file

    config = transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=shape.hidden,
        num_hidden_layers=FEWEST,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
        vocab_size=BUILT_VOCABULARY,
        max_position_embeddings=shape.context,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        parameters = dict(transformers.LlamaForCausalLM(config).named_parameters())
    generator = np.random.default_rng(0)

    def weight(size: torch.Size) -> torch.Tensor:
        values = np.concatenate(list(random_values(size.numel(), np.float32, generator)))
        if len(size) == 1:
            values += 1  # a norm's
        return torch.from_numpy(values).view(size).bfloat16()

    weights = {name: weight(parameter.shape) for name, parameter in parameters.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def enlarged(small: EngineBundle, path: Path, shape: Shape, form: WeightFormat | None = None) -> EngineBundle:
    """Another bundle of an engine, with more layers and tokens, and with weights of `form` where one is given."""

    def fill(folder: Path) -> Manifest:
        import onnx

        old = small.manifest
        for name in old.files:
            if name != old.engine:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(small.path / name, folder / name)
        graph = load_structure(small.engine_path)
        assert old.decoder is not None
        decoder = widen(graph, deepen(graph, old.decoder, shape.layers), shape.vocabulary, folder)
        if form is not None:
            quantise(graph, form, recorded(old.sku.name), folder)
        onnx.save(graph, folder / old.engine)
        made = onnx_model_from_path(folder / old.engine)
        changes = {
            "decoder": decoder,
            "inputs": tuple(map(TensorRecord.of, made.inputs)),
            "outputs": tuple(map(TensorRecord.of, made.outputs)),
            "model": old.model.model_copy(update={"parameters": made.parameters}),
            "checks": (),
            "memory": None,
            "files": file_records(folder),
        }
        return old.model_copy(update=changes)

    return write_bundle(path, fill)
