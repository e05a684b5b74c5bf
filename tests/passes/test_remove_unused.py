"""What no graph output depends on goes and is counted; what is needed stays, outputs told by position too."""

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from passes.remove_unused import RemoveUnused

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 3)).astype(np.float32)
FLAG = np.array(True)


def model(body: str, given: str = "float[3,3] x", made: str = "float[3,3] y", opset: int = 18) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}, "kiln": 1]> g ({given}) => ({made}) {{ {body} }}'
    )
    for number, node in enumerate(proto.graph.node):
        node.name = f"node{number}"
    return proto


DEAD = {  # body, operators left, how much is removed
    "node": ("y = Exp(x) a = Neg(x)", ["Exp"], 1),
    "chain": ("a = Neg(x) b = Abs(a) y = Exp(x)", ["Exp"], 2),
    "initialiser": ("c = Constant<value_float: float = 1.0>() a = Add(x, c) y = Exp(x)", ["Exp"], 2),
    "shared initialiser": (
        "c = Constant<value_float: float = 1.0>() a = Add(x, c) y = Sub(x, c)",
        ["Sub"],
        1,
    ),
    "constant": ("c = Constant<value_float: float = 1.0>() y = Exp(x)", ["Exp"], 0),
    "mask": ("a, b = Dropout(x) y = Exp(a)", ["Dropout", "Exp"], 1),
    "indices": (
        "s = Constant<value_ints = [1]>() a = Unsqueeze(x, s) b, c = MaxPool<kernel_shape = [1]>(a) y = Squeeze(b, s)",
        ["Unsqueeze", "MaxPool", "Squeeze"],
        1,
    ),
    "node that read a mask": ("a, b = Dropout(x) c = Not(b) y = Exp(a)", ["Dropout", "Exp"], 2),
    "statistics": (
        "c = Constant<value_floats = [1.0, 2.0, 3.0]>() y, m, v = LayerNormalization(x, c)",
        ["LayerNormalization"],
        2,
    ),
}


@pytest.mark.parametrize(("body", "ops", "removed"), DEAD.values(), ids=DEAD)
@pytest.mark.parametrize("branch", [False, True], ids=["", "in branch"])
def test_removes(body: str, ops: list[str], removed: int, branch: bool, tools: Any) -> None:
    before = model(body)
    if branch:
        before = tools.in_branch(before)
    applied = tools.apply(before, RemoveUnused())
    assert applied.ops == (["If", *ops, *ops] if branch else ops)
    copies = 2 if branch else 1
    assert applied.outcome.rewrites == removed * copies
    tools.same_outputs(before, applied.model, {"x": X} | ({"flag": FLAG} if branch else {}))


def test_one_initialiser_counts_once(tools: Any) -> None:
    weight = numpy_helper.from_array(np.ones((3, 3), np.float32), "w")
    before = model("a = Add(x, w) b = Mul(a, w) y = Exp(x)", "float[3,3] x, float[3,3] w")
    del before.graph.input[1:]
    before.graph.initializer.append(weight)
    applied = tools.apply(before, RemoveUnused())
    assert applied.outcome.rewrites == 3
    assert not applied.model.graph.initializer


LSTM = (
    "w = Constant<value = float[1,8,3] {{{}}}>() r = Constant<value = float[1,8,2] {{{}}}>() "
    "s = Constant<value_ints = [1, 3, 3]>() i = Reshape(x, s) a, b, c = LSTM<hidden_size = 2>(i, w, r) "
).format(", ".join(["0.5"] * 24), ", ".join(["0.25"] * 16))


@pytest.mark.parametrize(
    ("tail", "outputs"),
    [
        ("y = Abs(a)", ["a"]),
        ("y = Abs(b)", ["", "b"]),
        ("y = Abs(c)", ["", "", "c"]),
        ("d = Unsqueeze(b, k) y = Add(a, d)", ["a", "b"]),
        ("d = Add(b, c) y = Abs(d)", ["", "b", "c"]),
    ],
)
def test_states_of_an_lstm(tail: str, outputs: list[str], tools: Any) -> None:
    before = model(f"k = Constant<value_ints = [0]>() {LSTM} {tail}", made="float[] y")
    applied = tools.apply(before, RemoveUnused())
    node = next(node for node in applied.model.graph.node if node.op_type == "LSTM")
    assert list(node.output) == outputs
    assert applied.outcome.rewrites == 3 - sum(map(bool, outputs))
    tools.same_outputs(before, applied.model, {"x": X})


KEPT = {
    "everything is used": "a = Exp(x) y = Neg(a)",
    "values of TopK": "k = Constant<value_ints = [3]>() a, b = TopK(x, k) y = Cast<to: int = 1>(b)",
    "parts of Split": "a, b, c = Split<axis = 0, num_outputs = 3>(x) y = Expand(b, s)",
    "mask that is an output": "a, z = Dropout(x) y = Exp(a)",
    "training": "y, m, v = BatchNormalization<training_mode = 1>(x, p, p, p, p)",
    "other domain": "y, a = kiln.Two(x)",
}


