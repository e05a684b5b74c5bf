"""Fold batch normalisation, and other per-channel scales and shifts by constants, into the weights beside them.

`s`, `t` [C] are the scale and shift of an affine operator (`passes.affine`): a BatchNormalization in inference, or a
Mul, Add, Sub, Div by a constant of one value a channel, or a chain of these.

1. `Conv(x, W [C, I/g, k...], b) -> affine`          -> `Conv(x, s W, s b + t)`
2. `ConvTranspose(x, W [I, C/g, k...], b) -> affine` -> the same, with `s` along group and second axis
3. `alpha A B + beta C (Gemm) -> affine`             -> `alpha A (B s) + (s beta C + t)`, `s` along B's output axis
4. `MatMul(x, W [K, C]) -> affine`                   -> `Add(MatMul(x, W s), t)`; the bias's Add is part of the chain
5. `affine -> Conv(x, W, b)`                         -> `Conv(x, W s, b + sum(W t))`, where no padding enters or `t` = 0

Rules 1 to 4 come first: an operator between two Convs goes into the one in front of it. The values between must have
one reader and be no graph output; weights and parameters must be constants. A weight that others read as well stays
theirs, the rewritten node gets its own.

Reorders: products move from activations to weights. They are computed in float64 and rounded once to the weights'
type; nothing is folded where that overflows.

Left alone: weights that are computed, DequantizeLinear among them; training mode; BatchNormalization over an axis that
is not the weights' output axis (after a MatMul of rank 3), after any other operator, and before anything but Conv.
"""

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from passes.affine import (
    MINIMUM_OPSET,
    Affine,
    Channels,
    batch_norm_defect,
    chain_after,
    is_float_constant,
    link_before,
    numpy_dtype,
    stored,
)
from passes.base import Effect, Outcome, Refusal
from passes.convolution import window_of
from passes.pattern import (
    input_of,
    new_constant,
    only_consumer,
    producer,
    rank_of,
    replace_node,
    rewrite_nodes,
    take_outputs,
    values_of,
)
from passes.scopes import label

LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


class FoldBatchNorm:
    """Implements `passes.base.Pass`."""

    name = "fold_batch_norm"
    effect = Effect.REORDERS

    def call(self, graph: gs.Graph) -> Outcome:
        if graph.opset < MINIMUM_OPSET:
            return Outcome()
        after = rewrite_nodes(graph, _fold_into_producer, LAYERS)
        before = rewrite_nodes(graph, _fold_into_consumer, ("Conv",))
        left = rewrite_nodes(graph, _explain, ("BatchNormalization",))
        return Outcome(after.rewrites + before.rewrites, after.notes + before.notes + left.notes)


def _fold_into_producer(scope: gs.Graph, node: gs.Node) -> bool:
    """Rules 1 to 4."""
    channels = _output_channels(node)
    bias = None if channels is None else _bias(node, channels.count)
    if channels is None or bias is None:
        return False
    chain, affine = chain_after(scope, node.outputs[0], channels, scope.opset)
    needs_add = node.op == "MatMul" and affine.shifts
    if not chain or (not affine.scales and len(chain) <= int(needs_add)):
        return False
    output, channel = chain[-1].outputs[0], np.arange(channels.count)
    weight = node.inputs[1]
    if affine.scales:
        weight = _scaled(output, weight, _along_output(node, affine.scale), _along_output(node, channel))
    constant = _new_bias(output, weight, bias * affine.scale + affine.shift)
    node.inputs[1] = weight
    tail = node
    if needs_add:
        tail = gs.Node("Add", f"{output.name}/add", inputs=[node.outputs[0], constant])
    elif node.op != "MatMul":
        _set_bias(node, constant)
    take_outputs(chain[-1])
    tail.outputs = [output]
    replace_node(scope, chain[-1], *([] if tail is node else [tail]))
    for link in chain[:-1]:
        replace_node(scope, link)
    return True


def _fold_into_consumer(scope: gs.Graph, node: gs.Node) -> bool:
    """Rule 5. Takes the longest chain that the padding allows."""
    weight = node.inputs[1]
    bias = _bias(node, weight.shape[0]) if is_float_constant(weight) else None
    if bias is None:
        return False
    channels = Channels(weight.shape[1] * node.attrs.get("group", 1), len(weight.shape) - 2, len(weight.shape))
    chain: list[gs.Node] = []
    folded, affine, source = 0, Affine.identity(channels.count), node.inputs[0]
    total, tensor = affine, source
    while (link := link_before(scope, tensor, channels, scope.opset)) is not None:
        tensor, total = link.operand, link.affine.then(total)
        chain.append(link.node)
        if not (total.shifts and _pads(node)):
            folded, affine, source = len(chain), total, tensor
    if not folded:
        return False
    output, wide = node.outputs[0], np.asarray(values_of(weight)).astype(np.float64)
    bias = bias + (wide * _along_input(node, affine.shift)).sum(axis=tuple(range(1, wide.ndim)))
    made = _scaled(output, weight, _along_input(node, affine.scale), _rows(np.arange(len(wide)), wide.ndim))
    _set_bias(node, _new_bias(output, weight, bias))
    node.inputs[0], node.inputs[1] = source, made
    for passed in chain[:folded]:
        replace_node(scope, passed)
    return True


