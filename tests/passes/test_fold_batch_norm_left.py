"""What must stay, and what the notes say."""

import numpy as np
import pytest
from onnx import TensorProto, helper

from passes.fold_batch_norm import FoldBatchNorm

node = helper.make_node
NORM = "BatchNormalization"
IMAGE = (2, 3, 6, 6)


def left(tools, model, run=True):
    """Asserts that nothing changes, here or in a branch; returns the notes."""
    applied = tools.apply(model, FoldBatchNorm())
    assert not applied.outcome.changed
    assert applied.ops == [n.op_type for n in model.graph.node]
    assert not tools.apply(tools.in_branch(model), FoldBatchNorm()).outcome.changed
    if run:
        tools.same_outputs(model, applied.model, tools.feeds(model))
    return applied.outcome.notes


def conv(weights, output="z", **attributes):
    return node("Conv", ["x", weights.normal("w", 4, 3, 3, 3)], [output], name="conv", **attributes)


def norm(weights, source, output, channels=4, **attributes):
    return node(NORM, [source, *weights.batch_norm("bn", channels)], [output], name="bn", **attributes)


def test_another_reader(tools):
    weights = tools.Weights()
    nodes = [conv(weights), norm(weights, "z", "y"), node("Relu", ["z"], ["r"])]
    notes = left(tools, tools.model(nodes, weights, IMAGE, outputs=("y", "r")))
    assert notes == ["bn (BatchNormalization): the output of Conv 'conv' has another reader or is a graph output"]


def test_an_output_between(tools):
    weights = tools.Weights()
    notes = left(tools, tools.model([conv(weights), norm(weights, "z", "y")], weights, IMAGE, outputs=("y", "z")))
    assert len(notes) == 1


@pytest.mark.parametrize("between", ["Relu", "Sigmoid", "Identity"])
def test_an_operator_between(tools, between):
    weights = tools.Weights()
    nodes = [conv(weights), node(between, ["z"], ["r"]), norm(weights, "r", "y")]
    assert not left(tools, tools.model(nodes, weights, IMAGE))


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_reader_in_a_branch_only(tools, norm_first):
    """One of the two is outside, its one reader in one branch of an If."""
    weights = tools.Weights()
    weights.normal("w", 3, 3, 1, 1)
    layers = [norm(weights, "x", "z", 3), node("Conv", ["x", "w"], ["z"])]
    outside, inside = layers if norm_first else layers[::-1]
    inside.input[0], inside.output[0] = "z", "y"
    inner = tools.in_branch(tools.model([inside], weights, IMAGE))
    branches = {attribute.name: attribute.g for attribute in inner.graph.node[0].attribute}
    branches["else_branch"].node[0].input[0] = "x"
    model = tools.model([outside, *inner.graph.node], weights, IMAGE)
    model.graph.input.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
    applied = tools.apply(model, FoldBatchNorm())
    assert not applied.outcome.changed
    tools.same_outputs(model, applied.model, tools.feeds(model))


def test_another_reader_in_front(tools):
    weights = tools.Weights()
    nodes = [norm(weights, "x", "n", 3), node("Relu", ["n"], ["r"])]
    nodes.append(node("Conv", ["n", weights.normal("w", 4, 3, 3, 3)], ["y"]))
    assert not left(tools, tools.model(nodes, weights, IMAGE, outputs=("y", "r")))


def test_a_constant_that_raises_the_rank_in_front(tools):
    weights = tools.Weights()
    nodes = [
        node("Mul", ["x", weights.normal("c", 1, 1, 1, 1)], ["m"]),
        node("Conv", ["m", weights.normal("w", 4, 3, 3, 3)], ["y"]),
    ]
    left(tools, tools.model(nodes, weights, IMAGE[1:], rank=4))


@pytest.mark.parametrize(
    "shape", [(4,), (1, 1, 4), (4, 1), (2, 1, 1, 1), (1, 1, 4, 4), (1, 1, 4, 1, 1), (1, 1, 1, 1, 1)]
)
def test_constants_that_are_not_per_channel(tools, shape):
    """The convolution's output is [2, 4, 4, 4], so a constant on the wrong axis fits by size."""
    weights = tools.Weights()
    nodes = [conv(weights), node("Mul", ["z", weights.normal("c", *shape)], ["y"])]
    left(tools, tools.model(nodes, weights, IMAGE, rank=max(4, len(shape))))


def test_a_constant_that_grows_the_channels(tools):
    weights = tools.Weights()
    nodes = [
        node("Conv", ["x", weights.normal("w", 1, 3, 1, 1)], ["z"]),
        node("Mul", ["z", weights.normal("c", 4, 1, 1)], ["y"]),
    ]
    left(tools, tools.model(nodes, weights, IMAGE))


