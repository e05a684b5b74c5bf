"""What folds, and that it computes the same."""

import io

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from passes.fold_batch_norm import FoldBatchNorm

node = helper.make_node
NORM = "BatchNormalization"
LAYERS = {
    "conv1d": ("Conv", (4, 3, 3), (2, 3, 9), {}),
    "conv2d": ("Conv", (4, 3, 3, 2), (2, 3, 8, 7), {"pads": [1, 0, 1, 0], "strides": [2, 1]}),
    "conv3d": ("Conv", (4, 2, 1, 2, 2), (1, 2, 3, 4, 4), {}),
    "grouped": ("Conv", (6, 2, 3, 3), (2, 4, 7, 7), {"group": 2, "dilations": [2, 1]}),
    "depthwise": ("Conv", (8, 1, 3, 3), (2, 4, 7, 7), {"group": 4, "auto_pad": "SAME_UPPER"}),
    "transposed": ("ConvTranspose", (3, 4, 3, 3), (2, 3, 5, 5), {"strides": [2, 2], "output_padding": [1, 1]}),
    "transposed1d": ("ConvTranspose", (3, 4, 3), (2, 3, 5), {}),
    "transposed_grouped": ("ConvTranspose", (6, 2, 2, 3), (2, 6, 4, 4), {"group": 3, "pads": [1, 1, 0, 0]}),
    "gemm": ("Gemm", (5, 4), (3, 5), {"alpha": 0.5, "beta": 2.0}),
    "gemm_transposed": ("Gemm", (4, 5), (5, 3), {"transA": 1, "transB": 1}),
    "matmul": ("MatMul", (5, 4), (3, 5), {}),
}


def layer(weights, name, bias=False):
    """The node of a layer from x to z, its number of output channels, its rank and the input's shape."""
    op, shape, x_shape, attributes = LAYERS[name]
    group = attributes.get("group", 1)
    channels = {"ConvTranspose": shape[1] * group, "MatMul": shape[-1]}.get(op, shape[0])
    if op == "Gemm" and not attributes.get("transB"):
        channels = shape[1]
    inputs = ["x", weights.normal("w", *shape), *([weights.normal("b", channels)] if bias else [])]
    return node(op, inputs, ["z"], **attributes), channels, len(shape), x_shape


def check(tools, model, ops, tolerance=2e-6, rewrites=1, subgraph=True):
    """`ops` are left, outputs agree, and the same holds in both branches of an If."""
    applied = tools.apply(model, FoldBatchNorm())
    assert applied.ops == ops
    assert applied.outcome.rewrites == rewrites
    assert not applied.outcome.notes
    tools.same_outputs(model, applied.model, tools.feeds(model), tolerance)
    if subgraph:
        inside = tools.in_branch(model)
        applied_inside = tools.apply(inside, FoldBatchNorm())
        assert applied_inside.ops == ["If", *ops, *ops]
        tools.same_outputs(inside, applied_inside.model, tools.feeds(inside), tolerance)
    return applied


@pytest.mark.parametrize(("name", "bias"), [(n, b) for n in LAYERS for b in (False, True) if n != "matmul" or not b])
def test_folds_batch_norm_into_the_layer_before_it(tools, name, bias):
    weights = tools.Weights()
    first, channels, _, shape = layer(weights, name, bias)
    norm = node(NORM, ["z", *weights.batch_norm("bn", channels)], ["y"], epsilon=1e-3)
    model = tools.model([first, norm], weights, shape)
    check(tools, model, ["MatMul", "Add"] if name == "matmul" else [first.op_type])


