"""Builds for GPUs on a machine without one: the graph, its check in the CPU's form, what the bundle holds, refusals."""

import io
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from rich.console import Console

from engines.backends.onnxruntime import OnnxRuntimeDecoder
from engines.bundle import open_bundle
from engines.runtime.engine import Engine
from engines.runtime.request import SamplingParams
from engines.sku import resolve_sku
from passes.onnx_model import load_structure, onnx_model_from_path
from pipeline.build import build
from pipeline.compare.onnx_subject import bound_graph
from pipeline.config import BuildConfig
from pipeline.cpu_form import needs_cpu_form, write_cpu_form
from pipeline.expected import expected_from_file
from pipeline.optimize import OptimizeConfig, optimize
from pipeline.progress import Progress
from plugins import cuda_build
from plugins.errors import KilnError

HEADS = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with heads that the CUDA attention takes, as a Hugging Face folder."""
    return saved_llama(tmp_path_factory.mktemp("gpu") / "llama", 128)


def saved_llama(path: Path, vocabulary: int, tied: bool = False) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": vocabulary, "intermediate_size": 192, "num_hidden_layers": 2, "max_position_embeddings": 256}
    config = LlamaConfig(**HEADS, **sizes, initializer_range=0.1, tie_word_embeddings=tied)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def built_for(folder: Path, out: Path, *skus: str, **options):
    text = io.StringIO()
    progress = Progress(Console(file=text, width=400))
    return [item.bundle for item in build(str(folder), skus, BuildConfig(out=out, **options), progress)], text


@pytest.fixture(scope="module")
def built(folder, compiled, tmp_path_factory):
    """From one export, in order: for a CPU, an H200, an H100 of the same architecture, and an L4; what was said."""
    return built_for(folder, tmp_path_factory.mktemp("out") / "b", "cpu", "h200", "h100-sxm", "l4")


@pytest.fixture(scope="module")
def bundle(built):
    return built[0][1]


def operators(path: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for node in load_structure(path).graph.node:
        name = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        found[name] = found.get(name, 0) + 1
    return found


def test_the_bundle_says_what_it_is_and_what_is_open(bundle, built) -> None:
    manifest = open_bundle(bundle.path).manifest
    kind = "float16"
    assert (manifest.backend.provider, manifest.backend.options) == ("CUDAExecutionProvider", {"use_tf32": "0"})
    assert manifest.decoder.kv.dtype == kind
    assert [t.dtype for t in manifest.outputs if t.name == "logits"] == ["float32"]
    assert {t.dtype for t in manifest.inputs if "cache" in t.name} == {kind}
    assert (bundle.path / manifest.plugins[0].file).read_text() == "('sm_90',)", "for the SKU's architecture alone"
    assert len(manifest.unverified) == 2
    assert "kernels did not run" in manifest.unverified[0]
    assert f"run: kiln tune {bundle.path}" in built[1].getvalue()
    assert manifest.checks[0].value <= manifest.checks[0].limit
    assert not [record.name for record in manifest.passes if record.rolled_back]


def test_the_graph_is_made_of_kilns_cuda_operators(bundle) -> None:
    found = operators(bundle.engine_path)
    wanted = {"kiln::PagedAttention": 2, "kiln::AddRmsNorm": 4, "kiln::LinearSwiGlu": 2, "kiln::Linear": 7}
    assert {name: found.get(name) for name in wanted} == wanted
    assert "MatMul" not in found
    assert found["Cast"] == 2, "logits, and their indices"
    proto = load_structure(bundle.engine_path)
    weights = {t.name: t for t in proto.graph.initializer}
    node = next(node for node in proto.graph.node if node.op_type == "LinearSwiGlu")
    assert list(weights[node.input[1]].dims) == [2 * 192, 128], "by output"


def test_a_head_that_shares_a_large_embedding_is_a_product_of_kilns(compiled, tmp_path) -> None:
    """The embedding exceeds what constant folding would turn, and is stored once, for both."""
    (bundle,), _ = built_for(saved_llama(tmp_path / "tied", 4096, tied=True), tmp_path / "b", "h200")
    assert "MatMul" not in operators(bundle.engine_path)
    graph = load_structure(bundle.engine_path).graph
    (embedding,) = (weight.name for weight in graph.initializer if 4096 in weight.dims)
    readers = {node.op_type for node in graph.node if embedding in node.input}
    assert readers == {"Gather", "Linear"}


def test_expected_logits_are_those_of_the_model(bundle, folder, compiled, tmp_path) -> None:
    """And the CPU's form of the engine gives them within its precision, so a GPU's comparison means something."""
    manifest = bundle.manifest
    expected = expected_from_file(bundle.path / manifest.expected)
    form = write_cpu_form(bundle.engine_path, tmp_path)
    blocks = sum(-(-len(text) // manifest.decoder.kv.block_size) for text in expected.texts)
    backend = OnnxRuntimeDecoder(form, manifest.decoder.kv, blocks, plugins=[compiled])
    error = expected.worst_error(backend, manifest.decoder)
    assert 1e-6 < error < 2e-2


def test_a_wrong_weight_shows_in_the_cpus_form(bundle, compiled, tmp_path) -> None:
    shutil.copytree(bundle.path, tmp_path / "wrong")
    path = tmp_path / "wrong" / "engine.onnx"
    proto = onnx.load(path)
    node = [node for node in proto.graph.node if node.op_type == "Linear"][1]
    weight = next(t for t in proto.graph.initializer if t.name == node.input[1])
    values = onnx.numpy_helper.to_array(weight)
    weight.CopyFrom(onnx.numpy_helper.from_array(np.ascontiguousarray(values[::-1]), weight.name))
    onnx.save(proto, path)
    expected = expected_from_file(bundle.path / bundle.manifest.expected)
    backend = OnnxRuntimeDecoder(write_cpu_form(path, tmp_path), bundle.manifest.decoder.kv, 64, plugins=[compiled])
    assert expected.worst_error(backend, bundle.manifest.decoder) > 0.1


def test_skus_of_one_architecture_share_an_engine(built) -> None:
    _, first, second, third = built[0]
    assert second.engine_path.samefile(first.engine_path)
    assert not third.engine_path.samefile(first.engine_path)
    assert (third.path / third.manifest.plugins[0].file).read_text() == "('sm_89',)"


def test_a_cpu_is_built_for_as_without_gpus(built) -> None:
    on_cpu, on_gpu = built[0][:2]
    assert (on_cpu.manifest.precision, on_gpu.manifest.precision) == ("fp32", "fp16")
    assert (on_cpu.manifest.decoder.kv.dtype, on_gpu.manifest.decoder.kv.dtype) == ("float32", "float16")
    assert not on_cpu.manifest.unverified
    assert on_cpu.manifest.memory is not None
    with Engine.open(on_cpu.path) as engine:
        assert engine.generate([(1, 2, 3)], SamplingParams(max_tokens=3))[0].token_ids


def test_bf16_is_judged_though_the_cpu_lacks_it(built, tmp_path) -> None:
    source = onnx_model_from_path(built[0][0].engine_path)
    model, reports = optimize(source, tmp_path / "m.onnx", resolve_sku("a10"), OptimizeConfig(precision="bf16"))
    assert model.decoder.kv.dtype == "bfloat16"
    judged = {report.name: report for report in reports if report.rewrites}
    for name in ("cast_precision", "cast_attention", "bind_linear"):
        assert judged[name].errors.relative < 5e-2
        assert judged[name].rolled_back is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kv_dtype": "float32"}, "--kv-dtype is float32, but on h200 attention computes in its cache's type"),
        ({"block_size": 8}, "--block-size is 8; the attention of h200 takes multiples of 16"),
    ],
    ids=str,
)
def test_what_the_attention_does_not_carry_is_refused(folder, compiled, tmp_path, options, says) -> None:
    with pytest.raises(KilnError, match=says):
        built_for(folder, tmp_path / "b", "h200", **options)
    assert not (tmp_path / "b").exists()


def test_other_head_sizes_are_refused(make_llama, compiled, tmp_path) -> None:
    with pytest.raises(KilnError, match="attention heads of 16; the attention of h200 is built for 64, 96, 128, 256"):
        built_for(make_llama(), tmp_path / "b", "h200")


def test_without_nvcc_the_build_says_what_to_install(folder, compiled, tmp_path, monkeypatch) -> None:
    def missing() -> list[str]:
        raise cuda_build.NvccMissingError("no CUDA compiler found; install the CUDA toolkit")

    monkeypatch.setattr(cuda_build, "find_nvcc", missing)
    with pytest.raises(KilnError, match="install the CUDA toolkit"):
        built_for(folder, tmp_path / "b", "h200")
    assert not (tmp_path / "b").exists()


def test_in_fp32_attention_alone_is_in_sixteen_bits(built, tmp_path) -> None:
    source = onnx_model_from_path(built[0][0].engine_path)
    model, reports = optimize(source, tmp_path / "m.onnx", resolve_sku("h200"), OptimizeConfig())
    assert model.decoder.kv.dtype == "float16"
    found = operators(model.path)
    assert "kiln::Linear" not in found
    assert found["kiln::Sample"] == found["kiln::FeedTokens"] == 1
    assert next(report for report in reports if report.name == "cast_attention").errors.relative < 1e-2


def test_a_network_without_a_cache(tmp_path) -> None:
    """In FP16 on the provider's own kernels, channels last where it convolves."""
    weight = np.random.default_rng(0).standard_normal((8, 3, 3, 3)).astype(np.float32)
    text = (
        '<ir_version: 9, opset_import: ["": 18]> net (float[B,3,16,16] x) => (float[B,8] y) '
        "{ c = Conv<pads = [1, 1, 1, 1]>(x, w) r = Relu(c) p = GlobalAveragePool(r) y = Flatten(p) }"
    )
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(model, tmp_path / "net.onnx")
    for precision in ("fp16", "bf16", "fp32"):
        made, text = built_for(tmp_path / "net.onnx", tmp_path / precision, "l4", precision=precision)
        manifest = made[0].manifest
        assert manifest.precision == precision
        assert manifest.backend.options == {"use_tf32": "0", "prefer_nhwc": "1"}
        assert manifest.checks[0].value <= manifest.checks[0].limit
        assert not manifest.plugins
        assert "not verified here" in text.getvalue()


def test_a_float_graph_needs_no_other_form(built, tmp_path) -> None:
    path = built[0][0].engine_path
    assert not needs_cpu_form(load_structure(path))
    assert bound_graph(path, tmp_path) == path
