"""Exported graphs against torch: decoders of several architectures through the engine, encoders, CNNs, large models."""

import importlib.util
import re
import socket
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import transformers

from engines.runtime.engine import Engine
from engines.runtime.request import SamplingParams
from passes.onnx_model import load_structure
from pipeline.build import build
from pipeline.config import BuildConfig
from pipeline.export import export_model
from pipeline.load import TorchModel, load
from pipeline.source import resolve_source
from plugins.errors import KilnError
from plugins.paged_attention.schema import (
    EXPORT_DOMAIN,
    LOGITS,
    OP_TYPE,
    STEP_INPUTS,
    cache_names,
    cache_output_names,
)

ROOT = Path(__file__).parents[2]
WINDOW = 8
COMMON = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # far apart logits, so that greedy choices are no ties
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


def tiny(name: str) -> transformers.PreTrainedModel:
    """A model of the architecture with random weights; norms and biases too, so that none can be left out unseen."""
    t = transformers
    torch.manual_seed(0)
    without_groups = {key: value for key, value in COMMON.items() if key != "num_key_value_heads"}
    model = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**COMMON)),
        "llama-scaled-rope": lambda: t.LlamaForCausalLM(
            t.LlamaConfig(
                **COMMON,
                rope_parameters={
                    "rope_type": "llama3",
                    "rope_theta": 10000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
            )
        ),
        "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**COMMON, tie_word_embeddings=True)),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**COMMON, head_dim=32)),
        "mistral": lambda: t.MistralForCausalLM(t.MistralConfig(**COMMON, sliding_window=WINDOW, head_dim=16)),
        "gemma2": lambda: t.Gemma2ForCausalLM(
            t.Gemma2Config(
                **COMMON,
                head_dim=32,
                sliding_window=WINDOW,
                attn_logit_softcapping=5.0,
                final_logit_softcapping=20.0,
                query_pre_attn_scalar=40,
            )
        ),
        "gpt2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(
                vocab_size=160,
                n_embd=64,
                n_layer=2,
                n_head=4,
                n_positions=256,
                initializer_range=0.2,
                eos_token_id=None,
                bos_token_id=None,
            )
        ),
        "phi": lambda: t.PhiForCausalLM(t.PhiConfig(**without_groups)),
    }[name]()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn_like(parameter)
            assert parameter.abs().sum() > 0, key
    model.generation_config.eos_token_id = None
    return model.eval()


