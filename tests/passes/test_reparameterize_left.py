"""What must stay apart, and what the notes say."""

import numpy as np
import pytest
from onnx import TensorProto, helper

from passes.reparameterize import Reparameterize

node = helper.make_node
IMAGE = (2, 4, 6, 6)
SAME = {"pads": [1, 1, 1, 1]}


def conv(weights, name, *kernel, outputs=4, source="x", **attributes):
    inputs = [source, weights.normal(f"{name}_w", outputs, 4 // attributes.get("group", 1), *kernel)]
    return node("Conv", inputs, [name], name=name, **attributes)


def left(tools, nodes, weights, run=True, **options):
    """Asserts that nothing changes, here or in a branch; returns the notes."""
    model = tools.model(nodes, weights, options.pop("shape", IMAGE), **options)
    applied = tools.apply(model, Reparameterize())
    assert not applied.outcome.changed
    assert sorted(applied.ops) == sorted(n.op_type for n in nodes)
    assert not tools.apply(tools.in_branch(model), Reparameterize()).outcome.changed
    if run:
        tools.same_outputs(model, applied.model, tools.feeds(model))
    return applied.outcome.notes


def pair(weights, first, second):
    """Two branches and their sum."""
    return [
        conv(weights, "a", 3, 3, **first),
        conv(weights, "b", 1, 1, **second),
        node("Add", ["a", "b"], ["y"], name="s"),
    ]


def test_other_strides(tools):
    """Equal sizes all the same: 6 -> 2 by steps of 2 and by a crop of 4."""
    weights = tools.Weights()
    nodes = [
        conv(weights, "a", 3, 3, strides=[2, 2]),
        conv(weights, "b", 5, 5),
        node("Add", ["a", "b"], ["y"], name="s"),
    ]
    (note,) = left(tools, nodes, weights)
    assert note.startswith("s (Add): it adds 'b' and 'a', but neither window holds the other")
    assert "strides=(2, 2)" in note


def test_a_stride_that_leaves_one_pixel(tools):
    """Both windows give 6 at stride 1; at stride 6 the one pixel is broadcast over the other's output."""
    weights = tools.Weights()
    assert left(tools, pair(weights, {"strides": [6, 6], **SAME}, {}), weights)


def test_other_group(tools):
    weights = tools.Weights()
    (note,) = left(tools, pair(weights, SAME, {"group": 2}), weights)
    assert note == "s (Add): it adds 'a' and 'b', with group 1 and 2, expected equal ones"


@pytest.mark.parametrize(
    "second",
    [
        {"pads": [0, 0, 0, 0]},
        {"pads": [2, 1, 0, 1]},
        {"pads": [0, 1, 2, 1]},
        {"pads": [2, 2, 2, 2]},
    ],
)
def test_padding_that_does_not_fit(tools, second):
    """A 1x1 kernel over a 3x3 without padding must crop, which padding cannot say; and taps beside the host's."""
    weights = tools.Weights()
    first = {"pads": [0, 0, 0, 0]} if second["pads"] == [2, 2, 2, 2] else SAME
    nodes = [conv(weights, "a", 1, 1, **first), conv(weights, "b", 3, 3, **second), node("Add", ["a", "b"], ["y"])]
    assert left(tools, nodes, weights, run=False)


def test_broadcast_by_accident(tools):
    """One output row against many: the addition runs, but it is no sum of kernels."""
    weights = tools.Weights()
    nodes = [conv(weights, "a", 3, 3), conv(weights, "b", 1, 1), node("Add", ["a", "b"], ["y"])]
    left(tools, nodes, weights, shape=(1, 4, 3, 3))


def test_taps_between_the_hosts(tools):
    """Dilation 3 does not fall on every second tap."""
    weights = tools.Weights()
    nodes = [
        conv(weights, "a", 4, 4, pads=[3] * 4, dilations=[2, 2]),
        conv(weights, "b", 3, 3, pads=[3] * 4, dilations=[3, 3]),
        node("Add", ["a", "b"], ["y"]),
    ]
    left(tools, nodes, weights)


@pytest.mark.parametrize("between", ["Relu", "Sigmoid"])
def test_an_activation_between(tools, between):
    weights = tools.Weights()
    nodes = [
        conv(weights, "a", 3, 3, **SAME),
        conv(weights, "b", 1, 1),
        node(between, ["b"], ["r"]),
        node("Add", ["a", "r"], ["y"]),
    ]
    assert not left(tools, nodes, weights)


@pytest.mark.parametrize("tensor", ["a", "b"])
def test_another_reader_of_a_branch(tools, tensor):
    weights = tools.Weights()
    nodes = [*pair(weights, SAME, {}), node("Relu", [tensor], ["r"])]
    left(tools, nodes, weights, outputs=("y", "r"))


@pytest.mark.parametrize("tensor", ["a", "b"])
def test_a_branch_that_is_an_output(tools, tensor):
    weights = tools.Weights()
    left(tools, pair(weights, SAME, {}), weights, outputs=("y", tensor))


def test_a_partial_sum_with_another_reader(tools):
    """The inner sum is needed as it is; it merges by itself, the outer addition stays."""
    weights = tools.Weights()
    nodes = [*pair(weights, SAME, {}), node("Add", ["y", "x"], ["z"])]
    model = tools.model(nodes, weights, IMAGE, outputs=("y", "z"))
    applied = tools.apply(model, Reparameterize())
    assert applied.ops == ["Conv", "Add"]
    tools.same_outputs(model, applied.model, tools.feeds(model), 3e-6)


@pytest.mark.parametrize("terms", ["aa", "aab", "abb"])
def test_the_same_branch_twice(tools, terms):
    weights = tools.Weights()
    both = [conv(weights, "a", 3, 3, **SAME), conv(weights, "b", 1, 1)]
    nodes = [made for made in both if made.name in terms]
    left(tools, [*nodes, node("Sum", list(terms), ["y"])], weights)


def test_the_same_partial_sum_twice(tools):
    """It merges by itself."""
    weights = tools.Weights()
    nodes = [
        conv(weights, "a", 1, 1),
        node("Add", ["a", "x"], ["s"]),
        conv(weights, "b", 3, 3, **SAME),
        node("Sum", ["s", "b", "s"], ["y"]),
    ]
    model = tools.model(nodes, weights, IMAGE)
    applied = tools.apply(model, Reparameterize())
    assert sorted(applied.ops) == ["Conv", "Conv", "Sum"]
    tools.same_outputs(model, applied.model, tools.feeds(model), 3e-6)


def test_another_reader_of_a_pool(tools):
    weights = tools.Weights()
    nodes = [
        conv(weights, "a", 2, 2),
        node("AveragePool", ["x"], ["p"], kernel_shape=[2, 2]),
        node("Add", ["a", "p"], ["y"]),
        node("Relu", ["p"], ["r"]),
    ]
    assert not left(tools, nodes, weights, outputs=("y", "r"))


def test_other_inputs(tools):
    weights = tools.Weights()
    nodes = [conv(weights, "a", 3, 3, **SAME), conv(weights, "b", 1, 1, source="r"), node("Add", ["a", "b"], ["y"])]
    assert not left(tools, nodes, weights, inputs={"r": IMAGE})


@pytest.mark.parametrize("op", ["Sub", "Mul", "Max"])
def test_other_operators(tools, op):
    weights = tools.Weights()
    nodes = pair(weights, SAME, {})
    nodes[-1].op_type = op
    assert not left(tools, nodes, weights)


def test_identity_of_other_channels(tools):
    """One output channel against four: the addition broadcasts."""
    weights = tools.Weights()
    nodes = [conv(weights, "a", 3, 3, outputs=1, **SAME), node("Add", ["a", "x"], ["y"])]
    assert not left(tools, nodes, weights)


def test_identity_of_another_size(tools):
    """Without padding the output is one pixel, and is broadcast over x."""
    weights = tools.Weights()
    nodes = [conv(weights, "a", 6, 6), node("Add", ["a", "x"], ["y"])]
    assert not left(tools, nodes, weights)


@pytest.mark.parametrize(
    "attributes",
    [
        {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]},
        {"kernel_shape": [5, 5], "pads": [2, 2, 2, 2], "count_include_pad": 1},
        {"kernel_shape": [3, 3], "auto_pad": "SAME_UPPER"},
    ],
)
def test_pools_that_are_no_kernel(tools, attributes):
    """An average over what is inside the image only, and one wider than the convolution."""
    weights = tools.Weights()
    nodes = [
        conv(weights, "a", 3, 3, **SAME),
        node("AveragePool", ["x"], ["p"], **attributes),
        node("Add", ["a", "p"], ["y"]),
    ]
    assert not left(tools, nodes, weights)


@pytest.mark.parametrize("op", ["AveragePool", "MaxPool"])
def test_pools_with_windows_cut_off(tools, op):
    weights = tools.Weights()
    attributes = {"ceil_mode": 1} if op == "AveragePool" else {}
    nodes = [
        conv(weights, "a", 2, 2, strides=[2, 2]),
        node(op, ["x"], ["p"], kernel_shape=[2, 2], strides=[2, 2], **attributes),
        node("Add", ["a", "p"], ["y"]),
    ]
    assert not left(tools, nodes, weights)


@pytest.mark.parametrize("shape", [(4,), (4, 1), (1, 1, 4, 4), (2, 1, 1, 1), (1, 1, 4, 1, 1)])
def test_constants_that_are_no_bias(tools, shape):
    weights = tools.Weights()
    nodes = [
        conv(weights, "a", 3, 3),
        node("Add", ["a", "r"], ["ar"]),
        node("Add", ["ar", weights.normal("c", *shape)], ["y"]),
    ]
    left(tools, nodes, weights, inputs={"r": (2, 4, 4, 4)}, rank=max(4, len(shape)))


@pytest.mark.parametrize("what", ["weight", "bias"])
def test_computed_weights(tools, what):
    weights = tools.Weights()
    nodes = pair(weights, SAME, {})
    if what == "weight":
        nodes[1].input[1] = "given"
    else:
        nodes[1].input.append("given")
    shape = (4, 4, 1, 1) if what == "weight" else (4,)
    assert not left(tools, nodes, weights, inputs={"given": shape})


def test_padding_that_depends_on_the_size(tools):
    weights = tools.Weights()
    strided = {"strides": [2, 2]}
    nodes = pair(weights, {"auto_pad": "SAME_UPPER", **strided}, strided)
    left(tools, nodes, weights)


def test_training_mode(tools):
    weights = tools.Weights()
    nodes = [
        conv(weights, "a", 3, 3, **SAME),
        node("BatchNormalization", ["x", *weights.batch_norm("bn", 4)], ["n", "m", "v"], training_mode=1),
        node("Add", ["a", "n"], ["y"]),
    ]
    left(tools, nodes, weights, run=False)


def test_overflow_of_half_weights(tools):
    weights = tools.Weights(kind=TensorProto.FLOAT16)
    nodes = pair(weights, SAME, {})
    for name, shape in (("a_w", (4, 4, 3, 3)), ("b_w", (4, 4, 1, 1))):
        values = np.zeros(shape)
        values[2, 1, shape[2] // 2, shape[3] // 2] = 40000
        weights.set(name, values)
    (note,) = left(tools, nodes, weights, run=False)
    assert note == (
        "s (Add): the folded weight of channel 2 would be 80000, which float16 cannot hold; keep the model in float32"
    )
