"""FuseSkipNorm: residual sums into ONNX Runtime's skip norms, run on its CPU kernels."""

from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from passes.fuse_skip_norm import FuseSkipNorm

SIZE = 8
RNG = np.random.default_rng(5)
SKIP_SIMPLIFIED = "com.microsoft::SkipSimplifiedLayerNormalization"
SKIP_LAYER = "com.microsoft::SkipLayerNormalization"
SIMPLIFIED = "SimplifiedLayerNormalization<axis = -1, epsilon = 0.01>(t, g)"
LAYER = "LayerNormalization<axis = -1, epsilon = 0.01>(t, g, b)"
LAYER_WITHOUT_BETA = "LayerNormalization<axis = -1, epsilon = 0.01>(t, g)"
NORMS = {SIMPLIFIED: SKIP_SIMPLIFIED, LAYER: SKIP_LAYER, LAYER_WITHOUT_BETA: SKIP_LAYER}


def weight(*shape: int, dtype: Any = np.float32) -> NDArray:
    return (1 + RNG.standard_normal(shape) / 4).astype(dtype)


def build(
    body: str,
    given: str = "float[N,T,8] x, float[N,T,8] k",
    made: str = "float[N,T,8] y",
    opset: int = 18,
    dtype: Any = np.float32,
) -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}]> m ({given}) => ({made}) {{ {body} }}'
    )
    constants = {name: weight(SIZE, dtype=dtype) for name in ("g", "b", "bias")}
    constants |= {"g2": weight(3, SIZE), "bias_rank3": weight(1, 1, SIZE), "scalar": weight(1), "zero": np.array([0])}
    constants |= {"positions": weight(2, 3, SIZE), "matrix": weight(SIZE, SIZE) - 1}
    read = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in constants.items() if n in read)
    return model


def feeds(*shape: int, dtype: Any = np.float32, **others: NDArray) -> dict[str, NDArray]:
    rng = np.random.default_rng()
    shape = shape or (2, 3, SIZE)
    return {name: (rng.standard_normal(shape) * 2 + 1).astype(dtype) for name in ("x", "k")} | others


@pytest.mark.parametrize("order", ["x, k", "k, x"])
@pytest.mark.parametrize("norm", NORMS)
def test_sum_and_norm_become_one(norm, order, tools):
    model = build(f"t = Add({order}) y = {norm}")
    applied = tools.apply(model, FuseSkipNorm())
    assert applied.ops == [NORMS[norm]]
    assert applied.outcome.rewrites == 1
    assert onnx.helper.get_attribute_value(applied.model.graph.node[0].attribute[0]) == pytest.approx(0.01)
    tools.same_outputs(model, applied.model, feeds(), 2e-6)


@pytest.mark.parametrize("norm", ["SimplifiedLayerNormalization(t, g)", "LayerNormalization(t, g, b)"])
def test_default_epsilon_of_the_norm_is_passed_on(norm, tools):
    """The skip norms' own default is another."""
    model = build(f"t = Add(x, k) y = {norm}")
    applied = tools.apply(model, FuseSkipNorm())
    small = {name: value / 1000 for name, value in feeds().items()}
    assert onnx.helper.get_attribute_value(applied.model.graph.node[0].attribute[0]) == pytest.approx(1e-5)
    tools.same_outputs(model, applied.model, small, 2e-6)


@pytest.mark.parametrize("norm", NORMS)
def test_the_sum_goes_on_to_its_other_readers(norm, tools):
    model = build(f"t = Add(x, k) a = Neg(t) y = {norm} z = Add(a, y)", made="float[N,T,8] z")
    applied = tools.apply(model, FuseSkipNorm())
    assert applied.ops == [NORMS[norm], "Neg", "Add"]
    fused = applied.model.graph.node[0]
    assert list(fused.output) == ["y", "", "", "t"]
    tools.same_outputs(model, applied.model, feeds(), 2e-6)


