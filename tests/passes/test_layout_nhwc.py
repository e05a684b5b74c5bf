"""8-bit convolutional regions run channels-last with the same bits; the other targets leave the graph as it is."""

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from passes.base import Effect
from passes.graph import graph_from_proto
from passes.layout_nhwc import LayoutNhwc
from passes.shapes import infer_shapes

QCONV, UINT8, FLOAT = "com.microsoft::QLinearConv", TensorProto.UINT8, TensorProto.FLOAT
BORDERS = ["Transpose", QCONV, "Transpose"]


class Builder:
    """A small 8-bit model: nodes in order, constants by value."""

    def __init__(self, kind: int = UINT8) -> None:
        self.kind = kind
        self.dtype = helper.tensor_dtype_to_np_dtype(kind)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.rng = np.random.default_rng(0)
        self.scale, self.zero = self.constant(np.float32(0.05)), self.constant(np.array(7, self.dtype))

    def constant(self, values: NDArray) -> str:
        name = f"constant{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def node(self, op: str, inputs: Sequence[str], domain: str = "", **attrs: object) -> str:
        name = f"value{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name, domain=domain, **attrs))
        return name

    def contrib(self, op: str, inputs: Sequence[str], **attrs: object) -> str:
        return self.node(op, inputs, "com.microsoft", **attrs)

    @property
    def parameters(self) -> list[str]:
        return [self.scale, self.zero]

    def conv(self, x: str, inner: int = 4, outer: int = 4, group: int = 1, size: int = 3, **attrs: object) -> str:
        weights = self.rng.integers(-20, 20, (outer, inner // group, size, size)).astype(np.int8)
        scales = self.rng.uniform(0.01, 0.02, outer).astype(np.float32)
        bias = self.rng.integers(-99, 99, outer).astype(np.int32)
        kernel = map(self.constant, (weights, scales, np.zeros(outer, np.int8)))
        inputs = [x, *self.parameters, *kernel, *self.parameters, self.constant(bias)]
        return self.node("QLinearConv", inputs, **({"group": group, "pads": [size // 2] * 4} | attrs))

    def model(self, output: str, shape: Sequence[int] = (2, 4, 6, 5), kind: int | None = None) -> onnx.ModelProto:
        return helper.make_model(
            helper.make_graph(
                self.nodes,
                "g",
                [helper.make_tensor_value_info("x", self.kind, shape)],
                [helper.make_tensor_value_info(output, kind or self.kind, [None] * 4)],
                self.constants,
            ),
            opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)],
            ir_version=10,
        )


def image(kind: int = UINT8, shape: Sequence[int] = (2, 4, 6, 5)) -> dict[str, NDArray]:
    info = np.iinfo(helper.tensor_dtype_to_np_dtype(kind))
    return {"x": np.random.default_rng(3).integers(info.min, info.max + 1, shape).astype(info.dtype)}


@pytest.mark.parametrize("kind", [UINT8, TensorProto.INT8])
@pytest.mark.parametrize(
    "attrs",
    [{}, {"group": 4}, {"group": 2, "outer": 6}, {"size": 1}, {"strides": [2, 2]}, {"dilations": [2, 2], "outer": 3}],
    ids=str,
)
def test_convolution_is_converted_between_two_transposes(tools, kind, attrs) -> None:
    b = Builder(kind)
    model = b.model(b.conv("x", **attrs))
    applied = tools.apply(model, LayoutNhwc("cpu-int8"))
    assert applied.ops == BORDERS
    assert applied.outcome.rewrites == 1
    tools.same_outputs(model, applied.model, image(kind))


def test_auto_pad_and_contrib_spelling(tools) -> None:
    b = Builder()
    first = b.conv("x", pads=[0, 0, 0, 0], auto_pad="SAME_UPPER", strides=[2, 2])
    del b.nodes[-1].attribute[[a.name for a in b.nodes[-1].attribute].index("pads")]
    second = b.conv(first)
    b.nodes[-1].domain = "com.microsoft"
    model = b.model(second)
    applied = tools.apply(model, LayoutNhwc("cpu-int8"))
    assert applied.ops == ["Transpose", QCONV, QCONV, "Transpose"]
    tools.same_outputs(model, applied.model, image())


def _chains() -> dict[str, object]:
    """What stands between two convolutions and follows into their region."""

    def binary(op: str):
        def build(b: Builder, x: str) -> str:
            other = b.constant(b.rng.integers(0, 255, (4, 1, 1)).astype(np.uint8))
            return b.contrib(op, [x, *b.parameters, other, *b.parameters, *b.parameters])

        return build

    def through_float(*steps: tuple[str, dict, list[NDArray]]):
        def build(b: Builder, x: str) -> str:
            value = b.node("DequantizeLinear", [x, *b.parameters])
            for op, attrs, constants in steps:
                value = b.node(op, [value, *("" if c is None else b.constant(c) for c in constants)], **attrs)
            return b.node("QuantizeLinear", [value, *b.parameters])

        return build

    def per_axis(b: Builder, x: str) -> str:
        scales = b.constant(np.linspace(0.04, 0.06, 4, dtype=np.float32))
        zeros = b.constant(np.arange(4, dtype=np.uint8))
        value = b.node("DequantizeLinear", [x, scales, zeros], axis=-3)
        return b.node("QuantizeLinear", [value, scales, zeros], axis=1)

    def concat(b: Builder, x: str) -> str:
        joined = b.contrib("QLinearConcat", [*b.parameters, x, *b.parameters, x, *b.parameters], axis=1)
        return b.conv(joined, inner=8)

    def swapped_residual(b: Builder, x: str) -> str:
        return b.contrib("QLinearAdd", [b.conv(x), *b.parameters, x, *b.parameters, *b.parameters])

    def f32(*values: float) -> NDArray:
        return np.array(values, np.float32)

    def i64(*values: int) -> NDArray:
        return np.array(values, np.int64)

    channel = np.linspace(0.1, 1, 4, dtype=np.float32)
    split = {"num_outputs": 1, "axis": 1}
    return {
        "add": binary("QLinearAdd"),
        "mul": binary("QLinearMul"),
        "residual": swapped_residual,
        "sigmoid": lambda b, x: b.contrib("QLinearSigmoid", [x, *b.parameters, *b.parameters]),
        "leaky": lambda b, x: b.contrib("QLinearLeakyRelu", [x, *b.parameters, *b.parameters], alpha=0.1),
        "concat": concat,
        "8-bit concat": lambda b, x: b.conv(b.node("Concat", [x, x], axis=-3), inner=8),
        "max pool": lambda b, x: b.node("MaxPool", [x], kernel_shape=[3, 2], pads=[1, 0, 1, 1], strides=[2, 1]),
        "average pool": lambda b, x: b.contrib(
            "QLinearAveragePool", [x, *b.parameters, *b.parameters], kernel_shape=[2, 2], pads=[1, 1, 0, 0]
        ),
        "per axis": per_axis,
        "pad": lambda b, x: b.node("Pad", [x, b.constant(i64(0, 0, 1, 2, 0, 0, 3, 4)), b.zero]),
        "pad axes": lambda b, x: b.node("Pad", [x, b.constant(i64(1, 2, 3, 4)), b.zero, b.constant(i64(-2, -1))]),
        "slice": lambda b, x: b.node("Slice", [x, *map(b.constant, (i64(1, 0), i64(9, 9), i64(2, 3), i64(1, 2)))]),
        "split": lambda b, x: b.node("Split", [x], **split),
        "nearest": lambda b, x: b.node("Resize", [x, "", b.constant(f32(1, 1, 2, 3))]),
        "nearest axes": lambda b, x: b.node("Resize", [x, "", b.constant(f32(2, 3))], axes=[2, 3]),
        "nearest sizes": lambda b, x: b.node("Resize", [x, "", "", b.constant(i64(2, 4, 9, 10))]),
        "clip": through_float(("Clip", {}, [f32(0).reshape(()), f32(6).reshape(())])),
        "relu, hard swish": through_float(("Relu", {}, []), ("HardSwish", {}, [])),
        "per channel": through_float(("Mul", {}, [channel.reshape(1, 4, 1, 1)]), ("Add", {}, [channel[:, None, None]])),
        "per column": through_float(("Sub", {}, [np.linspace(0, 1, 5, dtype=np.float32)])),
        "scalar": through_float(("Div", {}, [f32(3)]), ("Pow", {}, [f32(2).reshape(())])),
        "slope": through_float(("PRelu", {}, [channel[:, None, None]])),
        "softmax": through_float(("Softmax", {"axis": 1}, [])),
        "linear": through_float(("Resize", {"mode": "linear"}, [None, f32(1, 1, 2, 1.5)])),
        "linear sizes": through_float(("Resize", {"mode": "linear"}, [None, None, i64(2, 4, 7, 7)])),
        "reduce": through_float(("ReduceMax", {}, [i64(1)])),
    }


CHAINS = _chains()


@pytest.mark.parametrize("name", CHAINS)
def test_nodes_between_convolutions_follow(tools, name) -> None:
    b = Builder()
    middle = CHAINS[name](b, b.conv("x"))
    model = b.model(b.conv(middle, inner=1 if name == "reduce" else 4))
    applied = tools.apply(model, LayoutNhwc("cpu-int8"))
    assert applied.ops.count("Transpose") == 2
    assert applied.ops[0] == applied.ops[-1] == "Transpose"
    assert applied.outcome.rewrites == len(model.graph.node)
    tools.same_outputs(model, applied.model, image())


def _strangers() -> dict[str, object]:
    """What stands between two convolutions and stays channels-first."""

    def float_op(op: str, *constants: NDArray, **attrs: object):
        def build(b: Builder, x: str) -> str:
            value = b.node("DequantizeLinear", [x, *b.parameters])
            value = b.node(op, [value, *("" if c is None else b.constant(c) for c in constants)], **attrs)
            return b.node("QuantizeLinear", [value, *b.parameters])

        return build

    scales = np.array([1, 1, 2, 2], np.float32)
    return {
        "float pool": float_op("MaxPool", kernel_shape=[2, 2]),
        "mean": float_op("ReduceMean", np.array([1]), keepdims=1),
        "cubic": float_op("Resize", None, scales, mode="cubic"),
        "antialias": float_op("Resize", None, 1 / scales, mode="linear", antialias=1),
        "8-bit linear": lambda b, x: b.node("Resize", [x, "", b.constant(scales)], mode="linear"),
        "reshape": lambda b, x: b.node("Reshape", [x, b.constant(np.array([2, 4, 5, 6]))]),
        "transpose": lambda b, x: b.node("Transpose", [x], perm=[0, 1, 3, 2]),
        "rank 5": lambda b, x: b.node(
            "Squeeze", [b.node("Add", [x, b.constant(np.ones((1, 1, 1, 1, 1), np.uint8))]), b.constant(np.array([0]))]
        ),
        "dynamic pads": lambda b, x: b.node("Pad", [x, b.node("Identity", [b.constant(np.zeros(8, np.int64))])]),
    }


STRANGERS = _strangers()


@pytest.mark.parametrize("name", [name for name in STRANGERS if name != "rank 5"])
def test_nodes_that_have_no_form_stay_between_borders(tools, name) -> None:
    b = Builder()
    middle = STRANGERS[name](b, b.conv("x"))
    model = b.model(b.conv(middle, inner=1 if name == "mean" else 4))
    applied = tools.apply(model, LayoutNhwc("cpu-int8"))
    assert applied.outcome.rewrites == 2
    assert applied.ops.count("Transpose") == 4 + (name == "transpose")
    assert applied.ops[:3] == BORDERS
    assert applied.ops[-3:] == BORDERS
    tools.same_outputs(model, applied.model, image())


def test_operands_of_other_ranks_stay() -> None:
    b = Builder()
    model = b.model(STRANGERS["rank 5"](b, b.conv("x")))
    graph = graph_from_proto(model)
    infer_shapes(graph)
    assert LayoutNhwc("cpu-int8").call(graph).rewrites == 1


def test_pool_at_the_end_follows_and_floats_at_the_rim_do_not(tools) -> None:
    b = Builder()
    pooled = b.contrib("QLinearGlobalAveragePool", [b.conv("x"), *b.parameters, *b.parameters])
    model = b.model(b.node("DequantizeLinear", [pooled, *b.parameters]), kind=FLOAT)
    applied = tools.apply(model, LayoutNhwc("cpu-int8"))
    pool = "com.microsoft::QLinearGlobalAveragePool"
    assert applied.ops == ["Transpose", QCONV, pool, "Transpose", "DequantizeLinear"]
    tools.same_outputs(model, applied.model, image())


def test_quantised_float_input_is_transposed_after_its_quantisation(tools) -> None:
    b = Builder()
    b.kind = FLOAT
    model = b.model(b.conv(b.node("QuantizeLinear", [b.node("Relu", ["x"]), *b.parameters])), kind=UINT8)
    applied = tools.apply(model, LayoutNhwc("cpu-int8"))
    assert applied.ops == ["Relu", "QuantizeLinear", *BORDERS]
    tools.same_outputs(model, applied.model, {"x": np.random.default_rng(0).normal(size=(2, 4, 6, 5)).astype("f4")})


def test_result_with_readers_of_both_layouts_gets_one_border(tools) -> None:
    b = Builder()
    shared = b.conv("x")
    flat = b.node("Flatten", [shared])
    model = b.model(b.conv(b.conv(shared)))
    model.graph.output.append(helper.make_tensor_value_info(flat, UINT8, None))
    model.graph.output.append(helper.make_tensor_value_info(shared, UINT8, None))
    applied = tools.apply(model, LayoutNhwc("cpu-int8"))
    assert sorted(applied.ops) == sorted([*BORDERS, QCONV, QCONV, "Transpose", "Flatten"])
    tools.same_outputs(model, applied.model, image())


def test_shapes_of_new_tensors_are_channels_last(tools) -> None:
    b = Builder()
    applied = tools.apply(b.model(b.conv(b.conv("x", strides=[2, 2]))), LayoutNhwc("cpu-int8"))
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in applied.model.graph.value_info}
    assert shapes["value0/nhwc"] == [2, 3, 3, 4]


def test_region_without_convolution_and_other_ranks_stay(tools) -> None:
    b = Builder()
    model = b.model(b.node("MaxPool", ["x"], kernel_shape=[2, 2]))
    assert not tools.apply(model, LayoutNhwc("cpu-int8")).outcome.changed
    b = Builder()
    weights = b.constant(np.ones((4, 4, 3), np.int8))
    inputs = ["x", *b.parameters, weights, b.scale, b.constant(np.int8(0)), *b.parameters]
    model = b.model(b.node("QLinearConv", inputs), shape=(2, 4, 6))
    model.graph.output[0].type.tensor_type.shape.dim.pop()
    assert not tools.apply(model, LayoutNhwc("cpu-int8")).outcome.changed


def test_subgraphs_are_converted_each_for_itself(tools) -> None:
    b = Builder()
    model = tools.in_branch(b.model(b.conv(b.conv("x"))))
    applied = tools.apply(model, LayoutNhwc("cpu-int8"))
    assert applied.ops == ["If", *["Transpose", QCONV, QCONV, "Transpose"] * 2]
    for flag in (True, False):
        tools.same_outputs(model, applied.model, {**image(), "flag": np.array(flag)})


def test_symbolic_batch(tools) -> None:
    b = Builder()
    model = b.model(b.contrib("QLinearAdd", [b.conv("x"), *b.parameters, "x", *b.parameters, *b.parameters]))
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    applied = tools.apply(model, LayoutNhwc("cpu-int8"))
    assert applied.ops == ["Transpose", QCONV, "com.microsoft::QLinearAdd", "Transpose"]
    tools.same_outputs(model, applied.model, image(shape=(3, 4, 6, 5)))


FP32 = """
    <ir_version: 10, opset_import: ["": 21]>
    g (float[n, 3, 8, 8] x, float16[1, 4, 8, 8] h, float[1, 2, 8, 8] m, float[4, 3, 3, 3] w, float16[4, 4, 1, 1] v)
        => (float[n, 4, 6, 6] y, float16[1, 4, 8, 8] z, float[1, 2, 8, 8] k) {
        c = Conv(x, w)
        y = Relu(c)
        z = Conv(h, v)
        k = Relu(m)
    }
"""


@pytest.mark.parametrize(
    ("target", "options", "formats"),
    [
        ("cpu", {}, {}),
        ("cuda", {"prefer_nhwc": "1"}, {}),
        ("tensorrt", {}, {"x": "HWC", "y": "HWC", "h": "HWC8", "z": "HWC8"}),
    ],
)
def test_other_targets_leave_the_graph_and_say_what_the_backend_does(tools, target, options, formats) -> None:
    layout = LayoutNhwc(target)
    applied = tools.apply(onnx.parser.parse_model(FP32), layout)
    assert applied.ops == ["Conv", "Relu", "Conv", "Relu"]
    assert "NCHW" in applied.outcome.notes[0]
    assert layout.provider_options == options
    assert layout.tensor_formats == formats


def test_convolutions_between_q_and_dq_are_noted(tools) -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        g (uint8[1, 3, 8, 8] x, float[4, 3, 1, 1] w) => (uint8[1, 4, 8, 8] y)
        <float s = {0.1}, uint8 z = {3}> {
            d = DequantizeLinear(x, s, z)
            c = Conv(d, w)
            y = QuantizeLinear(c, s, z)
        }
    """)
    outcome = tools.apply(model, LayoutNhwc("cpu-int8")).outcome
    assert not outcome.changed
    assert outcome.notes == ["1 convolutions left between DequantizeLinear and QuantizeLinear: fuse them before"]


def test_unknown_target_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of cpu, cpu-int8, cuda, tensorrt"):
        LayoutNhwc("gpu")
    assert LayoutNhwc("cpu").effect is Effect.EXACT
