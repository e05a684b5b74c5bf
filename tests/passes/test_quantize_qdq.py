"""Static quantisation: what gets Q and D on each target, how far outputs move, and that integer kernels run."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from passes.fuse_qdq import FuseQdq
from passes.quantization.insert_qdq import InsertQdq
from passes.quantization.plan import LayerPlan, PrecisionPlan
from passes.quantization.qdq import activation_parameters
from passes.quantization.rescale import Rescaled
from passes.quantization.smooth_quant import SmoothQuant
from passes.quantization.table import Range
from plugins.errors import KilnError
from tests.passes.quantize_models import after, calibrated, distance, loaded_operators, moments_of, transformer


def plan(*layers: str, scheme: str = "w8a8", **options) -> PrecisionPlan:
    return PrecisionPlan("m", {layer: LayerPlan(scheme, **options) for layer in layers})


def convnet(tools) -> onnx.ModelProto:
    """As EfficientNet has it: stem, depthwise, projection, a residual block, mean over the image, classifier."""
    weights, make = tools.Weights(), helper.make_node

    def conv(name: str, source: str, result: str, shape: list[int], **attrs) -> onnx.NodeProto:
        kernel = weights.set(f"{name}.w", weights.random.normal(size=shape) / np.sqrt(np.prod(shape[1:])))
        bias = weights.set(f"{name}.b", weights.random.normal(size=shape[0]) * 0.3)
        return make("Conv", [source, kernel, bias], [result], name=name, **attrs)

    six = [weights.set("zero", 0.0), weights.set("six", 6.0)]
    nodes = [
        conv("stem", "x", "c0", [8, 3, 3, 3], pads=[1] * 4, strides=[2, 2]),
        make("Clip", ["c0", *six], ["r0"]),
        conv("depthwise", "r0", "c1", [8, 1, 3, 3], pads=[1] * 4, group=8),
        make("Relu", ["c1"], ["r1"]),
        conv("project", "r1", "p0", [4, 8, 1, 1]),
        conv("expand", "p0", "c2", [12, 4, 1, 1]),
        make("Clip", ["c2", *six], ["r2"]),
        conv("back", "r2", "p1", [4, 12, 1, 1]),
        make("Add", ["p1", "p0"], ["sum"]),
        conv("head", "sum", "c3", [16, 4, 1, 1]),
        make("Clip", ["c3", *six], ["r3"]),
        make("ReduceMean", ["r3", "axes"], ["mean"], keepdims=1),
        make("Reshape", ["mean", "flat"], ["rows"]),
        make("Gemm", ["rows", weights.normal("fc.w", 10, 16), weights.normal("fc.b", 10)], ["y"], name="fc", transB=1),
    ]
    model = tools.model(nodes, weights, [2, 3, 16, 16], opset=21, rank=2)
    for name, values in {"axes": [2, 3], "flat": [0, 16]}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(values, np.int64), name))
    return model


CONVNET = ("stem", "depthwise", "project", "expand", "back", "head", "fc")


@pytest.fixture(scope="module")
def network(tools):
    model = convnet(tools)
    feeds = tools.feeds(model)
    return model, feeds, calibrated(tools, model, feeds)


def test_a_whole_convnet_stays_in_integers_on_a_cpu(tools, network, tmp_path):
    model, feeds, table = network
    applied = tools.apply(model, InsertQdq(plan(*CONVNET), table))
    assert applied.outcome.rewrites == 7
    quantised = after(model, [InsertQdq(plan(*CONVNET), table)])
    assert distance(tools, model, quantised, feeds) < 0.03
    operators = loaded_operators(quantised, str(tmp_path))
    others = ["QuantizeLinear", "QLinearAdd", "QLinearGlobalAveragePool", "Reshape", "MatMulIntegerToFloat"]
    assert sorted(op for op in operators if op != "Transpose") == sorted([*others, *["QLinearConv"] * 6])
    fused = after(quantised, [FuseQdq()])
    assert distance(tools, model, fused, feeds) < 0.03


def test_layers_that_are_kept_stay_float(tools, network, tmp_path):
    model, feeds, table = network
    kept = plan(*CONVNET[1:-1])
    quantised = after(model, [InsertQdq(kept, table)])
    operators = loaded_operators(quantised, str(tmp_path))
    assert operators.count("QLinearConv") == 5
    assert operators.count("ReduceMean") == 1  # the float classifier gets a float mean
    assert {"Conv", "Gemm"} <= {op.removeprefix("Fused") for op in operators}
    assert distance(tools, model, quantised, feeds) < 0.03


def test_tensorrt_gets_symmetric_int8_and_the_other_summand(tools, network):
    model, feeds, table = network
    applied = tools.apply(model, InsertQdq(plan(*CONVNET), table, "tensorrt"))
    assert applied.ops.count("QuantizeLinear") == 7  # one for each tensor that enters layers, p0 also for the sum
    nodes = {node.output[0]: node for node in applied.model.graph.node}
    assert nodes["sum"].input[0] == "p1"
    assert nodes[nodes["sum"].input[1]].op_type == "DequantizeLinear"
    stored = {t.name: t for t in applied.model.graph.initializer}
    for node in applied.model.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            zero = onnx.numpy_helper.to_array(stored[node.input[2]])
            assert zero.dtype == np.int8
            assert not zero.any()
    (fc,) = [node for node in applied.model.graph.node if node.name == "fc"]
    assert fc.input[2] == "fc.b"
    assert stored["y/weight/stored"].data_type == TensorProto.INT8
    assert distance(tools, model, applied.model, feeds) < 0.05


@pytest.mark.parametrize("scheme", ["w8a8", "fp8"])
@pytest.mark.parametrize("rank", [2, 3])
def test_products_on_gpus(tools, scheme, rank):
    model = transformer(tools, rank)
    feeds = tools.feeds(model)
    wanted = plan("up", "gate", "down", scheme=scheme)
    applied = tools.apply(model, InsertQdq(wanted, calibrated(tools, model, feeds), "tensorrt"))
    assert applied.ops.count("QuantizeLinear") == 2
    assert applied.ops.count("DequantizeLinear") == 2 + 3
    assert applied.ops.count("MatMul") == 3
    assert 1e-3 < distance(tools, model, applied.model, feeds) < (0.12 if scheme == "fp8" else 0.03)


def test_int8_and_fp8_readers_of_one_activation(tools):
    model = transformer(tools)
    feeds = tools.feeds(model)
    wanted = PrecisionPlan("m", {"up": LayerPlan("w8a8"), "gate": LayerPlan("fp8")})
    applied = tools.apply(model, InsertQdq(wanted, calibrated(tools, model, feeds), "tensorrt"))
    assert applied.ops.count("QuantizeLinear") == 2
    assert distance(tools, model, applied.model, feeds) < 0.12


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_products_on_a_cpu_run_in_integers(tools, rank, bias, tmp_path):
    model = transformer(tools, rank, bias=bias)
    feeds = tools.feeds(model)
    applied = tools.apply(model, InsertQdq(plan("up", "gate", "down"), calibrated(tools, model, feeds)))
    assert applied.ops.count("com.microsoft::MatMulIntegerToFloat") == 3
    assert applied.ops.count("QuantizeLinear") == 2
    assert "DequantizeLinear" not in applied.ops
    assert applied.ops.count("Add") == (1 if bias else 2)
    assert 1e-3 < distance(tools, model, applied.model, feeds) < 0.03
    assert loaded_operators(applied.model, str(tmp_path)).count("MatMulIntegerToFloat") == 3


@pytest.mark.parametrize("kernels", ["cpu", "tensorrt"])
def test_gemms_with_factors_and_either_layout(tools, kernels):
    for turned in (0, 1):
        weights = tools.Weights()
        w = weights.normal("w", *((24, 32) if turned else (32, 24)))
        node = helper.make_node("Gemm", ["x", w, weights.normal("b", 24)], ["y"], transB=turned, alpha=0.5, beta=3.0)
        model = tools.model([node], weights, [7, 32], opset=21)
        feeds = tools.feeds(model)
        applied = tools.apply(model, InsertQdq(plan("Gemm_0"), calibrated(tools, model, feeds), kernels))
        assert applied.outcome.rewrites == 1
        assert distance(tools, model, applied.model, feeds) < 0.02


def test_gptq_and_smoothing_go_together(tools):
    """A channel a hundred times as large as the others: lost without smoothing, kept with it; moments follow."""
    model = transformer(tools)
    gamma = next(t for t in model.graph.initializer if t.name == "gamma")
    values = onnx.numpy_helper.to_array(gamma).copy()
    values[3] *= 100
    gamma.CopyFrom(onnx.numpy_helper.from_array(values, "gamma"))
    feeds = tools.feeds(model)
    table, moments = calibrated(tools, model, feeds), moments_of(tools, model, feeds)
    wanted = plan("up", "gate", smooth=0.5, rounding="gptq")
    rescaled = Rescaled()
    smoothed = after(model, [SmoothQuant(wanted, table, rescaled), InsertQdq(wanted, table, "cpu", moments, rescaled)])
    plain = after(model, [InsertQdq(plan("up", "gate"), table)])
    assert distance(tools, model, smoothed, feeds) < 0.5 * distance(tools, model, plain, feeds)


def test_embeddings_that_are_the_last_weight_too(tools):
    weights, make = tools.Weights(), helper.make_node
    nodes = [
        make("Gather", [weights.normal("table", 40, 16), "ids"], ["e"]),
        make("Add", ["e", "x"], ["h"]),
        make("Transpose", ["table"], ["turned"], perm=[1, 0]),
        make("MatMul", ["h", "turned"], ["y"], name="lm_head"),
    ]
    model = tools.model(nodes, weights, [3, 16], opset=21)
    model.graph.input.append(helper.make_tensor_value_info("ids", TensorProto.INT64, [3]))
    feeds = {"x": np.random.default_rng(0).normal(size=(3, 16)).astype(np.float32), "ids": np.array([0, 5, 39])}
    quantised = after(model, [InsertQdq(plan("lm_head"), calibrated(tools, model, feeds))])
    kinds = {t.name: t.data_type for t in quantised.graph.initializer}
    assert kinds["table"] == TensorProto.FLOAT
    assert "Transpose" not in [node.op_type for node in quantised.graph.node]
    assert distance(tools, model, quantised, feeds) < 0.02


def test_a_bias_far_above_the_weights_fits_its_integers(tools):
    weights = tools.Weights()
    kernel = weights.random.normal(size=(4, 3, 1, 1))
    kernel[1], kernel[2] = 0, 1e-7
    node = helper.make_node("Conv", ["x", weights.set("w", kernel), weights.set("b", [1, 2, 300, 0])], ["y"], name="c")
    model = tools.model([node], weights, [1, 3, 4, 4], opset=21)
    feeds = tools.feeds(model)
    quantised = after(model, [InsertQdq(plan("c"), calibrated(tools, model, feeds))])
    np.testing.assert_allclose(tools.run(quantised, feeds)[0][:, 1:3], tools.run(model, feeds)[0][:, 1:3], rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"scheme": "fp8"},
            r"layer up \(MatMul\) is planned as fp8, for which cpu has no kernel; possible are float, w8a",
        ),
        ({"scheme": "w8a8", "group_size": 16}, r"planned as w8a8 with groups of 16; cpu takes 0, which is one scale"),
        ({"scheme": "w8a8", "rounding": "gptq"}, r"layer up is planned with GPTQ, which needs the second moments"),
    ],
)
def test_plans_that_cannot_be_met(tools, change, message):
    model = transformer(tools)
    with pytest.raises(KilnError, match=message):
        tools.apply(model, InsertQdq(plan("up", **change), calibrated(tools, model, tools.feeds(model))))


def test_old_opsets_and_missing_ranges_are_refused(tools, network):
    model = transformer(tools, opset=17)
    table = calibrated(tools, model, tools.feeds(model))
    with pytest.raises(KilnError, match="layer up is planned as fp8, which needs opset 19; the model has 17"):
        tools.apply(model, InsertQdq(plan("up", scheme="fp8"), table, "cuda"))
    del network[2].tensors["p1"]  # type: ignore[attr-defined]
    with pytest.raises(KilnError, match="no range of 'p1', which is stored in 8 bits too"):
        tools.apply(network[0], InsertQdq(plan(*CONVNET), network[2]))


def test_parameters_hold_zero_and_stay_within_bounds():
    found = activation_parameters(Range(1.0, 3.0), "uint8")
    assert float(found.scale) * -int(found.zero) == 0
    clipped = activation_parameters(Range(-1.0, 9.0), "uint8", (0.0, 6.0))
    assert 0 < 6 - float(clipped.scale) * 255 < 1e-5
    assert activation_parameters(Range(-2.0, 1.0), "int8").scale == np.float32(2 / 127)
    assert activation_parameters(Range(0.0, 0.0), "int8").scale == 1
