"""What is known of dimensions: equality, moves, and names that shape inference made up."""

import pytest
from onnx import parser

from passes.dimensions import moved_axes, moved_dims, unify_symbols, unproven
from passes.graph import graph_from_proto
from passes.shapes import infer_shapes


@pytest.mark.parametrize(
    ("first", "second", "count"),
    [
        ([2, "n"], [2, "n"], 0),
        ([2, "n"], [2, "m"], 1),
        ([2, None], [2, None], 1),
        ([2, "n"], [3, "n"], 3),
    ],
)
def test_unproven_pairs_are_counted(first, second, count):
    assert unproven(first, second) == count


@pytest.mark.parametrize(
    ("before", "after", "moves"),
    [
        ([1, "t", 8], ["t", 8], [1, 2]),
        (["t", 8], [1, "t", 1, 8], [None, 0, None, 1]),
        (["t", 8], [1, None, 8], [None, 0, 1]),  # the product decides
        (["a", "b"], [None, None, 1], None),
        (["a", "b"], ["b", "a"], None),
        ([4, 8], [8, 4], None),
        ([2, "t", 8], ["t", 16], None),
    ],
)
def test_moves_of_reshapes(before, after, moves):
    assert moved_dims(before, after) == moves


@pytest.mark.parametrize(
    ("node", "moves"),
    [
        ("y = Transpose<perm=[1, 0, 2]>(x)", [1, 0, 2]),
        ("y = Transpose(x)", [2, 1, 0]),
        ("a = Constant<value_ints=[0, -1]>() y = Unsqueeze(x, a)", [None, 0, 1, 2, None]),
        ("a = Constant<value_ints=[-3]>() y = Squeeze(x, a)", [1, 2]),
        ("y = Identity(x)", [0, 1, 2]),
        ("y = Relu(x)", None),
        ("y = Squeeze(x)", None),
    ],
)
def test_moves_of_nodes(node, moves):
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]> m (float[1,T,8] x) => (float[] y) {{ {node} }}'
    )
    graph = graph_from_proto(model)
    infer_shapes(graph)
    assert moved_axes(graph.nodes[-1]) == moves


@pytest.mark.parametrize(
    ("target", "shape"),
    [
        ([1, -1, 4, 2], [1, "T", 4, 2]),
        ([1, -1, 8], [1, "T", 8]),
        ([0, -1, 4], ["T", 2, 4]),
        ([-1, 4], None),  # twice T
    ],
)
def test_made_up_names_are_resolved(target, shape):
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> m (float[T,8] x) => (float[] z) '
        f"{{ s = Constant<value_ints={target}>() y = Reshape(x, s) z = Neg(y) }}"
    )
    graph = graph_from_proto(model)
    infer_shapes(graph)
    unify_symbols(graph)
    assert (graph.nodes[0].outputs[0].shape == shape) == (shape is not None)
    assert shape is None or graph.nodes[1].inputs[0].shape == shape
