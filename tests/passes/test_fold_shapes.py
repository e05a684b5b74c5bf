"""Folding of shape arithmetic whose elements are partly known, of decided branches, and what stays in loops."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from passes.fold_constants import FoldConstants

RNG = np.random.default_rng(0)
CONSTANTS = {
    "zero": np.int64(0),
    "one": np.int64(1),
    "two": np.int64(2),
    "axis": np.array([0], np.int64),
    "ones": np.array([1], np.int64),
    "twos": np.array([2], np.int64),
    "minus": np.array([-1], np.int64),
    "end": np.array([2**62], np.int64),
    "pair": np.array([1, 2], np.int64),
}


def model_of(signature: str, body: str, opset: int = 17) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> graph {signature} {{ {body} }}')
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), k) for k, v in CONSTANTS.items())
    return model


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


# Rule 3: x is [n, 3, 4], so only its first size is unknown

KNOWN = {
    "gather": "s = Shape (x) r = Gather (s, one)",
    "negative gather": "s = Shape (x) r = Gather (s, minus)",
    "several": "s = Shape (x) r = Gather (s, pair)",
    "slice": "s = Shape (x) r = Slice (s, ones, end)",
    "slice with step": "s = Shape (x) r = Slice (s, ones, end, axis, twos)",
    "start of shape": "r = Shape <start = 1> (x)",
    "end of shape": "r = Shape <start = -2, end = -1> (x)",
    "unsqueeze": "s = Shape (x) g = Gather (s, one) r = Unsqueeze (g, axis)",
    "squeeze": "s = Shape (x) g = Gather (s, twos) r = Squeeze (g, axis)",
    "reshape": "s = Shape (x) g = Gather (s, one) r = Reshape (g, minus)",
    "cast": "s = Shape (x) c = Cast <to = 6> (s) r = Gather (c, one)",
    "concat": "s = Shape (x) g = Gather (s, ones) r = Concat <axis = 0> (g, twos)",
    "known part of a concat": "s = Shape (x) c = Concat <axis = 0> (s, twos) r = Slice (c, twos, end)",
    "product": "s = Shape (x) g = Gather (s, one) h = Gather (s, two) r = Mul (g, h)",
    "size of a shape": "s = Shape (x) r = Size (s)",
    "size": "s = Shape (x) r = Size (k)",
    "comparison": "s = Shape (x) e = Equal (s, minus) r = Where (e, minus, minus)",
    "expand to": "s = Shape (x) g = Slice (s, ones, end) e = Equal (g, minus) r = Where (e, ones, g)",
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("body", KNOWN.values(), ids=KNOWN)
def test_known_sizes_become_constants(tools, body, inside):
    model = model_of("(float[n, 3, 4] x, float[2, 2] k) => (float[r] y)", f"{body} y = Cast <to = 1> (r)")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    feeds = {"x": floats(5, 3, 4), "k": floats(2, 2)}
    if inside:
        model, feeds = tools.in_branch(model), {**feeds, "flag": np.array(False)}
    result = tools.apply(model, FoldConstants())
    assert set(result.ops) == ({"If", "Identity"} if inside else {"Identity"})
    tools.same_outputs(model, result.model, feeds)


@pytest.mark.parametrize(
    "body",
    [
        "s = Shape (x) r = Gather (s, zero)",
        "s = Shape (x) r = Slice (s, axis, ones)",
        "r = Shape (x)",
        "r = Size (x)",
        "s = Shape (x) g = Gather (s, zero) r = Mul (g, g)",
        "s = Shape (x) r = Slice (s, twos, axis, axis, minus)",
        "s = Shape (x) r = Equal (s, ones)",
        "s = Shape (unranked) r = Gather (s, one)",
    ],
)
def test_unknown_sizes_stay(tools, body):
    model = model_of("(float[n, 3, 4] x, float[?] unranked) => (float[r] y)", f"{body} y = Cast <to = 1> (r)")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    model.graph.input[1].type.tensor_type.ClearField("shape")
    result = tools.apply(model, FoldConstants())
    assert result.ops == [node.op_type for node in model.graph.node]
    assert not result.outcome.changed


def test_a_shape_that_folding_makes_known_is_folded(tools):
    body = """
        s = Shape (x) g = Gather (s, one) h = Gather (s, two) m = Mul (g, h) u = Unsqueeze (m, axis)
        target = Concat <axis = 0> (minus, u) flat = Reshape (x, target)
        again = Shape (flat) width = Gather (again, one) scale = Cast <to = 1> (width) y = Div (flat, scale)
    """
    model = model_of("(float[n, 3, 4] x) => (float[n, k] y)", body)
    result = tools.apply(model, FoldConstants())
    assert result.ops == ["Reshape", "Div"]
    tools.same_outputs(model, result.model, {"x": floats(5, 3, 4)})


def test_attributes_of_old_opsets(tools):
    body = "s = Shape (x) g = Gather (s, ones) r = Squeeze <axes = [0]> (g) y = Cast <to = 1> (r)"
    model = model_of("(float[n, 3] x) => (float y)", body, opset=11)
    result = tools.apply(model, FoldConstants())
    assert result.ops == ["Identity"]
    tools.same_outputs(model, result.model, {"x": floats(5, 3)})


# Rule 4

BRANCHES = """
    y = If (condition) <
        then_branch = then () => (float[n, k] a) { n1 = Neg (x) a = Exp (n1) },
        else_branch = else () => (float[n, k] b) { b = Sqrt (x) }
    >
