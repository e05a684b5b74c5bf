"""What tests of passes share: make small models, apply a pass, run, put a model inside a subgraph, compare."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from passes.base import Outcome, Pass
from passes.graph import graph_from_proto, proto_from_graph
from passes.shapes import infer_shapes
from passes.validate import check_graph
from plugins.build import cpu_library
from plugins.spec import DOMAIN

Feeds = Mapping[str, NDArray]


@dataclass
class Applied:
    """A rewritten model with what the pass said."""

    model: onnx.ModelProto
    outcome: Outcome
    ops: list[str] = field(default_factory=list)
    """Operators of all graphs, `domain::Op` for those of other domains, in order."""


def apply_pass(model: onnx.ModelProto, graph_pass: Pass) -> Applied:
    """Call a pass as the manager does, and assert what every pass must hold: a sound result, and a second call idle."""
    graph = graph_from_proto(model)
    infer_shapes(graph)
    outcome = graph_pass.call(graph)
    check_graph(graph)
    infer_shapes(graph)
    rewritten = proto_from_graph(graph)
    again = graph_pass.call(graph)
    assert not again.changed, f"{graph_pass.name} is not idempotent: {again}"
    return Applied(rewritten, outcome, operators(rewritten.graph))


def operators(graph: onnx.GraphProto) -> list[str]:
    found = []
    for node in graph.node:
        found.append(f"{node.domain}::{node.op_type}" if node.domain else node.op_type)
        for attribute in node.attribute:
            if attribute.HasField("g"):
                found += operators(attribute.g)
    return found


def run_model(model: onnx.ModelProto, feeds: Feeds) -> list[NDArray]:
    """Outputs without ONNX Runtime's own rewrites, so that a test sees the graph as it is."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    if any(opset.domain == DOMAIN for opset in model.opset_import):
        options.register_custom_ops_library(str(cpu_library()))
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, dict(feeds))


def assert_same_outputs(before: onnx.ModelProto, after: onnx.ModelProto, feeds: Feeds, tolerance: float = 0.0) -> None:
    """max|after - before| <= tolerance * max|before| for every output; 0 asks for the same bits."""
    for expected, found in zip(run_model(before, feeds), run_model(after, feeds), strict=True):
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        if tolerance == 0:
            np.testing.assert_array_equal(found, expected)
        else:
            difference = np.abs(found.astype(np.float64) - expected.astype(np.float64)).max(initial=0)
            assert difference <= tolerance * np.abs(expected.astype(np.float64)).max(initial=0)


def in_branch(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model inside both branches of an If on a new input `flag`; its inputs and weights stay outside."""

    def branch(suffix: str) -> onnx.GraphProto:
        graph = onnx.GraphProto()
        graph.CopyFrom(model.graph)
        renamed = {name: f"{name}{suffix}" for node in graph.node for name in node.output if name}
        for node in graph.node:
            node.name = node.name and f"{node.name}{suffix}"
            node.input[:] = [renamed.get(name, name) for name in node.input]
            node.output[:] = [renamed.get(name, name) for name in node.output]
        outputs = [
            helper.make_tensor_value_info(
                renamed[value.name],
                value.type.tensor_type.elem_type,
                [d.dim_value if d.HasField("dim_value") else None for d in value.type.tensor_type.shape.dim]
                if value.type.tensor_type.HasField("shape")
                else None,
            )
            for value in graph.output
        ]
        return helper.make_graph(list(graph.node), f"branch{suffix}", [], outputs)

    names = [value.name for value in model.graph.output]
    node = helper.make_node("If", ["flag"], names, name="if", then_branch=branch("_then"), else_branch=branch("_else"))
    flag = helper.make_tensor_value_info("flag", onnx.TensorProto.BOOL, [])
    graph = helper.make_graph(
        [node], "outer", [flag, *model.graph.input], model.graph.output, list(model.graph.initializer)
    )
    return helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)


TYPES = {TensorProto.FLOAT: np.float32, TensorProto.FLOAT16: np.float16, TensorProto.BFLOAT16: ml_dtypes.bfloat16}


class Weights:
    """Random initialisers, made by name in float32 and stored in `kind`."""

    def __init__(self, seed: int = 0, kind: int = TensorProto.FLOAT) -> None:
        self.random = np.random.default_rng(seed)
        self.kind = kind
        self.tensors: dict[str, onnx.TensorProto] = {}

    def set(self, name: str, values: Any) -> str:
        self.tensors[name] = numpy_helper.from_array(np.asarray(values, TYPES[self.kind]), name)
        return name

    def normal(self, name: str, *shape: int) -> str:
        return self.set(name, self.random.standard_normal(shape))

    def positive(self, name: str, *shape: int) -> str:
        return self.set(name, self.random.uniform(0.5, 2, shape))

    def batch_norm(self, prefix: str, channels: int) -> list[str]:
        """Names of scale, bias, mean and variance."""
        rest = [self.normal(f"{prefix}_{part}", channels) for part in ("scale", "bias", "mean")]
        return [*rest, self.positive(f"{prefix}_variance", channels)]


def model_of(
    nodes: Sequence[onnx.NodeProto],
    weights: Weights,
    shape: Sequence[Any],
    outputs: Sequence[str] = ("y",),
    opset: int = 20,
    inputs: Mapping[str, Sequence[Any]] | None = None,
    rank: int | None = None,
) -> onnx.ModelProto:
    """A model that reads `x` of `shape`, and more `inputs`. Outputs have `rank` dimensions, those of x unless given."""
    for number, node in enumerate(nodes):
        node.name = node.name or f"{node.op_type}_{number}"
    unknown = [None] * (len(shape) if rank is None else rank)
    graph = helper.make_graph(
        list(nodes),
        "small",
        [helper.make_tensor_value_info(n, weights.kind, s) for n, s in {"x": shape, **(inputs or {})}.items()],
        [helper.make_tensor_value_info(name, weights.kind, unknown) for name in outputs],
        list(weights.tensors.values()),
    )
    ir_version = 8 if opset < 21 else 10
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)


def feeds_of(model: onnx.ModelProto, seed: int = 1, batch: int = 2) -> dict[str, NDArray]:
    """Fresh random inputs; symbolic sizes become `batch`."""
    random, feeds = np.random.default_rng(seed), {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape = [d.dim_value if d.HasField("dim_value") else batch for d in kind.shape.dim]
        flag = kind.elem_type == TensorProto.BOOL
        feeds[value.name] = np.array(True) if flag else random.standard_normal(shape).astype(TYPES[kind.elem_type])
    return feeds


class PassTools:
    """The functions and classes above, for tests."""

    apply = staticmethod(apply_pass)
    run = staticmethod(run_model)
    same_outputs = staticmethod(assert_same_outputs)
    in_branch = staticmethod(in_branch)
    Weights = Weights
    model = staticmethod(model_of)
    feeds = staticmethod(feeds_of)


@pytest.fixture(scope="session")
def tools() -> type[PassTools]:
    return PassTools
