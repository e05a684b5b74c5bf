"""Convolutions and pools between Q and DQ become integer operators."""

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

from passes.fuse_qdq import FuseQdq
from passes.layout_nhwc import LayoutNhwc

CONSTANTS: dict[str, NDArray] = {
    "s": np.array(0.05, np.float32),
    "t": np.array(0.1, np.float32),
    "z": np.array(128, np.uint8),
    "e": np.array(0, np.uint8),
    "i": np.array(3, np.int8),
    "w": np.random.default_rng(0).integers(-40, 40, (5, 4, 3, 3)).astype(np.int8),
    "uw": np.random.default_rng(0).integers(100, 140, (5, 4, 3, 3)).astype(np.uint8),
    "ws": np.linspace(0.01, 0.02, 5, dtype=np.float32),
    "wz": np.zeros(5, np.int8),
    "wd": np.arange(5, dtype=np.int8),
    "ws4": np.linspace(0.01, 0.02, 4, dtype=np.float32),
    "v": np.random.default_rng(1).normal(0, 0.4, (5, 4, 3, 3)).astype(np.float32),
    "b": np.arange(-2, 3, dtype=np.int32) * 300,
    "bs": np.float32(0.05) * np.linspace(0.01, 0.02, 5, dtype=np.float32),
    "bs1": np.array(0.007, np.float32),
    "fb": np.linspace(-1, 1, 5, dtype=np.float32),
    "huge": np.full(5, 1e9, np.float32),
    "zero": np.array(0, np.float32),
    "six": np.array(6, np.float32),
    "top": np.array(25.5, np.float32),
    "hw": np.array([3, -2], np.int64),
    "one": np.array([1], np.int64),
}
CONV = "d = DequantizeLinear(x, s, z)\n k = DequantizeLinear<axis = 0>(w, ws, wz)\n"
BIAS = "f = DequantizeLinear<axis = 0>(b, bs)\n"


def model(body: str, output: str = "uint8[n, m, h, k] y", source: str = "uint8[2, 4, 7, 6] x") -> onnx.ModelProto:
    parsed = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>\n g ({source}) => ({output}) {{ {body} }}'
    )
    used = {name for node in parsed.graph.node for name in node.input}
    parsed.graph.initializer.extend(onnx.numpy_helper.from_array(v, k) for k, v in CONSTANTS.items() if k in used)
    for index, node in enumerate(parsed.graph.node):
        node.name = f"node{index}"
    return parsed


