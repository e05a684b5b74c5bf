"""GELU in every spelling becomes one operator, with its bias; what only looks like it stays."""

import math

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, parser

from passes.fuse_gelu import FuseGelu

GELU, TANH, QUICK, BIAS = (f"com.microsoft::{op}" for op in ("Gelu", "FastGelu", "QuickGelu", "BiasGelu"))
CONSTANTS = {
    "half": 0.5,
    "one": 1.0,
    "two": 2.0,
    "three": 3.0,
    "root2": math.sqrt(2),
    "short_root2": 1.4142,
    "inv_root2": math.sqrt(0.5),
    "short_inv_root2": 0.7071,
    "cubic": 0.044715,
    "slope": math.sqrt(2 / math.pi),
    "both": math.sqrt(2 / math.pi) * 0.044715,
    "double_slope": 2 * math.sqrt(2 / math.pi),
    "quick": 1.702,
    "zero7": 0.7,
    "fifth": 0.2,
    "zero8": 0.8,
}


def model(body: str, dtype: int = TensorProto.FLOAT, opset: int = 21, outputs: str = "") -> onnx.ModelProto:
    """x [2, n, 8] -> y; the constants above stand ready in the type of x, those that the body uses."""
    kind = {TensorProto.FLOAT: "float", TensorProto.FLOAT16: "float16", TensorProto.BFLOAT16: "bfloat16"}[dtype]
    extra = f", {outputs}" if outputs else ""
    proto = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : {opset}]>
        g ({kind}[2, n, 8] x) => ({kind}[2, n, 8] y{extra}) {{ {body} }}
    """)
    used = {name for node in proto.graph.node for name in node.input}
    for name, value in CONSTANTS.items():
        if name in used:
            proto.graph.initializer.append(helper.make_tensor(name, dtype, [], [value]))
    return proto


def draw(seed: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (2, 5, 8)).astype(dtype)


ERF = "d = Div(x, root2) e = Erf(d) p = Add(e, one)"
ERF_SPELLINGS = {
    "half last": f"{ERF} q = Mul(x, p) y = Mul(q, half)",
    "half first": f"{ERF} h = Mul(half, x) y = Mul(p, h)",
    "half to the sum": f"{ERF} h = Mul(p, half) y = Mul(x, h)",
    "divided by two": f"{ERF} q = Mul(p, x) y = Div(q, two)",
    "swapped sum": "d = Div(x, root2) e = Erf(d) p = Add(one, e) h = Mul(half, x) y = Mul(h, p)",
    "times inverse root": "d = Mul(inv_root2, x) e = Erf(d) p = Add(one, e) q = Mul(x, p) y = Mul(half, q)",
    "four digits": "d = Div(x, short_root2) e = Erf(d) p = Add(one, e) q = Mul(x, p) y = Mul(half, q)",
    "four digits, inverse": "d = Mul(x, short_inv_root2) e = Erf(d) p = Add(one, e) q = Mul(x, p) y = Mul(half, q)",
    "half of each": "d = Div(x, root2) e = Erf(d) h = Mul(e, half) p = Add(h, half) y = Mul(x, p)",
    "multiplied out": "d = Div(x, root2) e = Erf(d) h = Mul(x, half) q = Mul(h, e) y = Add(q, h)",
}
TANH_END = "t = Tanh(a) p = Add(t, one) h = Mul(x, half) y = Mul(h, p)"
TANH_SPELLINGS = {
    "power": f"c = Pow(x, three) k = Mul(cubic, c) s = Add(x, k) a = Mul(slope, s) {TANH_END}",
    "products": f"b = Mul(x, x) c = Mul(x, b) k = Mul(c, cubic) s = Add(k, x) a = Mul(s, slope) {TANH_END}",
    "factor first": f"k = Mul(cubic, x) b = Mul(k, x) c = Mul(b, x) s = Add(x, c) a = Mul(s, slope) {TANH_END}",
    "square and one": f"b = Pow(x, two) k = Mul(b, cubic) s = Add(one, k) v = Mul(x, slope) a = Mul(v, s) {TANH_END}",
    "multiplied out": f"c = Pow(x, three) k = Mul(both, c) v = Mul(x, slope) a = Add(v, k) {TANH_END}",
    "half last": (
        "c = Pow(x, three) k = Mul(cubic, c) s = Add(x, k) a = Mul(slope, s) t = Tanh(a) p = Add(one, t) "
        "q = Mul(p, x) y = Mul(q, half)"
    ),
    "sigmoid of the cubic": (
        "c = Pow(x, three) k = Mul(cubic, c) s = Add(x, k) a = Mul(double_slope, s) g = Sigmoid(a) y = Mul(x, g)"
    ),
}
QUICK_SPELLINGS = {
    "quick": "a = Mul(quick, x) s = Sigmoid(a) y = Mul(x, s)",
    "quick, swapped": "a = Mul(x, quick) s = Sigmoid(a) y = Mul(s, x)",
}
CASES = {
    **{f"erf, {name}": (GELU, body) for name, body in ERF_SPELLINGS.items()},
    **{f"tanh, {name}": (TANH, body) for name, body in TANH_SPELLINGS.items()},
    **{name: (QUICK, body) for name, body in QUICK_SPELLINGS.items()},
}
ALL = list(CASES.values())
every_spelling = pytest.mark.parametrize(("op", "body"), ALL, ids=CASES.keys())


@every_spelling
def test_fuses_every_spelling(tools, op, body):
    before = model(body, opset=17)
    after = tools.apply(before, FuseGelu())
    assert after.ops == [op]
    assert after.outcome.rewrites == 1
    tools.same_outputs(before, after.model, {"x": draw(0)}, 1e-5)


@every_spelling
def test_fuses_constants_rounded_to_half_precision(tools, op, body):
    before = model(body, TensorProto.FLOAT16)
    after = tools.apply(before, FuseGelu())
    assert after.ops == [op]
    tools.same_outputs(before, after.model, {"x": draw(1, np.float16)}, 4e-3)


@pytest.mark.parametrize(("op", "body"), ALL[::4])
def test_fuses_constants_rounded_to_bfloat16(tools, op, body):
    """ONNX Runtime's CPU provider runs neither form in BF16."""
    assert tools.apply(model(body, TensorProto.BFLOAT16), FuseGelu()).ops == [op]


