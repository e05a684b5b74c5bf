"""The whole build: what is published, what is not, what the manifest says, and when it is refused."""

import dataclasses
import io
import json
import os
import shutil
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console

from engines.bundle import file_sha256, open_bundle
from engines.runtime.engine import Engine
from engines.runtime.request import SamplingParams
from engines.sku import host_cpu_features, resolve_sku
from pipeline import build as module
from pipeline import buildable
from pipeline import forecast as forecast_module
from pipeline.build import build
from pipeline.check import LIMITS
from pipeline.config import BuildConfig
from pipeline.export import export_model
from pipeline.forecast import forecast_from_onnx, forecast_plain, refuse_what_cannot_fit
from pipeline.load import describe, load
from pipeline.progress import Progress
from pipeline.sku_forecast import SizeOptions
from pipeline.source import resolve_source
from plugins.abi import abi_hash
from plugins.errors import KilnError

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def refused(spec: str, progress: Progress, skus: tuple[str, ...] = ("cpu",), **config) -> str:
    with pytest.raises(KilnError) as caught:
        build(spec, skus, BuildConfig(**config), progress)
    return str(caught.value)


def answer(path: Path) -> list[int]:
    with Engine.open(path) as engine:
        return list(engine.generate([[5, 3, 9]], GREEDY)[0].token_ids)


def test_the_manifest_says_what_the_bundle_is(tiny_llama_bundle, tiny_llama_folder):
    manifest = tiny_llama_bundle.manifest
    source, sku = resolve_source(str(tiny_llama_folder)), resolve_sku("cpu")
    assert manifest.schema_version == 1
    assert manifest.kiln_version == version("kiln-engine")
    assert manifest.name == "tiny-llama"
    assert manifest.model.source == str(tiny_llama_folder)
    assert manifest.model.sha256 == source.sha256
    assert manifest.model.architecture == "LlamaForCausalLM"
    assert manifest.model.parameters == describe(source).parameters
    assert (manifest.sku.name, manifest.sku.arch, manifest.sku.cpu_features) == (sku.name, sku.arch, sku.cpu_features)
    assert (manifest.backend.name, manifest.backend.version) == ("onnxruntime", version("onnxruntime"))
    assert manifest.precision == "fp32"
    decoder = manifest.decoder
    assert (decoder.vocab_size, decoder.max_context, decoder.eos_token_ids) == (128, 256, (2,))
    assert (decoder.kv.block_size, decoder.kv.dtype, decoder.kv.bytes_per_token) == (16, "float32", 2 * 2 * 2 * 16 * 4)
    assert [plugin.operator for plugin in manifest.plugins] == ["kiln::PagedAttention"]
    assert manifest.plugins[0].abi_hash == abi_hash()
    passes = {record.name: record for record in manifest.passes}
    assert [record.name for record in manifest.passes][:2] == ["bind_attention", "fold_constants"]
    for name, rewrites in {
        **{"bind_attention": 2, "fuse_rms_norm": 5, "fuse_rope": 2, "pack_matmuls": 2},
        **{"bind_add_rms_norm": 4, "bind_swiglu": 2},
    }.items():
        assert (passes[name].changed, passes[name].rewrites, passes[name].rolled_back) == (True, rewrites, None)
        assert passes[name].relative_error <= passes[name].limit
    assert manifest.checks[0].value <= manifest.checks[0].limit
    assert manifest.checks[0].origin
    on_disk = {
        p.relative_to(tiny_llama_bundle.path).as_posix() for p in tiny_llama_bundle.path.rglob("*") if p.is_file()
    }
    assert on_disk == {*manifest.files, "manifest.json", "manifest.sha256"}
    for name, record in manifest.files.items():
        assert record.sha256 == file_sha256(tiny_llama_bundle.path / name)
    proto = onnx.load(tiny_llama_bundle.engine_path, load_external_data=False)
    assert [tensor.name for tensor in manifest.inputs] == [value.name for value in proto.graph.input]
    assert [tensor.name for tensor in manifest.outputs] == [value.name for value in proto.graph.output]


def test_two_builds_give_the_same_engine(tiny_llama_folder, tiny_llama_bundle, silent, tmp_path):
    again = build(str(tiny_llama_folder), ["cpu"], BuildConfig(out=tmp_path / "again"), silent)[0].bundle
    assert again.manifest.files == tiny_llama_bundle.manifest.files
    assert again.sha256 != tiny_llama_bundle.sha256 or again.manifest.created == tiny_llama_bundle.manifest.created