@pytest.mark.parametrize("name", LAYERS)
def test_folds_a_decomposed_norm(tools, name):
    """Sub mean, Mul inverse deviation, Mul gamma, Add beta; operands of commutative operators on either side."""
    weights = tools.Weights()
    first, channels, rank, shape = layer(weights, name)
    trailing = [1] * (rank - 2)
    nodes = [
        first,
        node("Sub", ["z", weights.normal("mean", channels, *trailing)], ["z1"]),
        node("Mul", [weights.positive("inverse", 1, channels, *trailing), "z1"], ["z2"]),
        node("Mul", ["z2", weights.normal("gamma", channels, *trailing)], ["z3"]),
        node("Add", [weights.normal("beta", 1, channels, *trailing), "z3"], ["y"]),
    ]
    model = tools.model(nodes, weights, shape)
    check(tools, model, ["MatMul", "Add"] if name == "matmul" else [first.op_type])


@pytest.mark.parametrize("shape", [(), (1,), (4, 1, 1), (1, 4, 1, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize(
    ("op", "constant_first"),
    [("Mul", False), ("Mul", True), ("Add", True), ("Sub", False), ("Sub", True), ("Div", False)],
)
def test_folds_each_operator_in_each_shape(tools, op, constant_first, shape):
    weights = tools.Weights()
    first, *_, x_shape = layer(weights, "conv2d")
    constant = weights.positive("c", *shape)
    model = tools.model(
        [first, node(op, [constant, "z"] if constant_first else ["z", constant], ["y"])], weights, x_shape
    )
    check(tools, model, ["Conv"], subgraph=False)


def test_folds_a_norm_by_division_behind_another_norm(tools):
    weights = tools.Weights()
    first, channels, _, shape = layer(weights, "conv2d", bias=True)
    nodes = [
        first,
        node(NORM, ["z", *weights.batch_norm("one", channels)], ["z1"]),
        node(NORM, ["z1", *weights.batch_norm("two", channels)], ["z2"]),
        node("Div", ["z2", weights.positive("deviation", channels, 1, 1)], ["y"]),
    ]
    check(tools, tools.model(nodes, weights, shape), ["Conv"])


def test_matmul_keeps_one_bias(tools):
    """Rank 3, unknown to the pass: constants along the last axis fold, whatever the rank."""
    weights = tools.Weights()
    nodes = [
        node("MatMul", ["x", weights.normal("w", 5, 4)], ["z"]),
        node("Add", [weights.normal("b", 4), "z"], ["z1"]),
        node("Mul", ["z1", weights.normal("s", 4)], ["z2"]),
        node("Add", ["z2", weights.normal("t", 4)], ["y"]),
    ]
    check(tools, tools.model(nodes, weights, ("n", 3, 5)), ["MatMul", "Add"])


def test_a_scale_alone_adds_no_bias(tools):
    weights = tools.Weights()
    first, *_, shape = layer(weights, "matmul")
    check(tools, tools.model([first, node("Mul", ["z", weights.set("half", 0.5)], ["y"])], weights, shape), ["MatMul"])
    first, *_, shape = layer(weights, "conv2d")
    model = tools.model([first, node("Mul", ["z", weights.set("half", 0.5)], ["y"])], weights, shape)
    applied = check(tools, model, ["Conv"], tolerance=1e-12)
    assert len(applied.model.graph.node[0].input) == 2


def test_a_bias_that_cancels_is_cleared(tools):
    weights = tools.Weights()
    weights.set("b", [1.0, 2.0, 3.0, 4.0])
    first, *_, shape = layer(weights, "conv2d")
    first.input.append("b")
    model = tools.model(
        [first, node("Sub", ["z", weights.set("c", [[[1.0]], [[2.0]], [[3.0]], [[4.0]]])], ["y"])], weights, shape
    )
    check(tools, model, ["Conv"])


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (4,), (1, 4), (3, 4), (3, 1)])
def test_gemm_bias_of_any_broadcast(tools, shape):
    weights = tools.Weights()
    nodes = [
        node("Gemm", ["x", weights.normal("w", 5, 4), weights.normal("b", *shape)], ["z"], beta=0.5),
        node(NORM, ["z", *weights.batch_norm("bn", 4)], ["y"]),
    ]
    check(tools, tools.model(nodes, weights, (3, 5)), ["Gemm"])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["conv1d", "grouped", "conv3d"])