@pytest.mark.parametrize(("op", "body"), [ALL[0], ALL[len(ERF_SPELLINGS)], ALL[-1]])
def test_works_in_subgraphs(tools, op, body):
    before = tools.in_branch(model(body))
    after = tools.apply(before, FuseGelu())
    assert sorted(after.ops) == ["If", op, op]
    tools.same_outputs(before, after.model, {"x": draw(2), "flag": np.array(True)}, 1e-5)


def test_keeps_the_factor_of_quick_gelu(tools):
    after = tools.apply(model(QUICK_SPELLINGS["quick"]), FuseGelu())
    assert onnx.helper.get_node_attr_value(after.model.graph.node[0], "alpha") == pytest.approx(1.702, rel=1e-7)


@pytest.mark.parametrize(
    ("attribute", "op"), [("", GELU), ('<approximate = "none">', GELU), ('<approximate = "tanh">', TANH)]
)
def test_replaces_the_standard_operator(tools, attribute, op):
    before = model(f"y = Gelu {attribute} (x)")
    after = tools.apply(before, FuseGelu())
    assert after.ops == [op]
    tools.same_outputs(before, after.model, {"x": draw(3)}, 1e-6)


@pytest.mark.parametrize(
    ("spellings", "approximate"), [(ERF_SPELLINGS, b"none"), (TANH_SPELLINGS, b"tanh")], ids=["erf", "tanh"]
)
def test_makes_the_standard_operator(tools, spellings, approximate):
    for body in spellings.values():
        before = model(body, opset=20)
        after = tools.apply(before, FuseGelu("standard"))
        assert after.ops == ["Gelu"]
        assert onnx.helper.get_node_attr_value(after.model.graph.node[0], "approximate") == approximate
        tools.same_outputs(before, after.model, {"x": draw(4)}, 1e-5)


