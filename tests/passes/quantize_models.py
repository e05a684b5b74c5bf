"""What tests of the quantising passes share: ranges and moments of small models by running them, and how far off."""

from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import helper

from passes.base import Pass
from passes.fuse_qdq import FuseQdq
from passes.graph import graph_from_proto, proto_from_graph, tidy
from passes.quantization.layers import layers_of, name_layers
from passes.quantization.table import CalibrationTable, Range, TensorStatistics
from passes.shapes import infer_shapes

Feeds = dict[str, NDArray]


def transformer(tools, rank: int = 3, opset: int = 21, bias: bool = True) -> onnx.ModelProto:
    """Norm, two products of it, one with an Add, GELU-like nonlinearity, down projection, residual."""
    weights, make = tools.Weights(), helper.make_node
    gamma, beta = weights.positive("gamma", 32), weights.normal("beta", 32)
    nodes = [
        make("LayerNormalization", ["x", gamma, beta], ["n"], axis=-1),
        make("MatMul", ["n", weights.normal("w1", 32, 48)], ["h"], name="up"),
        make("MatMul", ["n", weights.normal("w2", 32, 48)], ["g"], name="gate"),
        make("Add", ["h", weights.normal("b1", 48)] if bias else ["h", "h"], ["hb"]),
        make("Tanh", ["g"], ["t"]),
        make("Mul", ["t", "hb"], ["a"]),
        make("MatMul", ["a", weights.normal("w3", 48, 32)], ["d"], name="down"),
        make("Add", ["d", "x"], ["y"]),
    ]
    return tools.model(nodes, weights, [2, 5, 32][3 - rank :], opset=opset)


def tensors_of(tools, model: onnx.ModelProto, feeds: Feeds) -> dict[str, NDArray]:
    """Every float tensor that is computed or fed."""
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    known = {value.name for value in watched.graph.output}
    names = [name for node in model.graph.node for name in node.output if name]
    watched.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names if name not in known)
    found = dict(zip([value.name for value in watched.graph.output], tools.run(watched, feeds), strict=True))
    return {name: value for name, value in {**feeds, **found}.items() if value.dtype.kind == "f" and value.ndim}


def calibrated(tools, model: onnx.ModelProto, feeds: Feeds) -> CalibrationTable:
    """Least and greatest values of every tensor."""
    statistics = {}
    for name, value in tensors_of(tools, model, feeds).items():
        axis = 1 if value.ndim == 4 else value.ndim - 1
        channels = np.abs(value).max(axis=tuple(i for i in range(value.ndim) if i != axis))
        span = Range(float(value.min()), float(value.max()))
        statistics[name] = TensorStatistics(span, {}, tuple(map(float, channels)))
    return CalibrationTable("m", "d", "minmax", False, statistics, {})


def moments_of(tools, model: onnx.ModelProto, feeds: Feeds) -> dict[str, NDArray]:
    """Second moments of what enters each matrix product, by its name."""
    graph, values = graph_from_proto(model), tensors_of(tools, model, feeds)
    name_layers(graph)
    rows = {
        layer.name: values[layer.activation].reshape(-1, layer.depth).astype(np.float64)
        for layer in layers_of(graph)
        if layer.kind != "Conv"
    }
    return {name: row.T @ row for name, row in rows.items()}


def after(model: onnx.ModelProto, passes: Sequence[Pass]) -> onnx.ModelProto:
    """The model after some passes, without nodes that nothing uses."""
    graph = graph_from_proto(model)
    infer_shapes(graph)
    for graph_pass in passes:
        graph_pass.call(graph)
        tidy(graph)
        infer_shapes(graph)
    return proto_from_graph(graph)


def loaded_operators(model: onnx.ModelProto, folder: str, fuse: bool = True) -> list[str]:
    """Operators that ONNX Runtime runs after its own rewrites, the build's fusion of Q and D before them."""
    given = after(model, [FuseQdq()] if fuse else [])
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = f"{folder}/loaded.onnx", 4
    onnxruntime.InferenceSession(given.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]


def distance(tools, before: onnx.ModelProto, now: onnx.ModelProto, feeds: Feeds) -> float:
    """Root mean squared error of the first output, relative to the output's own."""
    expected, found = (tools.run(model, feeds)[0].astype(np.float64) for model in (before, now))
    assert found.shape == expected.shape
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