def test_several_skus_give_several_bundles(tiny_llama_folder, tmp_path):
    silent = Progress(Console(file=io.StringIO()))
    skus = ["cpu-avx2", "cpu-avx512"] if "avx512vl" in host_cpu_features() else ["cpu-avx2", "cpu"]
    built = build(str(tiny_llama_folder), skus, BuildConfig(out=tmp_path / "out"), silent)
    assert [item.bundle.manifest.sku.name for item in built] == [resolve_sku(name).name for name in skus]
    assert len({answer(item.bundle.path)[0] for item in built}) == 1
    assert all(open_bundle(item.bundle.path) == item.bundle for item in built)
    first, second = (item.bundle.manifest for item in built)
    assert second.files == first.files
    assert second.checks == first.checks
    if first.sku != second.sku:  # what is the same for both is made and stored once
        assert built[1].bundle.engine_path.samefile(built[0].bundle.engine_path)
        assert [name for name in silent.seconds if name.startswith(f"{second.sku.name}: ")] == [
            f"{second.sku.name}: shares {first.sku.name}'s engine"
        ]
    assert sorted(os.listdir(tmp_path / "out")) == sorted({item.bundle.path.name for item in built})


def test_default_places(tiny_llama_folder, silent, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    built = build(str(tiny_llama_folder), ["cpu-avx2"], BuildConfig(), silent)[0]
    assert built.bundle.path.resolve() == tmp_path / "bundles" / "tiny-llama-cpu-avx2"
    assert os.listdir(tmp_path / "bundles") == ["tiny-llama-cpu-avx2"]


def test_a_rebuild_replaces(tiny_llama_folder, tiny_llama_bundle, silent, tmp_path):
    path = tmp_path / "bundle"
    shutil.copytree(tiny_llama_bundle.path, path)
    before = answer(path)
    config = BuildConfig(out=path, block_size=4, kv_dtype="float16", max_context=100)
    build(str(tiny_llama_folder), ["cpu"], config, silent)
    decoder = open_bundle(path).manifest.decoder
    assert (decoder.kv.block_size, decoder.kv.dtype, decoder.max_context) == (4, "float16", 100)
    assert len(answer(path)) == len(before)
    assert os.listdir(tmp_path) == ["bundle"]


@pytest.mark.parametrize("max_context", [1, 5])
def test_a_context_shorter_than_the_checks_texts(tiny_llama_folder, silent, tmp_path, max_context):
    from_torch, from_onnx = tmp_path / "torch", tmp_path / "onnx"
    config = BuildConfig(max_context=max_context)
    build(str(tiny_llama_folder), ["cpu"], dataclasses.replace(config, out=from_torch), silent)
    export_model(load(resolve_source(str(tiny_llama_folder))), tmp_path / "m.onnx", config)
    build(str(tmp_path / "m.onnx"), ["cpu"], BuildConfig(out=from_onnx), silent)
    assert open_bundle(from_onnx).manifest.decoder.max_context == max_context


@pytest.mark.parametrize("fault", ["wrong weight", "strict limit", "NaN"])
def test_a_wrong_engine_is_not_published(tiny_llama_folder, tiny_llama_bundle, silent, tmp_path, monkeypatch, fault):
    path = tmp_path / "bundle"
    shutil.copytree(tiny_llama_bundle.path, path)

    def broken_export(*arguments):
        model = export_model(*arguments)
        data = model.path.with_name("engine.onnx.data")
        weights = np.fromfile(data, np.float32)
        middle = slice(weights.size // 2, weights.size // 2 + 500)
        weights[middle] = np.nan if fault == "NaN" else weights[middle] + 0.01
        weights.tofile(data)
        return model

    if fault == "strict limit":
        monkeypatch.setitem(LIMITS, "float32", (1e-12, "a test"))
    else:
        monkeypatch.setattr(module, "export_model", broken_export)
    text = refused(str(tiny_llama_folder), silent, out=path, block_size=8)
    assert "the engine is wrong: logits against torch" in text
    assert "nothing was published" in text
    assert open_bundle(path) == dataclasses.replace(tiny_llama_bundle, path=path)
    assert os.listdir(tmp_path) == ["bundle"]


def plain_onnx(path: Path) -> Path:
    """Two convolutions and a product with weights in an external file in a folder of its own."""
    generator = np.random.default_rng(0)
    weights = {
        "k": generator.normal(size=(40, 3, 3, 3)).astype(np.float32),
        "w": generator.normal(size=(40, 5)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["image", "k"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "w"], ["scores"]),
    ]
    value = helper.make_tensor_value_info
    initializers = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    (path.parent / "data").mkdir(parents=True)
    for tensor in initializers:
        (path.parent / "data" / f"{tensor.name}.bin").write_bytes(tensor.raw_data)
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=f"data/{tensor.name}.bin")
    graph = helper.make_graph(
        nodes,
        "g",
        [value("image", TensorProto.FLOAT, ["n", 3, "h", "w_"])],
        [value("scores", TensorProto.FLOAT, ["n", 5])],
        initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    path.write_bytes(model.SerializeToString())
    return path


def test_a_plain_onnx_file(silent, tmp_path):
    import onnxruntime

    source = plain_onnx(tmp_path / "source" / "net.onnx")
    before = {file: file.read_bytes() for file in source.parent.rglob("*") if file.is_file()}
    built = build(str(source), ["cpu"], BuildConfig(out=tmp_path / "bundle"), silent)[0]
    manifest = built.bundle.manifest
    assert (manifest.model.architecture, manifest.model.parameters) == ("ONNX", 40 * 27 + 40 * 5)
    assert manifest.checks[0].name == "outputs against the unoptimised graph"
    assert set(manifest.files) == {"engine.onnx", "engine.onnx.data"}  # w is small enough for the graph itself
    assert {file: file.read_bytes() for file in source.parent.rglob("*") if file.is_file()} == before
    for file in manifest.files:
        assert (built.bundle.path / file).stat().st_ino not in {path.stat().st_ino for path in before}
    image = np.random.default_rng(1).normal(size=(2, 3, 9, 7)).astype(np.float32)
    session = onnxruntime.InferenceSession(str(source), providers=["CPUExecutionProvider"])
    with Engine.open(built.bundle.path) as engine:
        np.testing.assert_allclose(
            engine.infer({"image": image})["scores"], session.run(None, {"image": image})[0], 1e-5
        )


def test_a_serving_graph_that_we_exported(tiny_llama_folder, tiny_llama_bundle, silent, tmp_path):
    export_model(load(resolve_source(str(tiny_llama_folder))), tmp_path / "llama.onnx", BuildConfig())
    built = build(str(tmp_path / "llama.onnx"), ["cpu"], BuildConfig(out=tmp_path / "bundle"), silent)[0]
    assert built.bundle.manifest.checks[0].name == "logits against the unoptimised graph"
    assert built.bundle.manifest.decoder == tiny_llama_bundle.manifest.decoder
    assert built.bundle.manifest.plugins
    assert built.forecast.kv_bytes_per_token == built.bundle.manifest.decoder.kv.bytes_per_token
    assert answer(built.bundle.path) == answer(tiny_llama_bundle.path)


@pytest.mark.parametrize("damage", ["truncated", "weights cut", "weights missing", "unknown operator"])
def test_onnx_files_that_cannot_be_built(silent, tmp_path, damage):
    source = plain_onnx(tmp_path / "source" / "net.onnx")
    if damage == "truncated":
        source.write_bytes(source.read_bytes()[:100])
    elif damage == "weights cut":
        (source.parent / "data" / "w.bin").write_bytes(b"1234")
    elif damage == "weights missing":
        (source.parent / "data" / "w.bin").unlink()
    else:
        model = onnx.load(source, load_external_data=False)
        model.graph.node[1].op_type = "NoSuchOperator"
        source.write_bytes(model.SerializeToString())
    refused(str(source), silent, out=tmp_path / "new" / "bundle")
    assert os.listdir(tmp_path) == ["source"]


LARGE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


@pytest.fixture
def large_folder(tmp_path: Path) -> Path:
    """A Llama of 70 billion parameters: its configuration, and a sparse file where the weights would be."""
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LARGE))
    with (folder / "model.safetensors").open("wb") as stream:
        stream.truncate(20 * 10**9)  # long enough to notice that somebody reads it
    return folder