def run_optimised(given: onnx.ModelProto, feeds: dict[str, NDArray]) -> NDArray:
    """As ONNX Runtime runs it by itself, its own fusion of Q/DQ included."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = onnxruntime.InferenceSession(given.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


def image(dtype: str = "u1") -> dict[str, NDArray]:
    return {"x": np.random.default_rng(2).integers(0, 256, (2, 4, 7, 6)).astype(dtype)}


def assert_one_step(tools, before: onnx.ModelProto, after: onnx.ModelProto, feeds: dict[str, NDArray]) -> None:
    """At most one step from the floating-point graph, and nearly always none."""
    old, new = (tools.run(each, feeds)[0].astype(int) for each in (before, after))
    assert np.abs(old - new).max() <= 1
    assert np.mean(old != new) < 0.02


@pytest.mark.parametrize(
    "body",
    [
        f"{CONV} c = Conv(d, k)\n y = QuantizeLinear(c, t, z)",
        f"{CONV}{BIAS} c = Conv<pads = [1, 1, 1, 1], strides = [2, 1]>(d, k, f)\n y = QuantizeLinear(c, t, z)",
        f"{CONV} c = Conv(d, k, fb)\n y = QuantizeLinear(c, t, z)",
        "d = DequantizeLinear(x, s)\n k = DequantizeLinear(uw, t, z)\n c = Conv(d, k)\n y = QuantizeLinear(c, t, z)",
        f"{CONV}{BIAS} c = Conv(d, k, f)\n r = Relu(c)\n y = QuantizeLinear(r, t, e)",
        f"{CONV}{BIAS} c = Conv(d, k, f)\n r = Clip(c, zero, top)\n y = QuantizeLinear(r, s, e)",
        f"{CONV}{BIAS} c = Conv(d, k, f)\n r = Clip(c, zero)\n y = QuantizeLinear(r, t, e)",
        "d = DequantizeLinear(x, s, z)\n q = QuantizeLinear<axis = 0>(v, ws, wz)\n"
        "k = DequantizeLinear<axis = 0>(q, ws, wz)\n c = Conv(d, k)\n y = QuantizeLinear(c, t, z)",
        "d = DequantizeLinear(x, s, z)\n q = QuantizeLinear(v, bs1, i)\n"
        "k = DequantizeLinear(q, bs1, i)\n c = Conv(d, k)\n y = QuantizeLinear(c, t, z)",
    ],
    ids=[
        "plain",
        "bias",
        "float bias",
        "uint8 weights",
        "relu",
        "clip",
        "clip from below",
        "Q of weights",
        "Q of weights per tensor",
    ],
)
def test_convolution(tools, body) -> None:
    before = model(body)
    applied = tools.apply(before, FuseQdq())
    assert applied.ops == ["QLinearConv"]
    assert_one_step(tools, before, applied.model, image())
    both = tools.apply(applied.model, LayoutNhwc("cpu-int8"))
    np.testing.assert_array_equal(run_optimised(both.model, image()), run_optimised(applied.model, image()))


def test_gives_the_bits_of_the_runtimes_own_fusion(tools) -> None:
    before = model(f"{CONV}{BIAS} c = Conv(d, k, f)\n y = QuantizeLinear(c, t, z)")
    applied = tools.apply(before, FuseQdq())
    np.testing.assert_array_equal(run_optimised(before, image()), tools.run(applied.model, image())[0])


def test_int8_activations(tools) -> None:
    body = f"{CONV} c = Conv(d, k)\n y = QuantizeLinear(c, t, i)".replace("(x, s, z)", "(x, s, i)")
    before = model(body, "int8[n, m, h, k] y", "int8[2, 4, 7, 6] x")
    applied = tools.apply(before, FuseQdq())
    assert applied.ops == ["QLinearConv"]
    assert_one_step(tools, before, applied.model, image("i1"))


@pytest.mark.parametrize(
    ("pool", "op"),
    [
        ("GlobalAveragePool(d)", "com.microsoft::QLinearGlobalAveragePool"),
        ("ReduceMean<keepdims = 1>(d, hw)", "com.microsoft::QLinearGlobalAveragePool"),
        ("AveragePool<kernel_shape = [3, 2], pads = [1, 0, 1, 1]>(d)", "com.microsoft::QLinearAveragePool"),
        (
            "AveragePool<kernel_shape = [2, 2], pads = [1, 1, 0, 0], count_include_pad = 1, strides = [2, 2]>(d)",
            "com.microsoft::QLinearAveragePool",
        ),
    ],
)
def test_average_pools(tools, pool, op) -> None:
    before = model(f"d = DequantizeLinear(x, s, z)\n c = {pool}\n y = QuantizeLinear(c, t, e)")
    applied = tools.apply(before, FuseQdq())
    assert applied.ops == [op]
    assert_one_step(tools, before, applied.model, image())


def test_max_pool_is_exact(tools) -> None:
    before = model(
        "d = DequantizeLinear(x, s, z)\n c = MaxPool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(d)\n"
        "y = QuantizeLinear(c, s, z)"
    )
    applied = tools.apply(before, FuseQdq())
    assert applied.ops == ["MaxPool"]
    tools.same_outputs(before, applied.model, image())


@pytest.mark.parametrize(
    "body",
    [
        f"{CONV} c = Conv(d, k)\n r = Relu(c)\n y = QuantizeLinear(r, t, z)",
        f"{CONV} c = Conv(d, k)\n r = Clip(c, zero, six)\n y = QuantizeLinear(r, t, e)",
        f"{CONV} c = Conv(d, k)\n r = LeakyRelu(c)\n y = QuantizeLinear(r, t, e)",
        f"{CONV} c = Conv(d, d)\n y = QuantizeLinear(c, t, z)",
        f"{CONV} c = Conv(d, k)\n a = Abs(s)\n y = QuantizeLinear(c, a, z)",
        f"{CONV} c = Conv(d, k)\n q = QuantizeLinear(c, t, z)\n e2 = QuantizeLinear(c, s, z)\n y = Max(q, e2)",
        "d = DequantizeLinear(x, s, z)\n c = MaxPool<kernel_shape = [3, 3]>(d)\n y = QuantizeLinear(c, t, z)",
        "d = DequantizeLinear(x, s, z)\n c = AveragePool<kernel_shape = [2, 2], dilations = [2, 2]>(d)\n"
        " y = QuantizeLinear(c, t, z)",
        "d = DequantizeLinear(x, s, z)\n c = ReduceMean<keepdims = 1>(d, one)\n y = QuantizeLinear(c, t, z)",
        "d = DequantizeLinear<axis = 1>(x, ws4)\n c = GlobalAveragePool(d)\n y = QuantizeLinear(c, t, z)",
    ],
    ids=[
        "relu changes values",
        "clip changes values",
        "other activation",
        "variable weights",
        "variable scale",
        "two readers",
        "max pool rescaled",
        "dilated pool",
        "mean over channels",
        "per-channel activations",
    ],
)
def test_near_misses_stay(tools, body) -> None:
    assert not tools.apply(model(body), FuseQdq()).outcome.changed


def test_intermediate_outputs_stay(tools) -> None:
    before = model(f"{CONV} c = Conv(d, k)\n y = QuantizeLinear(c, t, z)", "uint8[n, m, h, k] y, float[n, m, h, k] c")
    assert not tools.apply(before, FuseQdq()).outcome.changed


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("<axis = 0>(w, ws, wz)", "<axis = 1>(w, ws4)", "along axis 1 by [4] scales"),
        ("(w, ws, wz)", "(w, ws, wd)", "zero point per channel"),
        ("Conv(d, k)", "Conv(d, k, huge)", "does not fit an int32"),
        ("c = Conv(d, k)", "f = DequantizeLinear<axis = 0>(b, ws)\n c = Conv(d, k, f)", "x_scale * w_scale"),
        ("c = Conv(d, k)", "f = Abs(fb)\n c = Conv(d, k, f)", "bias is not constant"),
    ],
)
def test_refusals_say_what_offends(tools, old, new, reason) -> None:
    body = f"{CONV} c = Conv(d, k)\n y = QuantizeLinear(c, t, z)".replace(old, new)
    outcome = tools.apply(model(body), FuseQdq()).outcome
    assert not outcome.changed
    assert reason in outcome.notes[0]


def test_inside_a_subgraph(tools) -> None:
    before = tools.in_branch(model(f"{CONV}{BIAS} c = Conv(d, k, f)\n y = QuantizeLinear(c, t, z)"))
    applied = tools.apply(before, FuseQdq())
    assert applied.ops == ["If", "QLinearConv", "QLinearConv"]
    assert_one_step(tools, before, applied.model, {**image(), "flag": np.array(True)})
