"""FuseRmsNorm: every spelling of an RMSNorm, with and without 16-bit islands, for both targets."""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from passes.fuse_rms_norm import FuseRmsNorm
from passes.graph import graph_from_proto
from passes.validate import check_graph
from plugins.errors import KilnError

SIZE = 8
EPSILON = 1e-3
SIMPLIFIED, STANDARD = "SimplifiedLayerNormalization", "RMSNormalization"
RNG = np.random.default_rng(7)
WEIGHT = (1 + RNG.standard_normal(SIZE) / 4).astype(np.float32)
HALF_WEIGHT = WEIGHT.astype(np.float16)
CONSTANTS: Mapping[str, NDArray] = {
    "two": np.array(2, np.float32),
    "three": np.array(3, np.float32),
    "half": np.array(0.5, np.float32),
    "minus_half": np.array(-0.5, np.float32),
    "one": np.array([1], np.float32),
    "eps": np.array(EPSILON, np.float32),
    "eps16": np.array(EPSILON, np.float16),
    "two16": np.array(2, np.float16),
    "last": np.array([-1]),
    "w": WEIGHT,
    "w_rank3": WEIGHT.reshape(1, 1, SIZE),
    "w_wide": WEIGHT.reshape(1, 1, 1, SIZE),
    "w_rows": np.ones((3, 1), np.float32),
    "w16": HALF_WEIGHT,
    "w16_in_32": HALF_WEIGHT.astype(np.float32),
    "w_bf16": WEIGHT.astype(ml_dtypes.bfloat16),
    "factor": np.array(0.3, np.float32),
}
STATISTIC = "s = Pow(x, two) m = ReduceMean<keepdims = 1>(s, last) e = Add(m, eps) q = Sqrt(e) "


def build(body: str, given: str = "float[N,3,8] x", made: str = "float[N,3,8] y", opset: int = 18) -> onnx.ModelProto:
    """A model of one graph, with those of CONSTANTS that it names."""
    version = 8 if opset < 23 else 11
    model = onnx.parser.parse_model(
        f'<ir_version: {version}, opset_import: ["": {opset}]> g ({given}) => ({made}) {{ {body} }}'
    )
    read = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in CONSTANTS.items() if k in read)
    return model


def feeds(dtype: Any = np.float32, **others: NDArray) -> dict[str, NDArray]:
    return {"x": (np.random.default_rng().standard_normal((2, 3, SIZE)) * 2 + 1).astype(dtype), **others}


def norm_of(model: onnx.ModelProto) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.op_type in (SIMPLIFIED, STANDARD))