def test_standard_needs_opset_20_and_says_so(tools):
    after = tools.apply(model(ERF_SPELLINGS["half last"], opset=19), FuseGelu("standard"))
    assert not after.outcome.changed
    (note,) = after.outcome.notes
    assert "opset 19" in note


@pytest.mark.parametrize("body", [*QUICK_SPELLINGS.values(), "y = Gelu(x)"])
def test_standard_leaves_alone_what_it_has_no_operator_for(tools, body):
    assert not tools.apply(model(body), FuseGelu("standard")).outcome.changed


def test_fuses_an_island_of_half_precision(tools):
    before = parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[n, 8] x) => (float[n, 8] y) {
            h = Cast<to = 10>(x) d = Div(h, root2) e = Erf(d) p = Add(e, one) q = Mul(h, p) r = Mul(q, half)
            y = Cast<to = 1>(r)
        }
    """)
    for name in ("root2", "one", "half"):
        before.graph.initializer.append(helper.make_tensor(name, TensorProto.FLOAT16, [], [CONSTANTS[name]]))
    after = tools.apply(before, FuseGelu())
    assert after.ops == ["Cast", GELU, "Cast"]
    tools.same_outputs(before, after.model, {"x": draw(5)[0]}, 4e-3)


NEAR_MISSES = {
    "no half": f"{ERF} y = Mul(x, p)",
    "another half": f"{ERF} q = Mul(x, p) y = Mul(q, zero7)",
    "another root": "d = Mul(x, zero7) e = Erf(d) p = Add(e, one) q = Mul(x, p) y = Mul(q, half)",
    "two instead of one": "d = Div(x, root2) e = Erf(d) p = Add(e, two) q = Mul(x, p) y = Mul(q, half)",
    "difference": "d = Div(x, root2) e = Erf(d) p = Sub(e, one) q = Mul(x, p) y = Mul(q, half)",
    "another factor": f"{ERF} a = Abs(x) q = Mul(a, p) y = Mul(q, half)",
    "inverse division": "d = Div(root2, x) e = Erf(d) p = Add(e, one) q = Mul(x, p) y = Mul(q, half)",
    "erf read twice": f"{ERF} q = Mul(x, p) r = Mul(q, half) y = Add(r, e)",
    "tanh of x": TANH_END.replace("(a)", "(x)"),
    "square, not cube": f"c = Pow(x, two) k = Mul(cubic, c) s = Add(x, k) a = Mul(slope, s) {TANH_END}",
    "another cubic": f"c = Pow(x, three) k = Mul(fifth, c) s = Add(x, k) a = Mul(slope, s) {TANH_END}",
    "another slope": f"c = Pow(x, three) k = Mul(cubic, c) s = Add(x, k) a = Mul(zero8, s) {TANH_END}",
    "SiLU": "s = Sigmoid(x) y = Mul(x, s)",
    "another quick": "a = Mul(x, two) s = Sigmoid(a) y = Mul(x, s)",
}


@pytest.mark.parametrize("body", NEAR_MISSES.values(), ids=NEAR_MISSES.keys())
def test_leaves_alone(tools, body):
    after = tools.apply(model(body), FuseGelu())
    assert not after.outcome.changed
    assert not {GELU, TANH, QUICK} & set(after.ops)


@pytest.mark.parametrize("inner", ["e", "p", "q"])
def test_leaves_alone_what_is_an_output(tools, inner):
    before = model(ERF_SPELLINGS["half last"], outputs=f"float[2, n, 8] {inner}")
    assert not tools.apply(before, FuseGelu()).outcome.changed


def test_leaves_alone_a_constant_that_adds_a_dimension(tools):
    before = parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[8] x) => (float[1, 8] y) <float[1, 1] half = {0.5}, float one = {1}, float root2 = {1.41421356}>
        { d = Div(x, root2) e = Erf(d) p = Add(e, one) q = Mul(x, p) y = Mul(q, half) }
    """)
    assert not tools.apply(before, FuseGelu()).outcome.changed