"""


@pytest.mark.parametrize(("condition", "ops"), [("one", ["Neg", "Exp"]), ("zero", ["Sqrt"])])
def test_a_decided_branch_is_inlined(tools, condition, ops):
    body = f"condition = Cast <to = 9> ({condition}) {BRANCHES}"
    model = model_of("(float[n, k] x) => (float[n, k] y)", body)
    result = tools.apply(model, FoldConstants())
    assert result.ops == ops
    tools.same_outputs(model, result.model, {"x": np.abs(floats(2, 3))})


def test_a_branch_decided_by_a_rank_in_a_branch(tools):
    body = f"s = Shape (x) r = Size (s) condition = Equal (r, two) {BRANCHES}"
    model = tools.in_branch(model_of("(float[n, k] x) => (float[n, k] y)", body))
    result = tools.apply(model, FoldConstants())
    assert result.ops == ["If", "Neg", "Exp", "Neg", "Exp"]
    tools.same_outputs(model, result.model, {"x": floats(2, 3), "flag": np.array(True)})


def test_an_open_branch_stays(tools):
    model = model_of("(float[n, k] x, bool condition) => (float[n, k] y)", BRANCHES)
    result = tools.apply(model, FoldConstants())
    assert result.ops == ["If", "Neg", "Exp", "Sqrt"]
    assert not result.outcome.changed


def test_inner_branches_and_constants_of_branches(tools):
    body = """
        condition = Cast <to = 9> (one)
        z = If (condition) <
            then_branch = then () => (float[1] a) {
                other = Cast <to = 9> (zero)
                a = If (other) <
                    then_branch = inner () => (float[1] c) { c = Constant <value_floats = [1.0]> () },
                    else_branch = outer () => (float[1] d) { d = Constant <value_floats = [2.0]> () }
                >
            },
            else_branch = else () => (float[1] b) { b = Constant <value_floats = [3.0]> () }
        >
        y = Mul (x, z)
    """
    model = model_of("(float[n] x) => (float[n] y)", body)
    result = tools.apply(model, FoldConstants())
    assert result.ops == ["Mul"]
    tools.same_outputs(model, result.model, {"x": floats(3)})


def test_outputs_that_a_branch_passes_twice(tools):
    body = """
        condition = Cast <to = 9> (one)
        y, z = If (condition) <
            then_branch = then () => (float[n] a, float[n] b) { a = Neg (x) b = Identity (a) },
            else_branch = else () => (float[n] c, float[n] d) { c = Exp (x) d = Exp (c) }
        >
    """
    model = model_of("(float[n] x) => (float[n] y, float[n] z)", body)
    for branch in model.graph.node[1].attribute:
        if branch.name == "then_branch":
            branch.g.output[1].name = "a"
            del branch.g.node[1]
    result = tools.apply(model, FoldConstants())
    assert sorted(result.ops) == ["Identity", "Neg"]
    x = floats(3)
    for found in tools.run(result.model, {"x": x}):
        np.testing.assert_array_equal(found, -x)


def test_a_weight_of_a_dropped_branch_has_one_reader_less(tools):
    body = """
        condition = Cast <to = 9> (one)
        z = If (condition) <
            then_branch = then () => (float[n, 600] a) { t = Transpose (w) a = MatMul (x, t) },
            else_branch = else () => (float[n, 600] b) { b = MatMul (x, w) }
        >
        y = Neg (z)
    """
    model = model_of("(float[n, 600] x) => (float[n, 600] y)", body)
    model.graph.initializer.append(numpy_helper.from_array(floats(600, 600), "w"))
    assert tools.apply(model, FoldConstants()).ops == ["MatMul", "Neg"]


# Loops

LOOP = """
    yes = Cast <to = 9> (one)
    y = Loop (count, yes, x) <
        body = turn (int64 i, bool go, float[n, 2] state) => (bool more, float[?, ?] next) {
            more = Identity (go)
            %s
        }
    >
"""


@pytest.mark.parametrize(
    ("body", "ops"),
    [
        ("k = Cast <to = 1> (two) l = Neg (k) next = Mul (state, l)", ["Mul"]),
        ("s = Shape (outer) g = Gather (s, one) k = Cast <to = 1> (g) next = Mul (state, k)", ["Mul"]),
        ("k = Cast <to = 1> (i) next = Mul (state, k)", ["Cast", "Mul"]),
    ],
)
def test_bodies_fold_what_comes_from_outside(tools, body, ops):
    model = model_of("(float[n, 2] x, float[m, 7] outer, int64 count) => (float[n, 2] y)", LOOP % body)
    result = tools.apply(model, FoldConstants())
    assert result.ops == ["Loop", "Identity", *ops]
    tools.same_outputs(model, result.model, {"x": floats(2, 2), "outer": floats(1, 7), "count": np.array(2)})


def test_annotated_shapes_in_a_body_are_not_trusted(tools):
    """The state grows, although the first iteration's shape is written beside it."""
    body = """
        s = Shape (state) g = Gather (s, one) k = Cast <to = 1> (g)
        wide = Concat <axis = 1> (state, state) next = Mul (wide, k)
    """
    model = model_of("(float[n, 2] x, int64 count) => (float[n, m] y)", LOOP % body)
    result = tools.apply(model, FoldConstants())
    assert result.ops == ["Loop", "Identity", "Shape", "Gather", "Cast", "Concat", "Mul"]
    tools.same_outputs(model, result.model, {"x": floats(2, 2), "count": np.array(2)})