SPELLINGS = {
    "reciprocal": STATISTIC + "r = Reciprocal(q) n = Mul(x, r) y = Mul(n, w)",
    "one over": STATISTIC + "r = Div(one, q) n = Mul(r, x) y = Mul(w, n)",
    "divided": STATISTIC + "n = Div(x, q) y = Mul(w, n)",
    "multiplied": "s = Mul(x, x) m = ReduceMean(s, last) e = Add(eps, m) q = Sqrt(e) n = Div(x, q) y = Mul(n, w)",
    "power -1/2": "s = Mul(x, x) m = ReduceMean(s, last) e = Add(m, eps) r = Pow(e, minus_half) n = Mul(r, x) "
    "y = Mul(n, w)",
    "power 1/2": "s = Mul(x, x) m = ReduceMean(s, last) e = Add(m, eps) q = Pow(e, half) n = Div(x, q) y = Mul(n, w)",
    "weight with x": STATISTIC + "r = Reciprocal(q) xw = Mul(w, x) y = Mul(r, xw)",
    "weight with x, divided": STATISTIC + "xw = Mul(x, w) y = Div(xw, q)",
    "weight with root": STATISTIC + "r = Reciprocal(q) g = Mul(r, w) y = Mul(x, g)",
    "weight of rank 3": STATISTIC + "n = Div(x, q) y = Mul(n, w_rank3)",
    "casts to the same type": "c = Cast<to = 1>(x) s = Pow(c, two) m = ReduceMean(s, last) e = Add(m, eps) q = Sqrt(e) "
    "n = Div(c, q) d = Cast<to = 1>(n) y = Mul(w, d)",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_becomes_one_operator(spelling, tools):
    model = build(SPELLINGS[spelling])
    applied = tools.apply(model, FuseRmsNorm())
    assert applied.ops == [SIMPLIFIED]
    assert applied.outcome.rewrites == 1
    tools.same_outputs(model, applied.model, feeds(), 1e-6)


@pytest.mark.parametrize(("opset", "axes"), [(11, -1), (13, 2), (17, -1)])
def test_axes_as_attribute_of_older_opsets(opset, axes, tools):
    model = build(
        f"s = Pow(x, two) m = ReduceMean<axes = [{axes}], keepdims = 1>(s) e = Add(m, eps) q = Sqrt(e) "
        "r = Div(one, q) n = Mul(x, r) y = Mul(w, n)",
        opset=opset,
    )
    applied = tools.apply(model, FuseRmsNorm())
    assert applied.ops == [SIMPLIFIED]
    tools.same_outputs(model, applied.model, feeds(), 1e-6)


def test_attributes_and_weight_are_carried_over(tools):
    node = norm_of(tools.apply(build(SPELLINGS["reciprocal"]), FuseRmsNorm()).model)
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert attributes == {"axis": -1, "epsilon": pytest.approx(EPSILON), "stash_type": 1}
    assert list(node.input) == ["x", "w"]


@pytest.mark.parametrize(
    "tail", ["y = Div(x, q)", "n = Div(x, q) y = Mul(n, factor)", "n = Div(x, q) y = Mul(n, w_rows)"]
)
def test_without_a_weight_of_its_shape_it_gets_ones(tail, tools):
    model = build(STATISTIC + tail)
    applied = tools.apply(model, FuseRmsNorm())
    assert applied.ops == [SIMPLIFIED, *(["Mul"] if "Mul" in tail else [])]
    tools.same_outputs(model, applied.model, feeds(), 1e-6)


def test_weight_that_is_an_input_of_known_shape(tools):
    model = build(STATISTIC + "n = Div(x, q) y = Mul(n, v)", "float[N,3,8] x, float[8] v")
    applied = tools.apply(model, FuseRmsNorm())
    assert applied.ops == [SIMPLIFIED]
    tools.same_outputs(model, applied.model, feeds(v=WEIGHT), 1e-6)


def test_two_weights_on_one_normalised_tensor_share_a_norm_of_ones(tools):
    model = build(STATISTIC + "n = Div(x, q) y = Mul(n, w) z = Mul(n, w_rank3)", made="float[N,3,8] y, float[N,3,8] z")
    applied = tools.apply(model, FuseRmsNorm())
    assert applied.ops == [SIMPLIFIED, "Mul", "Mul"]
    tools.same_outputs(model, applied.model, feeds(), 1e-6)


def test_size_known_from_a_projection_although_the_rank_is_not(tools):
    body = "p = MatMul(a, k) t = Add(p, w) x = Add(t, a) " + SPELLINGS["divided"]
    model = build(body, "float[2,3,8] a", "float[N,3,8] y")
    model.graph.initializer.append(numpy_helper.from_array(np.eye(SIZE, dtype=np.float32), "k"))
    model.graph.input[0].type.tensor_type.ClearField("shape")
    applied = tools.apply(model, FuseRmsNorm())
    assert applied.ops == ["MatMul", "Add", "Add", SIMPLIFIED]
    tools.same_outputs(model, applied.model, {"a": feeds()["x"]}, 1e-6)


@pytest.mark.parametrize("spelling", ["reciprocal", "weight of rank 3"])
def test_inside_a_branch(spelling, tools):
    model = tools.in_branch(build(SPELLINGS[spelling]))
    applied = tools.apply(model, FuseRmsNorm())
    assert applied.ops == ["If", SIMPLIFIED, SIMPLIFIED]
    for flag in (True, False):
        tools.same_outputs(model, applied.model, feeds(flag=np.array(flag)), 1e-6)


ISLAND = "c = Cast<to = 1>(x) s = Pow(c, two) m = ReduceMean(s, last) e = Add(m, eps) q = Sqrt(e) r = Reciprocal(q) "
ISLANDS = {
    "weight behind the Cast (Llama)": (ISLAND + "n = Mul(c, r) b = Cast<to = 10>(n) y = Mul(w16, b)", [SIMPLIFIED]),
    "x cast twice (T5)": (
        ISLAND + "d = Cast<to = 1>(x) n = Mul(d, r) b = Cast<to = 10>(n) y = Mul(w16, b)",
        [SIMPLIFIED],
    ),
    "root cast back": (ISLAND + "r16 = Cast<to = 10>(r) n = Mul(x, r16) y = Mul(n, w16)", [SIMPLIFIED]),
    "no weight": (ISLAND + "n = Mul(c, r) y = Cast<to = 10>(n)", [SIMPLIFIED]),
    "weight before the Cast, exact in 16 bits": (
        ISLAND + "n = Mul(c, r) nw = Mul(n, w16_in_32) y = Cast<to = 10>(nw)",
        [SIMPLIFIED],
    ),
    "weight before the Cast, inexact (Gemma)": (
        ISLAND + "n = Mul(c, r) nw = Mul(n, w) y = Cast<to = 10>(nw)",
        ["Cast", SIMPLIFIED, "Cast"],
    ),
    "16 bits throughout": (
        "s = Pow(x, two16) m = ReduceMean(s, last) e = Add(m, eps16) q = Sqrt(e) n = Div(x, q) y = Mul(n, w16)",
        [SIMPLIFIED],
    ),
}


@pytest.mark.parametrize("island", ISLANDS)
def test_float16_islands(island, tools):
    body, expected = ISLANDS[island]
    model = build(body, "float16[N,3,8] x", "float16[N,3,8] y")
    applied = tools.apply(model, FuseRmsNorm())
    assert applied.ops == expected
    tools.same_outputs(model, applied.model, feeds(np.float16), 3e-3)


def test_island_whose_result_stays_in_float32(tools):
    model = build(ISLAND + "n = Mul(c, r) y = Mul(n, w)", "float16[N,3,8] x")
    applied = tools.apply(model, FuseRmsNorm())
    assert applied.ops == ["Cast", SIMPLIFIED]
    tools.same_outputs(model, applied.model, feeds(np.float16), 1e-6)


def test_bfloat16_island(tools):
    """ONNX Runtime's CPU provider has no bfloat16 Mul, so the reference is float32 arithmetic."""
    island = ISLAND.replace("(x)", "(a)") + "n = Mul(c, r) b = Cast<to = 16>(n) z = Mul(b, w_bf16)"
    model = build(f"a = Cast<to = 16>(x) {island} y = Cast<to = 1>(z)")
    applied = tools.apply(model, FuseRmsNorm())
    assert applied.ops == ["Cast", SIMPLIFIED, "Cast"]
    given = feeds()
    x = given["x"].astype(ml_dtypes.bfloat16).astype(np.float64)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * CONSTANTS["w_bf16"].astype(np.float64)
    np.testing.assert_allclose(tools.run(applied.model, given)[0], expected, rtol=2**-7, atol=1e-6)


PRODUCTS = "n = Div(x, q) y = Mul(n, w)"
UNTOUCHED: dict[str, tuple[str, dict[str, Any], str]] = {
    "L2 norm": ("s = Mul(x, x) m = ReduceSum(s, last) e = Add(m, eps) q = Sqrt(e) " + PRODUCTS, {}, ""),
    "third power": (STATISTIC.replace("two", "three") + PRODUCTS, {}, ""),
    "epsilon behind the root": (
        "s = Mul(x, x) m = ReduceMean(s, last) r = Sqrt(m) q = Add(r, eps) " + PRODUCTS,
        {},
        "",
    ),
    "no epsilon": ("s = Mul(x, x) m = ReduceMean(s, last) q = Sqrt(m) " + PRODUCTS, {}, ""),
    "statistic of another tensor": (
        STATISTIC.replace("Pow(x", "Pow(a") + PRODUCTS,
        {"given": "float[N,3,8] x, float[N,3,8] a"},
        "",
    ),
    "two over the root": (STATISTIC + "r = Div(two, q) n = Mul(x, r) y = Mul(n, w)", {}, ""),
    "not kept dimension": (
        STATISTIC.replace("= 1", "= 0") + PRODUCTS,
        {"given": "float[3,3,8] x", "made": "float[3,3,8] y"},
        "",
    ),
    "LayerNorm": (
        "u = ReduceMean(x, last) d = Sub(x, u) s = Mul(d, d) m = ReduceMean(s, last) e = Add(m, eps) q = Sqrt(e) "
        "n = Div(d, q) y = Mul(n, w)",
        {},
        "",
    ),
    "other axis": (STATISTIC.replace(", last", ", axis1") + PRODUCTS, {}, "expected the last ones"),
    "two axes": (STATISTIC.replace(", last", ", axes2") + PRODUCTS, {}, "expected the last one only"),
    "unknown size": (
        STATISTIC + PRODUCTS,
        {"given": "float[N,3,H] x", "made": "float[N,3,H] y"},
        "size of 'x' ['N', 3, 'H'] along axes [-1] is unknown",
    ),
    "root is an output": (STATISTIC + PRODUCTS, {"made": "float[N,3,8] y, float[N,3,1] q"}, "'q' is also an output"),
    "mean read elsewhere": (
        STATISTIC + PRODUCTS + " z = Neg(m)",
        {"made": "float[N,3,8] y, float[N,3,1] z"},
        "'m' is also read by",
    ),
    "double": (
        "c = Cast<to = 11>(x) s = Mul(c, c) m = ReduceMean(s, last) e = Add(m, eps64) q = Sqrt(e) n = Div(c, q) "
        "y = Cast<to = 1>(n)",
        {},
        "computed in float64",
    ),
}


@pytest.mark.parametrize("case", UNTOUCHED)
def test_leaves_alone_what_is_no_rms_norm(case, tools):
    body, declared, note = UNTOUCHED[case]
    model = build(body, **declared)
    extra = {"axis1": np.array([1]), "axes2": np.array([1, 2]), "eps64": np.array(EPSILON)}
    read = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in extra.items() if k in read)
    applied = tools.apply(model, FuseRmsNorm())
    assert not applied.outcome.changed
    assert applied.ops == [node.op_type for node in model.graph.node]
    assert len(applied.outcome.notes) == bool(note)
    assert note in " ".join(applied.outcome.notes)


