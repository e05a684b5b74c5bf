"""Which nodes are layers to quantisation, and what they are called."""

import onnx
import pytest

from passes.graph import graph_from_proto
from passes.pack_matmuls import packed_name
from passes.quantization.layers import layers_of, name_layers
from plugins.errors import KilnError


def small(tools, names: tuple[str, str] = ("a.one", "a.two")) -> onnx.ModelProto:
    weights = tools.Weights()
    nodes = [
        onnx.helper.make_node("Gather", [weights.normal("table", 11, 8), "ids"], ["rows"]),
        onnx.helper.make_node("MatMul", ["x", weights.normal("w", 8, 8)], ["h"], name=names[0]),
        onnx.helper.make_node("Add", ["h", "rows"], ["sum"]),
        onnx.helper.make_node("Gemm", ["sum", weights.normal("v", 8, 8), weights.normal("b", 8)], ["g"], transB=1),
        onnx.helper.make_node("MatMul", ["g", "g2"], ["both"]),
        onnx.helper.make_node("Transpose", ["table"], ["turned"], perm=[1, 0]),
        onnx.helper.make_node("MatMul", ["both", "turned"], ["y"], name=names[1]),
    ]
    model = tools.model(nodes, weights, [3, 8], inputs={"g2": [8, 8]})
    model.graph.input.append(onnx.helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, [3]))
    for node, name in zip(model.graph.node, [*["", names[0], "", "", "", ""], names[1]], strict=True):
        node.name = name
    return model


def test_products_with_constant_weights_are_layers(tools):
    graph = graph_from_proto(small(tools))
    assert name_layers(graph) == 2
    first, gemm, head = layers_of(graph)
    assert (first.name, first.kind, first.activation, first.weight) == ("a.one", "MatMul", "x", "w")
    assert (gemm.name, gemm.kind, gemm.transposed) == ("g", "Gemm", True)
    assert (head.weight, head.transposed, head.depth, head.width) == ("table", True, 8, 11)
    assert name_layers(graph) == 0


def test_two_layers_of_one_name_are_refused_or_named_apart(tools):
    graph = graph_from_proto(small(tools, ("same", "same")))
    with pytest.raises(KilnError, match=r"2 layers are called 'same'"):
        layers_of(graph)
    name_layers(graph)
    assert [layer.name for layer in layers_of(graph)] == ["same", "g", "y"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["l.0.q_proj", "l.0.k_proj", "l.0.v_proj"], "l.0.q_proj+k_proj+v_proj"),
        (["l.0.a.q", "l.0.b.k"], "l.0.a.q+b.k"),
        (["q", "k"], "q+k"),
        (["l.q", "l"], "l.q+l"),
        (["l.q", ""], ""),
    ],
)
def test_packed_products_are_named_after_their_parts(names, expected):
    assert packed_name(names) == expected
