"""Transposes meet and cancel through operators that do not care about the order of axes; elsewhere nothing moves."""

import itertools
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from passes.base import Effect
from passes.minimum_cut import UNCUT, minimum_cut
from passes.sink_transposes import SinkTransposes

RNG = np.random.default_rng(0)
IN, OUT = "Transpose<perm = [0, 3, 1, 2]>", "Transpose<perm = [0, 2, 3, 1]>"
X = "float[2,3,4,5] x"
"""Channels last: 3 rows, 4 columns, 5 channels."""


def model(body: str, given: str = X, made: str = "float[] y", opset: int = 18) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}, "com.microsoft": 1]> g ({given}) => ({made}) {{ {body} }}'
    )
    for number, node in enumerate(proto.graph.node):
        node.name = f"node{number}"
    return proto


def feeds_of(proto: onnx.ModelProto) -> dict[str, Any]:
    feeds = {}
    for value in proto.graph.input:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        values = RNG.normal(size=[d.dim_value or 2 for d in value.type.tensor_type.shape.dim])
        feeds[value.name] = np.asarray(values > 0 if dtype.kind == "b" else values.astype(dtype))
    return feeds


CANCEL = {  # between Transposes to (2, 5, 3, 4) and back: operators that stay, with the Transposes all gone
    "nothing": "m = Identity(n)",
    "unary": "m = Relu(n)",
    "chain": "a = Sigmoid(n) m = Mul(n, a)",
    "clip": "l = Constant<value_float: float = -0.5>() m = Clip(n, l)",
    "cast": "a = Cast<to: int = 11>(n) m = Cast<to: int = 1>(a)",
    "gelu of com.microsoft": "m = com.microsoft.Gelu(n)",
    "scalar": "s = Constant<value_float: float = 2.0>() m = Mul(s, n)",
    "vector of one": "s = Constant<value_floats = [2.0]>() m = Mul(n, s)",
    "vector along the last axis": "s = Constant<value_floats = [1.0, 2.0, 3.0, 4.0]>() m = Add(n, s)",
    "one for each channel": "s = Constant<value = float[5,1,1] {1, 2, 3, 4, 5}>() m = Sub(s, n)",
    "slopes": "s = Constant<value = float[5,1,1] {1, 2, 3, 4, 5}>() m = PRelu(n, s)",
    "where": "s = Constant<value_float: float = 0.0>() c = Less(n, s) m = Where(c, s, n)",
    "concat": "a = Neg(n) m = Concat<axis = 1>(n, a, n)",
    "concat along the last axis": "a = Neg(n) m = Concat<axis = -1>(n, a)",
    "split": "a, b, c = Split<axis = 2, num_outputs = 3>(n) d = Mul(a, c) m = Add(d, b)",
    "slice": "s = Constant<value_ints = [1]>() e = Constant<value_ints = [4]>() m = Slice(n, s, e, s)",
    "slice without axes": "s = Constant<value_ints = [0, 1]>() e = Constant<value_ints = [2, 3]>() m = Slice(n, s, e)",
    "pad": "p = Constant<value_ints = [0, 1, 0, 2, 0, 0, 1, 0]>() m = Pad(n, p)",
    "pad of some axes": "p = Constant<value_ints = [1, 2]>() z = Constant<value_float: float = 1.0>() "
    "a = Constant<value_ints = [1]>() m = Pad(n, p, z, a)",
    "sum of integers": "a = Constant<value_ints = [2, 3]>() b = Cast<to: int = 6>(n) c = ReduceSum(b, a) "
    "m = Cast<to: int = 1>(c)",
    "largest": "a = Constant<value_ints = [-3]>() m = ReduceMax(n, a)",
    "argmax": "a = ArgMax<axis = 1>(n) m = Cast<to: int = 1>(a)",
    "softmax": "m = Softmax<axis = 1>(n)",
    "log softmax": "m = LogSoftmax(n)",
    "q and dq": "s = Constant<value_float: float = 0.5>() z = Constant<value = uint8 {7}>() "
    "a = QuantizeLinear(n, s, z) m = DequantizeLinear(a, s, z)",
    "q and dq for each channel": "s = Constant<value_floats = [0.5, 0.25, 1.0, 2.0, 3.0]>() "
    "z = Constant<value = uint8[5] {7, 0, 1, 2, 3}>() a = QuantizeLinear<axis = 1>(n, s, z) "
    "m = DequantizeLinear<axis = -3>(a, s, z)",
    "resize by scales": "s = Constant<value_floats = [1.0, 1.0, 2.0, 3.0]>() m = Resize(n, , s)",
    "resize to sizes": "s = Constant<value_ints = [2, 5, 6, 4]>() m = Resize(n, , , s)",
    "dropout": "m = Dropout(n)",
    "gate": "a = Constant<value_ints = [2, 3]>() b = ReduceMax(n, a) c = Sigmoid(b) m = Mul(c, n)",
}


