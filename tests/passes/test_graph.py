"""The normal form of graphs, and weights that stay on disk."""

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from passes.graph import graph_from_path, graph_from_proto, proto_from_graph, tidy
from passes.pattern import values_of
from passes.scopes import scopes
from passes.shapes import infer_shapes
from passes.weights import FileValues, consolidate, data_files, inline, spill
from plugins.errors import KilnError

FUNCTIONS = """
<ir_version: 10, opset_import: ["" : 21, "local" : 1]>
main (float[2] x) => (float[2] y) { y = local.twice (x) }
<domain: "local", opset_import: ["" : 21]>
twice (a) => (b) { b = Add(a, a) }
"""
CONSTANTS = """
<ir_version: 10, opset_import: ["" : 21]>
main (float[2] x) => (float[2] y, float c) {
    one = Constant <value_float = 1.0> ()
    two = Constant <value_floats = [1.0, 2.0]> ()
    axes = Constant <value_ints = [0]> ()
    three = Constant <value = float[2] {3, 4}> ()
    c = Constant <value_float = 7.0> ()
    s = ReduceSum <keepdims = 0> (x, axes)
    t = Add(s, one)
    u = Add(two, t)
    y = Mul(u, three)
}
"""


def test_functions_are_inlined(tools):
    model = parser.parse_model(FUNCTIONS)
    graph = graph_from_proto(model)
    assert [node.op for node in graph.nodes] == ["Add"]
    tools.same_outputs(model, proto_from_graph(graph), {"x": np.array([1, 2], np.float32)})


def test_constants_become_tensors_except_where_they_are_outputs(tools):
    model = parser.parse_model(CONSTANTS)
    graph = graph_from_proto(model)
    assert [node.op for node in graph.nodes] == ["Constant", "ReduceSum", "Add", "Add", "Mul"]
    assert graph.nodes[0].outputs[0].name == "c"
    tools.same_outputs(model, proto_from_graph(graph), {"x": np.array([1, 2], np.float32)})


def test_initialisers_that_are_inputs_are_constants():
    model = parser.parse_model(
        '<ir_version: 3, opset_import: ["" : 8]> m (float[2] x, float[2] w) => (float[2] y) { y = Add(x, w) }'
    )
    model.graph.initializer.append(numpy_helper.from_array(np.ones(2, np.float32), "w"))
    graph = graph_from_proto(model)
    assert [tensor.name for tensor in graph.inputs] == ["x"]
    assert isinstance(graph.nodes[0].inputs[1], gs.Constant)


def test_the_standard_domain_has_one_name():
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["ai.onnx" : 21]> m (float[2] x) => (float[2] y) { y = Relu(x) }'
    )
    model.graph.node[0].domain = "ai.onnx"
    graph = graph_from_proto(model)
    assert (graph.nodes[0].domain, graph.opset) == ("", 21)
    assert model.opset_import[0].domain == "ai.onnx", "the caller's model is not touched"
    onnx.checker.check_model(proto_from_graph(graph))


def test_sizes_that_a_file_does_not_know_are_unknown():
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> m (float[n,3,h,w] x) => (float[n,3,h,w] y) { y = Relu(x) }'
    )
    for value in (model.graph.input[0], model.graph.output[0]):
        dims = value.type.tensor_type.shape.dim
        dims[0].dim_value = -1
        dims[2].dim_param = dims[3].dim_param = "?"
    graph = graph_from_proto(model)
    infer_shapes(graph)
    assert [tensor.shape for tensor in (*graph.inputs, *graph.outputs)] == [[None, 3, None, None]] * 2


