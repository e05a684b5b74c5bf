"""Operators that change nothing go; what only looks like it stays."""

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from passes.remove_no_ops import RemoveNoOps

RNG = np.random.default_rng(0)
BIG = 9223372036854775807


def model(body: str, given: str = "float[2,3,4] x", made: str = "float[a,b,c] y", opset: int = 17) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}]> g ({given}) => ({made}) {{ {body} }}'
    )
    for number, node in enumerate(proto.graph.node):
        node.name = f"node{number}"
    return proto


def feeds_of(proto: onnx.ModelProto) -> dict[str, Any]:
    """Random values, -0.0, infinities and NaN among floats; an unknown size is 3."""
    feeds = {}
    for value in proto.graph.input:
        shape = [d.dim_value or 3 for d in value.type.tensor_type.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        values = np.asarray(RNG.normal(size=shape) * 10)
        if np.issubdtype(dtype, np.floating) and values.size > 3:
            values.reshape(-1)[:4] = [-0.0, np.inf, -np.inf, np.nan]
        feeds[value.name] = np.asarray(values > 0 if dtype.kind == "b" else values.astype(dtype))
    return feeds


REMOVED = {
    "identity": "m = Identity(n)",
    "dropout": "m = Dropout(n)",
    "dropout with ratio": "r = Constant<value_float: float = 0.5>() m = Dropout(n, r)",
    "dropout, training false": "r = Constant<value_float: float = 0.5>() f = Constant<value = bool {0}>() "
    "m = Dropout(n, r, f)",
    "cast": "m = Cast<to: int = 1>(n)",
    "reshape, static": "s = Constant<value_ints = [2, 3, 4]>() m = Reshape(n, s)",
    "reshape, inferred": "s = Constant<value_ints = [2, -1, 4]>() m = Reshape(n, s)",
    "reshape to own shape": "s = Shape(n) m = Reshape(n, s)",
    "reshape there and back": "s = Constant<value_ints = [6, 4]>() t = Constant<value_ints = [2, 3, 4]>() "
    "k = Reshape(n, s) m = Reshape(k, t)",
    "flatten and back": "k = Flatten<axis = 2>(n) s = Shape(n) m = Reshape(k, s)",
    "squeeze without ones": "m = Squeeze(n)",
    "squeeze of unsqueeze": "s = Constant<value_ints = [0]>() k = Unsqueeze(n, s) m = Squeeze(k, s)",
    "squeeze of unsqueeze, negative": "s = Constant<value_ints = [1]>() t = Constant<value_ints = [-3]>() "
    "k = Unsqueeze(n, s) m = Squeeze(k, t)",
    "transpose": "m = Transpose<perm = [0, 1, 2]>(n)",
    "transposes that cancel": "k = Transpose<perm = [1, 2, 0]>(n) m = Transpose<perm = [2, 0, 1]>(k)",
    "transposes by default": "k = Transpose(n) m = Transpose(k)",
    "slice to the largest": f"s = Constant<value_ints = [0]>() e = Constant<value_ints = [{BIG}]>() "
    "a = Constant<value_ints = [1]>() m = Slice(n, s, e, a)",
    "slice of known size": "s = Constant<value_ints = [0, -9]>() e = Constant<value_ints = [2, 3]>() "
    "m = Slice(n, s, e)",
    "pad by nothing": "p = Constant<value_ints = [0, 0, 0, 0, 0, 0]>() m = Pad(n, p)",
    "tile once": "p = Constant<value_ints = [1, 1, 1]>() m = Tile(n, p)",
    "expand": "p = Constant<value_ints = [3, 1]>() m = Expand(n, p)",
    "expand to own shape": "p = Shape(n) m = Expand(n, p)",
    "concat of one": "m = Concat<axis = 1>(n)",
    "sum of one": "m = Sum(n)",
    "max of one": "m = Max(n)",
    "min of one": "m = Min(n)",
    "split into one": "m = Split<axis = 1>(n)",
    "add of -0.0": "c = Constant<value_float: float = -0.0>() m = Add(c, n)",
    "subtract 0": "c = Constant<value = float[4] {0, 0, 0, 0}>() m = Sub(n, c)",
    "multiply by 1": "c = Constant<value_float: float = 1.0>() m = Mul(n, c)",
    "1 multiplied": "c = Constant<value = float[1,3,1] {1, 1, 1}>() m = Mul(c, n)",
    "divide by 1": "c = Constant<value_float: float = 1.0>() m = Div(n, c)",
    "power 1": "c = Constant<value_int: int = 1>() m = Pow(n, c)",
    "max pool": "m = MaxPool<kernel_shape = [1], strides = [1], pads = [0, 0]>(n)",
    "where true": "c = Constant<value = bool {1}>() z = Constant<value_float: float = 3.0>() m = Where(c, n, z)",
    "where false": "c = Constant<value = bool[2,1,1] {0, 0}>() z = Constant<value_float: float = 3.0>() "
    "m = Where(c, z, n)",
    "neg of neg": "k = Neg(n) m = Neg(k)",
    "resize": "s = Constant<value_floats = [1.0, 1.0, 1.0]>() m = Resize<mode = 'nearest'>(n, , s)".replace("'", '"'),
    "resize to own sizes": "s = Constant<value_ints = [2, 3, 4]>() m = Resize(n, , , s)",
}


@pytest.mark.parametrize("middle", REMOVED.values(), ids=REMOVED)
@pytest.mark.parametrize("branch", [False, True], ids=["", "in branch"])
def test_removes(middle: str, branch: bool, tools: Any) -> None:
    before = model(f"n = Exp(x) {middle} y = Abs(m)", made="float[2,3,4] y")
    if branch:
        before = tools.in_branch(before)
    applied = tools.apply(before, RemoveNoOps())
    assert applied.outcome.changed
    assert applied.ops == (["If", "Exp", "Abs", "Exp", "Abs"] if branch else ["Exp", "Abs"])
    feeds = feeds_of(before)
    if "MaxPool" in middle:
        feeds["x"] = np.nan_to_num(feeds["x"])
    tools.same_outputs(before, applied.model, feeds)


OTHERS = {
    "integer add 0": (
        "int64[N,3] x",
        "int64[N,3] y",
        "c = Constant<value_int: int = 0>() m = Add(x, c) y = Abs(m)",
        17,
    ),
    "clip of integers": ("int64[N,3] x", "int64[N,3] y", "m = Clip(x) y = Abs(m)", 17),
    "dynamic copy": (
        "float[N,3,S] x",
        "float[N,3,S] y",
        "s = Constant<value_ints = [0, 3, -1]>() m = Reshape(x, s) y = Abs(m)",
        17,
    ),
    "no axes": ("float[N,3] x", "float[N,3] y", "m = ReduceSum<noop_with_empty_axes = 1>(x) y = Abs(m)", 17),
    "no axes, 18": ("float[N,3] x", "float[N,3] y", "m = ReduceMax<noop_with_empty_axes = 1>(x) y = Abs(m)", 18),
    "dropout 10": ("float[N,3] x", "float[N,3] y", "m, k = Dropout(x) y = Abs(m)", 10),
    "slice 9": (
        "float[N,3] x",
        "float[N,3] y",
        "m = Slice<starts = [0], ends = [2147483647], axes = [0]>(x) y = Abs(m)",
        9,
    ),
    "average pool": (
        "float[N,3,4,4] x",
        "float[N,3,4,4] y",
        "m = AveragePool<kernel_shape = [1, 1]>(x) y = Abs(m)",
        17,
    ),
    "upsample 7": ("float[N,3] x", "float[N,3] y", "m = Upsample<scales = [1.0, 1.0]>(x) y = Abs(m)", 7),
    "flatten": ("float[N,3] x", "float[N,3] y", "m = Flatten(x) y = Abs(m)", 17),
    "relu twice": ("float[N,3] x", "float[N,3] y", "m = Relu(x) y = Relu(m)", 17),
    "unsqueeze of squeeze": (
        "float[N,1,3] x",
        "float[N,1,3] y",
        "s = Constant<value_ints = [1]>() k = Squeeze(x, s) m = Unsqueeze(k, s) y = Abs(m)",
        17,
    ),
}


@pytest.mark.parametrize(("given", "made", "body", "opset"), OTHERS.values(), ids=OTHERS)
def test_removes_with_other_types_and_opsets(given: str, made: str, body: str, opset: int, tools: Any) -> None:
    before = model(body, given, made, opset)
    applied = tools.apply(before, RemoveNoOps())
    assert len(applied.ops) == 1
    tools.same_outputs(before, applied.model, feeds_of(before))


def test_removes_logic(tools: Any) -> None:
    body = (
        "t = Constant<value = bool {1}>() f = Constant<value = bool {0}>() "
        "a = And(x, t) b = Or(f, a) c = Xor(b, f) d = Not(c) e = Not(d) y = And(e, z)"
    )
    before = model(body, "bool[N] x, bool[N] z", "bool[N] y")
    applied = tools.apply(before, RemoveNoOps())
    assert applied.ops == ["And"]
    tools.same_outputs(before, applied.model, feeds_of(before))


def test_clip_twice_with_one_pair_of_bounds(tools: Any) -> None:
    body = (
        "l = Constant<value_float: float = 0.0>() h = Constant<value_float: float = 6.0>() m = Clip(x, l, h) {} = Clip"
    )
    before = model(body.format("y") + "(m, l, h)")
    applied = tools.apply(before, RemoveNoOps())
    assert applied.ops == ["Clip"]
    tools.same_outputs(before, applied.model, feeds_of(before))
    assert not tools.apply(model(body.format("y") + "(m, , h)"), RemoveNoOps()).outcome.changed


KEPT = {
    "add of 0.0": "c = Constant<value_float: float = 0.0>() m = Add(n, c)",
    "subtract -0.0": "c = Constant<value_float: float = -0.0>() m = Sub(n, c)",
    "0 minus": "c = Constant<value_float: float = 0.0>() m = Sub(c, n)",
    "1 divided": "c = Constant<value_float: float = 1.0>() m = Div(c, n)",
    "1 to a power": "c = Constant<value_float: float = 1.0>() m = Pow(c, n)",
    "multiply by another": "c = Constant<value = float[4] {1, 1, 1, 2}>() m = Mul(n, c)",
    "larger rank": "c = Constant<value = float[1,1,1,1] {1}>() k = Mul(n, c) s = Constant<value_ints = [0]>() "
    "m = Squeeze(k, s)",
    "clip of floats": "m = Clip(n)",
    "dropout in training": "r = Constant<value_float: float = 0.0>() t = Constant<value = bool {1}>() "
    "m = Dropout(n, r, t)",
    "cast": "k = Cast<to: int = 10>(n) m = Cast<to: int = 1>(k)",
    "reshape": "s = Constant<value_ints = [3, 2, 4]>() m = Reshape(n, s)",
    "reshape to another's shape": "k = Transpose(n) s = Shape(k) m = Reshape(n, s)",
    "slice of a part": "s = Constant<value_ints = [0]>() e = Constant<value_ints = [1]>() m = Slice(n, s, e)",
    "slice backwards": f"s = Constant<value_ints = [-1]>() e = Constant<value_ints = [-{BIG}]>() "
    "a = Constant<value_ints = [1]>() p = Constant<value_ints = [-1]>() m = Slice(n, s, e, a, p)",
    "slice in steps": f"s = Constant<value_ints = [0]>() e = Constant<value_ints = [{BIG}]>() "
    "a = Constant<value_ints = [2]>() p = Constant<value_ints = [2]>() m = Slice(n, s, e, a, p)",
    "tile twice": "p = Constant<value_ints = [1, 2, 1]>() m = Tile(n, p)",
    "expand": "p = Constant<value_ints = [2, 2, 3, 4]>() k = Expand(n, p) s = Constant<value_ints = [0]>() "
    "m = ReduceMax<axes = [0], keepdims = 0>(k)",
    "two operands": "m = Max(n, x)",
    "pool over two": "m = MaxPool<kernel_shape = [2]>(n)",
    "pool in steps": "m = MaxPool<kernel_shape = [1], strides = [2]>(n)",
    "linear resize": 's = Constant<value_floats = [1.0, 1.0, 1.0]>() m = Resize<mode = "linear">(n, , s)',
    "resize": "s = Constant<value_floats = [1.0, 1.0, 2.0]>() m = Resize(n, , s)",
    "reduce": "m = ReduceSum<noop_with_empty_axes = 0>(n)",
    "where mixed": "c = Constant<value = bool[2,1,1] {0, 1}>() z = Constant<value_float: float = 3.0>() "
    "m = Where(c, n, z)",
    "where the other is larger": "c = Constant<value = bool {1}>() m = Where(c, larger, n)",
    "mask used": "m, k = Dropout(n) u = Cast<to: int = 1>(k)",
    "gelu twice": "k = Sin(n) m = Sin(k)",
}


@pytest.mark.parametrize("middle", KEPT.values(), ids=KEPT)
def test_leaves_alone(middle: str, tools: Any) -> None:
    made = "float[a,b,c] y" + (", float[a,b,c] u" if " u = " in middle else "")
    before = model(f"n = Exp(x) {middle} y = Abs(m)", "float[2,3,4] x, float[1] larger", made)
    applied = tools.apply(before, RemoveNoOps())
    assert not applied.outcome.changed


DYNAMIC = {
    "one that may enlarge": "c = Constant<value = float[3] {1, 1, 1}>() m = Mul(x, c)",
    "two sizes open": "t = Constant<value_ints = [-1, 3]>() m = Reshape(x, t)",
    "slice of an unknown size": "s = Constant<value_ints = [0]>() e = Constant<value_ints = [5]>() m = Slice(x, s, e)",
    "unknown shape": "m = Reshape(x, z)",
    "squeeze": "m = Squeeze(x)",
}


@pytest.mark.parametrize("middle", DYNAMIC.values(), ids=DYNAMIC)
def test_leaves_alone_what_sizes_decide(middle: str, tools: Any) -> None:
    before = model(f"{middle} y = Abs(m)", "float[N,M] x, int64[2] z", "float[] y")
    assert not tools.apply(before, RemoveNoOps()).outcome.changed


CASTS = [  # from, by way of, to, whether the middle one goes
    ("float16", 1, 11, True),
    ("int8", 7, 2, True),
    ("bool", 1, 6, True),
    ("int8", 1, 10, True),
    ("int8", 1, 7, True),
    ("int32", 11, 1, True),
    ("int8", 1, 2, False),
    ("float", 10, 1, False),
    ("float", 11, 6, False),
    ("int32", 1, 7, False),
    ("int64", 6, 7, False),
    ("float16", 16, 1, False),
]


@pytest.mark.parametrize(("first", "between", "last", "shorter"), CASTS)
def test_chain_of_casts(first: str, between: int, last: int, shorter: bool, tools: Any) -> None:
    name = onnx.TensorProto.DataType.Name(last).lower()
    body = f"m = Cast<to: int = {between}>(x) y = Cast<to: int = {last}>(m)"
    before = model(body, f"{first}[9] x", f"{name}[9] y")
    applied = tools.apply(before, RemoveNoOps())
    assert applied.ops == ["Cast"] * (1 if shorter else 2)
    if shorter:
        tools.same_outputs(before, applied.model, feeds_of(before))


RESHAPES = [  # input, first target, second target, the composed one or None
    ("float[2,3,4] x", [6, 4], [4, 6], [4, 6]),
    ("float[2,3,4] x", [6, 4], [0, 2, 2], [6, 2, 2]),
    ("float[N,3,4] x", [0, 12], [0, 4, 3], [0, 4, 3]),
    ("float[N,3,M] x", [-1, 4], [0, 2, 2], [-1, 2, 2]),
    ("float[N,3,M] x", [-1, 4], [0, -1, 2], None),
]


@pytest.mark.parametrize(("given", "first", "second", "composed"), RESHAPES)
def test_reshape_of_reshape(
    given: str, first: list[int], second: list[int], composed: list[int] | None, tools: Any
) -> None:
    body = f"s = Constant<value_ints = {first}>() t = Constant<value_ints = {second}>() "
    body += "m = Reshape(x, s) y = Reshape(m, t)"
    before = model(body, given, "float[] y")
    applied = tools.apply(before, RemoveNoOps())
    assert applied.ops == ["Reshape"] * (2 if composed is None else 1)
    if composed is not None:
        targets = {
            tensor.name: onnx.numpy_helper.to_array(tensor).tolist() for tensor in applied.model.graph.initializer
        }
        assert targets[applied.model.graph.node[0].input[1]] == composed
        feeds = {"x": RNG.normal(size=(2, 3, 4)).astype(np.float32)}
        tools.same_outputs(before, applied.model, feeds)


def test_transposes_become_one(tools: Any) -> None:
    before = model("k = Transpose<perm = [1, 2, 0]>(x) m = Transpose<perm = [0, 2, 1]>(k) y = Transpose(m)")
    applied = tools.apply(before, RemoveNoOps())
    assert applied.ops == ["Transpose"]
    tools.same_outputs(before, applied.model, feeds_of(before))


NAMES = {  # what stays, so that inputs and outputs keep their names
    "from input to output": ("y = Identity(x)", ["Identity"], False),
    "no-op from input to output": ("y = Dropout(x)", ["Identity"], True),
    "two outputs of one value": ("y = Exp(x) z = Identity(y)", ["Exp", "Identity"], False),
    "output takes its name along": ("m = Exp(x) y = Identity(m) z = Abs(y)", ["Exp", "Abs"], True),
    "readers pass by": ("y = Identity(x) z = Abs(y)", ["Identity", "Abs"], True),
    "dead": ("y = Abs(x) m = Identity(x) k = Exp(m)", ["Abs"], True),
}


@pytest.mark.parametrize(("body", "ops", "changed"), NAMES.values(), ids=NAMES)
def test_graph_inputs_and_outputs_keep_their_names(body: str, ops: list[str], changed: bool, tools: Any) -> None:
    made = "float[2,3,4] y" + (", float[2,3,4] z" if "z =" in body else "")
    before = model(body, made=made)
    applied = tools.apply(before, RemoveNoOps())
    assert (applied.ops, applied.outcome.changed) == (ops, changed)
    assert [value.name for value in applied.model.graph.output] == [value.name for value in before.graph.output]
    tools.same_outputs(before, applied.model, feeds_of(before))


@pytest.mark.parametrize(
    "body",
    [
        "m = MaxPool<kernel_shape = [1]>(x) y = Exp(m)",  # inference gives its sizes names of their own
        "s = Constant<value_ints = [2, 3, 4]>() m = Reshape(x, s) y = Exp(m)",
    ],
)
def test_inputs_keep_their_declared_sizes(body: str, tools: Any) -> None:
    before = model(body, "float[a,3,b] x")
    applied = tools.apply(before, RemoveNoOps())
    assert [value.SerializeToString() for value in applied.model.graph.input] == [
        value.SerializeToString() for value in before.graph.input
    ]


STEPS = [step for step in REMOVED.values() if "MaxPool" not in step] + [
    step for name, step in KEPT.items() if name in ("add of 0.0", "multiply by another", "1 divided")
]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.sampled_from(STEPS), min_size=1, max_size=5))
def test_any_chain_keeps_its_bits(steps: list[str], tools: Any) -> None:
    body, last = "", "x"
    for number, step in enumerate(steps):
        words = step.replace("(", " ( ").replace(")", " ) ").replace(",", " , ").split(" ")
        names = {"n": last, **{name: f"{name}{number}" for name in "mkcseatfrpz"}}
        body += " ".join(names.get(word, word) for word in words) + "\n"
        last = f"m{number}"
    before = model(f"{body} y = Identity({last})")
    applied = tools.apply(before, RemoveNoOps())
    feeds = feeds_of(before)
    for expected, found in zip(tools.run(before, feeds), tools.run(applied.model, feeds), strict=True):
        keep = ~np.isnan(expected)
        assert (expected[keep].view(np.int32) == found[keep].view(np.int32)).all()
        assert (np.isnan(expected) == np.isnan(found)).all()
