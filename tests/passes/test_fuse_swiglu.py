"""SiLU in every spelling becomes one operator; what only looks like it stays."""

import numpy as np
import onnx
import pytest
from onnx import parser

from passes.fuse_swiglu import FuseSwiglu

FUSED = "com.microsoft::QuickGelu"


def model(
    body: str, shape: str = "2, n, 8", dtype: str = "float", opset: int = 21, outputs: str = ""
) -> onnx.ModelProto:
    extra = f", {outputs}" if outputs else ""
    return parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : {opset}]>
        g ({dtype}[{shape}] x) => ({dtype}[{shape}] y{extra}) {{ {body} }}
    """)


def constant(value: float, dtype: str = "float", shape: str = "") -> str:
    dims = f"[{shape}]" if shape else ""
    return f"Constant<value = {dtype}{dims} {{{value}}}>()"


SPELLINGS = {
    "sigmoid times x": "s = Sigmoid(x) y = Mul(s, x)",
    "x times sigmoid": "s = Sigmoid(x) y = Mul(x, s)",
    "swish with beta 1": f"b = {constant(1)} z = Mul(b, x) s = Sigmoid(z) y = Mul(x, s)",
    "beta of one element": f"b = {constant(1, shape='1')} z = Mul(x, b) s = Sigmoid(z) y = Mul(x, s)",
    "division": f"o = {constant(1)} n = Neg(x) e = Exp(n) d = Add(o, e) y = Div(x, d)",
    "division, swapped sum": f"o = {constant(1)} n = Neg(x) e = Exp(n) d = Add(e, o) y = Div(x, d)",
    "exponent by product": f"o = {constant(1)} m = {constant(-1)} n = Mul(x, m) e = Exp(n) d = Add(e, o) y = Div(x, d)",
    "exponent by difference": (
        f"o = {constant(1)} z = {constant(0)} n = Sub(z, x) e = Exp(n) d = Add(e, o) y = Div(x, d)"
    ),
    "reciprocal": f"o = {constant(1)} n = Neg(x) e = Exp(n) d = Add(e, o) r = Reciprocal(d) y = Mul(r, x)",
    "one over": f"o = {constant(1)} n = Neg(x) e = Exp(n) d = Add(e, o) r = Div(o, d) y = Mul(x, r)",
}


def alpha_of(proto: onnx.ModelProto) -> float:
    (node,) = [node for node in proto.graph.node if node.op_type == "QuickGelu"]
    return onnx.helper.get_node_attr_value(node, "alpha")


@pytest.mark.parametrize("body", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_fuses_every_spelling(tools, body):
    before = model(body)
    after = tools.apply(before, FuseSwiglu())
    assert after.ops == [FUSED]
    assert after.outcome.rewrites == 1
    assert alpha_of(after.model) == 1.0
    x = np.random.default_rng(0).normal(0, 4, (2, 3, 8)).astype(np.float32)
    tools.same_outputs(before, after.model, {"x": x}, 1e-6)


@pytest.mark.parametrize("body", [SPELLINGS["x times sigmoid"], SPELLINGS["division"], SPELLINGS["reciprocal"]])
def test_works_in_subgraphs(tools, body):
    before = tools.in_branch(model(body))
    after = tools.apply(before, FuseSwiglu())
    assert sorted(after.ops) == ["If", FUSED, FUSED]
    x = np.random.default_rng(1).normal(0, 4, (2, 3, 8)).astype(np.float32)
    tools.same_outputs(before, after.model, {"x": x, "flag": np.array(False)}, 1e-6)


@pytest.mark.parametrize("beta", [0.5, 1.702, 3.0])
def test_keeps_the_factor_of_swish(tools, beta):
    before = model(f"b = {constant(beta)} z = Mul(x, b) s = Sigmoid(z) y = Mul(x, s)")
    after = tools.apply(before, FuseSwiglu())
    assert after.ops == [FUSED]
    assert alpha_of(after.model) == pytest.approx(beta, rel=1e-7)
    x = np.random.default_rng(2).normal(0, 4, (2, 3, 8)).astype(np.float32)
    tools.same_outputs(before, after.model, {"x": x}, 1e-6)


@pytest.mark.parametrize(("attribute", "alpha"), [("", 1.0), ("<alpha = 0.5>", 0.5)])
def test_replaces_swish_of_opset_24(tools, attribute, alpha):
    before = model(f"y = Swish {attribute} (x)", opset=24)
    after = tools.apply(before, FuseSwiglu())
    assert after.ops == [FUSED]
    assert alpha_of(after.model) == alpha
    x = np.random.default_rng(3).normal(0, 4, (2, 3, 8)).astype(np.float32)
    tools.same_outputs(before, after.model, {"x": x}, 1e-6)


def test_fuses_the_gate_of_swiglu_and_leaves_the_product(tools):
    before = parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[n, 8] gate, float[n, 8] up) => (float[n, 8] y)
        { s = Sigmoid(gate) silu = Mul(gate, s) y = Mul(silu, up) }
    """)
    after = tools.apply(before, FuseSwiglu())
    assert after.ops == [FUSED, "Mul"]
    draw = np.random.default_rng(4)
    feeds = {name: draw.normal(0, 3, (5, 8)).astype(np.float32) for name in ("gate", "up")}
    tools.same_outputs(before, after.model, feeds, 1e-6)