def test_folds_batch_norm_into_the_convolution_after_it(tools, name, bias):
    weights = tools.Weights()
    conv, _, _, shape = layer(weights, name, bias)
    conv.input[0], conv.output[0] = "n", "y"
    model = tools.model([node(NORM, ["x", *weights.batch_norm("bn", shape[1])], ["n"]), conv], weights, shape)
    check(tools, model, ["Conv"])


def test_padding_lets_only_a_scale_pass(tools):
    """Preprocessing in front of a padded convolution: the division folds, the subtraction of the mean stays."""
    weights = tools.Weights()
    conv, *_, shape = layer(weights, "conv2d")
    conv.input[0], conv.output[0] = "n", "y"
    nodes = [
        node("Sub", ["x", weights.normal("mean", 1, 3, 1, 1)], ["m"]),
        node("Div", ["m", weights.positive("deviation", 1, 3, 1, 1)], ["n"]),
        conv,
    ]
    check(tools, tools.model(nodes, weights, shape), ["Sub", "Conv"])


def test_same_padding_of_a_pointwise_kernel_adds_no_zeros(tools):
    weights = tools.Weights()
    nodes = [
        node(NORM, ["x", *weights.batch_norm("bn", 3)], ["n"]),
        node("Conv", ["n", weights.normal("w", 4, 3, 1, 1)], ["y"], auto_pad="SAME_LOWER", strides=[2, 2]),
    ]
    check(tools, tools.model(nodes, weights, (1, 3, 5, 6)), ["Conv"])


def test_a_norm_between_two_convolutions_goes_forward_into_the_first(tools):
    weights = tools.Weights()
    nodes = [
        node("Conv", ["x", weights.normal("w1", 4, 3, 3, 3)], ["z"]),
        node(NORM, ["z", *weights.batch_norm("bn", 4)], ["n"]),
        node("Conv", ["n", weights.normal("w2", 2, 4, 1, 1)], ["y"]),
    ]
    applied = check(tools, tools.model(nodes, weights, (1, 3, 6, 6)), ["Conv", "Conv"])
    assert applied.model.graph.node[1].input[1] == "w2"


def test_shared_weights_are_copied_only_for_the_rewritten_layer(tools):
    weights = tools.Weights()
    weights.normal("w", 4, 3, 3, 3)
    nodes = [
        node("Conv", ["x", "w"], ["z"]),
        node(NORM, ["z", *weights.batch_norm("bn", 4)], ["y"]),
        node("Conv", ["x", "w"], ["plain"]),
    ]
    model = tools.model(nodes, weights, (1, 3, 6, 6), outputs=("y", "plain"))
    applied = check(tools, model, ["Conv", "Conv"])
    kept = {tensor.name: numpy_helper.to_array(tensor) for tensor in applied.model.graph.initializer}
    assert sorted(kept) == ["w", "y/bias", "y/weight"]
    np.testing.assert_array_equal(kept["w"], numpy_helper.to_array(weights.tensors["w"]))


def test_a_pure_shift_leaves_the_weight_as_it_is(tools):
    weights = tools.Weights()
    first, *_, shape = layer(weights, "conv2d")
    model = tools.model([first, node("Add", ["z", weights.normal("b", 4, 1, 1)], ["y"])], weights, shape)
    assert "w" in [tensor.name for tensor in check(tools, model, ["Conv"]).model.graph.initializer]


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_half_weights_are_rounded_once(tools, kind):
    weights = tools.Weights(kind=kind)
    first, channels, _, shape = layer(weights, "conv2d", bias=True)
    names = weights.batch_norm("bn", channels)
    model = tools.model([first, node(NORM, ["z", *names], ["y"])], weights, shape, opset=22)
    w, b, gamma, beta, mean, variance = (
        numpy_helper.to_array(weights.tensors[name]).astype(np.float64) for name in ("w", "b", *names)
    )
    scale = gamma / np.sqrt(variance + np.float32(1e-5))
    dtype = np.float16 if kind == TensorProto.FLOAT16 else ml_dtypes.bfloat16
    applied = tools.apply(model, FoldBatchNorm())
    made = {tensor.name: tensor for tensor in applied.model.graph.initializer}
    assert {tensor.data_type for tensor in made.values()} == {kind}
    np.testing.assert_array_equal(
        numpy_helper.to_array(made["y/weight"]), (w * scale[:, None, None, None]).astype(dtype)
    )
    np.testing.assert_array_equal(numpy_helper.to_array(made["y/bias"]), ((b - mean) * scale + beta).astype(dtype))


