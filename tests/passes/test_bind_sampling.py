"""Binding the sampling operators: what is added, what stays, who reads the fed ids, and equality in a real session."""

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime
import pytest
from onnx import TensorProto, helper

from passes.bind_sampling import BindSampling
from passes.graph import graph_from_proto, proto_from_graph, tidy
from passes.validate import check_graph
from plugins.build import cpu_library
from plugins.sampling.schema import GRAPH_INPUTS, TOKENS

EMBEDDING = np.random.default_rng(0).normal(size=(11, 11)).astype(np.float32)


def model(ids: int = TensorProto.INT32, logits: str = "logits", inner: str = "tokens") -> onnx.ModelProto:
    """Logits of an id are a row of a table, doubled where `flag` is set: a branch reads the ids, too."""
    make, value = helper.make_node, helper.make_tensor_value_info

    def branch(name: str, factor: float) -> onnx.GraphProto:
        nodes = [
            make("Gather", ["embedding", "input_ids"], [f"{name}_rows"]),
            make("Constant", [], [f"{name}_factor"], value_float=factor),
            make("Mul", [f"{name}_rows", f"{name}_factor"], [f"{name}_out"]),
        ]
        return helper.make_graph(nodes, name, [], [value(f"{name}_out", TensorProto.FLOAT, None)])

    nodes = [
        make("If", ["flag"], [inner], then_branch=branch("twice", 2.0), else_branch=branch("once", 1.0)),
        make("Identity", [inner], [logits]),
    ]
    graph = helper.make_graph(
        nodes,
        "serving",
        [value("input_ids", ids, ["tokens"]), value("flag", TensorProto.BOOL, [])],
        [value(logits, TensorProto.FLOAT, ["rows", 11])],
        [onnx.numpy_helper.from_array(EMBEDDING, "embedding")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def bound(proto: onnx.ModelProto) -> tuple[gs.Graph, list[str]]:
    graph = graph_from_proto(proto)
    outcome = BindSampling().call(graph)
    tidy(graph)
    check_graph(graph)
    assert outcome.changed == bool(TOKENS in {output.name for output in graph.outputs})
    assert not BindSampling().call(graph).changed
    return graph, outcome.notes


def run(proto: onnx.ModelProto, **feeds) -> dict[str, np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(cpu_library()))
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


@pytest.mark.parametrize("flag", [False, True])
def test_tokens_are_chosen_and_fed_and_logits_keep_their_bits(flag: bool) -> None:
    graph, _ = bound(model())
    assert [tensor.name for tensor in graph.inputs][2:] == ["feed", "previous_tokens", *GRAPH_INPUTS[:6]]
    ids, previous = np.array([3, 4, 5], np.int32), np.array([9, 8], np.int32)
    rows = {name: np.zeros(3, np.int32) for name in ("top_k", "sample_position")}
    rows |= {name: np.zeros(3, np.float32) for name in ("temperature", "top_p", "min_p")}
    rows |= {"seed": np.zeros(3, np.int64), "feed": np.array([-1, 1, 0], np.int32), "previous_tokens": previous}
    found = run(proto_from_graph(graph), input_ids=ids, flag=np.array(flag), **rows)
    expected = run(model(), input_ids=np.array([3, 8, 9], np.int32), flag=np.array(flag))["logits"]
    np.testing.assert_array_equal(found["logits"], expected)
    np.testing.assert_array_equal(found[TOKENS], expected.argmax(axis=1))


def test_other_graphs_are_left_alone_and_told_why() -> None:
    for proto, reason in (
        (model(logits="hidden"), "no input input_ids or no output logits"),
        (model(ids=TensorProto.INT64), "input_ids is int64"),
    ):
        before = proto_from_graph(graph_from_proto(proto))
        graph, notes = bound(proto)
        assert reason in notes[0]
        assert proto_from_graph(graph) == before
    taken = model()
    taken.graph.input.append(helper.make_tensor_value_info("feed", TensorProto.INT32, ["tokens"]))
    assert bound(taken)[1] == ["has inputs or outputs called feed already"]
