"""Bundles derived from others, with other blocks or settings: the same tokens from the same weights."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from engines.bundle import BundleError, open_bundle, write_bundle
from engines.manifest import ServingRecord
from engines.runtime.engine import Engine
from engines.runtime.opening import default_config
from engines.runtime.scheduler import SchedulerConfig
from passes.onnx_model import DecoderSpec, load_structure
from pipeline.cli import inspect_command
from pipeline.tune.derive import derive_bundle, write_graph_with_block_size
from plugins.errors import KilnError
from plugins.paged_attention.schema import DOMAIN, OP_TYPE, KvLayer, KvSpec
from tests.pipeline.tune_material import answers

onnx = pytest.importorskip("onnx")


def serving_record(**changes: object) -> ServingRecord:
    fields = {"objective": "throughput", "knee": 1, "falls": True, "workload": "w", "machine": {}, "threads": 1}
    return ServingRecord.model_validate({**fields, "measurements": (), **changes})


def test_a_bundle_with_other_blocks_gives_the_same_tokens_from_the_same_weights(
    llama_bundle: Path, tmp_path: Path
) -> None:
    parent = open_bundle(llama_bundle)
    expected = answers(llama_bundle)
    for size in (8, 32):
        path = tmp_path / str(size)
        derived = derive_bundle(parent, path, block_size=size)
        assert open_bundle(path).manifest == derived.manifest
        assert derived.manifest.parent == parent.sha256 != derived.sha256
        assert derived.manifest.decoder is not None
        assert derived.manifest.decoder.kv.block_size == size
        assert derived.manifest.checks[-1].name == f"logits with blocks of {size} against 16"
        weights = f"{parent.manifest.engine}.data"
        assert (path / weights).samefile(llama_bundle / weights)
        assert answers(path) == expected


def test_a_bundle_with_other_settings_alone_shares_every_file(llama_bundle: Path, tmp_path: Path) -> None:
    parent = open_bundle(llama_bundle)
    serving = serving_record(max_running=3, tokens_per_step=64, kv_blocks=20)
    derived = derive_bundle(parent, tmp_path / "b", block_size=16, serving=serving)
    assert derived.manifest.checks == parent.manifest.checks
    assert all((derived.path / name).samefile(llama_bundle / name) for name in parent.manifest.files)
    assert default_config(derived.manifest) == SchedulerConfig(max_running=3, tokens_per_step=64)
    with Engine.open(derived.path, threads=1) as engine:
        assert engine.info.num_blocks == 20
    with Engine.open(derived.path, threads=1, kv_blocks=9) as engine:
        assert engine.info.num_blocks == 9
    result = CliRunner().invoke(inspect_command, [str(derived.path)], catch_exceptions=False)
    assert parent.sha256 in result.stdout
    assert "max_running 3, tokens_per_step 64, kv_blocks 20 for throughput" in result.stdout


def test_a_parent_outlives_neither_its_children_nor_the_other_way(llama_bundle: Path, tmp_path: Path) -> None:
    parent = shutil.copytree(llama_bundle, tmp_path / "parent")
    derive_bundle(open_bundle(parent), tmp_path / "child")
    shutil.rmtree(parent)
    assert open_bundle(tmp_path / "child").manifest.parent


def test_a_parent_that_changed_is_refused(llama_bundle: Path, tmp_path: Path) -> None:
    path = shutil.copytree(llama_bundle, tmp_path / "parent")
    opened = open_bundle(path)

    def rebuilt(folder: Path):
        for name in opened.manifest.files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(llama_bundle / name, folder / name)
        return opened.manifest.model_copy(update={"created": "later"})

    write_bundle(path, rebuilt)
    with pytest.raises(BundleError, match=r"was changed after it was opened \(its identity\)"):
        derive_bundle(opened, tmp_path / "child")
    reopened = open_bundle(path)
    (path / "tokenizer" / "tokenizer_config.json").write_text("{}")
    with pytest.raises(BundleError, match=r"was changed .*tokenizer_config.json.*: nothing was written"):
        derive_bundle(reopened, tmp_path / "child")
    shutil.rmtree(path)
    with pytest.raises(BundleError, match="was changed"):
        derive_bundle(reopened, tmp_path / "child")
    assert [entry.name for entry in tmp_path.iterdir()] == []


def test_a_bundle_is_not_its_own_child(llama_bundle: Path) -> None:
    with pytest.raises(BundleError, match="is the bundle itself; choose another --out"):
        derive_bundle(open_bundle(llama_bundle), llama_bundle)


def serving_graph(path: Path, extra: str = "") -> DecoderSpec:
    """One layer with a fixed block size; not a whole model."""
    decoder = DecoderSpec(KvSpec((KvLayer(2, 4),), 16, "float32"), 10, 64, (0,))
    cache = "float[blocks,16,2,4]"
    text = f"""<ir_version: 10, opset_import: ["" : 21, "{DOMAIN}" : 1], metadata_props: ["other": "kept"]>
    main (float[t,8] q, {cache} key_cache.0, {cache} value_cache.0)
      => (float[t,8] y, {cache} key_cache_out.0, {cache} value_cache_out.0) {{
        y, key_cache_out.0, value_cache_out.0 = {DOMAIN}.{OP_TYPE} (q, q, q, key_cache.0, value_cache.0)
        {extra}
    }}"""
    text = text.replace("_cache.0", "_cache_0").replace("_out.0", "_out_0")
    model = onnx.parser.parse_model(text)
    for value in (*model.graph.input, *model.graph.output):
        value.name = value.name.replace("_cache_0", "_cache.0").replace("_out_0", "_out.0")
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [name.replace("_cache_0", "_cache.0").replace("_out_0", "_out.0") for name in names]
    onnx.helper.set_model_props(model, {"kiln.decoder": decoder.to_json(), "other": "kept"})
    path.write_bytes(model.SerializeToString())
    return decoder


def test_a_fixed_block_size_is_changed_wherever_the_graph_has_it(tmp_path: Path) -> None:
    decoder = serving_graph(tmp_path / "a.onnx")
    changed = replace(decoder, kv=replace(decoder.kv, block_size=32))
    write_graph_with_block_size(tmp_path / "a.onnx", tmp_path / "b.onnx", changed)
    proto = load_structure(tmp_path / "b.onnx")
    for value in (*proto.graph.input, *proto.graph.output):
        sizes = [size.dim_value for size in value.type.tensor_type.shape.dim]
        assert sizes == ([0, 32, 2, 4] if "cache" in value.name else [0, 8])
    properties = {entry.key: entry.value for entry in proto.metadata_props}
    assert properties["other"] == "kept"
    assert DecoderSpec.from_json(properties["kiln.decoder"]) == changed


def test_a_graph_that_looks_at_its_cache_keeps_its_block_size(tmp_path: Path) -> None:
    decoder = serving_graph(tmp_path / "a.onnx", "shape = Shape (key_cache_0)")
    with pytest.raises(KilnError, match=r"Shape .* uses a cache; .* --block-size 16"):
        write_graph_with_block_size(tmp_path / "a.onnx", tmp_path / "b.onnx", decoder)