def test_a_weight_of_higher_rank_than_x_stays_outside(tools):
    model = build(STATISTIC + "n = Div(x, q) y = Mul(n, w_wide)", made="float[1,N,3,8] y")
    applied = tools.apply(model, FuseRmsNorm())
    assert applied.ops == [SIMPLIFIED, "Mul"]
    tools.same_outputs(model, applied.model, feeds(), 1e-6)


def test_standard_target_makes_the_operator_of_opset_23(tools):
    model = build(SPELLINGS["reciprocal"], opset=23)
    applied = tools.apply(model, FuseRmsNorm(target="standard"))
    assert applied.ops == [STANDARD]
    onnx.checker.check_model(applied.model, full_check=True)
    tools.same_outputs(model, applied.model, feeds(), 1e-6)


def test_standard_target_inside_a_branch(tools):
    model = tools.in_branch(build(SPELLINGS["reciprocal"], opset=23))
    assert tools.apply(model, FuseRmsNorm(target="standard")).ops == ["If", STANDARD, STANDARD]


def test_standard_target_refuses_older_opsets(tools):
    applied = tools.apply(build(SPELLINGS["reciprocal"], opset=22), FuseRmsNorm(target="standard"))
    assert not applied.outcome.changed
    assert "opset 22 has no RMSNormalization" in applied.outcome.notes[0]


