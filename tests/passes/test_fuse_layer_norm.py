"""FuseLayerNorm: every spelling of a LayerNorm, at opsets with and without the operator, with and without 16 bits."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from passes.fuse_layer_norm import FuseLayerNorm

SIZE = 8
EPSILON = 1e-3
LAYER_NORM = "LayerNormalization"
RNG = np.random.default_rng(11)


def weight(*shape: int) -> NDArray:
    return (1 + RNG.standard_normal(shape) / 4).astype(np.float32)


GAMMA, BETA = weight(SIZE), weight(SIZE)
CONSTANTS: Mapping[str, NDArray] = {
    "two": np.array(2, np.float32),
    "three": np.array(3, np.float32),
    "half": np.array(0.5, np.float32),
    "minus_half": np.array([-0.5], np.float32),
    "one": np.array(1, np.float32),
    "eps": np.array(EPSILON, np.float32),
    "eps64": np.array(EPSILON, np.float64),
    "two64": np.array(2, np.float64),
    "last": np.array([-1]),
    "last_positive": np.array([2]),
    "axes2": np.array([-2, -1]),
    "axes2_positive": np.array([2, 1]),
    "axes_first": np.array([0, 1]),
    "g": GAMMA,
    "b": BETA,
    "g_rank3": GAMMA.reshape(1, 1, SIZE),
    "g2": weight(3, SIZE),
    "b2": weight(3, SIZE),
    "g_channels": weight(3, 1),
    "g16": GAMMA.astype(np.float16),
    "b16": BETA.astype(np.float16),
    "g16_in_32": GAMMA.astype(np.float16).astype(np.float32),
    "b16_in_32": BETA.astype(np.float16).astype(np.float32),
}
CENTRED = "u = ReduceMean(x, last) d = Sub(x, u) "
STATISTIC = CENTRED + "s = Pow(d, two) v = ReduceMean<keepdims = 1>(s, last) e = Add(v, eps) q = Sqrt(e) "
ROOT = STATISTIC + "r = Reciprocal(q) "
AFFINE = " ng = Mul(n, g) y = Add(ng, b)"


def build(body: str, given: str = "float[N,3,8] x", made: str = "float[N,3,8] y", opset: int = 18) -> onnx.ModelProto:
    """A model of one graph, with those of CONSTANTS that it names."""
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}]> g ({given}) => ({made}) {{ {body} }}'
    )
    read = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in CONSTANTS.items() if k in read)
    return model


def feeds(dtype: Any = np.float32, **others: NDArray) -> dict[str, NDArray]:
    return {"x": (np.random.default_rng().standard_normal((2, 3, SIZE)) * 2 + 1).astype(dtype), **others}


SPELLINGS = {
    "divided (TorchScript)": STATISTIC + "n = Div(d, q)" + AFFINE,
    "reciprocal (dynamo)": ROOT + "n = Mul(d, r)" + AFFINE,
    "one over": STATISTIC + "r = Div(one, q) n = Mul(r, d) ng = Mul(g, n) y = Add(b, ng)",
    "multiplied": CENTRED + "s = Mul(d, d) v = ReduceMean(s, last) e = Add(eps, v) q = Sqrt(e) n = Div(d, q)" + AFFINE,
    "power -1/2": CENTRED
    + "s = Mul(d, d) v = ReduceMean(s, last) e = Add(v, eps) r = Pow(e, minus_half) n = Mul(d, r)"
    + AFFINE,
    "power 1/2": CENTRED
    + "s = Mul(d, d) v = ReduceMean(s, last) e = Add(v, eps) q = Pow(e, half) n = Div(d, q)"
    + AFFINE,
    "two Subs": STATISTIC + "d2 = Sub(x, u) n = Div(d2, q)" + AFFINE,
    "two means and Subs": STATISTIC + "u2 = ReduceMean(x, last) d2 = Sub(x, u2) n = Div(d2, q)" + AFFINE,
    "gamma first": STATISTIC + "dg = Mul(g, d) ng = Div(dg, q) y = Add(ng, b)",
    "gamma with the root": ROOT + "f = Mul(r, g) ng = Mul(d, f) y = Add(ng, b)",
    "gamma of rank 3": STATISTIC + "n = Div(d, q) ng = Mul(n, g_rank3) y = Add(ng, b)",
    "positive axes": (STATISTIC + "n = Div(d, q)" + AFFINE).replace("last", "last_positive"),
    "no gamma": STATISTIC + "n = Div(d, q) y = Add(n, b)",
    "no beta": STATISTIC + "n = Div(d, q) y = Mul(n, g)",
    "no weights": STATISTIC + "y = Div(d, q)",
    "expanded (TensorFlow)": ROOT + "f = Mul(r, g) a = Mul(x, f) c = Mul(u, f) h = Sub(b, c) y = Add(a, h)",
    "expanded, swapped": ROOT + "f = Mul(g, r) a = Mul(f, x) c = Mul(f, u) h = Sub(b, c) y = Add(h, a)",
    "expanded, no gamma": ROOT + "a = Mul(x, r) c = Mul(u, r) h = Sub(b, c) y = Add(a, h)",
    "expanded, no beta": ROOT + "f = Mul(r, g) a = Mul(x, f) c = Mul(u, f) y = Sub(a, c)",
    "expanded, negated": ROOT + "f = Mul(r, g) a = Mul(x, f) c = Mul(u, f) h = Neg(c) y = Add(a, h)",
    "expanded, no beta but later": ROOT + "f = Mul(r, g) a = Mul(x, f) c = Mul(u, f) n = Sub(a, c) y = Add(n, b)",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_becomes_one_operator(spelling, tools):
    model = build(SPELLINGS[spelling])
    applied = tools.apply(model, FuseLayerNorm())
    assert applied.ops == [LAYER_NORM]
    assert applied.outcome.rewrites == 1
    onnx.checker.check_model(applied.model, full_check=True)
    tools.same_outputs(model, applied.model, feeds(), 2e-6)


def test_attributes_and_weights_are_carried_over(tools):
    (node,) = tools.apply(build(SPELLINGS["two Subs"]), FuseLayerNorm()).model.graph.node
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert attributes == {"axis": -1, "epsilon": pytest.approx(EPSILON), "stash_type": 1}
    assert (list(node.input), list(node.output)) == (["x", "g", "b"], ["y"])


@pytest.mark.parametrize("axes", ["axes2", "axes2_positive"])
def test_several_last_axes(axes, tools):
    model = build((STATISTIC + "n = Div(d, q) ng = Mul(n, g2) y = Add(ng, b2)").replace("last", axes))
    applied = tools.apply(model, FuseLayerNorm())
    assert applied.ops == [LAYER_NORM]
    assert {a.name: a.i for a in applied.model.graph.node[0].attribute}["axis"] == -2
    tools.same_outputs(model, applied.model, feeds(), 2e-6)


def older(opset: int, made: str = "float[N,3,8] y") -> onnx.ModelProto:
    """Axes are an attribute up to opset 17."""
    body = SPELLINGS["divided (TorchScript)"]
    body = body.replace("<keepdims = 1>", "").replace("ReduceMean", "ReduceMean<axes = [-1]>").replace(", last", "")
    return build(body, made=made, opset=opset)


@pytest.mark.parametrize("opset", [11, 12, 13, 14, 15, 16, 17])
def test_onnx_runtime_has_the_operator_at_every_opset(opset, tools):
    model = older(opset)
    applied = tools.apply(model, FuseLayerNorm())
    assert applied.ops == [LAYER_NORM]
    tools.same_outputs(model, applied.model, feeds(), 2e-6)


@pytest.mark.parametrize(("opset", "fused"), [(16, False), (17, True)])
def test_standard_target_refuses_opsets_without_the_operator(opset, fused, tools):
    applied = tools.apply(older(opset), FuseLayerNorm(target="standard"))
    assert applied.outcome.changed == fused
    assert ("opset 16 has no LayerNormalization" in " ".join(applied.outcome.notes)) == (not fused)


@pytest.mark.parametrize("spelling", ["divided (TorchScript)", "expanded (TensorFlow)"])
def test_inside_a_branch(spelling, tools):
    model = tools.in_branch(build(SPELLINGS[spelling]))
    applied = tools.apply(model, FuseLayerNorm())
    assert applied.ops == ["If", LAYER_NORM, LAYER_NORM]
    for flag in (True, False):
        tools.same_outputs(model, applied.model, feeds(flag=np.array(flag)), 2e-6)


def test_statistics_that_two_branches_share_stay(tools):
    branch = "(float[N,3,8] {0}) {{ n{0} = Div(d, q) ng{0} = Mul(n{0}, g) {0} = Add(ng{0}, b) }}"
    one, other = branch.format("y1"), branch.format("y2")
    body = STATISTIC + f"y = If<then_branch = t () => {one}, else_branch = f () => {other}>(flag)"
    model = build(body, "float[N,3,8] x, bool flag")
    model.graph.initializer.extend(numpy_helper.from_array(CONSTANTS[name], name) for name in "gb")
    applied = tools.apply(model, FuseLayerNorm())
    assert not applied.outcome.changed
    assert all("is also read by" in note for note in applied.outcome.notes)
    tools.same_outputs(model, applied.model, feeds(flag=np.array(True)))


WIDE = STATISTIC.replace("(x", "(c") + "n = Div(d, q) "
ISLANDS = {
    "Casts around, weights behind": (
        "c = Cast<to = 1>(x) " + WIDE + "h = Cast<to = 10>(n) ng = Mul(h, g16) y = Add(ng, b16)",
        [LAYER_NORM],
    ),
    "Casts around, exact weights within": (
        "c = Cast<to = 1>(x) " + WIDE + "ng = Mul(n, g16_in_32) nb = Add(ng, b16_in_32) y = Cast<to = 10>(nb)",
        [LAYER_NORM],
    ),
    "Casts around, inexact weights within": (
        "c = Cast<to = 1>(x) " + WIDE + "ng = Mul(n, g) nb = Add(ng, b) y = Cast<to = 10>(nb)",
        ["Cast", LAYER_NORM, "Cast"],
    ),
    "to double behind the Sub (TorchScript)": (
        "u = ReduceMean(x, last) d = Sub(x, u) c = Cast<to = 11>(d) s = Pow(c, two64) v = ReduceMean(s, last) "
        "e = Add(v, eps64) q = Sqrt(e) n = Div(c, q) h = Cast<to = 10>(n) ng = Mul(h, g16) y = Add(ng, b16)",
        [LAYER_NORM],
    ),
    "only the variance in float32": (
        "u = ReduceMean(x, last) d = Sub(x, u) c = Cast<to = 1>(d) s = Pow(c, two) v = ReduceMean(s, last) "
        "e = Add(v, eps) q = Sqrt(e) h = Cast<to = 10>(q) n = Div(d, h) ng = Mul(n, g16) y = Add(ng, b16)",
        [LAYER_NORM],
    ),
}


@pytest.mark.parametrize("island", ISLANDS)
def test_float16_islands(island, tools):
    body, expected = ISLANDS[island]
    model = build(body, "float16[N,3,8] x", "float16[N,3,8] y")
    applied = tools.apply(model, FuseLayerNorm())
    assert applied.ops == expected
    tools.same_outputs(model, applied.model, feeds(np.float16), 3e-3)


MOMENTS = (
    "u = ReduceMean(x, last) s = Mul(x, x) a = ReduceMean(s, last) k = Mul(u, u) v = Sub(a, k) e = Add(v, eps) "
    "q = Sqrt(e) d = Sub(x, u) n = Div(d, q)" + AFFINE
)
PLAIN = STATISTIC + "n = Div(d, q)" + AFFINE
UNTOUCHED: dict[str, tuple[str, dict[str, Any], str]] = {
    "variance from moments": (MOMENTS, {}, "which cancels"),
    "third power": (PLAIN.replace("two", "three"), {}, ""),
    "mean of another tensor": (
        PLAIN.replace("ReduceMean(x", "ReduceMean(a"),
        {"given": "float[N,3,8] x, float[N,3,8] a"},
        "",
    ),
    "numerator not centred": (STATISTIC + "n = Div(x, q)" + AFFINE, {}, ""),
    "mean minus x": (PLAIN.replace("Sub(x, u)", "Sub(u, x)"), {}, ""),
    "no epsilon": (PLAIN.replace("e = Add(v, eps) ", "").replace("Sqrt(e)", "Sqrt(v)"), {}, ""),
    "expanded with another mean": (
        ROOT + "k = ReduceMean(d, last) a = Mul(x, r) c = Mul(k, r) y = Sub(a, c)",
        {},
        "",
    ),
    "expanded the wrong way round": (ROOT + "a = Mul(x, r) c = Mul(u, r) y = Sub(c, a)", {}, ""),
    "expanded with two factors": (
        ROOT + "f = Mul(r, g) a = Mul(x, f) c = Mul(u, r) h = Sub(b, c) y = Add(a, h)",
        {},
        "",
    ),
    "different axes": (PLAIN.replace("ReduceMean(x, last)", "ReduceMean(x, axes2)"), {}, "its variance over [-1]"),
    "axes not last": (PLAIN.replace("last", "axes_first"), {}, "expected the last ones"),
    "positive axis, rank unknown": (PLAIN.replace("last", "last_positive"), {"given": "float[N,3,8] x"}, "rank is"),
    "instance norm": (
        STATISTIC.replace("last", "axes2") + "n = Div(d, q) y = Mul(n, g_channels)",
        {},
        "without weights of shape [3, 8]",
    ),
    "unknown size": (PLAIN, {"given": "float[N,3,H] x", "made": "float[N,3,H] y"}, "along axes [-1] is unknown"),
    "difference is an output": (PLAIN, {"made": "float[N,3,8] y, float[N,3,8] d"}, "'d' is also an output"),
    "root read elsewhere": (
        PLAIN + " z = Neg(q)",
        {"made": "float[N,3,8] y, float[N,3,1] z"},
        "'q' is also read by",
    ),
}


@pytest.mark.parametrize("case", UNTOUCHED)
def test_leaves_alone_what_is_no_layer_norm(case, tools):
    body, declared, note = UNTOUCHED[case]
    model = build(body, **declared)
    if case == "positive axis, rank unknown":
        model.graph.input[0].type.tensor_type.ClearField("shape")
    applied = tools.apply(model, FuseLayerNorm())
    assert not applied.outcome.changed
    assert applied.ops == [node.op_type for node in model.graph.node]
    assert bool(applied.outcome.notes) == bool(note)
    assert note in " ".join(applied.outcome.notes)


def test_double_is_left_alone(tools):
    body = "u = ReduceMean(x, last) d = Sub(x, u) s = Mul(d, d) v = ReduceMean(s, last) e = Add(v, eps64) q = Sqrt(e) "
    applied = tools.apply(build(body + "y = Div(d, q)", "double[N,3,8] x", "double[N,3,8] y"), FuseLayerNorm())
    assert not applied.outcome.changed
    assert "computed in float64" in applied.outcome.notes[0]


def test_what_follows_the_norm_is_not_taken_for_its_weights(tools):
    """A second factor, a sum with a tensor and a scalar stay; normalised values that others read get no weight."""
    made = "float[N,3,8] y, float[N,3,8] n"
    model = build(PLAIN.replace("y = Add(ng, b)", "k = Mul(ng, one) y = Add(k, x)"), made=made)
    applied = tools.apply(model, FuseLayerNorm())
    assert applied.ops == [LAYER_NORM, "Mul", "Mul", "Add"]
    tools.same_outputs(model, applied.model, feeds(), 2e-6)
