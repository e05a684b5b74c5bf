"""Reading ONNX files: what is damaged gives KilnError, never another exception."""

import json
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from passes.onnx_model import (
    DECODER_METADATA,
    DecoderSpec,
    OnnxModel,
    external_files,
    load_structure,
    onnx_model_from_path,
)
from plugins.errors import KilnError
from plugins.paged_attention.schema import KvLayer, KvSpec

DECODER = DecoderSpec(KvSpec((KvLayer(2, 32), KvLayer(1, 64)), 16, "float16"), 100, 256, (2, 7))
WEIGHT = np.arange(12, dtype=np.float32).reshape(3, 4)


def small_model() -> onnx.ModelProto:
    """x [batch, 3] times a weight, then an If whose branches hold a constant each; with decoder metadata."""
    value = helper.make_tensor_value_info
    branches = {}
    for name in ("then_branch", "else_branch"):
        constant = helper.make_node("Constant", [], [name], value=numpy_helper.from_array(WEIGHT[0], "c"))
        branches[name] = helper.make_graph([constant], name, [], [value(name, TensorProto.FLOAT, [4])])
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"]),
        helper.make_node("If", ["flag"], ["chosen"], **branches),
        helper.make_node("Add", ["product", "chosen"], ["y"]),
    ]
    inputs = [value("x", TensorProto.FLOAT, ["batch", 3]), value("flag", TensorProto.BOOL, [])]
    graph = helper.make_graph(
        nodes, "g", inputs, [value("y", TensorProto.FLOAT, ["batch", 4])], [numpy_helper.from_array(WEIGHT, "w")]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    helper.set_model_props(model, {DECODER_METADATA: DECODER.to_json()})
    return model


CONTENT = small_model().SerializeToString()


def make_external(tensor: onnx.TensorProto, location: str) -> None:
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)


def read(path: Path, content: bytes) -> OnnxModel | None:
    """The model, or None where a KilnError was raised; anything else escapes."""
    path.write_bytes(content)
    try:
        return onnx_model_from_path(path)
    except KilnError:
        return None


def test_reads_names_shapes_decoder_and_sizes(tmp_path):
    model = read(tmp_path / "m.onnx", CONTENT)
    assert model is not None
    assert [(t.name, t.dtype, t.shape) for t in model.inputs] == [("x", "float32", ("batch", 3)), ("flag", "bool", ())]
    assert [(t.name, t.shape) for t in model.outputs] == [("y", ("batch", 4))]
    assert model.decoder == DECODER
    assert model.parameters == 12


@pytest.mark.parametrize(("stated", "found"), [(-1, "x_0"), ("?", "x_0"), ("", "x_0"), (0, 0), ("n", "n")])
def test_unknown_sizes_get_names_of_their_own(tmp_path, stated, found):
    proto = onnx.load_model_from_string(CONTENT)
    dim = proto.graph.input[0].type.tensor_type.shape.dim[0]
    setattr(dim, "dim_value" if isinstance(stated, int) else "dim_param", stated)
    model = read(tmp_path / "m.onnx", proto.SerializeToString())
    assert model is not None
    assert model.inputs[0].shape == (found, 3)


def test_every_truncation_is_refused_or_still_whole(tmp_path):
    refused = [length for length in range(len(CONTENT)) if read(tmp_path / "m.onnx", CONTENT[:length]) is None]
    assert set(range(len(CONTENT) // 2)) <= set(refused)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_bytes_never_raise_anything_else(tmp_path, data):
    from engines.sku import sku_table
    from pipeline.optimize import optimize

    content = bytearray(CONTENT)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    model = read(tmp_path / "m.onnx", bytes(content))
    if model is not None:
        with suppress(KilnError):
            optimize(model, tmp_path / "out.onnx", sku_table()["cpu-avx2"])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=400))
def test_garbage_is_no_model(tmp_path, content):
    assert read(tmp_path / "m.onnx", content) is None


@pytest.mark.parametrize("where", ["initializer", "branch"])
@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("weights.bin", "'weights.bin' is missing"),
        ("../secret.bin", "lies outside the model's folder"),
        ("/etc/hostname", "lies outside the model's folder"),
        ("sub/../../secret.bin", "lies outside the model's folder"),
        ("link.bin", "lies outside the model's folder"),
        ("a\0b", "lies outside the model's folder"),
        ("", "is missing"),
        (".", "is missing"),
        ("x" * 300, "is missing"),
    ],
)
def test_external_data_that_is_missing_or_elsewhere(tmp_path, where, location, message):
    (tmp_path / "secret.bin").write_bytes(bytes(48))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    model = small_model()
    constant = model.graph.node[1].attribute[0].g.node[0].attribute[0].t
    make_external(model.graph.initializer[0] if where == "initializer" else constant, location)
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(KilnError, match=message) as caught:
        onnx_model_from_path(folder / "m.onnx")
    assert str(folder / "m.onnx") in str(caught.value)


def test_the_digest_covers_external_data(tmp_path):
    model = small_model()
    make_external(model.graph.initializer[0], "w.bin")
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    (tmp_path / "w.bin").write_bytes(WEIGHT.tobytes())
    assert external_files(path, load_structure(path)) == [tmp_path / "w.bin"]
    before = onnx_model_from_path(path).sha256
    (tmp_path / "w.bin").write_bytes((WEIGHT + 1).tobytes())
    assert onnx_model_from_path(path).sha256 != before


def damaged(**changes) -> str:
    return json.dumps({**json.loads(DECODER.to_json()), **changes})


KV = json.loads(DECODER.to_json())["kv"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[]",
        "7",
        "{}",
        damaged(kv=None),
        damaged(kv={}),
        damaged(kv={**KV, "layers": []}),
        damaged(kv={**KV, "layers": 3}),
        damaged(kv={**KV, "layers": [{"kv_heads": 1}]}),
        damaged(kv={**KV, "layers": [{"kv_heads": 0, "head_dim": 64}]}),
        damaged(kv={**KV, "block_size": "many"}),
        damaged(kv={**KV, "block_size": 0}),
        damaged(kv={**KV, "dtype": "int3"}),
        damaged(vocab_size=-1),
        damaged(vocab_size="x"),
        damaged(max_context=None),
        damaged(max_context=0),
        damaged(eos_token_ids=5),
        damaged(eos_token_ids=["a"]),
        "[" * 10_000,
    ],
)
def test_damaged_decoder_metadata_is_named(tmp_path, text):
    model = small_model()
    helper.set_model_props(model, {DECODER_METADATA: text})
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(KilnError, match=r"'kiln\.decoder' is damaged"):
        onnx_model_from_path(path)


def test_metadata_round_trip():
    assert DecoderSpec.from_json(DECODER.to_json()) == DECODER


@pytest.mark.parametrize("kind", ["folder", "absent", "empty", "text", "pickle"])
def test_what_is_no_onnx_file(tmp_path, kind):
    path = tmp_path / "m.onnx"
    if kind == "folder":
        path.mkdir()
    elif kind != "absent":
        path.write_bytes({"empty": b"", "text": b"hello\n" * 50, "pickle": b"\x80\x04\x95" + bytes(99)}[kind])
    with pytest.raises(KilnError, match=str(path)):
        load_structure(path)


def test_an_output_that_is_no_tensor(tmp_path):
    sequence = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, [2])
    node = helper.make_node("SequenceConstruct", ["x"], ["s"])
    graph = helper.make_graph([node], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])], [sequence])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph), path)
    with pytest.raises(KilnError, match="'s' is not a tensor"):
        onnx_model_from_path(path)