# Rule 6: the bias.


def biased(
    gelu: str, bias: str = "float[8] b", add: str = "Add(x, b)", outputs: str = "", opset: int = 21
) -> onnx.ModelProto:
    """x [n, 4, 8] plus a bias that is an initialiser of random numbers, then a GELU of `s`."""
    extra = f", {outputs}" if outputs else ""
    proto = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]>
        g (float[n, 4, 8] x) => (float[n, 4, 8] y{extra}) {{ s = {add} {gelu} }}
    """)
    dims = [int(size) for size in bias.partition("[")[2].partition("]")[0].split(",") if size.strip()]
    values = np.random.default_rng(6).normal(size=dims).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(values, "b"))
    for name in ("root2", "one", "half"):
        proto.graph.initializer.append(helper.make_tensor(name, TensorProto.FLOAT, [], [CONSTANTS[name]]))
    return proto


SPELLED = "d = Div(s, root2) e = Erf(d) p = Add(e, one) q = Mul(s, p) y = Mul(q, half)"
BIASED = {
    "standard": ("y = Gelu(s)", BIAS),
    "tanh": ('y = Gelu<approximate = "tanh">(s)', TANH),
    "contrib": ("y = com.microsoft.Gelu(s)", BIAS),
    "spelled out": (SPELLED, BIAS),
}


@pytest.mark.parametrize("add", ["Add(x, b)", "Add(b, x)"])
@pytest.mark.parametrize(("gelu", "op"), BIASED.values(), ids=BIASED.keys())
def test_fuses_the_bias(tools, gelu, op, add):
    before = biased(gelu, add=add)
    after = tools.apply(before, FuseGelu(bias="all"))
    assert after.ops == [op]
    assert len(after.model.graph.node[0].input) == 2
    x = np.random.default_rng(7).normal(size=(3, 4, 8)).astype(np.float32)
    tools.same_outputs(before, after.model, {"x": x}, 1e-5)


def test_fuses_the_bias_in_subgraphs(tools):
    before = tools.in_branch(biased(SPELLED))
    after = tools.apply(before, FuseGelu(bias="all"))
    assert sorted(after.ops) == ["If", BIAS, BIAS]
    x = np.random.default_rng(8).normal(size=(3, 4, 8)).astype(np.float32)
    tools.same_outputs(before, after.model, {"x": x, "flag": np.array(True)}, 1e-5)


@pytest.mark.parametrize(
    "before",
    [
        biased("y = Gelu(s)", bias="float[1] b"),
        biased("y = Gelu(s)", bias="float[1, 8] b"),
        biased("y = Gelu(s)", bias="float[4, 8] b"),
        biased("y = Gelu(s)", add="Add(x, x)"),
        biased("y = Gelu(s)", add="Sub(x, b)"),
        biased("y = Gelu(s)", outputs="float[n, 4, 8] s"),
        biased("g = Gelu(s) y = Add(g, s)"),
    ],
    ids=["one number", "two dimensions", "rows", "no constant", "difference", "sum is an output", "sum read twice"],
)
def test_leaves_the_bias_alone(tools, before):
    after = tools.apply(before, FuseGelu(bias="all"))
    assert GELU in after.ops
    assert BIAS not in after.ops
    x = np.random.default_rng(9).normal(size=(3, 4, 8)).astype(np.float32)
    tools.same_outputs(before, after.model, {"x": x}, 1e-5)


@pytest.mark.parametrize(
    ("graph_pass", "gelu", "keeps"),
    [
        (FuseGelu(), SPELLED, True),
        (FuseGelu(), BIASED["tanh"][0], False),
        (FuseGelu(bias="none"), BIASED["tanh"][0], True),
        (FuseGelu("standard", bias="all"), SPELLED, True),
    ],
    ids=["default, erf", "default, tanh", "none", "standard"],
)
def test_the_bias_is_an_option(tools, graph_pass, gelu, keeps):
    assert ("Add" in tools.apply(biased(gelu), graph_pass).ops) == keeps