@pytest.mark.parametrize("middle", CANCEL.values(), ids=CANCEL)
@pytest.mark.parametrize("branch", [False, True], ids=["", "in branch"])
def test_cancels(middle: str, branch: bool, tools: Any) -> None:
    before = model(f"t = Abs(x) n = {IN}(t) {middle} u = {OUT}(m) y = Neg(u)", made="float[a,b,c,d] y")
    after = [node.op_type for node in before.graph.node if node.op_type not in ("Transpose", "Constant")]
    if branch:
        before = tools.in_branch(before)
    applied = tools.apply(before, SinkTransposes())
    assert "Transpose" not in applied.ops
    assert applied.outcome.changed
    if "nothing" not in middle and not branch:
        assert sorted(op.replace("com.microsoft::", "") for op in applied.ops) == sorted(after)
    tools.same_outputs(before, applied.model, feeds_of(before))


REGIONS = {  # whole graphs: body, inputs, Transposes left
    "two inputs": (f"a = {IN}(x) b = {IN}(z) c = Add(a, b) y = Relu(c)", f"{X}, float[2,3,4,5] z", 1),
    "residual": (f"a = {IN}(x) b = Relu(a) c = Add(a, b) y = {OUT}(c)", X, 0),
    "residual with another input": (f"a = {IN}(x) b = Add(a, z) c = {OUT}(b) y = Relu(c)", f"{X}, float[2,5,3,4] z", 1),
    "reduced to a matrix": (
        f"k = Constant<value_ints = [2, 3]>() a = {IN}(x) y = ReduceMin<keepdims = 0>(a, k)",
        X,
        0,
    ),
    "pooled and flattened": (
        f"k = Constant<value_ints = [2, 3]>() a = {IN}(x) b = ReduceMax(a, k) c = Flatten(b) y = Relu(c)",
        X,
        0,
    ),
    "pooled and reshaped": (
        f"k = Constant<value_ints = [2, 3]>() s = Constant<value_ints = [0, 5]>() a = {IN}(x) b = ReduceMax(a, k) "
        "y = Reshape(b, s)",
        X,
        0,
    ),
    "two readers alike": (f"a = Relu(x) b = {OUT}(a) c = Neg(a) d = {OUT}(c) e = Add(b, d) y = Abs(e)", X, 1),
    "unsqueezed inside": (
        "k = Constant<value_ints = [0, -1]>() a = Transpose<perm = [1, 2, 0]>(w) b = Unsqueeze(a, k) c = Relu(b) "
        "y = Transpose<perm = [0, 3, 1, 2, 4]>(c)",
        "float[2,3,5] w",
        0,
    ),
    "squeezed inside": (
        f"k = Constant<value_ints = [-2]>() a = {IN}(w) b = Squeeze(a, k) c = Relu(b) "
        "y = Transpose<perm = [0, 2, 1]>(c)",
        "float[2,1,4,5] w",
        0,
    ),
    "unsqueezed on the way": (
        "k = Constant<value_ints = [1]>() a = Relu(w) b = Unsqueeze(a, k) c = Transpose<perm = [0, 2, 1, 3]>(b) "
        "y = Add(c, x)",
        f"{X}, float[2,3,5] w",
        0,
    ),
    "reshaped on the way": (
        "k = Constant<value_ints = [2, 1, 3, -1]>() a = Relu(w) b = Reshape(a, k) "
        "c = Transpose<perm = [0, 2, 1, 3]>(b) y = Add(c, x)",
        f"{X}, float[2,3,5] w",
        0,
    ),
    "only the end of a chain": (
        "a = Transpose<perm = [1, 2, 3, 0]>(x) b = Relu(a) c = Relu(b) d = Transpose<perm = [0, 2, 1, 3]>(w) "
        "e = Add(c, d) y = Transpose<perm = [0, 2, 1, 3]>(e)",
        f"{X}, float[3,5,4,2] w",
        2,
    ),
    "a matrix in both orders": (
        f"k = Constant<value_ints = [2, 3]>() l = Constant<value_ints = [0, 3]>() a = {IN}(x) "
        "b = ReduceMax<keepdims = 0>(a, k) c = ReduceMax<keepdims = 0>(a, l) d = Add(b, c) "
        "e = Transpose<perm = [1, 0]>(d) y = Neg(e)",
        "float[3,3,4,3] x",
        1,
    ),
    "composed": (f"a = {IN}(x) b = Transpose<perm = [1, 0, 2, 3]>(a) y = Relu(b)", X, 1),
    "rotary": (
        "p = Constant<value_ints = [1]>() s = Constant<value_ints = [0]>() h = Constant<value_ints = [2]>() "
        "e = Constant<value_ints = [9]>() l = Constant<value_ints = [-1]>() "
        "q = Transpose<perm = [0, 2, 1, 3]>(x) c = Unsqueeze(w, p) a = Slice(q, s, h, l) b = Slice(q, h, e, l) "
        "d = Neg(b) f = Concat<axis = -1>(d, a) g = Mul(f, c) m = Add(q, g) y = Transpose<perm = [0, 2, 1, 3]>(m)",
        f"{X}, float[2,3,5] w",
        0,
    ),
    "two regions of different order": (
        f"a = {IN}(x) b = Relu(a) c = {OUT}(b) d = MatMul(c, w) e = Transpose<perm = [1, 0, 2, 3]>(d) f = Abs(e) "
        "y = Transpose<perm = [1, 0, 2, 3]>(f)",
        f"{X}, float[5,5] w",
        0,
    ),
    "old names stay where they are read": (
        f"a = {IN}(x) b = Relu(a) c = {OUT}(b) d = Neg(c) y = Add(d, c) z = Exp(b)",
        X,
        1,
    ),
}