def test_what_cannot_fit_is_refused_before_weights_are_read(large_folder, silent, tmp_path, monkeypatch):
    monkeypatch.setattr(forecast_module, "host_memory", lambda: 64 * 2**30)
    monkeypatch.setattr(module, "load", lambda *_: pytest.fail("loaded the weights first"))
    monkeypatch.setattr("pipeline.source.file_sha256", lambda path: pytest.fail(f"read {path} first"))
    text = refused(str(large_folder), silent, out=tmp_path / "bundle")
    assert "the weights take 262.8 GiB, but cpu-" in text
    assert "has 64.0 GiB of memory" in text
    assert os.listdir(tmp_path) == ["large"]


def test_weights_that_fit_without_room_for_one_sequence(large_folder, silent, tmp_path, monkeypatch):
    monkeypatch.setattr(forecast_module, "host_memory", lambda: int(262.9 / 0.9 * 2**30))
    assert "no sequence of 512 tokens fits" in refused(str(large_folder), silent, out=tmp_path / "bundle")


def test_the_forecast_is_what_the_engine_holds(tiny_llama_folder, tiny_llama_bundle, silent, tmp_path):
    built = build(str(tiny_llama_folder), ["cpu"], BuildConfig(out=tmp_path / "bundle"), silent)[0]
    forecast, decoder = built.forecast, built.bundle.manifest.decoder
    assert forecast.kv_bytes_per_token == decoder.kv.bytes_per_token
    data = built.bundle.manifest.files["engine.onnx.data"].bytes
    assert forecast.weights == pytest.approx(data, rel=0.06)  # tensors begin at whole pages
    assert set(forecast.sequences) == {256}
    room = int(forecast.memory * 0.9) - forecast.weights
    assert forecast.sequences[256] == room // (256 * decoder.kv.bytes_per_token)
    assert any("KV cache 512 B per token" in line for line in forecast.lines())
    read_again = forecast_from_onnx(built.bundle.engine_path, resolve_sku("cpu"))
    assert read_again.sequences == pytest.approx(forecast.sequences, rel=0.01)


