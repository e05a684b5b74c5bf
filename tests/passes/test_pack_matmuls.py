"""Projections of one input become one; what they feed gets the same numbers."""

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper, parser

from passes.pack_matmuls import PackMatMuls
from plugins.build import cpu_library
from plugins.paged_attention.schema import DOMAIN, EXPORT_DOMAIN

PACKED = ["MatMul", "Split"]
PACKED_BIASED = ["MatMul", "Add", "Split"]


def model(
    body: str, inputs: str = "float[2, n, 8] x", outputs: str = "", opset: int = 21, **shapes: tuple[int, ...]
) -> onnx.ModelProto:
    """A graph whose initialisers are random, named and shaped by `shapes`; without `outputs` they are q, k and v."""
    proto = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : {opset}]>
        g ({inputs}) => ({outputs or "float[2, n, 12] q, float[2, n, 4] k, float[2, n, 4] v"}) {{ {body} }}
    """)
    draw = np.random.default_rng(0)
    for name, shape in shapes.items():
        proto.graph.initializer.append(numpy_helper.from_array(draw.normal(size=shape).astype(np.float32), name))
    return proto


def draw(*shape: int) -> NDArray:
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


WEIGHTS = {"wq": (8, 12), "wk": (8, 4), "wv": (8, 4)}
TRANSPOSED = {name: shape[::-1] for name, shape in WEIGHTS.items()}
BIASES = {"bq": (12,), "bk": (4,), "bv": (4,)}
PLAIN = "q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv)"
BIASED = """
    mq = MatMul(x, wq) q = Add(mq, bq) mk = MatMul(x, wk) k = Add(bk, mk) mv = MatMul(x, wv) v = Add(mv, bv)
