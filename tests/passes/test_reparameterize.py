"""What merges, and that it computes the same."""

import io

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from passes.fold_batch_norm import FoldBatchNorm
from passes.reparameterize import Reparameterize

node = helper.make_node
IMAGE = (2, 4, 7, 6)


def conv(weights, name, *kernel, outputs=4, inputs=4, bias=True, source="x", **attributes):
    names = [weights.normal(f"{name}_w", outputs, inputs // attributes.get("group", 1), *kernel)]
    names += [weights.normal(f"{name}_b", outputs)] if bias else []
    return node("Conv", [source, *names], [name], name=name, **attributes)


def check(tools, model, ops, tolerance=3e-6, subgraph=True):
    """`ops` are left, outputs agree, and the same holds in both branches of an If."""
    applied = tools.apply(model, Reparameterize())
    assert applied.ops == ops
    assert applied.outcome.changed
    assert not applied.outcome.notes
    tools.same_outputs(model, applied.model, tools.feeds(model), tolerance)
    if subgraph:
        inside = tools.in_branch(model)
        applied_inside = tools.apply(inside, Reparameterize())
        assert applied_inside.ops == ["If", *ops, *ops]
        tools.same_outputs(inside, applied_inside.model, tools.feeds(inside), tolerance)
    return applied


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_repvgg_block(tools, group, bias):
    """3x3, 1x1 and a normalised identity, as `(a + b) + bn(x)` with operands on either side."""
    weights = tools.Weights()
    nodes = [
        conv(weights, "a", 3, 3, bias=bias, group=group, pads=[1, 1, 1, 1]),
        conv(weights, "b", 1, 1, bias=bias, group=group),
        node("BatchNormalization", ["x", *weights.batch_norm("bn", 4)], ["n"]),
        node("Add", ["b", "a"], ["ab"]),
        node("Add", ["n", "ab"], ["y"]),
    ]
    check(tools, tools.model(nodes, weights, IMAGE), ["Conv"])


@pytest.mark.parametrize("group", [1, 2])
def test_plain_identity(tools, group):
    weights = tools.Weights()
    nodes = [conv(weights, "a", 3, 3, group=group, pads=[1, 1, 1, 1]), node("Add", ["x", "a"], ["y"])]
    check(tools, tools.model(nodes, weights, IMAGE), ["Conv"])


def test_identity_by_constants(tools):
    """A decomposed normalisation of x, and x twice more."""
    weights = tools.Weights()
    nodes = [
        node("Sub", ["x", weights.normal("m", 4, 1, 1)], ["x1"]),
        node("Mul", [weights.normal("s", 1, 4, 1, 1), "x1"], ["x2"]),
        conv(weights, "a", 1, 1),
        node("Sum", ["a", "x2", "x", "x"], ["y"]),
    ]
    check(tools, tools.model(nodes, weights, IMAGE), ["Conv"])


def test_acnet_block(tools):
    """Kernels of one row and one column, added by a Sum, embed at the offsets that their padding says."""
    weights = tools.Weights()
    nodes = [
        conv(weights, "row", 1, 3, pads=[0, 1, 0, 1]),
        conv(weights, "square", 3, 3, pads=[1, 1, 1, 1], strides=[1, 1]),
        conv(weights, "column", 3, 1, pads=[1, 0, 1, 0]),
        node("Sum", ["row", "square", "column"], ["y"]),
    ]
    check(tools, tools.model(nodes, weights, IMAGE), ["Conv"])


def test_mobileone_block_with_strides(tools):
    weights = tools.Weights()
    nodes = [
        *(conv(weights, f"k{i}", 3, 3, group=4, pads=[1, 1, 1, 1], strides=[2, 2]) for i in range(3)),
        conv(weights, "point", 1, 1, group=4, strides=[2, 2]),
        node("Add", ["k0", "k1"], ["s0"]),
        node("Add", ["k2", "point"], ["s1"]),
        node("Add", ["s0", "s1"], ["y"]),
    ]
    check(tools, tools.model(nodes, weights, IMAGE), ["Conv"])


@pytest.mark.parametrize("attributes", [{"count_include_pad": 1, "pads": [1, 1, 1, 1]}, {"pads": [0, 0, 0, 0]}])
@pytest.mark.parametrize("normalised", [False, True])
def test_diverse_branch_pool(tools, attributes, normalised):
    weights = tools.Weights()
    nodes = [
        conv(weights, "a", 3, 3, pads=attributes["pads"]),
        node("AveragePool", ["x"], ["p"], kernel_shape=[3, 3], **attributes),
        *([node("BatchNormalization", ["p", *weights.batch_norm("bn", 4)], ["pn"])] if normalised else []),
        node("Add", ["pn" if normalised else "p", "a"], ["y"]),
    ]
    check(tools, tools.model(nodes, weights, IMAGE), ["Conv"])


def test_one_axis_and_three(tools):
    for kernel, shape in (((3,), (2, 4, 7)), ((3, 1, 3), (1, 4, 4, 4, 4))):
        weights = tools.Weights()
        pads = [size // 2 for size in kernel] * 2
        nodes = [
            conv(weights, "a", *kernel, pads=pads),
            conv(weights, "b", *[1] * len(kernel)),
            node("Sum", ["a", "b", "x"], ["y"]),
        ]
        check(tools, tools.model(nodes, weights, shape), ["Conv"])


def test_dilated_kernels(tools):
    """3 taps at distance 2 fall on every second tap of 5; a point falls on the middle of a dilated 3."""
    weights = tools.Weights()
    nodes = [
        conv(weights, "five", 5, 5, pads=[2] * 4),
        conv(weights, "wide", 3, 3, pads=[2] * 4, dilations=[2, 2]),
        node("Add", ["five", "wide"], ["y"]),
    ]
    check(tools, tools.model(nodes, weights, IMAGE), ["Conv"])
    nodes = [conv(weights, "wide", 3, 3, pads=[2] * 4, dilations=[2, 2]), node("Add", ["wide", "x"], ["y"])]
    check(tools, tools.model(nodes, weights, IMAGE), ["Conv"])


def test_same_padding_and_uneven_padding(tools):
    """SAME_UPPER pads a kernel of two at the end only."""
    weights = tools.Weights()
    nodes = [
        conv(weights, "a", 2, 3, auto_pad="SAME_UPPER"),
        conv(weights, "b", 2, 1, pads=[0, 0, 1, 0]),
        node("Sum", ["a", "b", "x"], ["y"]),
    ]
    check(tools, tools.model(nodes, weights, IMAGE), ["Conv"])


def test_affine_operators_behind_a_branch(tools):
    weights = tools.Weights()
    nodes = [
        conv(weights, "a", 3, 3, pads=[1] * 4),
        conv(weights, "b", 1, 1),
        node("Mul", ["b", weights.normal("s", 4, 1, 1)], ["bs"]),
        node("Add", ["a", "bs"], ["y"]),
    ]
    check(tools, tools.model(nodes, weights, IMAGE), ["Conv"])


def test_other_terms_are_still_added(tools):
    """A residual from elsewhere stays, a constant of one value a channel becomes bias."""
    weights = tools.Weights()
    nodes = [
        conv(weights, "a", 3, 3, pads=[1] * 4, bias=False),
        conv(weights, "b", 1, 1, bias=False),
        node("Add", ["a", "r"], ["ar"]),
        node("Add", [weights.normal("c", 4, 1, 1), "ar"], ["arc"]),
        node("Add", ["arc", "b"], ["arcb"]),
        node("Add", ["q", "arcb"], ["y"]),
    ]
    model = tools.model(nodes, weights, IMAGE, inputs={"r": IMAGE, "q": (1, 1, 6)})
    check(tools, model, ["Conv", "Add", "Add"])


def test_a_constant_becomes_bias_at_any_stride(tools):
    weights = tools.Weights()
    nodes = [
        conv(weights, "a", 3, 3, strides=[2, 2]),
        node("Add", ["a", "r"], ["ar"]),
        node("Add", ["ar", weights.normal("c", 1, 4, 1, 1)], ["y"]),
    ]
    check(tools, tools.model(nodes, weights, IMAGE, inputs={"r": (2, 4, 3, 2)}), ["Conv", "Add"])


def test_two_inputs_make_two_convolutions(tools):
    weights = tools.Weights()
    nodes = [
        conv(weights, "a", 3, 3, pads=[1] * 4),
        conv(weights, "b", 3, 3, pads=[1] * 4, source="r"),
        conv(weights, "c", 1, 1),
        conv(weights, "d", 1, 1, source="r"),
        node("Sum", ["a", "b", "c", "d"], ["y"]),
    ]
    check(tools, tools.model(nodes, weights, IMAGE, inputs={"r": IMAGE}), ["Conv", "Conv", "Add"])


def test_a_row_keeps_apart_from_a_column_but_takes_the_point(tools):
    """The union of a row and a column would multiply 9 taps instead of 6."""
    weights = tools.Weights()
    nodes = [
        conv(weights, "row", 1, 3, pads=[0, 1, 0, 1]),
        conv(weights, "column", 3, 1, pads=[1, 0, 1, 0]),
        conv(weights, "point", 1, 1),
        node("Sum", ["row", "column", "point"], ["y"]),
    ]
    model = tools.model(nodes, weights, IMAGE)
    applied = tools.apply(model, Reparameterize())
    assert applied.ops == ["Conv", "Conv", "Add"]
    tools.same_outputs(model, applied.model, tools.feeds(model), 3e-6)


def test_the_sum_of_a_chain_of_blocks(tools):
    """Residual blocks, each merged by itself: the input of the second is read by its branches only."""
    weights = tools.Weights()
    nodes = []
    for number, (source, output) in enumerate((("x", "h"), ("h", "y"))):
        nodes += [
            conv(weights, f"a{number}", 3, 3, pads=[1] * 4, source=source),
            node("Add", [f"a{number}", source], [f"s{number}"]),
            node("Relu", [f"s{number}"], [output]),
        ]
    check(tools, tools.model(nodes, weights, IMAGE), ["Conv", "Relu", "Conv", "Relu"])


def test_half_kernels_are_rounded_once(tools):
    weights = tools.Weights(kind=TensorProto.FLOAT16)
    nodes = [
        conv(weights, "a", 3, 3, pads=[1] * 4),
        conv(weights, "b", 1, 1),
        conv(weights, "c", 1, 1),
        node("Sum", ["a", "b", "c", "x"], ["y"]),
    ]
    model = tools.model(nodes, weights, IMAGE)
    applied = tools.apply(model, Reparameterize())
    a, b, c = (numpy_helper.to_array(weights.tensors[f"{name}_w"]).astype(np.float64) for name in "abc")
    a[:, :, 1:2, 1:2] += b + c + np.eye(4)[:, :, None, None]
    made = {tensor.name: numpy_helper.to_array(tensor) for tensor in applied.model.graph.initializer}
    np.testing.assert_array_equal(made["a/merged_weight"], a.astype(np.float16))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_geometry(tools, data):
    """A host of random geometry and a branch on some of its taps, padded so that the outputs are of equal size."""
    draw = data.draw
    axes, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))

    def each(low, high):
        return [draw(st.integers(low, high)) for _ in range(axes)]

    kernel, strides, dilations = each(1, 4), each(1, 2), each(1, 2)
    extent = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
    begin, end = ([draw(st.integers(0, size)) for size in extent] for _ in range(2))
    taps = [draw(st.integers(1, size)) for size in kernel]
    first = [draw(st.integers(0, k - t)) for k, t in zip(kernel, taps, strict=True)]
    inner_begin = [b - f * d for b, f, d in zip(begin, first, dilations, strict=True)]
    inner_end = [e - (k - t - f) * d for e, k, t, f, d in zip(end, kernel, taps, first, dilations, strict=True)]
    fits = min(inner_begin + inner_end) >= 0
    pads = [max(0, pad) for pad in inner_begin + inner_end]
    weights = tools.Weights(draw(st.integers(0, 99)))
    inputs, outputs = 2 * group, draw(st.integers(1, 3)) * group
    shared = {"inputs": inputs, "outputs": outputs, "group": group, "strides": strides, "dilations": dilations}
    nodes = [
        conv(weights, "a", *kernel, pads=begin + end, **shared),
        conv(weights, "b", *taps, pads=pads, **shared),
        node("Add", ["b", "a"], ["y"]),
    ]
    model = tools.model(nodes, weights, (2, inputs, *[11] * axes))
    if not fits:  # outputs of other sizes, or equal only by rounding: the addition may not even run
        assert "Add" in tools.apply(model, Reparameterize()).ops
        return
    applied = tools.apply(model, Reparameterize())
    assert applied.ops == ["Conv"]
    tools.same_outputs(model, applied.model, tools.feeds(model), 5e-6)


def test_what_torch_exports(tools):
    """A RepVGG block with normalised branches and a pool, through both passes."""
    torch = pytest.importorskip("torch")

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.three = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3, padding=1, bias=False), torch.nn.BatchNorm2d(4))
            self.one = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 1, bias=False), torch.nn.BatchNorm2d(4))
            self.pool = torch.nn.Sequential(torch.nn.AvgPool2d(3, 1, 1), torch.nn.BatchNorm2d(4))
            self.identity = torch.nn.BatchNorm2d(4)

        def forward(self, x):
            return torch.relu(self.three(x) + self.one(x) + self.pool(x) + self.identity(x))

    module = torch.nn.Sequential(Block(), Block()).eval()
    for part in module.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.running_var.uniform_(0.5, 2)
            for values in (part.running_mean, part.weight.data, part.bias.data):
                values.normal_()
    buffer = io.BytesIO()
    torch.onnx.export(
        module,
        (torch.rand(2, 4, 5, 5),),
        buffer,
        dynamo=False,
        training=torch.onnx.TrainingMode.PRESERVE,
        do_constant_folding=False,
        input_names=["x"],
    )
    model = onnx.load_from_string(buffer.getvalue())
    folded = tools.apply(model, FoldBatchNorm())
    assert folded.outcome.rewrites == 4
    applied = tools.apply(folded.model, Reparameterize())
    assert applied.ops == ["Conv", "Relu", "Conv", "Relu"]
    tools.same_outputs(model, applied.model, tools.feeds(model), 3e-6)