def branching(then: float, otherwise: float) -> onnx.ModelProto:
    """Both branches use the same names for different tensors and constants."""

    def branch(name: str, value: float) -> onnx.GraphProto:
        return helper.make_graph(
            [helper.make_node("Add", ["x", "w"], ["t"], name="n"), helper.make_node("Mul", ["t", "k"], ["r"])],
            name,
            [],
            [helper.make_tensor_value_info("r", TensorProto.FLOAT, [400])],
            [numpy_helper.from_array(np.full(400, value, np.float32), "w")],
        )

    node = helper.make_node("If", ["flag"], ["y"], then_branch=branch("t", then), else_branch=branch("e", otherwise))
    graph = helper.make_graph(
        [node],
        "main",
        [
            helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [400]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [400])],
        [numpy_helper.from_array(np.full(400, 2, np.float32), "k")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_names_are_unique_over_branches_and_their_constants_move_out(tools):
    model = branching(1, 5)
    graph = graph_from_proto(model)
    tensors = {id(t): t.name for s in scopes(graph) for node in s.nodes for t in [*node.inputs, *node.outputs]}
    assert len(set(tensors.values())) == len(tensors)
    rewritten = proto_from_graph(graph)
    assert len(rewritten.graph.initializer) == 3
    for attribute in rewritten.graph.node[0].attribute:
        assert not attribute.g.initializer
    for flag in (True, False):
        feeds = {"flag": np.array(flag), "x": np.arange(400, dtype=np.float32)}
        tools.same_outputs(model, rewritten, feeds)


def test_what_graphs_cannot_carry_is_refused():
    optional = helper.make_node("Optional", [], ["o"], name="maybe")
    optional.attribute.append(helper.make_attribute("type", helper.make_tensor_type_proto(TensorProto.FLOAT, [2])))
    relu = helper.make_node("Relu", ["x"], ["y"])
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [optional, relu], "g", [value("x", TensorProto.FLOAT, [2])], [value("y", TensorProto.FLOAT, [2])]
    )
    with pytest.raises(KilnError, match=r"node 'maybe' \(Optional\): attribute 'type' is a TYPE_PROTO"):
        graph_from_proto(helper.make_model(graph))


