"""Weight-only and dynamic quantisation: structure by target, how far outputs move, rows that do not know each other."""

import numpy as np
import onnx
import pytest
from onnx import helper

from passes.fuse_cpu_norm import BindAddRmsNorm
from passes.fuse_cpu_swiglu import BindSwiglu
from passes.quantization.dynamic_int8 import DynamicInt8
from passes.quantization.fuse_quantize_rows import FuseQuantizeRows
from passes.quantization.plan import LayerPlan, PrecisionPlan
from passes.quantization.quantize_weights import QuantizeWeights
from plugins.errors import KilnError
from tests.passes.quantize_models import after, distance, moments_of

NAMES = ("up", "gemm", "down")
KILN, PLAIN = "cpu-plugins", "cpu"


def plan(scheme: str, group_size: int = 0, **options) -> PrecisionPlan:
    return PrecisionPlan("m", {name: LayerPlan(scheme, group_size, **options) for name in NAMES})


def network(tools, depth: int = 72) -> onnx.ModelProto:
    """Two products of x, with and without a bias and transposition, and one of their sum; 72 = 2 * 32 + 8."""
    weights, make = tools.Weights(), helper.make_node
    w2, b2 = weights.normal("w2", 48, depth), weights.normal("b2", 48)
    nodes = [
        make("MatMul", ["x", weights.normal("w1", depth, 48)], ["h"], name="up"),
        make("Add", ["h", weights.normal("b1", 48)], ["hb"]),
        make("Gemm", ["x", w2, b2], ["g"], name="gemm", transB=1, alpha=0.5, beta=2.0),
        make("Mul", ["hb", "g"], ["a"]),
        make("MatMul", ["a", weights.normal("w3", 48, 20)], ["y"], name="down"),
    ]
    return tools.model(nodes, weights, [6, depth])


@pytest.mark.parametrize(("scheme", "limit"), [("w8a16", 0.02), ("w4a16", 0.2)])
@pytest.mark.parametrize("group", [0, 16, 32])
@pytest.mark.parametrize("rounding", ["rtn", "gptq", "hqq"])
@pytest.mark.parametrize("kernels", [KILN, PLAIN, "cuda"])
def test_weights_alone(tools, scheme, limit, group, rounding, kernels):
    model = network(tools)
    feeds = tools.feeds(model)
    moments = moments_of(tools, model, feeds) if rounding == "gptq" else {}
    graph_pass = QuantizeWeights(plan(scheme, group, rounding=rounding), kernels, moments)
    applied = tools.apply(model, graph_pass)
    operator = "kiln::WeightMatMul" if kernels == KILN else "com.microsoft::MatMulNBits"
    assert applied.outcome.rewrites == 3
    assert sorted(applied.ops) == sorted(["Mul", *[operator] * 3])
    assert [n.name for n in applied.model.graph.node if n.op_type != "Mul"] == list(NAMES)
    assert 1e-4 < distance(tools, model, applied.model, feeds) < limit


@pytest.mark.parametrize("scheme", ["w8a16", "w4a16"])
def test_blocks_hold_the_very_integers(tools, scheme):
    """With exact arithmetic MatMulNBits gives what the quantised weights give."""
    from passes.quantization.weights import quantise_weight

    model = network(tools)
    feeds = tools.feeds(model)
    applied = tools.apply(model, QuantizeWeights(plan(scheme, 16), PLAIN, accuracy_level=0))
    exact = onnx.ModelProto()
    exact.CopyFrom(model)
    for tensor in exact.graph.initializer:
        values = onnx.numpy_helper.to_array(tensor)
        if values.ndim == 2:
            turned = values.T if tensor.name == "w2" else values
            found = quantise_weight(
                "w", turned, LayerPlan(scheme, 16), zeros="integer" if scheme == "w4a16" else "none"
            ).values
            tensor.CopyFrom(onnx.numpy_helper.from_array(found.T if tensor.name == "w2" else found, tensor.name))
    assert distance(tools, exact, applied.model, feeds) < 1e-4


@pytest.mark.parametrize(
    ("scheme", "group", "activations", "limit"),
    [
        ("w8a8-dynamic", 0, 0, 0.03),
        ("w8a8-dynamic", 32, 0, 0.03),
        ("w8a8-dynamic", 32, 32, 0.03),
        ("w4a8-dynamic", 16, 0, 0.2),
        ("w4a8-dynamic", 16, 16, 0.2),
    ],
)
def test_dynamic_rows_with_kilns_operators(tools, scheme, group, activations, limit):
    model = network(tools)
    feeds = tools.feeds(model)
    applied = tools.apply(model, DynamicInt8(plan(scheme, group, activation_group_size=activations), KILN))
    assert applied.ops.count("kiln::QuantizeRows") == 2  # of x, for two products, and of their product
    assert applied.ops.count("kiln::Int8MatMul") == 3
    assert len(applied.ops) == 6
    assert 1e-3 < distance(tools, model, applied.model, feeds) < limit


