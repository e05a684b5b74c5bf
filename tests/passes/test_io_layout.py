"""Image inputs and outputs become channels-last; everything else about the interface stays."""

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from passes.graph import graph_from_proto
from passes.io_layout import IoLayoutNhwc
from passes.layout_nhwc import LayoutNhwc
from passes.shapes import infer_shapes

NHWC = [0, 2, 3, 1]
WEIGHTS = {"w": (4, 3, 3, 3), "v": (4, 3, 2, 2)}


def model(text: str) -> onnx.ModelProto:
    """Nodes after `x [n, 3, 8, 6]`, with weights `w` of a Conv and `v` of a ConvTranspose."""
    parsed = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]>\n{text}')
    rng = np.random.default_rng(0)
    for index, node in enumerate(parsed.graph.node):
        node.name = f"node{index}"
    used = {name for node in parsed.graph.node for name in node.input}
    for name, shape in WEIGHTS.items():
        if name in used:
            parsed.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=shape).astype("f4"), name))
    return parsed


def shapes(values) -> dict[str, list]:
    return {v.name: [d.dim_value or d.dim_param for d in v.type.tensor_type.shape.dim] for v in values}


def compare(tools, before: onnx.ModelProto, after: onnx.ModelProto, permuted: dict, feeds: dict[str, NDArray]) -> None:
    """The same bits, once inputs are permuted as told and outputs compared as told."""
    fed = {name: value.transpose(permuted[name]) if name in permuted else value for name, value in feeds.items()}
    fed = {name: np.ascontiguousarray(value) for name, value in fed.items()}
    names = [output.name for output in before.graph.output]
    for name, old, new in zip(names, tools.run(before, feeds), tools.run(after, fed), strict=True):
        np.testing.assert_array_equal(new, old.transpose(permuted[name]) if name in permuted else old)


def image(dtype: str = "f4") -> NDArray:
    return np.random.default_rng(1).uniform(0, 255, (2, 3, 8, 6)).astype(dtype)


SEGMENTER = """g (float[n, 3, 8, 6] x) => (float[n, 3, h, k] y) {
    a = Conv(x, w)
    b = Relu(a)
    c = ConvTranspose(b, v)
    y = Sigmoid(c)
}"""


def test_input_and_output_are_permuted_and_keep_their_names(tools) -> None:
    before, layout = model(SEGMENTER), IoLayoutNhwc()
    applied = tools.apply(before, layout)
    assert applied.ops == ["Transpose", "Conv", "Relu", "ConvTranspose", "Sigmoid", "Transpose"]
    assert layout.permuted == {"x": NHWC, "y": NHWC}
    assert shapes(applied.model.graph.input) == {"x": ["n", 8, 6, 3]}
    assert shapes(applied.model.graph.output)["y"][3] == 3
    compare(tools, before, applied.model, layout.permuted, {"x": image()})


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        (
            "(uint8[n, 3, 8, 6] x) => (float[n, 4, 6, 4] y) { a = Cast<to = 1>(x)\n b = Div(a, s)\n y = Conv(b, w) }",
            "u1",
        ),
        ("(float[n, 3, 8, 6] x) => (float[n, 4, 6, 4] y) { a = Sub(s, x)\n y = Conv(a, w) }", "f4"),
        (
            "(float[n, 3, 8, 6] x) => (float[n, 4, 6, 4] y) {"
            " q = QuantizeLinear(x, s)\n d = DequantizeLinear(q, s)\n y = Conv(d, w) }",
            "f4",
        ),
    ],
)
def test_ways_from_an_input_to_a_convolution(tools, text, dtype) -> None:
    before, layout = model(f"g {text.replace('{', '<float s = {2.5}> {', 1)}"), IoLayoutNhwc()
    applied = tools.apply(before, layout)
    assert layout.permuted == {"x": NHWC, "y": NHWC}
    assert applied.ops[0] == applied.ops[-1] == "Transpose"
    compare(tools, before, applied.model, layout.permuted, {"x": image(dtype)})