@pytest.mark.parametrize("opset", [7, 8, 9, 13, 14, 15])
def test_old_opsets(tools, opset):
    weights = tools.Weights()
    first, channels, _, shape = layer(weights, "conv2d")
    attributes = {"spatial": 1} if opset < 9 else {}
    norm = node(NORM, ["z", *weights.batch_norm("bn", channels)], ["y"], **attributes)
    check(tools, tools.model([first, norm], weights, shape, opset=opset), ["Conv"], subgraph=opset >= 11)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_geometry(tools, data):
    """Convolutions of 1 to 3 axes, transposed or not, with a norm behind or in front."""
    draw = data.draw
    axes, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    kernel, strides, dilations = (draw(st.lists(st.integers(1, 3), min_size=axes, max_size=axes)) for _ in range(3))
    pads = draw(st.lists(st.integers(0, 2), min_size=2 * axes, max_size=2 * axes))
    inputs, outputs = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    transposed, front, bias = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    weights = tools.Weights(draw(st.integers(0, 99)))
    shape = (inputs * group, outputs, *kernel) if transposed else (outputs * group, inputs, *kernel)
    names = [weights.normal("w", *shape), *([weights.normal("b", outputs * group)] if bias else [])]
    norm = weights.batch_norm("bn", (inputs if front else outputs) * group)
    op = "ConvTranspose" if transposed else "Conv"
    attributes = {"group": group, "strides": strides, "dilations": dilations, "pads": pads}
    if front:
        nodes = [node(NORM, ["x", *norm], ["z"]), node(op, ["z", *names], ["y"], **attributes)]
    else:
        nodes = [node(op, ["x", *names], ["z"], **attributes), node(NORM, ["z", *norm], ["y"])]
    model = tools.model(nodes, weights, (2, inputs * group, *[7] * axes))
    applied = tools.apply(model, FoldBatchNorm())
    folds = not front or (not transposed and not any(pads))
    assert applied.ops == ([op] if folds else [n.op_type for n in nodes])
    tools.same_outputs(model, applied.model, tools.feeds(model), 5e-6)


def test_what_torch_exports(tools):
    """A Linear and a ConvTranspose with norms, from torch's exporter without its own folding."""
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, bias=False),
        torch.nn.BatchNorm2d(4),
        torch.nn.ConvTranspose2d(4, 6, 2, groups=2),
        torch.nn.BatchNorm2d(6),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(6, 5),
        torch.nn.BatchNorm1d(5),
    ).eval()
    for index in (1, 3, 7):
        module[index].running_var.uniform_(0.5, 2)
        module[index].running_mean.normal_()
    buffer = io.BytesIO()
    torch.onnx.export(
        module,
        (torch.rand(2, 3, 6, 6),),
        buffer,
        dynamo=False,
        training=torch.onnx.TrainingMode.PRESERVE,
        do_constant_folding=False,
        input_names=["x"],
    )
    model = onnx.load_from_string(buffer.getvalue())
    assert [n.op_type for n in model.graph.node].count(NORM) == 3
    applied = tools.apply(model, FoldBatchNorm())
    assert applied.outcome.rewrites == 3
    assert NORM not in applied.ops
    tools.same_outputs(model, applied.model, tools.feeds(model), 2e-6)