LLAMA_PRODUCTS = (
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
DECODERS = ("llama", "llama-scaled-rope", "qwen2", "qwen3", "mistral", "gemma2", "gpt2", "phi")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Each tiny decoder once, as a model in memory and as a folder."""
    made = {}

    def make(name: str) -> tuple[transformers.PreTrainedModel, Path]:
        if name not in made:
            model, folder = tiny(name), tmp_path_factory.mktemp("tiny") / name
            model.save_pretrained(folder)
            made[name] = (model, folder)
        return made[name]

    return make


@pytest.mark.parametrize("name", DECODERS)
def test_greedy_tokens_and_logits_equal_torchs(saved, name, silent, tmp_path):
    """Prompts of 1 to 70 tokens, together: longer than the window, across blocks, each as torch generates it alone."""
    model, folder = saved(name)
    built = build(str(folder), ["cpu"], BuildConfig(out=tmp_path / "bundle", block_size=8), silent)[0]
    check = built.bundle.manifest.checks[0]
    assert check.name == "logits against torch"
    assert 0 < check.value <= check.limit
    generator = np.random.default_rng(3)
    prompts = [generator.integers(0, 160, length).tolist() for length in (1, 5, WINDOW, 30, 70)]
    with Engine.open(built.bundle.path) as engine:
        answers = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=16))
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)
        assert list(answer.token_ids) == expected[0, len(prompt) :].tolist()


def exported(folder: Path, path: Path, config: BuildConfig | None = None) -> onnx.ModelProto:
    export_model(load(resolve_source(str(folder))), path, config or BuildConfig())
    return load_structure(path)


def shape_of(value: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    return tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim)


def test_names_and_shapes_are_the_documented_ones(saved, tmp_path):
    proto = exported(saved("qwen3")[1], tmp_path / "m.onnx", BuildConfig(kv_dtype="float16", block_size=32))
    keys, values = zip(*(cache_names(layer) for layer in range(2)), strict=True)
    keys_out, values_out = zip(*(cache_output_names(layer) for layer in range(2)), strict=True)
    assert [value.name for value in proto.graph.input] == [*STEP_INPUTS, *keys, *values]
    assert [value.name for value in proto.graph.output] == [LOGITS, *keys_out, *values_out]
    for value in proto.graph.input:
        kind = value.type.tensor_type.elem_type
        if value.name in STEP_INPUTS:
            assert shape_of(value) == STEP_INPUTS[value.name]
            assert kind == onnx.TensorProto.INT32
        else:
            assert shape_of(value)[2:] == (2, 32)
            assert kind == onnx.TensorProto.FLOAT16
    assert shape_of(proto.graph.output[0]) == ("rows", 160)
    operators = [node for node in proto.graph.node if node.op_type == OP_TYPE]
    assert [node.domain for node in operators] == [EXPORT_DOMAIN] * 2
    assert {opset.domain for opset in proto.opset_import} == {"", EXPORT_DOMAIN}


def test_products_are_named_after_their_modules(saved, tmp_path):
    proto = exported(saved("llama")[1], tmp_path / "m.onnx")
    names = [node.name for node in proto.graph.node if node.op_type == "MatMul"]
    layers = [f"model.layers.{layer}.{name}" for layer in range(2) for name in LLAMA_PRODUCTS]
    assert [name for name in names if not name.startswith("node_")] == [*layers, "lm_head"]


def test_windows_softcap_and_scale_reach_the_operator(saved, tmp_path):
    proto = exported(saved("gemma2")[1], tmp_path / "m.onnx")
    attributes = [
        {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        for node in proto.graph.node
        if node.op_type == OP_TYPE
    ]
    assert [a.get("local_window_size", -1) for a in attributes] == [WINDOW, -1]
    assert [a["softcap"] for a in attributes] == [5.0, 5.0]
    assert attributes[0]["scale"] == pytest.approx(40**-0.5)


def test_tied_weights_are_stored_once(tmp_path):
    sizes = {}
    for tied in (True, False):
        config = transformers.LlamaConfig(**{**COMMON, "vocab_size": 5000, "tie_word_embeddings": tied})
        folder = tmp_path / f"tied-{tied}"
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
        exported(folder, tmp_path / f"{tied}.onnx")
        sizes[tied] = (tmp_path / f"{tied}.onnx.data").stat().st_size
        assert (tmp_path / f"{tied}.onnx").stat().st_size < 200_000
    assert sizes[False] - sizes[True] == pytest.approx(
        5000 * 64 * 4, rel=0.05
    )  # tensors are aligned, to 64 KiB by some versions


def test_no_traces_of_this_machine(saved, tmp_path):
    path = tmp_path / "m.onnx"
    proto = exported(saved("llama")[1], path)
    content = path.read_bytes()
    for trace in (str(ROOT), sys.prefix, str(tmp_path), str(Path.home()), socket.gethostname(), ".py", "Traceback"):
        assert trace.encode() not in content, trace
    assert not re.search(rb"/(home|root|tmp|usr|work)/", content)
    for node in proto.graph.node:
        assert len(node.metadata_props) == 0
        assert node.doc_string == ""


def test_two_exports_are_byte_for_byte_equal(saved, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        exported(saved("qwen2")[1], tmp_path / name / "m.onnx")
    for file in ("m.onnx", "m.onnx.data"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_rotation_that_depends_on_the_length_is_not_built_wrong(silent, tmp_path):
    """Frequencies by the longest sequence of a step: sequences of one step would change each other."""
    longrope = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 64}
    for kind, parameters in (("dynamic", {}), ("longrope", longrope)):
        rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0, **parameters}
        config = transformers.LlamaConfig(**COMMON, rope_parameters=rope)
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / kind)
        with pytest.raises(KilnError, match=f"rope_type {kind}"):
            build(str(tmp_path / kind), ["cpu"], BuildConfig(out=tmp_path / "bundle"), silent)
        assert not (tmp_path / "bundle").exists()
    build(str(tmp_path / "longrope"), ["cpu"], BuildConfig(out=tmp_path / "bundle", max_context=64), silent)


@pytest.mark.slow
def test_minilm_encodes_as_torch_does(minilm_bundle):
    manifest = minilm_bundle.manifest
    assert manifest.decoder is None
    assert manifest.model.architecture == "BertModel"
    assert [tensor.name for tensor in manifest.inputs] == ["input_ids", "attention_mask", "token_type_ids"]
    assert [tensor.name for tensor in manifest.outputs] == ["last_hidden_state", "pooler_output"]
    model = load(resolve_source("minilm"))
    texts = ["A man eats bread.", "Someone is having food.", "The stock market fell sharply today."]
    feeds = dict(model.tokenizer(texts, padding=True, return_tensors="np"))
    with torch.inference_mode():
        expected = model.module(**{name: torch.from_numpy(value) for name, value in feeds.items()})
    with Engine.open(minilm_bundle.path) as engine:
        found = engine.infer(feeds)
    np.testing.assert_allclose(found["last_hidden_state"], expected.last_hidden_state.numpy(), atol=2e-5)
    mask = feeds["attention_mask"][..., None]
    vectors = (found["last_hidden_state"] * mask).sum(1) / mask.sum(1)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    similar, different = vectors[0] @ vectors[1], vectors[0] @ vectors[2]
    assert similar > 0.5 > 0.3 > different


@pytest.mark.slow
def test_efficientnet_lite0_classifies_images(silent, tmp_path):
    """foolbox's 20 ImageNet images, whose labels are in their names: 17 right at first, all within five."""
    image_module = pytest.importorskip("PIL.Image")
    found = importlib.util.find_spec("foolbox")  # only its data are used; it is not imported
    assert found, "pip install --no-deps foolbox==3.3.4"
    images = sorted((Path(found.submodule_search_locations[0]) / "data").glob("imagenet_*_*.jpg"))
    assert len(images) == 20
    pixels = [
        np.asarray(image_module.open(path).convert("RGB").resize((224, 224), image_module.Resampling.BICUBIC))
        for path in images
    ]
    inputs = ((np.stack(pixels).astype(np.float32) - 127) / 128).transpose(0, 3, 1, 2)
    labels = np.array([int(path.stem.split("_")[2]) for path in images])
    built = build("efficientnet-lite0", ["cpu"], BuildConfig(out=tmp_path / "cnn"), silent)[0]
    with Engine.open(built.bundle.path) as engine:
        logits = engine.infer({"inputs": np.ascontiguousarray(inputs)})["output"]
        alone = engine.infer({"inputs": np.ascontiguousarray(inputs[:1])})["output"]
    ranked = np.argsort(-logits, axis=1)
    assert (ranked[:, 0] == labels).sum() == 17
    assert (ranked[:, :5] == labels[:, None]).any(axis=1).sum() == 20
    np.testing.assert_allclose(alone, logits[:1], atol=1e-4)


HUGE = """
import torch
from torch import nn


class Huge(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(530_000, 1024, _weight=torch.full((530_000, 1024), 0.5))
        self.head = nn.Linear(1024, 4)

    def forward(self, ids):
        return self.head(self.table(ids))


def make():
    model = Huge().eval()
    with torch.no_grad():
        model.table.weight[529_999] = 2.0
    return model, {"ids": torch.tensor([[0, 529_999], [3, 7]])}
"""


@pytest.mark.slow
def test_a_model_above_two_gigabytes(silent, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "huge_model_for_test.py").write_text(HUGE)
    built = build("huge_model_for_test:make", ["cpu"], BuildConfig(out=tmp_path / "huge"), silent)[0]
    try:
        files = built.bundle.manifest.files
        assert files["engine.onnx.data"].bytes > 2**31
        assert files["engine.onnx"].bytes < 10_000
        with Engine.open(built.bundle.path) as engine:
            last, other = engine.infer({"ids": np.array([[529_999, 1]])})["output"][0]
        weight = sys.modules["huge_model_for_test"].make()[0].head.weight
        assert last.shape == other.shape == (4,)
        assert weight.shape == (4, 1024)
        assert not np.allclose(last, other)
    finally:
        for file in built.bundle.path.rglob("*.data"):
            file.unlink()


@pytest.mark.parametrize("model", ["returns nothing", "raises", "branches on data"])
def test_models_that_cannot_be_exported(model, tmp_path, capfd):
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor):
            if model == "returns nothing":
                return ()
            if model == "raises":
                raise IndexError("no such row")
            return x + 1 if x.sum().item() > 0 else x - 1

    resolved = resolve_source("pipeline.zoo:efficientnet_lite0")
    example = {"x": torch.ones(2, 3)}
    torch_model = TorchModel(resolved, Module().eval(), "Module", False, None, example, {"x": {0: "batch"}})
    message = {"returns nothing": "returned no tensor", "raises": "IndexError: no such row"}.get(
        model, "could not export"
    )
    with pytest.raises(KilnError, match=message):
        export_model(torch_model, tmp_path / "m.onnx", BuildConfig())
    assert capfd.readouterr() == ("", "")