def external_model(folder, dtype=np.float32):
    """MatMul and Add whose weights lie in one file, two of them at the same place."""
    generator = np.random.default_rng(0)
    weights = {"w": generator.normal(size=(40, 40)), "b": generator.normal(size=(40,))}
    path = folder / "model.onnx"
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        main (float[n,40] x) => (float[n,40] y) { a = MatMul(x, w)  c = MatMul(a, v)  y = Add(c, b) }"""
    )
    model.graph.initializer.extend(numpy_helper.from_array(v.astype(dtype), k) for k, v in weights.items())
    onnx.save(model, path, save_as_external_data=True, location="model.data", size_threshold=0)
    stored = onnx.load(path, load_external_data=False)
    alias = onnx.TensorProto()
    alias.CopyFrom(stored.graph.initializer[0])
    alias.name = "v"
    stored.graph.initializer.append(alias)
    path.write_bytes(stored.SerializeToString())
    return path


def constants(graph):
    return {t.name: t for node in graph.nodes for t in node.inputs if isinstance(t, gs.Constant)}


def test_weights_stay_on_disk_and_small_constants_are_read(tmp_path):
    graph = graph_from_path(external_model(tmp_path))
    found = constants(graph)
    assert isinstance(found["w"]._values, FileValues)
    assert isinstance(found["b"]._values, np.ndarray)
    assert values_of(found["w"]).shape == (40, 40)
    assert isinstance(found["w"]._values, FileValues), "values_of keeps nothing"
    assert data_files(graph) == {tmp_path / "model.data": 6400}


def test_new_weights_are_spilled_and_old_ones_left(tmp_path, tools):
    path = external_model(tmp_path)
    graph = graph_from_path(path)
    product = graph.nodes[0]
    product.inputs[1] = gs.Constant("doubled", 2 * values_of(product.inputs[1]))
    spill(graph, tmp_path / "new.data")
    assert data_files(graph) == {tmp_path / "new.data": 6400, tmp_path / "model.data": 6400}
    (tmp_path / "new.onnx").write_bytes(proto_from_graph(graph).SerializeToString())
    feeds = {"x": np.ones((2, 40), np.float32)}
    before, after = (tools.run(onnx.load(file), feeds) for file in (path, tmp_path / "new.onnx"))
    bias = values_of(constants(graph)["b"])
    np.testing.assert_allclose(after[0] - bias, 2 * (before[0] - bias), rtol=1e-5)


def test_consolidated_weights_are_stored_once(tmp_path, tools):
    path = external_model(tmp_path)
    graph = graph_from_path(path)
    consolidate(graph, tmp_path / "one.data")
    assert data_files(graph) == {tmp_path / "one.data": 6400}
    assert (tmp_path / "one.data").stat().st_size == 6400
    (tmp_path / "one.onnx").write_bytes(proto_from_graph(graph).SerializeToString())
    feeds = {"x": np.ones((2, 40), np.float32)}
    np.testing.assert_array_equal(*(tools.run(onnx.load(f), feeds)[0] for f in (path, tmp_path / "one.onnx")))
    inline(graph)
    assert data_files(graph) == {}


@pytest.mark.parametrize("size", [0, 100, 6399])
def test_a_truncated_weights_file_is_named(tmp_path, size):
    path = external_model(tmp_path)
    with (tmp_path / "model.data").open("r+b") as stream:
        stream.truncate(size)
    with pytest.raises(KilnError, match=r"initialiser '[wbv]' needs bytes .* 'model.data', which has"):
        graph_from_path(path)


def test_a_file_of_more_than_two_gigabytes_is_never_read(tmp_path):
    """A sparse file: were it read, or put into one message, this would not end well."""
    rows = 600_000
    value = helper.make_tensor_value_info
    big = onnx.TensorProto(name="table", data_type=TensorProto.FLOAT, dims=[rows, 1024])
    big.data_location = TensorProto.EXTERNAL
    for key, text in (("location", "big.data"), ("offset", "0"), ("length", str(rows * 4096))):
        big.external_data.add(key=key, value=text)
    graph = helper.make_graph(
        [helper.make_node("Identity", ["ids"], ["same"]), helper.make_node("Gather", ["table", "same"], ["y"])],
        "g",
        [value("ids", TensorProto.INT64, ["n"])],
        [value("y", TensorProto.FLOAT, ["n", 1024])],
        [big],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    (tmp_path / "big.onnx").write_bytes(model.SerializeToString())
    with (tmp_path / "big.data").open("wb") as stream:
        stream.truncate(rows * 4096)
    loaded = graph_from_path(tmp_path / "big.onnx")
    infer_shapes(loaded)
    tidy(loaded)
    assert loaded.nodes[1].outputs[0].shape == ["n", 1024]
    assert len(proto_from_graph(loaded).SerializeToString()) < 2000


def test_shapes_inside_subgraphs_come_from_constants_too(tools):
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> m (float[N,6] x) => (float[N,2,3] y) '
        "{ shape = Constant<value_ints=[-1, 2, 3]>() z = Reshape(x, shape) y = Relu(z) }"
    )
    graph = graph_from_proto(tools.in_branch(model))
    infer_shapes(graph)
    for branch in graph.subgraphs():
        (reshape,) = (node for node in branch.nodes if node.op == "Reshape")
        assert reshape.outputs[0].shape[1:] == [2, 3]


def test_names_that_inference_makes_up_stand_for_one_size_each(tools):
    """A second inference must not give the name of a size inside a subgraph to another one outside."""
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> m (float[N,6] x) => (float[M,3] y) '
        "{ shape = Constant<value_ints=[-1, 3]>() z = Reshape(x, shape) y = Relu(z) }"
    )
    graph = graph_from_proto(tools.in_branch(model))
    infer_shapes(graph)
    inner = [node.outputs[0] for branch in graph.subgraphs() for node in branch.nodes if node.op == "Reshape"]
    outer = gs.Variable("outer", np.float32)
    graph.nodes.append(
        gs.Node("Reshape", inputs=[graph.inputs[1], gs.Constant("s", np.array([-1, 2]))], outputs=[outer])
    )
    graph.outputs.append(outer)
    infer_shapes(graph)
    assert len({tensor.shape[0] for tensor in (*inner, outer)}) == 3


@pytest.mark.parametrize("branch", [False, True], ids=["", "in branch"])
def test_values_of_a_slice_with_unknown_bounds_are_unknown(tools, branch):
    """ONNX's inference takes them for those from 0 on: here it would find a z of rank 4."""
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> m (float[2,4,4] x) => (float[a,b,c] z) '
        "{ one = Constant<value_ints=[1]>() start = Identity(one) end = Constant<value_ints=[2]>() "
        "axis = Constant<value_ints=[0]>() shape = Shape(x) first = Shape<start=0, end=1>(x) "
        "middle = Slice(shape, start, end, axis) last = Constant<value_ints=[4]>() "
        "target = Concat<axis=0>(first, middle, last) y = Reshape(x, target) z = Relu(y) }"
    )
    graph = graph_from_proto(tools.in_branch(model) if branch else model)
    infer_shapes(graph)
    nodes = [node for scope in scopes(graph) for node in scope.nodes]
    assert {node.outputs[0].shape for node in nodes if node.op == "Reshape"} == {None}
    assert [node.op for node in nodes].count("Transpose") == 0
