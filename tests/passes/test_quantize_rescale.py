"""SmoothQuant and AWQ on graphs: the same outputs from other weights, and what cannot be divided is left alone."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import helper

from passes.quantization.awq import ScaleForAwq
from passes.quantization.plan import LayerPlan, PrecisionPlan
from passes.quantization.rescale import Rescaled
from passes.quantization.smooth_quant import SmoothQuant
from passes.quantization.table import CalibrationTable, Range, TensorStatistics
from plugins.errors import KilnError

K = 16
FACTORS = np.logspace(-1.5, 1.5, K)


def table(magnitudes: dict[str, np.ndarray]) -> CalibrationTable:
    statistics = {
        name: TensorStatistics(Range(-float(values.max()), float(values.max())), {}, tuple(map(float, values)))
        for name, values in magnitudes.items()
    }
    return CalibrationTable("m", "d", "minmax", True, statistics, {})


def plan(*layers: str, **options) -> PrecisionPlan:
    options = {"scheme": "w8a8", "smooth": 0.5} | options
    return PrecisionPlan("m", {layer: LayerPlan(**options) for layer in layers})


def chain(tools, kind: str) -> onnx.ModelProto:
    """x [5, 16] or [2, 5, 16] -> something that makes `h` -> MatMul `one` and Gemm or MatMul `two`."""
    weights, make = tools.Weights(), helper.make_node
    gamma, beta = weights.positive("gamma", K), weights.normal("beta", K)
    w = weights.normal("w", K, K)
    nodes = {
        "layer norm": [make("LayerNormalization", ["x", gamma, beta], ["h"], axis=-1)],
        "rms norm": [make("SimplifiedLayerNormalization", ["x", gamma], ["h"], axis=-1)],
        "weighted": [make("Sigmoid", ["x"], ["bounded"]), make("Mul", [gamma, "bounded"], ["h"])],
        "biased": [make("MatMul", ["x", w], ["p"], name="zero"), make("Add", [beta, "p"], ["h"])],
        "gemm": [make("Gemm", ["x", w, beta], ["h"], name="zero", transB=1, alpha=0.5, beta=2.0)],
        "relu": [
            make("MatMul", ["x", w], ["p"], name="zero"),
            make("Relu", ["p"], ["r"]),
            make("Reshape", ["r", weights.tensors.setdefault("s", shape()) and "s"], ["h"]),
        ],
        "swiglu": [
            make("MatMul", ["x", w], ["up"], name="up"),
            make("MatMul", ["x", weights.normal("g", K, K)], ["gate"], name="gate"),
            make("QuickGelu", ["gate"], ["act"], domain="com.microsoft", alpha=1.0),
            make("Mul", ["act", "up"], ["h"]),
        ],
        "rows": [
            make("Gemm", ["x", w, beta], ["p"], name="zero"),
            make("Gather", ["p", weights.tensors.setdefault("i", rows()) and "i"], ["h"]),
        ],
        "kiln norm": [make("AddRmsNorm", ["x", "x", gamma], ["h"], domain="kiln", epsilon=1e-6)],
        "kiln swiglu": [
            make("MatMul", ["x", w], ["up"], name="up"),
            make("MatMul", ["x", weights.normal("g", K, K)], ["gate"], name="gate"),
            make("SwiGlu", ["gate", "up"], ["h"], domain="kiln"),
        ],
        "residual": [
            make("SimplifiedLayerNormalization", ["x", gamma], ["n"], axis=-1),
            make("Add", ["x", "n"], ["h"]),
        ],
    }[kind]
    readers = [
        make("MatMul", ["h", weights.normal("w1", K, 6)], ["y1"], name="one"),
        make("Gemm", ["h", weights.normal("w2", 6, K), weights.normal("b2", 6)], ["y2"], name="two", transB=1),
        make("Add", ["y1", "y2"], ["y"]),
    ]
    model = tools.model([*nodes, *readers], weights, [5, K])
    model.opset_import.extend(helper.make_opsetid(domain, 1) for domain in ("com.microsoft", "kiln"))
    return model


def rows() -> onnx.TensorProto:
    return onnx.numpy_helper.from_array(np.array([4, 0, 4], np.int64), "i")


def shape() -> onnx.TensorProto:
    return onnx.numpy_helper.from_array(np.array([5, K], np.int64), "s")


CHAINS = ("rows", "layer norm", "rms norm", "weighted", "kiln norm", "biased", "gemm", "relu", "swiglu", "kiln swiglu")


@pytest.mark.parametrize("kind", CHAINS)
def test_smoothing_keeps_the_outputs_and_adds_nothing(tools, kind):
    model, rescaled = chain(tools, kind), Rescaled()
    applied = tools.apply(model, SmoothQuant(plan("one"), table({"h": FACTORS}), rescaled))
    assert applied.outcome.rewrites == 1
    assert applied.ops == [
        f"{node.domain}::{node.op_type}" if node.domain else node.op_type for node in model.graph.node
    ]
    tools.same_outputs(model, applied.model, tools.feeds(model), 2e-5)
    assert len(rescaled) == 2  # both readers, planned or not
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in applied.model.graph.initializer}
    before = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    (changed,) = [name for name in weights if name.startswith("y1/")]
    np.testing.assert_allclose(weights[changed] / before["w1"], np.repeat(rescaled[changed][:, None], 6, 1), rtol=1e-5)
    assert rescaled[changed].max() / rescaled[changed].min() > 5


def test_a_residual_sum_is_left_alone_and_said(tools):
    model = chain(tools, "residual")
    applied = tools.apply(model, SmoothQuant(plan("one"), table({"h": FACTORS})))
    assert applied.outcome.rewrites == 0
    assert applied.outcome.notes == ["one: not smoothed, 'h' is a sum, which cannot be scaled"]


def test_an_activation_with_another_reader_is_left_alone(tools):
    model = chain(tools, "rms norm")
    model.graph.node.append(helper.make_node("Neg", ["h"], ["z"], name="other"))
    model.graph.output.append(helper.make_tensor_value_info("z", 1, [5, K]))
    applied = tools.apply(model, SmoothQuant(plan("one"), table({"h": FACTORS})))
    assert applied.outcome.notes == ["one: not smoothed, its input 'h' is also read by 'other' (Neg)"]


def test_layers_without_smooth_stay(tools):
    model = chain(tools, "rms norm")
    assert tools.apply(model, SmoothQuant(plan("one", smooth=None), table({"h": FACTORS}))).outcome.rewrites == 0


def test_a_table_of_other_channels_is_refused(tools):
    with pytest.raises(KilnError, match=r"the calibration table has 3 channel magnitudes of 'h', which has 16"):
        tools.apply(chain(tools, "gemm"), SmoothQuant(plan("one"), table({"h": np.ones(3)})))
    with pytest.raises(KilnError, match="no ranges for the tensor 'h'"):
        tools.apply(chain(tools, "gemm"), SmoothQuant(plan("one"), table({})))


def multi_head(tools) -> onnx.ModelProto:
    """MiniLM's block: three projections, attention, a guard against rows without any key, the output projection."""
    weights, make = tools.Weights(), helper.make_node
    inputs, nodes = [], []
    for part in "qkv":
        nodes.append(make("MatMul", ["x", weights.normal(f"w{part}", K, K)], [f"p{part}"], name=f"attention.{part}"))
        nodes.append(make("Add", [f"p{part}", weights.normal(f"b{part}", K)], [part]))
        inputs.append(part)
    nodes += [
        make("MultiHeadAttention", inputs, ["a"], domain="com.microsoft", num_heads=2),
        make("IsNaN", ["a"], ["bad"]),
        make("Where", ["bad", weights.set("zero", 0.0), "a"], ["checked"]),
        make("MatMul", ["checked", weights.normal("wo", K, 8)], ["y"], name="attention.output"),
    ]
    model = tools.model(nodes, weights, [2, 5, K])
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model