def test_the_limit_of_weights_is_exact():
    sku = resolve_sku("h200")
    usable = int(sku.memory * 0.9)
    refuse_what_cannot_fit(forecast_plain(usable // 4, sku, SizeOptions()))
    with pytest.raises(KilnError, match="choose a larger SKU or a smaller model"):
        refuse_what_cannot_fit(forecast_plain(usable // 4 + 1, sku, SizeOptions()))


def test_machines_that_are_not_this_one(tiny_llama_folder, silent, tmp_path, monkeypatch):
    assert "the attention of h200 is built for 64, 96, 128, 256" in refused(
        str(tiny_llama_folder), silent, ("cpu", "h200"), out=tmp_path / "bundle"
    )
    monkeypatch.setattr(buildable, "host_cpu_features", lambda: frozenset({"avx2", "fma", "f16c"}))
    text = refused(str(tiny_llama_folder), silent, ("cpu-avx512",), out=tmp_path / "bundle")
    assert "whose CPU lacks avx512bw" in text
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"block_size": 0}, "block size is 0; expected 1 to 256"),
        ({"block_size": 257}, "block size is 257"),
        ({"max_context": 0}, "maximum context is 0"),
        ({"max_context": 257}, "maximum context is 257, but LlamaForCausalLM has 256 positions"),
        ({"precision": "fp64"}, "'fp64'"),
    ],
)
def test_wrong_options(tiny_llama_folder, silent, tmp_path, config, message):
    assert message in refused(str(tiny_llama_folder), silent, out=tmp_path / "x", **config)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("option", [{"kv_dtype": "float16"}, {"block_size": 32}, {"max_context": 64}], ids=str)
@pytest.mark.parametrize("kind", ["onnx decoder", "encoder"])
def test_cache_options_without_a_cache_to_make_are_refused(tiny_llama_folder, silent, tmp_path, kind, option):
    spec = "minilm"
    if kind == "onnx decoder":
        spec = str(tmp_path / "m.onnx")
        export_model(load(resolve_source(str(tiny_llama_folder))), Path(spec), BuildConfig())
    message = refused(spec, silent, out=tmp_path / "x", **option)
    assert f"--{next(iter(option)).replace('_', '-')} is" in message
    assert not (tmp_path / "x").exists()


def test_a_foreign_target_is_refused_before_any_work(tmp_path, silent, monkeypatch):
    monkeypatch.setattr(module, "describe", lambda source: pytest.fail("read the model first"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    model = tmp_path / "m.onnx"
    model.write_bytes(b"")
    assert "exists and is not an engine bundle" in refused(str(model), silent, out=tmp_path / "mine")


def test_a_module_that_counts_its_own_size(silent, tmp_path, monkeypatch):
    monkeypatch.setattr(forecast_module, "host_memory", lambda: 1000)
    assert "the weights take" in refused("efficientnet-lite0", silent, out=tmp_path / "x")
    assert torch.get_default_dtype() == torch.float32
