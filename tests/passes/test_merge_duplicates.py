"""Equal initialisers and equal computations are kept once; what only looks equal is kept."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from onnx_graphsurgeon.ir.tensor import LazyValues

from passes.graph import graph_from_path
from passes.merge_duplicates import MergeDuplicates

X = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)


def model(body: str, given: str = "float[2,4] x", made: str = "float[2,4] y", opset: int = 18) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}, "com.microsoft": 1, "kiln": 1]> '
        f"g ({given}) => ({made}) {{ {body} }}"
    )
    for number, node in enumerate(proto.graph.node):
        node.name = f"node{number}"
    return proto


def with_weights(*weights: np.ndarray) -> onnx.ModelProto:
    """x + w0 + w1 + ..."""
    nodes, last = [], "x"
    for number in range(len(weights)):
        nodes.append(helper.make_node("Add", [last, f"w{number}"], [f"s{number}"], name=f"add{number}"))
        last = f"s{number}"
    nodes.append(helper.make_node("Abs", [last], ["y"], name="abs"))
    made = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [2, 4]) for n in "xy"]
    constants = [numpy_helper.from_array(w, f"w{number}") for number, w in enumerate(weights)]
    return helper.make_model(
        helper.make_graph(nodes, "g", made[:1], made[1:], constants),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=8,
    )


W = np.arange(4, dtype=np.float32)
ZERO, MINUS = np.zeros(4, np.float32), np.full(4, -0.0, np.float32)
NAN, OTHER_NAN = np.array([0x7FC00000], np.uint32).view(np.float32), np.array([0x7FC00001], np.uint32).view(np.float32)
CONSTANTS = {
    "equal": ([W, W.copy()], 1),
    "three": ([W, W.copy(), W + 1, W.copy()], 2),
    "one NaN": ([NAN, NAN.copy()], 1),
    "other value": ([W, W + 1], 0),
    "other shape": ([W, W.reshape(1, 4)], 0),
    "sign of zero": ([ZERO, MINUS], 0),
    "two NaNs": ([NAN, OTHER_NAN], 0),
    "scalar and vector": ([np.array(1, np.float32), np.ones(1, np.float32)], 0),
}


@pytest.mark.parametrize(("weights", "merged"), CONSTANTS.values(), ids=CONSTANTS)
@pytest.mark.parametrize("branch", [False, True], ids=["", "in branch"])
def test_initialisers(weights: list[np.ndarray], merged: int, branch: bool, tools: Any) -> None:
    before = with_weights(*weights)
    if branch:
        before = tools.in_branch(before)
    applied = tools.apply(before, MergeDuplicates())
    assert applied.outcome.rewrites == merged
    assert len(applied.model.graph.initializer) == len(weights) - merged
    tools.same_outputs(before, applied.model, {"x": X} | ({"flag": np.array(True)} if branch else {}))


def test_initialisers_of_another_type_stay(tools: Any) -> None:
    body = "a = Constant<value_float: float = 0.0>() b = Constant<value = int32 {0}>() "
    before = model(f"{body} c = Cast<to: int = 1>(b) d = Add(x, a) y = Add(d, c)")
    assert not tools.apply(before, MergeDuplicates()).outcome.changed


def test_weights_in_a_file_are_compared_and_left_there(tmp_path: Path) -> None:
    big = np.arange(4096, dtype=np.float32)
    last = np.concatenate([big[:-1], [-1]]).astype(np.float32)
    before = with_weights(big, big.copy(), last)
    onnx.save(before, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    graph = graph_from_path(tmp_path / "m.onnx")
    assert MergeDuplicates().call(graph).rewrites == 1
    weights = [node.inputs[1] for node in graph.nodes if node.op == "Add"]
    assert weights[0] is weights[1]
    assert weights[0] is not weights[2]
    assert all(isinstance(tensor._values, LazyValues) for tensor in weights)


MERGED = {  # body, operators left
    "unary": ("a = Exp(x) b = Exp(x) y = Add(a, b)", ["Exp", "Add"]),
    "chain": ("a = Exp(x) b = Exp(x) c = Neg(a) d = Neg(b) y = Sub(c, d)", ["Exp", "Neg", "Sub"]),
    "swapped": ("z = Neg(x) a = Mul(x, z) b = Mul(z, x) y = Sub(a, b)", ["Neg", "Mul", "Sub"]),
    "attributes": (
        "a = Softmax<axis = 1>(x) b = Softmax<axis = 1>(x) y = Sub(a, b)",
        ["Softmax", "Sub"],
    ),
    "constants": (
        "s = Constant<value_float: float = 2.0>() t = Constant<value_float: float = 2.0>() "
        "a = Mul(x, s) b = Mul(t, x) y = Sub(a, b)",
        ["Mul", "Sub"],
    ),
    "tensor attributes": (
        "s = Shape(x) a = ConstantOfShape<value = float[1] {2}>(s) b = ConstantOfShape<value = float[1] {2}>(s) "
        "c = Add(x, a) y = Sub(c, b)",
        ["Shape", "ConstantOfShape", "Add", "Sub"],
    ),
    "two outputs": (
        "a, b = Split<axis = 0, num_outputs = 2>(x) c, d = Split<axis = 0, num_outputs = 2>(x) e = Sub(a, d) "
        "f = Sub(c, b) y = Concat<axis = 0>(e, f)",
        ["Split", "Sub", "Concat"],
    ),
    "com.microsoft": (
        "a = com.microsoft.Gelu(x) b = com.microsoft.Gelu(x) y = Sub(a, b)",
        ["com.microsoft::Gelu", "Sub"],
    ),
    "empty last input": ("a = Clip(x) b = Clip(x, , ) y = Sub(a, b)", ["Clip", "Sub"]),
}


@pytest.mark.parametrize(("body", "ops"), MERGED.values(), ids=MERGED)
@pytest.mark.parametrize("branch", [False, True], ids=["", "in branch"])
def test_nodes(body: str, ops: list[str], branch: bool, tools: Any) -> None:
    before = model(body)
    if branch:
        before = tools.in_branch(before)
    applied = tools.apply(before, MergeDuplicates())
    assert applied.ops == (["If", *ops, *ops] if branch else ops)
    tools.same_outputs(before, applied.model, {"x": X} | ({"flag": np.array(False)} if branch else {}))


KEPT = {
    "other operator": "a = Exp(x) b = Log(x) y = Add(a, b)",
    "other input": "z = Neg(x) a = Exp(x) b = Exp(z) y = Add(a, b)",
    "not commutative": "z = Neg(x) a = Sub(x, z) b = Sub(z, x) y = Add(a, b)",
    "three operands": "z = Neg(x) a = Sum(x, z, x) b = Sum(z, x, x) y = Add(a, b)",
    "maximum": "z = Neg(x) a = Max(x, z) b = Max(z, x) y = Add(a, b)",
    "other attribute": "a = Softmax<axis = 1>(x) b = Softmax<axis = 0>(x) y = Add(a, b)",
    "other float": "a = Elu<alpha = 1.0>(x) b = Elu<alpha = 1.1>(x) y = Add(a, b)",
    "other tensor attribute": "s = Shape(x) a = ConstantOfShape<value = float[1] {2}>(s) "
    "b = ConstantOfShape<value = float[1] {3}>(s) c = Add(x, a) y = Sub(c, b)",
    "random": "a = RandomNormalLike(x) b = RandomNormalLike(x) y = Sub(a, b)",
    "noise with one seed": "a = Bernoulli<seed = 1.0>(x) b = Bernoulli<seed = 1.0>(x) y = Sub(a, b)",
    "dropout": "a = Dropout(x) b = Dropout(x) y = Sub(a, b)",
    "other domain": "a = kiln.Gelu(x) b = kiln.Gelu(x) y = Sub(a, b)",
    "unknown of com.microsoft": "a = com.microsoft.PagedAttention(x) b = com.microsoft.PagedAttention(x) y = Sub(a, b)",
    "absent output": "r = Constant<value_ints = [1, 2, 4]>() k = Reshape(x, r) a, b = MaxPool<kernel_shape = [2]>(k) "
    "c = MaxPool<kernel_shape = [2]>(k) d = Cast<to: int = 1>(b) y = Sum(a, c, d)",
    "identity": "y = Identity(x) z = Identity(x)",
}


@pytest.mark.parametrize("body", KEPT.values(), ids=KEPT)
def test_leaves_alone(body: str, tools: Any) -> None:
    made = "float[2,4] y, float[2,4] z" if " z = Identity" in body else "float[] y"
    assert not tools.apply(model(body, made=made), MergeDuplicates()).outcome.changed


def test_two_outputs_keep_their_names(tools: Any) -> None:
    before = model("y = Exp(x) z = Exp(x)", made="float[2,4] y, float[2,4] z")
    applied = tools.apply(before, MergeDuplicates())
    assert applied.ops == ["Exp", "Identity"]
    assert [value.name for value in applied.model.graph.output] == ["y", "z"]
    tools.same_outputs(before, applied.model, {"x": X})


@pytest.mark.parametrize("output_first", [True, False])
def test_an_output_and_an_inner_tensor(output_first: bool, tools: Any) -> None:
    pair = ["y = Exp(x)", "a = Exp(x)"]
    before = model(" ".join(pair if output_first else pair[::-1]) + " z = Abs(a)", made="float[2,4] y, float[2,4] z")
    applied = tools.apply(before, MergeDuplicates())
    assert applied.ops == ["Exp", "Abs"]
    assert [value.name for value in applied.model.graph.output] == ["y", "z"]
    tools.same_outputs(before, applied.model, {"x": X})


BRANCHES = """
y = If (flag) <
    then_branch = then_graph () => (float[2,4] t) {{ {then} }},
    else_branch = else_graph () => (float[2,4] e) {{ {other} }}