def test_all_readers_of_an_image_read_behind_its_transpose(tools) -> None:
    text = """g (float[n, 3, 8, 6] x) => (float[n, 4, 6, 4] y, int64[4] size, float[n, 4, 6, 4] z) {
        y = Conv(x, w)
        size = Shape(x)
        z = Neg(y)
    }"""
    before, layout = model(text), IoLayoutNhwc()
    applied = tools.apply(before, layout)
    assert applied.ops.count("Transpose") == 3
    assert layout.permuted == {"x": NHWC, "y": NHWC, "z": NHWC}
    compare(tools, before, applied.model, layout.permuted, {"x": image()})


@pytest.mark.parametrize(
    "text",
    [
        "(float[n, 3, 8, 6] x) => (float[n, 3, 8, 6] y) { y = Relu(x) }",
        "(float[1, 3, 8, 6] x) => (float[1, 3, 8, 6] y) { y = Softmax<axis = 1>(x) }",
        "(float[24, 48] x) => (float[m, 4, 6, 4] y) { a = Reshape(x, r)\n b = Conv(a, w)\n c = Flatten(b)\n"
        " y = Reshape(c, r) }",
        "(float[n, 8, 6, 3] x) => (float[n, 6, 4, 4] y) { a = Transpose<perm = [0, 3, 1, 2]>(x)\n b = Conv(a, w)\n"
        " y = Transpose<perm = [0, 2, 3, 1]>(b) }",
        "(int32[n, 3, 8, 6] x) => (int32[n, 4, 6, 4] y) { a = Cast<to = 1>(x)\n b = Conv(a, w)\n y = Cast<to = 6>(b) }",
        "(float[4, 3, 3, 3] k, float[m, 3] x) => (float[m] y) { y = ReduceSum<keepdims = 0>(x, o)\n t = Conv(f, k) }",
    ],
    ids=["no convolution", "softmax alone", "not images", "channels-last already", "other type", "weights"],
)
def test_left_alone(text) -> None:
    body = text.replace("{", "<int64[4] r = {1, 3, 8, 48}, int64[1] o = {1}, float[1, 3, 3, 3] f> {", 1)
    graph = graph_from_proto(model(f"g {body}"))
    infer_shapes(graph)
    layout = IoLayoutNhwc()
    assert not layout.call(graph).changed
    assert layout.permuted == {}


def test_input_that_is_an_output_too_stays() -> None:
    before = model("g (float[n, 3, 8, 6] x) => (float[n, 3, 8, 6] x, float[n, 4, 6, 4] y) { y = Conv(x, w) }")
    layout = IoLayoutNhwc()
    layout.call(graph_from_proto(before))
    assert layout.permuted == {"y": NHWC}


def test_convolution_inside_a_subgraph(tools) -> None:
    before, layout = tools.in_branch(model(SEGMENTER)), IoLayoutNhwc()
    applied = tools.apply(before, layout)
    assert layout.permuted == {"x": NHWC}
    assert applied.ops[0] == "Transpose"
    for flag in (True, False):
        compare(tools, before, applied.model, layout.permuted, {"x": image(), "flag": np.array(flag)})


def test_second_call_after_the_layout_pass_changes_nothing(tools) -> None:
    text = """g (uint8[n, 3, 8, 6] x) => (uint8[n, 4, 6, 4] y) <float s = {0.1}, uint8 z = {3}, int8 k = {0}> {
        q = Cast<to = 2>(x)
        y = QLinearConv(q, s, z, iw, s, k, s, z)
    }"""
    before, layout = model(text), IoLayoutNhwc()
    weights = np.random.default_rng(0).integers(-9, 9, (4, 3, 3, 3)).astype(np.int8)
    before.graph.initializer.append(onnx.numpy_helper.from_array(weights, "iw"))
    applied = tools.apply(before, layout)
    both = tools.apply(applied.model, LayoutNhwc("cpu-int8"))
    again = graph_from_proto(both.model)
    infer_shapes(again)
    assert not IoLayoutNhwc().call(again).changed
    compare(tools, before, both.model, layout.permuted, {"x": image("u1")})