@pytest.mark.parametrize("norm", NORMS)
def test_the_sum_stays_a_graph_output(norm, tools):
    model = build(f"t = Add(x, k) y = {norm}", made="float[N,T,8] y, float[N,T,8] t")
    applied = tools.apply(model, FuseSkipNorm())
    assert applied.ops == [NORMS[norm]]
    tools.same_outputs(model, applied.model, feeds(), 2e-6)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    "body",
    ["c = Add(x, bias) t = Add(c, k)", "c = Add(bias, k) t = Add(x, c)", "c = Add(x, bias_rank3) t = Add(k, c)"],
)
def test_bias_before_the_sum_is_taken_along(body, norm, tools):
    model = build(f"{body} z = Neg(t) y = {norm}", made="float[N,T,8] y, float[N,T,8] z")
    applied = tools.apply(model, FuseSkipNorm())
    assert applied.ops == [NORMS[norm], "Neg"]
    tools.same_outputs(model, applied.model, feeds(), 2e-6)


def test_a_chain_of_residual_blocks(tools):
    """Pre-norm blocks: each sum feeds its norm and the next sum; the first norm has no sum before it."""
    body = (
        "n0 = SimplifiedLayerNormalization(x, g) p0 = MatMul(n0, matrix) t1 = Add(x, p0) "
        "n1 = SimplifiedLayerNormalization(t1, g) p1 = MatMul(n1, matrix) t2 = Add(t1, p1) "
        "y = SimplifiedLayerNormalization(t2, g)"
    )
    model = build(body, "float[N,T,8] x")
    for name in ("n0", "n1", "p0", "p1"):
        value = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", "T", SIZE])
        model.graph.value_info.append(value)
    applied = tools.apply(model, FuseSkipNorm())
    assert applied.ops == ["SimplifiedLayerNormalization", "MatMul", SKIP_SIMPLIFIED, "MatMul", SKIP_SIMPLIFIED]
    tools.same_outputs(model, applied.model, {"x": feeds()["x"]}, 2e-6)


def test_two_norms_of_one_sum_fuse_once(tools):
    model = build(f"t = Add(x, k) y = {LAYER} z = {SIMPLIFIED}", made="float[N,T,8] y, float[N,T,8] z")
    applied = tools.apply(model, FuseSkipNorm())
    assert sorted(applied.ops) == ["LayerNormalization", SKIP_SIMPLIFIED]
    tools.same_outputs(model, applied.model, feeds(), 2e-6)


@pytest.mark.parametrize("norm", NORMS)
def test_packed_tokens_of_rank_2(norm, tools):
    model = build(f"t = Add(x, k) y = {norm}", "float[T,8] x, float[T,8] k", "float[T,8] y")
    applied = tools.apply(model, FuseSkipNorm())
    assert applied.ops == [NORMS[norm]]
    tools.same_outputs(model, applied.model, feeds(5, SIZE), 2e-6)


@pytest.mark.parametrize("norm", NORMS)
def test_float16(norm, tools):
    model = build(
        f"c = Add(x, bias) t = Add(c, k) y = {norm}",
        "float16[N,T,8] x, float16[N,T,8] k",
        "float16[N,T,8] y, float16[N,T,8] t",
        dtype=np.float16,
    )
    applied = tools.apply(model, FuseSkipNorm())
    assert applied.ops == [NORMS[norm]]
    tools.same_outputs(model, applied.model, feeds(dtype=np.float16), 3e-3)


def test_at_an_opset_without_layer_normalization(tools):
    model = build(f"t = Add(x, k) y = {LAYER}", opset=13)
    applied = tools.apply(model, FuseSkipNorm())
    assert applied.ops == [SKIP_LAYER]
    tools.same_outputs(model, applied.model, feeds(), 2e-6)


@pytest.mark.parametrize("norm", NORMS)
def test_inside_a_branch(norm, tools):
    model = tools.in_branch(
        build(f"c = Add(x, bias) t = Add(c, k) y = {norm} z = Neg(t)", made="float[N,T,8] y, float[N,T,8] z")
    )
    applied = tools.apply(model, FuseSkipNorm())
    assert applied.ops == ["If", NORMS[norm], "Neg", NORMS[norm], "Neg"]
    for flag in (True, False):
        tools.same_outputs(model, applied.model, feeds(flag=np.array(flag)), 2e-6)