@pytest.mark.parametrize(
    ("target", "given", "made"), [("contrib", STANDARD, SIMPLIFIED), ("standard", SIMPLIFIED, STANDARD)]
)
@pytest.mark.parametrize("attributes", ["", "<axis = 2, epsilon = 0.01, stash_type = 1>"])
def test_converts_the_other_targets_operator(target, given, made, attributes, tools):
    model = build(f"y = {given}{attributes}(x, w)", opset=23)
    applied = tools.apply(model, FuseRmsNorm(target=target))
    assert applied.ops == [made]
    tools.same_outputs(model, applied.model, feeds(), 1e-6)


@pytest.mark.parametrize(
    ("target", "body", "given", "note"),
    [
        ("contrib", "y = RMSNormalization<stash_type = 11>(x, w)", "float[N,3,8] x", "computes in type 11"),
        ("contrib", "y = RMSNormalization(x, one)", "float[N,3,8] x", "not known to have the normalised axes' shape"),
        ("contrib", "y = RMSNormalization(x, w)", "float[N,3,H] x", "not known to have the normalised axes' shape"),
        ("standard", "y, i = SimplifiedLayerNormalization(x, w)", "float[N,3,8] x", "has 2 outputs"),
        ("standard", "y = SimplifiedLayerNormalization(x, w)", "float16[N,3,8] x", "expected one type"),
    ],
)
def test_leaves_alone_what_the_other_operator_cannot_do(target, body, given, note, tools):
    applied = tools.apply(build(body, given, opset=23), FuseRmsNorm(target=target))
    assert not applied.outcome.changed
    assert note in applied.outcome.notes[0]


def test_operators_that_nobody_has_are_still_refused():
    check_graph(graph_from_proto(build("y = SimplifiedLayerNormalization(x, w)")))
    with pytest.raises(KilnError, match="malformed"):
        check_graph(graph_from_proto(build("y = SimplifiedNormalization(x, w)")))
