"""Measured ranges equal those of the tensors themselves; odd tensors, weights in files, custom operators, misuse."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, parser

from pipeline.ranges import measure_ranges
from plugins.build import cpu_library
from plugins.errors import KilnError
from plugins.paged_attention.schema import DOMAIN, EXPORT_DOMAIN, INPUTS

TEXT = """<ir_version: 8, opset_import: ["" : 17]>
net (float[N, 3] x, int64[N] ids) => (float[N, 3] y)
<float[3] bias = {-7.0, 0.5, 1.0}>
{
    scaled = Add (x, bias)
    numbers = Cast <to = 1> (ids)
    positive = Relu (scaled)
    y = Neg (positive)
}"""


def saved(tmp_path, model=None, **options):
    path = tmp_path / "net.onnx"
    onnx.save(model or parser.parse_model(TEXT), path, **options)
    return path


def feed(rows, seed=0):
    x = np.random.default_rng(seed).normal(size=(rows, 3)).astype(np.float32)
    return {"x": x, "ids": np.arange(rows, dtype=np.int64)}


def test_the_largest_magnitude_over_all_inputs(tmp_path):
    feeds = [feed(2, 1), feed(5, 2), feed(1, 3)]
    bias = np.array([-7.0, 0.5, 1.0], np.float32)
    scaled = [f["x"] + bias for f in feeds]
    expected = {
        "x": max(np.abs(f["x"]).max() for f in feeds),
        "scaled": max(np.abs(s).max() for s in scaled),
        "numbers": 4.0,
        "positive": max(s.max() for s in scaled),
        "y": max(s.max() for s in scaled),
    }
    found = measure_ranges(saved(tmp_path), iter(feeds))
    assert found == pytest.approx(expected)
    assert all(type(value) is float for value in found.values())
    assert [file.name for file in tmp_path.iterdir()] == ["net.onnx"]


def test_empty_and_infinite_tensors(tmp_path):
    path = saved(tmp_path)
    assert set(measure_ranges(path, [feed(0)]).values()) == {0.0}
    infinite = feed(1)
    infinite["x"][0, 0] = -np.inf
    assert measure_ranges(path, [infinite, feed(2)])["scaled"] == np.inf


def test_weights_in_a_file_and_tensors_of_branches(tmp_path):
    branch = parser.parse_graph("then () => (float[N, 64] a) { a = Add (h, h) }")
    other = parser.parse_graph("else () => (float[N, 64] b) { b = Sub (h, h) }")
    weight = np.full((3, 64), 2.0, np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("If", ["flag"], ["y"], then_branch=branch, else_branch=other),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3]),
            helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 64])],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = saved(tmp_path, model, save_as_external_data=True, location="net.data", size_threshold=0)
    found = measure_ranges(path, [{"x": np.ones((1, 3), np.float32), "flag": np.array(True)}])
    assert found == {"x": 1.0, "h": 6.0, "y": 12.0}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["net.data", "net.onnx"]


def test_the_exported_attention_operator_is_bound(tmp_path):
    given = [spec for spec in INPUTS if not spec.optional or spec.name in ("key", "value")]
    kinds = {"float32": TensorProto.FLOAT, "int32": TensorProto.INT32}
    node = helper.make_node(
        "PagedAttention",
        [spec.name if spec in given else "" for spec in INPUTS],
        ["output", "key_cache_out", "value_cache_out"],
        domain=EXPORT_DOMAIN,
        num_heads=1,
        kv_num_heads=1,
    )
    graph = helper.make_graph(
        [node],
        "decoder",
        [helper.make_tensor_value_info(s.name, kinds[s.dtypes[0]], [None] * len(s.shape)) for s in given],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, [None, 32])],
    )
    opsets = [helper.make_opsetid(*item) for item in (("", 21), (EXPORT_DOMAIN, 1), (DOMAIN, 1))]
    path = saved(tmp_path, helper.make_model(graph, opset_imports=opsets, ir_version=10))
    query = np.full((1, 32), 3.0, np.float32)
    feeds = {
        "query": query,
        "key": query,
        "value": -5 * query,
        "key_cache": np.zeros((2, 4, 1, 32), np.float32),
        "value_cache": np.zeros((2, 4, 1, 32), np.float32),
        "cumulative_sequence_length": np.array([0, 1], np.int32),
        "past_seqlens": np.array([0], np.int32),
        "block_table": np.array([[0]], np.int32),
        "slot_mapping": np.array([0], np.int32),
    }
    found = measure_ranges(path, [feeds], plugins=[cpu_library()])
    assert (found["query"], found["value"], found["output"]) == (3.0, 15.0, 15.0)


def test_misuse_is_explained(tmp_path):
    path = saved(tmp_path)
    with pytest.raises(KilnError, match="no inputs were given"):
        measure_ranges(path, [])
    with pytest.raises(KilnError, match="cannot be run on the given inputs"):
        measure_ranges(path, [{"x": np.zeros((1, 3), np.float32)}])
    with pytest.raises(KilnError, match="does not exist"):
        measure_ranges(tmp_path / "other.onnx", [])