def test_the_values_of_attention_take_the_division(tools):
    model = multi_head(tools)
    applied = tools.apply(model, SmoothQuant(plan("attention.output"), table({"checked": FACTORS})))
    assert applied.outcome.rewrites == 1, applied.outcome.notes
    tools.same_outputs(model, applied.model, tools.feeds(model), 2e-5)


@pytest.mark.parametrize("packed", [True, False])
def test_heads_that_share_values_share_factors(tools, packed):
    """Four heads, two of keys and values: channels of heads 0 and 1 are tied, and of 2 and 3."""
    from plugins.paged_attention.schema import DOMAIN, OP_TYPE

    weights, make = tools.Weights(), helper.make_node
    size, wide = 4, {"q": 16, "k": 8, "v": 8}
    if packed:
        nodes = [make("MatMul", ["x", weights.normal("w", K, 32)], ["rows"], name="qkv")]
        inputs = ["rows", "", ""]
    else:
        nodes = [make("MatMul", ["x", weights.normal(f"w{n}", K, w)], [n], name=n) for n, w in wide.items()]
        inputs = list(wide)
    rest = ["keys", "values", "cu", "past", "blocks", "", "", "slots"]
    nodes += [
        make(OP_TYPE, [*inputs, *rest], ["a", "ko", "vo"], domain=DOMAIN, num_heads=4, kv_num_heads=2),
        make("MatMul", ["a", weights.normal("wo", 16, 5)], ["y"], name="o"),
    ]
    model = tools.model(nodes, weights, [6, K])
    cache = [8, 4, 2, size]
    for name in ("keys", "values"):
        model.graph.input.append(helper.make_tensor_value_info(name, 1, cache))
    for name, dims in {"cu": [3], "past": [2], "blocks": [2, 3], "slots": [6]}.items():
        model.graph.input.append(helper.make_tensor_value_info(name, onnx.TensorProto.INT32, dims))
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    rescaled = Rescaled()
    applied = tools.apply(model, SmoothQuant(plan("o"), table({"a": FACTORS}), rescaled))
    assert applied.outcome.rewrites == 1, applied.outcome.notes
    (factors,) = rescaled.values()
    np.testing.assert_array_equal(factors[:4], factors[4:8])
    np.testing.assert_array_equal(factors[8:12], factors[12:])
    feeds = {
        "x": np.random.default_rng(1).normal(size=(6, K)).astype(np.float32),
        "keys": np.zeros(cache, np.float32),
        "values": np.zeros(cache, np.float32),
        "cu": np.array([0, 2, 6], np.int32),
        "past": np.zeros(2, np.int32),
        "blocks": np.array([[0, 1, 2], [3, 4, 5]], np.int32),
        "slots": np.array([0, 1, 12, 13, 14, 15], np.int32),
    }
    tools.same_outputs(model, applied.model, feeds, 2e-5)