def test_fuses_in_half_precision_between_casts(tools):
    before = parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[n, 8] x) => (float[n, 8] y) {
            h = Cast<to = 10>(x) one = Constant<value = float16 {15360}>() n = Neg(h) e = Exp(n) d = Add(one, e)
            q = Div(h, d) y = Cast<to = 1>(q)
        }
    """)
    after = tools.apply(before, FuseSwiglu())
    assert after.ops == ["Cast", FUSED, "Cast"]
    x = np.random.default_rng(5).normal(0, 2, (5, 8)).astype(np.float32)
    tools.same_outputs(before, after.model, {"x": x}, 2e-3)


def test_proves_the_rank_from_what_computes_an_unshaped_tensor(tools):
    """A factor of shape [1] keeps the shape of anything with a dimension: a sum with a bias has one."""
    before = parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[n, 8] x, int64[k] shape) => (float y)
        <float[8] bias = {1, 2, 3, 4, 5, 6, 7, 8}, float[1] b = {1}>
        { v = Reshape(x, shape) h = Add(v, bias) z = Mul(h, b) s = Sigmoid(z) q = Mul(h, s)
          y = ReduceMax<keepdims = 0>(q) }
    """)
    after = tools.apply(before, FuseSwiglu())
    assert FUSED in after.ops
    assert "Sigmoid" not in after.ops


NEAR_MISSES = {
    "hard swish": "s = HardSigmoid<alpha = 0.16666667, beta = 0.5>(x) y = Mul(x, s)",
    "another factor": "a = Relu(x) s = Sigmoid(x) y = Mul(a, s)",
    "sum instead of product": "s = Sigmoid(x) y = Add(x, s)",
    "square": "s = Sigmoid(x) t = Mul(s, s) y = Mul(x, t)",
    "shifted argument": f"c = {constant(1)} z = Add(x, c) s = Sigmoid(z) y = Mul(x, s)",
    "two, not one, below": f"o = {constant(2)} n = Neg(x) e = Exp(n) d = Add(e, o) y = Div(x, d)",
    "two above": f"t = {constant(2)} o = {constant(1)} n = Neg(x) e = Exp(n) d = Add(e, o) r = Div(t, d) y = Mul(x, r)",
    "upside down": f"o = {constant(1)} n = Neg(x) e = Exp(n) d = Add(e, o) y = Div(d, x)",
    "another numerator": f"o = {constant(1)} n = Neg(x) e = Exp(n) d = Add(e, o) a = Abs(x) y = Div(a, d)",
    "factor per channel": (
        "b = Constant<value = float[8] {1, 1, 1, 1, 1, 1, 1, 2}>() z = Mul(x, b) s = Sigmoid(z) y = Mul(x, s)"
    ),
    "sigmoid read twice": "s = Sigmoid(x) p = Mul(x, s) y = Add(p, s)",
    "exponential read twice": f"o = {constant(1)} n = Neg(x) e = Exp(n) d = Add(e, o) q = Div(x, d) y = Add(q, e)",
}


@pytest.mark.parametrize("body", NEAR_MISSES.values(), ids=NEAR_MISSES.keys())
def test_leaves_alone(tools, body):
    after = tools.apply(model(body), FuseSwiglu())
    assert FUSED not in after.ops
    assert not after.outcome.changed


@pytest.mark.parametrize("inner", ["s", "e"])
def test_leaves_alone_what_is_an_output(tools, inner):
    body = {
        "s": SPELLINGS["x times sigmoid"],
        "e": SPELLINGS["division"],
    }[inner]
    after = tools.apply(model(body, outputs=f"float[2, n, 8] {inner}"), FuseSwiglu())
    assert not after.outcome.changed


def test_leaves_alone_a_factor_that_adds_a_dimension(tools):
    """x [8] times [[1]] is [1, 8]: QuickGelu would yield [8]."""
    before = parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[8] x) => (float[1, 8] y)
        { b = Constant<value = float[1, 1] {1}>() z = Mul(x, b) s = Sigmoid(z) y = Mul(x, s) }
    """)
    assert not tools.apply(before, FuseSwiglu()).outcome.changed