>
"""


@pytest.mark.parametrize(
    ("before_if", "then", "other", "ops"),
    [
        ("o = Exp(x)", "a = Exp(x) t = Neg(a)", "e = Abs(o)", ["Exp", "If", "Neg", "Abs"]),
        ("o = Exp(x)", "t = Exp(x)", "e = Abs(o)", ["Exp", "If", "Identity", "Abs"]),
        ("o = Neg(x)", "a = Exp(x) t = Neg(a)", "b = Exp(x) e = Add(b, o)", None),
    ],
    ids=["inner uses outer", "output of a branch", "siblings"],
)
def test_scopes(before_if: str, then: str, other: str, ops: list[str] | None, tools: Any) -> None:
    before = model(before_if + BRANCHES.format(then=then, other=other), "float[2,4] x, bool flag")
    applied = tools.apply(before, MergeDuplicates())
    assert applied.outcome.changed == (ops is not None)
    if ops:
        assert applied.ops == ops
    for flag in (True, False):
        tools.same_outputs(before, applied.model, {"x": X, "flag": np.array(flag)})


def test_outer_never_uses_inner(tools: Any) -> None:
    before = model(
        BRANCHES.format(then="a = Exp(x) t = Neg(a)", other="e = Abs(x)").replace("y =", "p =")
        + "o = Exp(x) y = Add(p, o)",
        "float[2,4] x, bool flag",
    )
    applied = tools.apply(before, MergeDuplicates())
    assert sorted(applied.ops) == sorted(["Exp", "If", "Neg", "Abs", "Add"])
    names = [name for node in applied.model.graph.node for name in node.output]
    assert len(list(names)) == 3, "the outer Exp is the one that stays"
    tools.same_outputs(before, applied.model, {"x": X, "flag": np.array(True)})


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    choices=st.lists(
        st.tuples(
            st.sampled_from(["Exp", "Neg", "Add", "Mul", "Sub", "Transpose"]), st.integers(0, 9), st.integers(0, 9)
        ),
        min_size=2,
        max_size=12,
    )
)
def test_any_graph_keeps_its_bits(choices: list[tuple[str, int, int]], tools: Any) -> None:
    body, made = "", ["x"]
    for number, (op, left, right) in enumerate(choices):
        operands = [made[left % len(made)], made[right % len(made)]][: 2 if op in ("Add", "Mul", "Sub") else 1]
        body += f"t{number} = {op}({', '.join(operands)}) "
        made.append(f"t{number}")
    before = model(
        f"{body} y = Sum({', '.join(made)}) z = Neg({made[-1]})", "float[3,3] x", "float[3,3] y, float[3,3] z"
    )
    applied = tools.apply(before, MergeDuplicates())
    assert applied.outcome.rewrites == len(before.graph.node) - len(applied.ops)
    graph_ops = {
        (node.op_type, *sorted(node.input)) for node in applied.model.graph.node if node.op_type in ("Add", "Exp")
    }
    assert len(graph_ops) == sum(node.op_type in ("Add", "Exp") for node in applied.model.graph.node)
    tools.same_outputs(before, applied.model, {"x": X[:, :3].repeat(2, axis=0)[:3]})