"""
GEMM = "q = Gemm{0}(x, wq{1}) k = Gemm{0}(x, wk{2}) v = Gemm{0}(x, wv{3})"
GEMM_IO = ("float[n, 8] x", "float[n, 12] q, float[n, 4] k, float[n, 4] v")
CASES = {
    "plain": (model(PLAIN, **WEIGHTS), PACKED, (2, 3, 8)),
    "any rank": (model(PLAIN, "float[n, 8] x", GEMM_IO[1], **WEIGHTS), PACKED, (3, 8)),
    "one row": (model(PLAIN, "float[8] x", "float[12] q, float[4] k, float[4] v", **WEIGHTS), PACKED, (8,)),
    "unknown shape": (model(PLAIN, "float[] x", "float[] q, float[] k, float[] v", **WEIGHTS), PACKED, (2, 3, 4, 8)),
    "biases": (model(BIASED, **WEIGHTS, **BIASES), PACKED_BIASED, (2, 3, 8)),
    "biases of other shapes": (
        model(BIASED, **WEIGHTS, bq=(1, 1, 12), bk=(1,), bv=()),
        PACKED_BIASED,
        (2, 3, 8),
    ),
    "one without bias": (
        model(BIASED.replace("mk = MatMul(x, wk) k = Add(bk, mk)", "k = MatMul(x, wk)"), **WEIGHTS, **BIASES),
        PACKED_BIASED,
        (2, 3, 8),
    ),
    "Gemm": (model(GEMM.format("", "", "", ""), *GEMM_IO, **WEIGHTS), ["Gemm", "Split"], (3, 8)),
    "Gemm, transposed": (
        model(
            GEMM.format("<transB = 1, alpha = 0.5, beta = 2.0>", ", bq", ", bk", ", bv"),
            *GEMM_IO,
            **TRANSPOSED,
            bq=(1, 12),
            bk=(4,),
            bv=(),
        ),
        ["Gemm", "Split"],
        (3, 8),
    ),
    "Gemm, one without bias": (
        model(GEMM.format("<transB = 1>", ", bq", "", ", bv"), *GEMM_IO, **TRANSPOSED, bq=(12,), bv=(4,)),
        ["Gemm", "Split"],
        (3, 8),
    ),
    "opset 11": (model(PLAIN, opset=11, **WEIGHTS), PACKED, (2, 3, 8)),
}


@pytest.mark.parametrize(("before", "ops", "shape"), CASES.values(), ids=CASES.keys())
def test_packs(tools, before, ops, shape):
    after = tools.apply(before, PackMatMuls())
    assert after.ops == ops
    assert after.outcome.rewrites == 1
    assert len(after.model.graph.initializer) <= 3  # the weights it had before are gone
    tools.same_outputs(before, after.model, {"x": draw(*shape)}, 1e-6)


@pytest.mark.parametrize("name", ["plain", "biases", "Gemm, transposed"])
def test_works_in_subgraphs(tools, name):
    before, ops, shape = CASES[name]
    branched = tools.in_branch(before)
    after = tools.apply(branched, PackMatMuls())
    assert sorted(after.ops) == sorted(["If", *ops, *ops])
    tools.same_outputs(branched, after.model, {"x": draw(*shape), "flag": np.array(False)}, 1e-6)


def test_packs_gate_and_up_of_swiglu(tools):
    before = model(
        "g = MatMul(x, wg) s = Sigmoid(g) a = Mul(g, s) u = MatMul(x, wu) y = Mul(a, u)",
        outputs="float[2, n, 6] y",
        wg=(8, 6),
        wu=(8, 6),
    )
    after = tools.apply(before, PackMatMuls())
    assert after.ops == ["MatMul", "Split", "Sigmoid", "Mul", "Mul"]
    tools.same_outputs(before, after.model, {"x": draw(2, 3, 8)}, 1e-6)


def test_packs_each_half_precision_weight_as_it_is(tools):
    before = model(PLAIN, "float16[2, n, 8] x", "float16[] q, float16[] k, float16[] v")
    for name, shape in WEIGHTS.items():
        before.graph.initializer.append(numpy_helper.from_array(draw(*shape).astype(np.float16), name))
    after = tools.apply(before, PackMatMuls())
    weight = next(t for t in map(numpy_helper.to_array, after.model.graph.initializer) if t.ndim == 2)
    assert weight.dtype == np.float16
    np.testing.assert_array_equal(weight, np.hstack([draw(*shape).astype(np.float16) for shape in WEIGHTS.values()]))


def test_copies_a_weight_that_something_else_reads(tools):
    before = model(f"{PLAIN} t = Transpose(wq)", outputs="float[] q, float[] k, float[] v, float[12, 8] t", **WEIGHTS)
    after = tools.apply(before, PackMatMuls())
    assert after.ops.count("MatMul") == 1
    assert "wq" in {tensor.name for tensor in after.model.graph.initializer}
    tools.same_outputs(before, after.model, {"x": draw(2, 3, 8)}, 1e-6)


def test_packs_a_product_whose_bias_is_not_alone(tools):
    """mq is read twice: its Add stays, behind the Split."""
    body = BIASED + "r = Relu(mq)"
    before = model(body, outputs="float[] q, float[] k, float[] v, float[] r", **WEIGHTS, **BIASES)
    after = tools.apply(before, PackMatMuls())
    assert sorted(after.ops) == ["Add", "Add", "MatMul", "Relu", "Split"]
    tools.same_outputs(before, after.model, {"x": draw(2, 3, 8)}, 1e-6)


def test_packs_only_what_has_one_form(tools):
    """Two Gemms of three have the same alpha."""
    body = GEMM.format("", "", "", "").replace("k = Gemm", "k = Gemm<alpha = 0.5>")
    before = model(body, *GEMM_IO, **WEIGHTS)
    after = tools.apply(before, PackMatMuls())
    assert sorted(after.ops) == ["Gemm", "Gemm", "Split"]
    tools.same_outputs(before, after.model, {"x": draw(3, 8)}, 1e-6)


TWO = {"inputs": "float[2, n, 8] x, float[2, n, 8] z", "outputs": "float[] a, float[] b"}
NEAR_MISSES = {
    "two inputs": model("a = MatMul(x, wq) b = MatMul(z, wk)", **TWO, **WEIGHTS),
    "one projection": model("a = MatMul(x, wq) b = Relu(z)", **TWO, **WEIGHTS),
    "weight from a graph input": model(
        "a = MatMul(x, wq) t = Transpose<perm = [0, 2, 1]>(z) b = MatMul(x, t)", **TWO, **WEIGHTS
    ),
    "weights left of x": model(
        "a = MatMul(w1, x) b = MatMul(w2, x)", "float[8, n] x", "float[] a, float[] b", w1=(3, 8), w2=(4, 8)
    ),
    "stacked weights": model("a = MatMul(x, w1) b = MatMul(x, w2)", **TWO, w1=(2, 8, 4), w2=(2, 8, 4)),
    "transposed input": model(
        "a = Gemm<transA = 1>(x, w1) b = Gemm<transA = 1>(x, w2)",
        "float[8, n] x",
        "float[] a, float[] b",
        w1=(8, 3),
        w2=(8, 4),
    ),
    "bias per row": model(
        "a = Gemm(x, w1, c) b = Gemm(x, w2, c)", "float[5, 8] x", "float[] a, float[] b", w1=(8, 3), w2=(8, 4), c=(5, 1)
    ),
    "quantised": model(
        """one = Constant<value = float {0.5}>() zero = Constant<value = int8 {0}>()
        i1 = QuantizeLinear(w1, one, zero) d1 = DequantizeLinear(i1, one, zero)
        i2 = QuantizeLinear(w2, one, zero) d2 = DequantizeLinear(i2, one, zero)
        a = MatMul(x, d1) b = MatMul(x, d2)""",
        **TWO,
        w1=(8, 3),
        w2=(8, 4),
    ),
    "opset 10": model("a = MatMul(x, w1) b = MatMul(x, w2)", **TWO, opset=10, w1=(8, 3), w2=(8, 4)),
}


@pytest.mark.parametrize("before", NEAR_MISSES.values(), ids=NEAR_MISSES.keys())
def test_leaves_alone(tools, before):
    assert not tools.apply(before, PackMatMuls()).outcome.changed


def test_leaves_alone_projections_in_different_scopes(tools):
    before = parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[n, 8] x, bool flag) => (float[] a, float[] b) <float[8, 1] w1 = {1, 2, 3, 4, 5, 6, 7, 8}> {
            a = MatMul(x, w1)
            b = If (flag) <
                then_branch = t () => (float[] p) { p = MatMul(x, w1) },
                else_branch = e () => (float[] r) { r = Relu(x) }
            >
        }
    """)
    assert not tools.apply(before, PackMatMuls()).outcome.changed