@pytest.mark.parametrize(("body", "given", "left"), REGIONS.values(), ids=REGIONS)
def test_regions(body: str, given: str, left: int, tools: Any) -> None:
    before = model(body, given, "float[] y, float[] z" if "z = Exp" in body else "float[] y")
    applied = tools.apply(before, SinkTransposes())
    assert applied.outcome.changed
    assert applied.ops.count("Transpose") == left
    assert len(applied.ops) - left <= sum(node.op_type not in ("Transpose", "Constant") for node in before.graph.node)
    assert [value.name for value in applied.model.graph.output] == [value.name for value in before.graph.output]
    tools.same_outputs(before, applied.model, feeds_of(before))


def test_graph_output_in_the_middle_keeps_its_name_and_order(tools: Any) -> None:
    before = model(
        f"a = {IN}(x) z = Relu(a) b = {OUT}(z) c = Neg(b) d = Add(a, z) y = {OUT}(d)", made="float[] y, float[] z"
    )
    applied = tools.apply(before, SinkTransposes())
    assert applied.ops.count("Transpose") == 1
    assert [value.name for value in applied.model.graph.output] == ["y", "z"]
    tools.same_outputs(before, applied.model, feeds_of(before))


MEANS = {
    "mean": f"n = {IN}(x) m = ReduceMean(n, a) y = {OUT}(m)",
    "gate": f"n = {IN}(x) m = ReduceMean(n, a) g = Mul(m, n) y = {OUT}(g)",
    "norm": f"n = {IN}(x) m = LpNormalization<axis = 1>(n) y = {OUT}(m)",
    "mean of a matrix": f"n = {IN}(x) y = ReduceMean<keepdims = 0>(n, a)",
}