@pytest.mark.parametrize("kind", [*CHAINS, "residual"])
def test_awq_keeps_the_outputs_with_a_multiplication_where_nothing_takes_it(tools, kind):
    model, random = chain(tools, kind), np.random.default_rng(3)
    activations = random.normal(size=(64, K)) * FACTORS
    wanted = plan("one", "two", scheme="w4a16", rounding="awq", smooth=None)
    moments = {"one": activations.T @ activations / 64}
    applied = tools.apply(model, ScaleForAwq(wanted, moments=moments))
    assert applied.outcome.rewrites == 1, applied.outcome.notes
    assert applied.ops.count("Mul") == (kind in ("residual", "swiglu", "weighted"))
    tools.same_outputs(model, applied.model, tools.feeds(model), 2e-5)


def test_awq_divides_for_its_own_products_alone(tools):
    model = chain(tools, "rms norm")
    both = plan("one", "two", scheme="w4a16", rounding="awq", smooth=None)
    wanted = replace(both, layers={"one": both.layers["one"], "two": LayerPlan("w8a16")})
    applied = tools.apply(model, ScaleForAwq(wanted, table({"h": FACTORS})))
    assert applied.ops.count("Mul") == 1
    tools.same_outputs(model, applied.model, tools.feeds(model), 2e-5)
    assert [node.input[0] for node in applied.model.graph.node if node.name == "two"] == ["h"]


def test_awq_without_data_is_refused(tools):
    wanted = plan("one", scheme="w4a16", rounding="awq", smooth=None)
    with pytest.raises(KilnError, match="layer one is planned with AWQ, which needs its input's second moments"):
        tools.apply(chain(tools, "gemm"), ScaleForAwq(wanted))