def test_a_constant_that_grows_the_channels_in_front(tools):
    """One channel becomes three before the convolution; and an input of unknown size might."""
    weights = tools.Weights()
    nodes = [
        node("Mul", ["x", weights.normal("c", 3, 1, 1)], ["m"]),
        node("Conv", ["m", weights.normal("w", 4, 3, 3, 3)], ["y"]),
    ]
    left(tools, tools.model(nodes, weights, (2, 1, 6, 6)))
    assert not tools.apply(tools.model(nodes, weights, (2, "c", 6, 6)), FoldBatchNorm()).outcome.changed
    assert tools.apply(tools.model(nodes, weights, IMAGE), FoldBatchNorm()).ops == ["Conv"]


@pytest.mark.parametrize("op", ["Div", "Pow"])
def test_a_constant_over_the_activations(tools, op):
    weights = tools.Weights()
    nodes = [conv(weights), node(op, [weights.positive("c", 1), "z"], ["y"])]
    left(tools, tools.model(nodes, weights, IMAGE))


def test_division_by_zero(tools):
    weights = tools.Weights()
    nodes = [conv(weights), node("Div", ["z", weights.set("c", 0.0)], ["y"])]
    assert not left(tools, tools.model(nodes, weights, IMAGE))


def test_a_residual(tools):
    weights = tools.Weights()
    nodes = [node("Conv", ["x", weights.normal("w", 3, 3, 1, 1)], ["z"]), node("Add", ["z", "x"], ["y"])]
    left(tools, tools.model(nodes, weights, IMAGE))


def test_matmul_of_rank_three(tools):
    """The norm is over axis 1, the weight's outputs are the last axis."""
    weights = tools.Weights()
    nodes = [node("MatMul", ["x", weights.normal("w", 5, 4)], ["z"]), norm(weights, "z", "y")]
    left(tools, tools.model(nodes, weights, (2, 4, 5)))


def test_matmul_with_a_stack_of_weights(tools):
    weights = tools.Weights()
    nodes = [
        node("MatMul", ["x", weights.normal("w", 2, 5, 4)], ["z"]),
        node("Mul", ["z", weights.normal("s", 1)], ["y"]),
    ]
    left(tools, tools.model(nodes, weights, (2, 3, 5)))


def test_matmul_with_its_bias_only(tools):
    weights = tools.Weights()
    nodes = [node("MatMul", ["x", weights.normal("w", 5, 4)], ["z"]), node("Add", ["z", weights.normal("b", 4)], ["y"])]
    left(tools, tools.model(nodes, weights, (2, 4, 5)))


def test_matmul_of_unknown_rank(tools):
    """A constant of rank 2 might raise the rank of a vector's product."""
    weights = tools.Weights()
    nodes = [
        node("Reshape", ["x", "shape"], ["v"]),
        node("MatMul", ["v", weights.normal("w", 5, 4)], ["z"]),
        node("Mul", ["z", weights.normal("s", 1, 4)], ["y"]),
    ]
    model = tools.model(nodes, weights, (2, 5), rank=2)
    shape = helper.make_tensor_value_info("shape", TensorProto.INT64, [None])
    model.graph.input.append(shape)
    left(tools, model, run=False)


@pytest.mark.parametrize("op", ["MatMul", "Gemm"])
def test_constant_left_operand(tools, op):
    weights = tools.Weights()
    nodes = [node(op, [weights.normal("w", 4, 5), "x"], ["z"]), node("Mul", ["z", weights.normal("s", 1)], ["y"])]
    left(tools, tools.model(nodes, weights, (5, 3)))


@pytest.mark.parametrize(("weight", "bias"), [("given", "b"), ("w", "given")])
def test_computed_weights(tools, weight, bias):
    weights = tools.Weights()
    weights.normal("w", 4, 3, 3, 3)
    weights.normal("b", 4)
    nodes = [node("Conv", ["x", weight, bias], ["z"], name="conv"), norm(weights, "z", "y")]
    shape = [4, 3, 3, 3] if weight == "given" else [4]
    notes = left(tools, tools.model(nodes, weights, IMAGE, inputs={"given": shape}))
    what = "weight" if weight == "given" else "bias"
    assert notes == [f"bn (BatchNormalization): the {what} of Conv 'conv' is computed, expected a constant"]


def test_quantised_weights(tools):
    weights = tools.Weights()
    weights.tensors["q"] = helper.make_tensor("q", TensorProto.INT8, [4, 3, 1, 1], list(range(12)))
    nodes = [
        node("DequantizeLinear", ["q", weights.set("s", 0.1)], ["w"]),
        node("Conv", ["x", "w"], ["z"], name="conv"),
        norm(weights, "z", "y"),
    ]
    assert left(tools, tools.model(nodes, weights, IMAGE))


def test_computed_parameters(tools):
    weights = tools.Weights()
    names = weights.batch_norm("bn", 4)
    nodes = [conv(weights), node(NORM, ["z", "given", *names[1:]], ["y"], name="bn")]
    notes = left(tools, tools.model(nodes, weights, IMAGE, inputs={"given": [4]}))
    assert notes == [
        "bn (BatchNormalization): its scale 'given' is computed, expected a constant; fold constants first"
    ]