@pytest.mark.parametrize("body", MEANS.values(), ids=MEANS)
def test_sums_move_only_when_asked(body: str, tools: Any) -> None:
    before = model(f"a = Constant<value_ints = [2, 3]>() {body}")
    assert SinkTransposes().effect is Effect.EXACT
    assert not tools.apply(before, SinkTransposes()).outcome.changed
    assert SinkTransposes(through_sums=True).effect is Effect.REORDERS
    applied = tools.apply(before, SinkTransposes(through_sums=True))
    assert "Transpose" not in applied.ops
    tools.same_outputs(before, applied.model, feeds_of(before), 1e-6)


def test_a_sum_in_another_order_never_moves(tools: Any) -> None:
    turn = "Transpose<perm = [0, 3, 2, 1]>"
    before = model(f"a = Constant<value_ints = [2, 3]>() n = {turn}(x) m = ReduceMean(n, a) y = {turn}(m)")
    assert not tools.apply(before, SinkTransposes(through_sums=True)).outcome.changed


def test_older_opsets(tools: Any) -> None:
    body = f"""a = {IN}(x) b = ReduceMax<axes = [2, 3], keepdims = 1>(a) c = Pad<pads = [0,1,0,0,0,0,0,0]>(a)
        d = Slice<starts = [1], ends = [9], axes = [1]>(c) e = Mul(d, b) f = Softmax<axis = 3>(b) g = Add(e, f)
        h = Squeeze<axes = [2]>(b) i = Unsqueeze<axes = [2]>(h) j = Add(g, i) y = {OUT}(j)"""
    before = model(body, opset=9)
    applied = tools.apply(before, SinkTransposes())
    assert applied.ops.count("Transpose") == 2, "this Softmax is over the last axis and all after it, which moves"
    tools.same_outputs(before, applied.model, feeds_of(before))


KEPT = {
    "no counterpart": f"n = {IN}(x) y = Relu(n)",
    "other permutation": f"n = {IN}(x) m = Conv(n, w) k = Relu(m) y = Transpose<perm = [2, 0, 3, 1]>(k)",
    "convolution": f"n = {IN}(x) m = Conv(n, w) y = {OUT}(m)",
    "batch normalisation": f"n = {IN}(x) m = BatchNormalization(n, v, v, v, v) y = {OUT}(m)",
    "pool": f"n = {IN}(x) m = MaxPool<kernel_shape = [2, 2]>(n) y = {OUT}(m)",
    "mean of all": f"n = {IN}(x) m = ReduceSum(n) y = {OUT}(m)",
    "axes unknown": f"n = {IN}(x) m = ReduceMax(n, i) y = {OUT}(m)",
    "pads unknown": f"n = {IN}(x) m = Pad(n, j) y = {OUT}(m)",
    "slice of unknown axes": f"n = {IN}(x) m = Slice(n, i, i, i) y = {OUT}(m)",
    "interpolation": f"s = Constant<value_floats = [1.0, 1.0, 2.0, 2.0]>() n = {IN}(x) "
    f'm = Resize<mode = "linear">(n, , s) y = {OUT}(m)',
    "reshape that merges": f"s = Constant<value_ints = [2, 5, 12, 1]>() n = {IN}(x) m = Reshape(n, s) y = {OUT}(m)",
    "operand of another rank": f"n = {IN}(x) m = Add(n, v4) y = {OUT}(m)",
    "two operands that would need it": f"n = {IN}(x) m = Sum(n, p, q) y = {OUT}(m)",
    "training": f"r = Constant<value_float: float = 0.5>() n = {IN}(x) m = Dropout(n, r, f) y = {OUT}(m)",
}
OTHERS = "float[5,5,1,1] w, float[5] v, float[4] v4, int64[1] i, int64[8] j, float[2,5,3,4] p, float[2,5,3,4] q, bool f"