@pytest.mark.parametrize("options", [{"split": False}, {"min_group": 4}])
def test_options_turn_the_second_rule_off(tools, options):
    assert not tools.apply(model(PLAIN, **WEIGHTS), PackMatMuls(**options)).outcome.changed


def test_a_group_of_one_is_no_option():
    with pytest.raises(ValueError, match="min_group is 1"):
        PackMatMuls(min_group=1)


# Rule 1: query, key and value of paged attention, 3 heads of 4 with one head for keys and values.


def attention(
    body: str,
    x: str = "float[tokens, 8] x",
    domain: str = DOMAIN,
    attrs: str = "num_heads = 3, kv_num_heads = 1",
    **shapes: tuple[int, ...],
) -> onnx.ModelProto:
    caches = "float[blocks, 2, 1, 4] kc, float[blocks, 2, 1, 4] vc"
    step = "int32[s1] cu, int32[seqs] past, int32[seqs, m] table, int32[tokens] slots"
    proto = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 21, "{domain}" : 1]>
        g ({x}, {caches}, {step}) => (float[tokens, 12] y, float[blocks, 2, 1, 4] ko, float[blocks, 2, 1, 4] vo) {{
            {body}
            y, ko, vo = {domain}.PagedAttention<{attrs}>(q, k, v, kc, vc, cu, past, table, , , slots)
        }}
    """)
    random = np.random.default_rng(2)
    for name, shape in (WEIGHTS | shapes).items():
        proto.graph.initializer.append(numpy_helper.from_array(random.normal(size=shape).astype(np.float32), name))
    return proto


SQUEEZED = """
    hq = MatMul(x, wq) q0 = Constant<value = int64[4] {1, -1, 3, 4}>() vq = Reshape(hq, q0)
    q1 = Constant<value = int64[2] {-1, 12}>() q = Reshape(vq, q1)
    hk = MatMul(x, wk) k1 = Constant<value = int64[2] {-1, 4}>() k = Reshape(hk, k1)
    hv = MatMul(x, wv) axes = Constant<value = int64[1] {0}>() v = Squeeze(hv, axes)