def test_sum_outside_of_the_norms_branch_stays(tools):
    norm = f"(float[N,T,8] y1) {{ y1 = {SIMPLIFIED} }}"
    other = "(float[N,T,8] y2) { y2 = Neg(t) }"
    body = f"t = Add(x, k) y = If<then_branch = a () => {norm}, else_branch = o () => {other}>(flag)"
    model = build(body, "float[N,T,8] x, float[N,T,8] k, bool flag")
    model.graph.initializer.append(numpy_helper.from_array(weight(SIZE), "g"))
    applied = tools.apply(model, FuseSkipNorm())
    assert applied.ops == ["Add", "If", "SimplifiedLayerNormalization", "Neg"]


@pytest.mark.parametrize(
    "body",
    [
        "c = Add(x, bias) z = Neg(c) t = Add(c, k)",
        "c = Add(x, scalar) z = Neg(k) t = Add(c, k)",
    ],
)
def test_bias_that_cannot_be_taken_along(body, tools):
    model = build(f"{body} y = {SIMPLIFIED}", made="float[N,T,8] y, float[N,T,8] z")
    applied = tools.apply(model, FuseSkipNorm())
    assert sorted(applied.ops) == ["Add", "Neg", SKIP_SIMPLIFIED]
    tools.same_outputs(model, applied.model, feeds(), 2e-6)


FIXED = {"made": "float[2,3,8] y"}
UNTOUCHED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no sum": ("t = Mul(x, k) y = " + LAYER, {}, ""),
    "bias only": ("t = Add(x, bias) y = " + LAYER, {}, ""),
    "constant positions": ("t = Add(x, positions) y = " + LAYER, {"given": "float[2,3,8] x", **FIXED}, ""),
    "smaller x": ("t = Add(x, k) y = " + LAYER, {"given": "float[1,3,8] x, float[2,3,8] k", **FIXED}, "[1, 3, 8]"),
    "smaller skip": ("t = Add(k, x) y = " + SIMPLIFIED, {"given": "float[1,3,8] x, float[2,3,8] k", **FIXED}, "known"),
    "other symbols": ("t = Add(x, k) y = " + LAYER, {"given": "float[N,T,8] x, float[N,S,8] k"}, "not known to be"),
    "unnamed dimensions": (
        "t = Add(x, k) y = " + LAYER,
        {"given": "float[N,?,8] x, float[N,?,8] k"},
        "not known to be",
    ),
    "rank 4": (
        "t = Add(x, k) y = " + LAYER,
        {"given": "float[1,2,3,8] x, float[1,2,3,8] k", "made": "float[1,2,3,8] y"},
        "rank 4",
    ),
    "rank 1": ("t = Add(x, k) y = " + LAYER, {"given": "float[8] x, float[8] k", "made": "float[8] y"}, "rank 1"),
    "double": (
        "t = Add(x, k) y = LayerNormalization(t, h)",
        {"given": "double[N,T,8] x, double[N,T,8] k, double[8] h", "made": "double[N,T,8] y"},
        "is on float64",
    ),
    "two axes": (
        "t = Add(x, k) y = LayerNormalization<axis = 1>(t, g2)",
        {"given": "float[2,3,8] x, float[2,3,8] k", **FIXED},
        "expected the last axis",
    ),
    "further outputs": (
        "t = Add(x, k) y, u = LayerNormalization(t, g)",
        {"made": "float[N,T,8] y, float[N,T,1] u"},
        "has 2 outputs",
    ),
    "gamma of one element": (
        "t = Add(x, k) y = LayerNormalization(t, scalar)",
        {},
        "'scalar' [1] is not a constant [8]",
    ),
    "gamma that the sum yields": (
        "t = Add(x, k) r = Gather<axis = 0>(t, zero) h = Reshape(r, eight) y = SimplifiedLayerNormalization(t, h)",
        {"given": "float[1,1,8] x, float[1,1,8] k", "made": "float[1,1,8] y"},
        "is not a constant [8]",
    ),
}


@pytest.mark.parametrize("case", UNTOUCHED)
def test_leaves_alone_what_the_kernels_cannot_do(case, tools):
    body, declared, note = UNTOUCHED[case]
    model = build(body, **declared)
    if "eight" in body:
        model.graph.initializer.append(numpy_helper.from_array(np.array([SIZE]), "eight"))
    applied = tools.apply(model, FuseSkipNorm())
    assert not applied.outcome.changed
    assert applied.ops == [node.op_type for node in model.graph.node]
    assert len(applied.outcome.notes) == bool(note)
    assert note in " ".join(applied.outcome.notes)
