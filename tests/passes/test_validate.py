"""Unsound models are refused with the node or file that is at fault."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from passes.graph import graph_from_path, graph_from_proto
from passes.validate import check_graph
from plugins.errors import KilnError

HEADER = '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>'


def model_of(body: str, signature: str = "(float[2,3] x) => (float[2,3] y)") -> onnx.ModelProto:
    return parser.parse_model(f"{HEADER} main {signature} {{ {body} }}")


def refusal(model: onnx.ModelProto) -> str:
    with pytest.raises(KilnError) as caught:
        check_graph(graph_from_proto(model))
    return str(caught.value)


def named(model: onnx.ModelProto) -> onnx.ModelProto:
    for number, node in enumerate(model.graph.node):
        node.name = f"node{number}"
    return model


def test_a_sound_graph_passes_and_is_sorted():
    graph = graph_from_proto(named(model_of("a = Relu(x)  unused = Neg(a)  y = Add(a, x)")))
    graph.nodes.reverse()
    check_graph(graph)
    assert [node.op for node in graph.nodes] == ["Relu", "Add"]


def test_a_cycle():
    model = named(model_of("a = Add(x, b)  b = Relu(a)  y = Neg(b)"))
    assert "depends on its own output: the graph has a cycle" in refusal(model)


def test_a_cycle_through_a_branch(tools):
    model = tools.in_branch(model_of("y = Relu(x)"))
    outer = model.graph.node[0]
    outer.attribute[0].g.node[0].input[0] = "y"
    assert "node 'if' (If) depends on its own output" in refusal(model)


def test_a_dangling_input():
    model = named(model_of("a = Relu(x)  y = Add(a, nowhere)"))
    assert "node 'node1' (Add) reads 'nowhere', which is neither an input" in refusal(model)


def test_a_dangling_input_inside_a_branch(tools):
    model = tools.in_branch(model_of("a = Relu(x)  y = Add(a, nowhere)"))
    assert "(Add) reads 'nowhere'" in refusal(model)


def test_a_branch_cannot_read_its_sibling(tools):
    model = tools.in_branch(model_of("a = Relu(x)  y = Neg(a)"))
    other = model.graph.node[0].attribute[1].g
    other.node[1].input[0] = model.graph.node[0].attribute[0].g.node[0].output[0]
    assert "(Neg) reads 'a_" in refusal(model)


def test_two_producers():
    model = named(model_of("a = Relu(x)  b = Neg(x)  y = Add(a, b)"))
    model.graph.node[1].output[0] = "a"
    assert "nodes 'node0' and 'node1' both produce 'a'" in refusal(model)


def test_an_output_that_nothing_produces():
    model = named(model_of("y = Relu(x)"))
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [2]))
    assert "graph output 'z' is produced by no node" in refusal(model)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("c = Cast <to = 7> (x)  y = Add(x, c)", "type error"),
        ("y = Gemm <alpha = 1> (x, x, x)", "node 'node0' (Gemm) is malformed"),
        ("y = Concat(x, x)", "node 'node0' (Concat) is malformed"),
        ("y = NoSuchOperator(x)", "node 'node0' (NoSuchOperator) is malformed"),
        ("y = Relu(x, x)", "node 'node0' (Relu) is malformed"),
    ],
)
def test_wrong_types_and_attributes(body, message):
    assert message in refusal(named(model_of(body)))


def test_other_domains_are_not_judged():
    check_graph(graph_from_proto(model_of("y = com.microsoft.NoSuchOperator(x)")))


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("gone.data", "external data file 'gone.data' is missing"),
        ("../outside.data", "'../outside.data' lies outside the model's folder"),
        ("/etc/hostname", "'/etc/hostname' lies outside the model's folder"),
        ("link.data", "'link.data' lies outside the model's folder"),
    ],
)
def test_external_data(tmp_path, location, message):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "outside.data").write_bytes(bytes(10_000))
    (folder / "link.data").symlink_to(tmp_path / "outside.data")
    model = model_of("y = Add(x, w)")
    weight = numpy_helper.from_array(np.zeros((2, 3), np.float32), "w")
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value=location)
    model.graph.initializer.append(weight)
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(KilnError, match="external data") as caught:
        graph_from_path(folder / "m.onnx")
    assert message in str(caught.value)


@pytest.mark.parametrize("missing", ["then_branch", "else_branch"])
def test_control_flow_without_a_graph_that_it_needs(missing, tools):
    model = tools.in_branch(model_of("y = Relu(x)"))
    (node,) = model.graph.node
    kept = [attribute for attribute in node.attribute if attribute.name != missing]
    del node.attribute[:]
    node.attribute.extend(kept)
    assert refusal(model) == f"node 'if' (If) has no '{missing}'; export it again"


@pytest.mark.parametrize("where", ["initialiser", "attribute"])
def test_a_tensor_with_fewer_values_than_its_shape_says(where, tmp_path):
    model = named(model_of("c = Constant<value = float[3] {1, 2, 3}>() y = Add(x, c)"))
    if where == "initialiser":
        model.graph.initializer.append(model.graph.node[0].attribute[0].t)
        model.graph.initializer[0].name = "c"
        del model.graph.node[0]
        model.graph.initializer[0].dims[:] = [2, 2, 10617, 27]
    else:
        model.graph.node[0].attribute[0].t.dims[:] = [4]
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(KilnError, match=r"m\.onnx: tensor '.*' is damaged: .*; export it again"):
        graph_from_path(tmp_path / "m.onnx")