@pytest.mark.parametrize("op", ["ConvTranspose", "MatMul"])
def test_in_front_of_other_operators(tools, op):
    weights = tools.Weights()
    nodes = [norm(weights, "x", "n", 3), node(op, ["n", weights.normal("w", 3, 6)], ["y"])]
    shape = (2, 3)
    if op == "ConvTranspose":
        weights.normal("w", 3, 2, 3, 3)
        shape = IMAGE
    left(tools, tools.model(nodes, weights, shape))


@pytest.mark.parametrize("attributes", [{"pads": [0, 0, 0, 1]}, {"auto_pad": "SAME_UPPER"}])
def test_in_front_of_padding(tools, attributes):
    weights = tools.Weights()
    nodes = [norm(weights, "x", "n", 3), node("Conv", ["n", weights.normal("w", 4, 3, 3, 3)], ["y"], "c", **attributes)]
    (note,) = left(tools, tools.model(nodes, weights, IMAGE))
    assert "Conv 'c' behind it pads with zeros" in note


def test_alone(tools):
    weights = tools.Weights()
    assert not left(tools, tools.model([norm(weights, "x", "y", 3)], weights, IMAGE))


@pytest.mark.parametrize(
    ("opset", "outputs", "attributes"),
    [
        (15, ["y", "m", "v"], {"training_mode": 1}),
        (9, ["y", "m", "v", "sm", "sv"], {}),
        (13, ["y", "m", "v", "sm", "sv"], {}),
    ],
)
def test_training_mode(tools, opset, outputs, attributes):
    weights = tools.Weights()
    nodes = [conv(weights), node(NORM, ["z", *weights.batch_norm("bn", 4)], outputs, name="bn", **attributes)]
    applied = tools.apply(tools.model(nodes, weights, IMAGE, opset=opset), FoldBatchNorm())
    assert applied.ops == ["Conv", NORM]
    (note,) = applied.outcome.notes
    assert note.startswith("bn (BatchNormalization): it is in training mode")
    assert "model.eval()" in note


def test_outputs_of_training_outside_it(tools):
    weights = tools.Weights()
    nodes = [conv(weights), node(NORM, ["z", *weights.batch_norm("bn", 4)], ["y", "m", "v"], name="bn")]
    (note,) = tools.apply(tools.model(nodes, weights, IMAGE, opset=15), FoldBatchNorm()).outcome.notes
    assert "it has 3 outputs outside training mode, expected 1" in note


def test_statistics_of_each_element(tools):
    weights = tools.Weights()
    names = [weights.positive(part, 4, 4, 4) for part in ("scale", "bias", "mean", "variance")]
    nodes = [conv(weights), node(NORM, ["z", *names], ["y"], name="bn", spatial=0)]
    (note,) = tools.apply(tools.model(nodes, weights, IMAGE, opset=7), FoldBatchNorm()).outcome.notes
    assert "spatial=0" in note


@pytest.mark.parametrize(("value", "shown"), [(-1.0, "-0.5"), (-0.5, "0"), (np.nan, "nan"), (np.inf, "inf")])
def test_damaged_variance(tools, value, shown):
    weights = tools.Weights()
    nodes = [conv(weights), norm(weights, "z", "y", epsilon=0.5)]
    weights.set("bn_variance", [1.0, 2.0, value, 1.0])
    (note,) = left(tools, tools.model(nodes, weights, IMAGE), run=False)
    assert f"variance + epsilon of channel 2 is {shown}, expected a positive finite number" in note


@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
def test_overflow_of_half_weights(tools, op):
    """Channel 3 is the second of group 1."""
    weights = tools.Weights(kind=TensorProto.FLOAT16)
    weights.set("w", np.ones((4, 1, 1, 1) if op == "Conv" else (2, 2, 1, 1)))
    nodes = [node(op, ["x", "w"], ["z"], name="conv", group=2), norm(weights, "z", "y")]
    weights.set("bn_scale", [1.0, 1.0, 1.0, 60000.0])
    weights.set("bn_variance", [1.0, 1.0, 1.0, 0.25])
    (note,) = left(tools, tools.model(nodes, weights, (1, 2, 3, 3)), run=False)
    assert note.startswith(f"conv ({op}): the folded weight of channel 3 would be 11999")
    assert "float16 cannot hold" in note


def test_overflow_of_a_half_bias(tools):
    weights = tools.Weights(kind=TensorProto.FLOAT16)
    nodes = [conv(weights), norm(weights, "z", "y")]
    weights.set("bn_mean", [0.0, 60000.0, 0.0, 0.0])
    weights.set("bn_scale", [1.0, -2.0, 1.0, 1.0])
    weights.set("bn_variance", np.ones(4))
    (note,) = left(tools, tools.model(nodes, weights, IMAGE), run=False)
    assert "the folded bias of channel 1 would be 1" in note