@pytest.mark.parametrize("body", KEPT.values(), ids=KEPT)
def test_leaves_alone(body: str, tools: Any) -> None:
    made = "float[3,3] y, bool[3,3] z" if "a, z" in body else "float[3,3] y"
    before = model(body, "float[3,3] x, int64[2] s, float[3] p", made)
    applied = tools.apply(before, RemoveUnused())
    assert not applied.outcome.changed
    assert [list(node.output) for node in applied.model.graph.node] == [
        list(node.output) for node in before.graph.node if node.op_type != "Constant"
    ]


def test_graph_inputs_stay(tools: Any) -> None:
    applied = tools.apply(model("y = Exp(x)", "float[3,3] x, float[3,3] z"), RemoveUnused())
    assert [value.name for value in applied.model.graph.input] == ["x", "z"]


BRANCHES = """
a, b = If (flag) <
    then_branch = then_graph () => (float[3,3] t, float[3,3] u) { t = Exp(x) v = Neg(x) u = Abs(v) },
    else_branch = else_graph () => (float[3,3] e, float[3,3] f) { e = Sin(x) f = Cos(w) }
>
"""


@pytest.mark.parametrize(
    ("used", "ops", "removed"),
    [("a", ["If", "Exp", "Sin", "Sqrt"], 5), ("b", ["Neg", "If", "Neg", "Abs", "Cos", "Sqrt"], 3)],
)
def test_unused_result_of_an_if(used: str, ops: list[str], removed: int, tools: Any) -> None:
    """With the result go its nodes in both branches, and the outer node that only they read."""
    before = model(f"w = Neg(x) {BRANCHES} y = Sqrt({used})", "float[3,3] x, bool flag")
    applied = tools.apply(before, RemoveUnused())
    assert applied.ops == ops
    assert applied.outcome.rewrites == removed
    for flag in (True, False):
        tools.same_outputs(before, applied.model, {"x": X, "flag": np.array(flag)})


def loop(used: str) -> onnx.ModelProto:
    """Carries c = c + x, and scans exp(c) and c * i."""
    body = onnx.parser.parse_graph(
        "body (int64 i, bool go, float[3,3] c) => (bool stay, float[3,3] d, float[3,3] p, float[3,3] q) "
        "{ stay = Identity(go) d = Add(c, x) p = Exp(c) n = Neg(c) q = Abs(n) }"
    )
    for number, node in enumerate(body.node):
        node.name = f"inner{number}"
    graph = onnx.parser.parse_graph(
        f"g (float[3,3] x) => (float y) {{ t = Constant<value_int: int = 3>() y = Neg({used}) }}"
    )
    graph.node[1].name = "neg"
    graph.node.insert(
        1, helper.make_node("Loop", ["t", "", "x"], ["final", "scan_p", "scan_q"], name="loop", body=body)
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.mark.parametrize(
    ("used", "ops", "outputs"),
    [
        ("final", ["Loop", "Identity", "Add", "Neg"], ["final"]),
        ("scan_p", ["Loop", "Identity", "Add", "Exp", "Neg"], ["final", "scan_p"]),
        ("scan_q", ["Loop", "Identity", "Add", "Neg", "Abs", "Neg"], ["final", "scan_q"]),
    ],
)
def test_unused_scans_of_a_loop(used: str, ops: list[str], outputs: list[str], tools: Any) -> None:
    """The carried value stays, although nothing reads its last one: each turn needs it."""
    before = loop(used)
    applied = tools.apply(before, RemoveUnused())
    assert applied.ops == ops
    assert list(applied.model.graph.node[0].output) == outputs
    tools.same_outputs(before, applied.model, {"x": X})


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    choices=st.lists(
        st.tuples(st.sampled_from(["Exp", "Add", "Mul", "Transpose", "Dropout"]), st.integers(0, 9), st.integers(0, 9)),
        min_size=2,
        max_size=12,
    )
)
def test_any_graph_keeps_its_bits(choices: list[tuple[str, int, int]], tools: Any) -> None:
    body, made = "", ["x"]
    for number, (op, left, right) in enumerate(choices):
        operands = [made[left % len(made)], made[right % len(made)]][: 2 if op in ("Add", "Mul") else 1]
        mask = f", m{number}" if op == "Dropout" else ""
        body += f"t{number}{mask} = {op}({', '.join(operands)}) "
        made.append(f"t{number}")
    before = model(f"{body} y = Neg({made[-1]})")
    applied = tools.apply(before, RemoveUnused())
    needed = {"y"}
    for node in reversed(before.graph.node):
        needed |= set(node.input) if needed & set(node.output) else set()
    assert {name for node in applied.model.graph.node for name in node.output} == needed - {"x"}
    tools.same_outputs(before, applied.model, {"x": X})