"""
ATTENTIONS = {
    "direct": (attention(PLAIN), ["MatMul"]),
    "biases": (attention(BIASED, **BIASES), ["MatMul", "Add"]),
    "views": (attention(SQUEEZED, "float[1, tokens, 8] x"), ["MatMul", "Reshape"]),
    "Gemm": (
        attention(GEMM.format("<transB = 1>", ", bq", ", bk", ", bv"), **TRANSPOSED, **BIASES),
        ["Gemm"],
    ),
    "keys first": (attention("k = MatMul(x, wk) v = MatMul(x, wv) q = MatMul(x, wq)"), ["MatMul"]),
}


def run_attention(proto: onnx.ModelProto) -> list[NDArray]:
    """Two sequences of three and two tokens, the second with one token in the cache."""
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(cpu_library()))
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    shape = [size if isinstance(size, int) else 5 for size in session.get_inputs()[0].shape]
    feeds = {
        "x": draw(*shape),
        "kc": draw(4, 2, 1, 4),
        "vc": draw(4, 2, 1, 4) + 1,
        "cu": np.array([0, 3, 5], np.int32),
        "past": np.array([0, 1], np.int32),
        "table": np.array([[0, 1], [2, 3]], np.int32),
        "slots": np.array([0, 1, 2, 5, 6], np.int32),
    }
    return session.run(None, feeds)


@pytest.mark.parametrize(("before", "ops"), ATTENTIONS.values(), ids=ATTENTIONS.keys())
def test_packs_for_attention(tools, before, ops):
    after = tools.apply(before, PackMatMuls(packed_attention=True))
    assert after.ops == [*ops, "kiln::PagedAttention"]
    node = after.model.graph.node[-1]
    assert list(node.input[1:3]) == ["", ""]
    for expected, found in zip(run_attention(before), run_attention(after.model), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_packs_for_attention_in_subgraphs(tools):
    after = tools.apply(tools.in_branch(attention(PLAIN)), PackMatMuls(packed_attention=True))
    assert sorted(after.ops) == ["If", "MatMul", "MatMul", "kiln::PagedAttention", "kiln::PagedAttention"]


def test_packs_for_attention_before_it_is_bound(tools):
    after = tools.apply(attention(PLAIN, domain=EXPORT_DOMAIN), PackMatMuls(packed_attention=True))
    assert after.ops == ["MatMul", "com.microsoft::PagedAttention"]


def test_packs_the_siblings_of_packed_attention_by_themselves(tools):
    body = f"{PLAIN} g = MatMul(x, wg) u = MatMul(x, wu) z = Mul(g, u)"
    before = attention(body, wg=(8, 6), wu=(8, 6))
    before.graph.output.append(onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, ["tokens", 6]))
    after = tools.apply(before, PackMatMuls(packed_attention=True))
    assert after.outcome.rewrites == 2
    assert sorted(after.ops) == ["MatMul", "MatMul", "Mul", "Split", "kiln::PagedAttention"]
    for expected, found in zip(run_attention(before), run_attention(after.model), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


ROTATED = "hq = MatMul(x, wq) q = Neg(hq) hk = MatMul(x, wk) k = Neg(hk) v = MatMul(x, wv)"
SPLIT_ONLY = {
    "arithmetic between": attention(ROTATED),
    "query read elsewhere": attention(f"{PLAIN} r = Relu(q)"),
    "another width": attention(PLAIN, attrs="num_heads = 6, kv_num_heads = 1"),
    "one tensor for both": attention("q = MatMul(x, wq) k = MatMul(x, wk) v = Identity(k)"),
}
SPLIT_ONLY["query read elsewhere"].graph.output.append(
    onnx.helper.make_tensor_value_info("r", onnx.TensorProto.FLOAT, ["tokens", 12])
)


@pytest.mark.parametrize("before", SPLIT_ONLY.values(), ids=SPLIT_ONLY.keys())
def test_splits_what_attention_cannot_take_packed(tools, before):
    after = tools.apply(before, PackMatMuls(packed_attention=True))
    assert after.ops.count("MatMul") == 1
    assert "Split" in after.ops
    assert not tools.apply(before, PackMatMuls(packed_attention=True, split=False)).outcome.changed


def test_the_first_rule_is_an_option(tools):
    after = tools.apply(attention(PLAIN), PackMatMuls())
    assert after.ops == ["MatMul", "Split", "kiln::PagedAttention"]
    for expected, found in zip(run_attention(attention(PLAIN)), run_attention(after.model), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