@pytest.mark.parametrize("body", KEPT.values(), ids=KEPT)
def test_leaves_alone(body: str, tools: Any) -> None:
    before = model(body, f"{X}, {OTHERS}")
    applied = tools.apply(before, SinkTransposes())
    assert not applied.outcome.changed
    assert applied.ops == [node.op_type for node in before.graph.node if node.op_type != "Constant"]


def test_unknown_rank_and_softmax_of_old(tools: Any) -> None:
    body = f"n = {IN}(x) m = Add(n, z) y = {OUT}(m)"
    assert not tools.apply(model(body, f"{X}, float[] z"), SinkTransposes()).outcome.changed
    body = f"n = {IN}(x) m = Softmax<axis = 1>(n) y = {OUT}(m)"
    assert not tools.apply(model(body, opset=12), SinkTransposes()).outcome.changed


@pytest.mark.parametrize("seed", range(20))
def test_minimum_cut_is_the_least_of_all(seed: int) -> None:
    random = np.random.default_rng(seed)
    names = ["s", *"abcde", "t"]
    edges = [
        (a, b, int(random.choice([1, 2, UNCUT], p=[0.6, 0.35, 0.05])))
        for a, b in itertools.permutations(names, 2)
        if random.random() < 0.35 and b != "s" and a != "t"
    ]
    sides = [{"s", *inner} for size in range(6) for inner in itertools.combinations("abcde", size)]
    costs = [sum(c for a, b, c in edges if a in side and b not in side) for side in sides]
    capacity, side = minimum_cut(edges, "s", "t")
    assert capacity == min(costs)
    best = [candidate for candidate, cost in zip(sides, costs, strict=True) if cost == capacity]
    assert side == set.intersection(*best)


UNARY = ("Relu", "Neg", "Softmax<axis = 1>", "Transpose<perm = [0, 2, 1]>", "Transpose<perm = [1, 2, 0]>", "Transpose")
PAIRS = ("Add", "Mul", "Concat<axis = 1>")
STEPS = st.tuples(st.sampled_from([*UNARY, *UNARY[3:], *PAIRS]), st.integers(0, 9), st.integers(0, 9))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, min_size=2, max_size=12), outputs=st.integers(1, 3))
def test_any_graph_keeps_its_bits_and_gets_no_more_transposes(
    steps: list[tuple[str, int, int]], outputs: int, tools: Any
) -> None:
    """All tensors are cubes, so that any two can be added; a Concat is cut back to one."""
    body, made = (
        "c = Constant<value_ints = [3]>() o = Constant<value_ints = [1]>() e = Constant<value_ints = [4]>()",
        ["x"],
    )
    for number, (op, left, right) in enumerate(steps):
        first, second = made[-1 - left % len(made)], made[-1 - right % len(made)]
        operands = f"{first}, {second}" if op in PAIRS else first
        if op.startswith("Concat"):
            body += f" k{number} = {op}({operands}) t{number} = Slice(k{number}, o, e, o)"
        else:
            body += f" t{number} = {op}({operands})"
        made.append(f"t{number}")
    ends = made[-outputs:]
    body += "".join(f" y{number} = Exp({end})" for number, end in enumerate(ends))
    before = model(body, "float[3,3,3] x", ", ".join(f"float[3,3,3] y{number}" for number in range(len(ends))))
    applied = tools.apply(before, SinkTransposes())
    assert applied.ops.count("Transpose") <= sum(node.op_type == "Transpose" for node in before.graph.node)
    tools.same_outputs(before, applied.model, feeds_of(before))