def _explain(scope: gs.Graph, node: gs.Node) -> bool:
    """Says why a BatchNormalization that looks foldable was left."""
    if defect := batch_norm_defect(node, scope.opset):
        raise Refusal(defect)
    layer = producer(node.inputs[0], *LAYERS)
    if layer is not None:
        for what, tensor in zip(("weight", "bias"), layer.inputs[1:], strict=False):
            if not isinstance(tensor, gs.Constant) and not tensor.is_empty():
                raise Refusal(f"the {what} of {layer.op} '{label(layer)}' is computed, expected a constant")
        if only_consumer(scope, node.inputs[0]) is None:
            raise Refusal(f"the output of {layer.op} '{label(layer)}' has another reader or is a graph output")
    reader = only_consumer(scope, node.outputs[0], "Conv")
    if layer is None and reader is not None and isinstance(reader.inputs[1], gs.Constant) and _pads(reader):
        raise Refusal(f"Conv '{label(reader)}' behind it pads with zeros, which its shift would turn into other values")
    return False


def _output_channels(node: gs.Node) -> Channels | None:
    """None where the weight is no floating-point constant of the right rank."""
    weight = node.inputs[1]
    if not is_float_constant(weight) or len(weight.shape) < 2:
        return None
    rank = len(weight.shape)
    if node.op == "Conv":
        return Channels(weight.shape[0], rank - 2, rank)
    if node.op == "ConvTranspose":
        return Channels(weight.shape[1] * node.attrs.get("group", 1), rank - 2, rank)
    if node.op == "Gemm":
        return Channels(weight.shape[0 if node.attrs.get("transB", 0) else 1], 0, 2)
    return Channels(weight.shape[1], 0, rank_of(node.outputs[0])) if rank == 2 else None


def _along_output(node: gs.Node, values: NDArray) -> NDArray:
    """Values per output channel [C], shaped to broadcast against the weight."""
    weight = node.inputs[1]
    if node.op == "Conv":
        return _rows(values, len(weight.shape))
    if node.op == "ConvTranspose":
        inputs, outputs, *kernel = weight.shape
        group = node.attrs.get("group", 1)
        rows = np.repeat(values.reshape(group, outputs), inputs // group, axis=0)
        return rows.reshape(inputs, outputs, *[1] * len(kernel))
    return values[:, None] if node.attrs.get("transB", 0) else values


def _along_input(node: gs.Node, values: NDArray) -> NDArray:
    """Values per input channel of a Conv, shaped to broadcast against its weight."""
    outputs, inputs, *kernel = node.inputs[1].shape
    group = node.attrs.get("group", 1)
    rows = np.repeat(values.reshape(group, inputs), outputs // group, axis=0)
    return rows.reshape(outputs, inputs, *[1] * len(kernel))


def _rows(values: NDArray, rank: int) -> NDArray:
    return values.reshape(-1, *[1] * (rank - 1))


def _scaled(output: gs.Tensor, weight: gs.Constant, scale: NDArray, channel: NDArray) -> gs.Constant:
    """A new weight, named after the tensor that its node will produce."""
    product = np.asarray(values_of(weight)).astype(np.float64) * scale
    return new_constant(output, "weight", stored(product, numpy_dtype(weight), channel, "weight"))


def _bias(node: gs.Node, channels: int) -> NDArray | None:
    """The bias as it is added, float64, [C] or for Gemm whatever broadcasts to [M, C]; None where it is computed."""
    bias = None if node.op == "MatMul" else input_of(node, 2)
    if bias is None:
        return np.zeros(channels)
    if not is_float_constant(bias):
        return None
    values = np.asarray(values_of(bias)).astype(np.float64)
    return values * node.attrs.get("beta", 1.0) if node.op == "Gemm" else values


def _new_bias(output: gs.Tensor, weight: gs.Constant, bias: NDArray) -> gs.Constant:
    """A bias in the weight's type, channels last."""
    return new_constant(output, "bias", stored(bias, numpy_dtype(weight), np.arange(bias.shape[-1]), "bias"))


def _set_bias(node: gs.Node, bias: gs.Constant) -> None:
    """Give a node a bias that counts once; none where it is zero and the node had none."""
    node.attrs.pop("beta", None)
    if input_of(node, 2) is not None or np.any(values_of(bias)):
        node.inputs = [*node.inputs[:2], bias]


def _pads(node: gs.Node) -> bool:
    window = window_of(node, node.inputs[1].shape[2:])
    return window is None or window.pads