@pytest.mark.parametrize("kernels", [PLAIN, "cuda"])
@pytest.mark.parametrize("opset", [13, 21])
def test_dynamic_rows_with_plain_operators(tools, kernels, opset):
    weights = tools.Weights()
    nodes = [
        helper.make_node("MatMul", ["x", weights.normal("w", 32, 48)], ["h"], name="up"),
        helper.make_node("Add", ["h", weights.normal("b", 48)], ["hb"]),
        helper.make_node("MatMul", ["hb", weights.normal("v", 48, 16)], ["y"], name="down"),
    ]
    model = tools.model(nodes, weights, [2, 5, 32], opset=opset)
    feeds = tools.feeds(model)
    applied = tools.apply(model, DynamicInt8(plan("w8a8-dynamic"), kernels))
    assert applied.ops.count("MatMulInteger") == 2
    assert "DynamicQuantizeLinear" not in applied.ops
    assert 1e-3 < distance(tools, model, applied.model, feeds) < 0.03


@pytest.mark.parametrize("kernels", [KILN, PLAIN])
def test_rows_do_not_know_each_other_and_hide_nothing(tools, kernels):
    """The same bits alone and beside rows a thousand times as large; NaN and infinity stay in their rows."""
    model = network(tools)
    rewritten = after(model, [DynamicInt8(plan("w8a8-dynamic"), kernels)])
    x = tools.feeds(model)["x"]
    expected = tools.run(rewritten, {"x": x})[0]
    x[1] *= 1000
    x[2] = 0
    x[3, 40], x[4, 71], x[5, 0] = np.nan, np.inf, -np.inf
    found = tools.run(rewritten, {"x": x})[0]
    np.testing.assert_array_equal(found[0], expected[0])
    assert np.isfinite(found[:3]).all()
    assert np.isnan(found[3:]).all()


def decoder_block(tools) -> onnx.ModelProto:
    weights, make = tools.Weights(), helper.make_node
    nodes = [
        make("Add", ["x", "skip"], ["s"]),
        make("SimplifiedLayerNormalization", ["s", weights.positive("gamma", 32)], ["n"], axis=-1, epsilon=1e-6),
        make("MatMul", ["n", weights.normal("w1", 32, 48)], ["gate"], name="up"),
        make("MatMul", ["n", weights.normal("w2", 32, 48)], ["u"], name="gemm"),
        make("QuickGelu", ["gate"], ["act"], domain="com.microsoft", alpha=1.0),
        make("Mul", ["act", "u"], ["a"]),
        make("MatMul", ["a", weights.normal("w3", 48, 32)], ["d"], name="down"),
        make("Add", ["d", "s"], ["y"]),
    ]
    for node in nodes:
        node.name = node.name or node.output[0]
    shape = [7, 32]
    known = {"s": shape, "n": shape, "act": [7, 48], "a": [7, 48], "gate": [7, 48], "u": [7, 48]}
    model = tools.model(nodes, weights, shape, inputs={"skip": shape})
    model.graph.value_info.extend(helper.make_tensor_value_info(name, 1, dims) for name, dims in known.items())
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model


@pytest.mark.parametrize("group", [0, 16])
def test_norms_and_gates_quantise_by_themselves(tools, group):
    model = decoder_block(tools)
    feeds = tools.feeds(model)
    wanted = plan("w8a8-dynamic", group, activation_group_size=group)
    apart = after(model, [DynamicInt8(wanted, KILN), BindAddRmsNorm(), BindSwiglu()])
    applied = tools.apply(apart, FuseQuantizeRows())
    assert applied.outcome.rewrites == 2
    assert applied.ops == [
        *("kiln::AddRmsNormQuantize", "kiln::Int8MatMul", "kiln::Int8MatMul"),
        *("kiln::SwiGluQuantize", "kiln::Int8MatMul", "Add"),
    ]
    tools.same_outputs(apart, applied.model, feeds)
    assert distance(tools, model, applied.model, feeds) < 0.03


def test_a_norm_that_is_read_in_float_too_is_left(tools):
    model = decoder_block(tools)
    apart = after(model, [DynamicInt8(PrecisionPlan("m", {"up": LayerPlan("w8a8-dynamic")}), KILN), BindAddRmsNorm()])
    applied = tools.apply(apart, FuseQuantizeRows())
    assert applied.outcome.rewrites == 0


@pytest.mark.parametrize(
    ("graph_pass", "message"),
    [
        (
            DynamicInt8(plan("w4a8-dynamic", 16), PLAIN),
            r"layer up \(MatMul\) is planned as w4a8-dynamic, for which cpu has no kernel; possible are float, w8a8",
        ),
        (DynamicInt8(plan("w8a8-dynamic", 16), PLAIN), "with groups of 16; cpu takes 0, which is one scale"),
        (DynamicInt8(plan("w8a8-dynamic", 6), KILN), "groups of 6; cpu-plugins takes 0 or a multiple of 4"),
        (QuantizeWeights(plan("w4a16", 48), PLAIN), "groups of 48; cpu takes 0 or one of 16, 32, 64, 128, 256"),
        (QuantizeWeights(plan("w4a16", 16), "tensorrt"), "for which tensorrt has no kernel; possible are float, w8a8"),
    ],
)
def test_what_a_target_lacks(tools, graph_pass, message):
    with pytest.raises(KilnError, match=message):
        tools.apply(network(tools), graph_pass)


def test_a_transposed_activation_is_refused(tools):
    weights = tools.Weights()
    node = helper.make_node("Gemm", ["x", weights.normal("w", 6, 8)], ["y"], name="up", transA=1)
    model = tools.model([node], weights, [6, 5])
    with pytest.raises(KilnError, match=r"layer up .* its activation is transposed"):
        tools.apply(model, QuantizeWeights(plan("w8a16"), PLAIN))
