"""The least work that a model can do: counted from its graph, without running it.

A multiply-add counts as two operations. Only matrix products, convolutions and attention are counted; all
else is small beside them. Bytes are those of weights that must be read once a step, each tensor once.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from passes.onnx_model import DecoderSpec, load_structure
from plugins.paged_attention.schema import LOGITS, OP_TYPE

if TYPE_CHECKING:
    import onnx

_PRODUCTS = {"MatMul", "Gemm"}
_SAME_VALUES = {"Transpose", "Cast", "Identity", "Reshape"}


@dataclass(frozen=True)
class AttentionLayer:
    """One paged-attention node; `window` is None where it reaches back to the first token."""

    heads: int
    head_dim: int
    window: int | None


@dataclass(frozen=True)
class DecoderWork:
    """What one decoder step must do at least.

    body_parameters   weights of products that every token passes
    head_parameters   weights of the product that makes logits, done for a row of logits only
    weight_bytes      bytes of all weights that a step reads; an embedding counts only where it is also the head
    """

    body_parameters: int
    head_parameters: int
    weight_bytes: int
    layers: tuple[AttentionLayer, ...]
    kv_bytes_per_token: int

    def prefill_operations(self, tokens: int) -> float:
        """A whole prompt, logits for its last token.

        2 * body * tokens + 2 * head + sum over layers of 4 * heads * head_dim * (query, key) pairs, where the
        causal pairs are tokens * (tokens + 1) / 2, or fewer in a sliding window.
        """
        attention = sum(4 * layer.heads * layer.head_dim * _pairs(tokens, layer.window) for layer in self.layers)
        return 2.0 * self.body_parameters * tokens + 2.0 * self.head_parameters + attention

    def decode_operations(self, batch: int, context: float) -> float:
        """One token for each of `batch` sequences that hold `context` tokens: 2 * (body + head) and attention each."""
        attention = sum(
            4 * layer.heads * layer.head_dim * min(context, layer.window or context) for layer in self.layers
        )
        return batch * (2.0 * (self.body_parameters + self.head_parameters) + attention)

    def decode_bytes(self, batch: int, context: float) -> float:
        """Bytes that such a step reads: all weights once, and the keys and values of every sequence."""
        reach = [min(context, layer.window or context) for layer in self.layers]
        mean = sum(reach) / len(reach) if reach else 0.0
        return self.weight_bytes + batch * mean * self.kv_bytes_per_token


def _pairs(tokens: int, window: int | None) -> int:
    if window is None or window >= tokens:
        return tokens * (tokens + 1) // 2
    return window * (window + 1) // 2 + (tokens - window) * window


def decoder_work_from_graph(path: Path, spec: DecoderSpec) -> DecoderWork:
    """Count a serving graph."""
    import onnx

    graph = load_structure(path).graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    producers = {output: node for node in graph.node for output in node.output}
    products = [node for node in graph.node if node.op_type in _PRODUCTS]
    names = {id(node): _weight_of(node, producers, weights) for node in products}
    head = _nearest_product(LOGITS, producers)
    used = {name for name in names.values() if name} | _read_whole(graph, weights)
    geometry = iter(spec.kv.layers)
    layers = []
    for node in graph.node:
        if node.op_type == OP_TYPE:
            options = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
            window = options.get("local_window_size", -1)
            layers.append(AttentionLayer(options["num_heads"], next(geometry).head_dim, window if window > 0 else None))
    sizes = {id(node): math.prod(weights[name].dims) for node in products if (name := names[id(node)])}
    head_size = sizes.get(id(head), 0)
    return DecoderWork(
        body_parameters=sum(sizes.values()) - head_size,
        head_parameters=head_size,
        weight_bytes=sum(_bytes(weights[name]) for name in used),
        layers=tuple(layers),
        kv_bytes_per_token=spec.kv.bytes_per_token,
    )


def plain_operations(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> float | None:
    """Operations of products and convolutions for inputs of these shapes; None where ONNX cannot infer them all."""
    import onnx

    model = load_structure(path)
    for value in model.graph.input:
        if value.name in shapes:
            for dim, size in zip(value.type.tensor_type.shape.dim, shapes[value.name], strict=True):
                dim.dim_value = size
    for values in (model.graph.output, model.graph.value_info):
        for value in values:
            value.type.tensor_type.ClearField("shape")
    try:
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except onnx.shape_inference.InferenceError:
        return None
    graph = model.graph
    known = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for value in [*graph.input, *graph.value_info, *graph.output]:
        dims = value.type.tensor_type.shape.dim
        if value.type.tensor_type.HasField("shape") and all(dim.HasField("dim_value") for dim in dims):
            known[value.name] = tuple(dim.dim_value for dim in dims)
    total = 0.0
    for node in graph.node:
        if node.op_type not in (*_PRODUCTS, "Conv"):
            continue
        shape, operand = known.get(node.output[0]), known.get(node.input[1 if node.op_type == "Conv" else 0])
        if shape is None or operand is None:
            return None
        inner = math.prod(operand[1:]) if node.op_type == "Conv" else _inner(node, operand)
        total += 2.0 * math.prod(shape) * inner
    return total


def weight_bytes(path: Path) -> int:
    """Bytes of the tables that a plain model reads whole: all weights but those it only selects rows of."""
    graph = load_structure(path).graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    return sum(_bytes(weights[name]) for name in _read_whole(graph, weights))


def _inner(node: "onnx.NodeProto", operand: tuple[int, ...]) -> int:
    """Length of the sum in a product with this first operand."""
    transposed = any(attribute.name == "transA" and attribute.i for attribute in node.attribute)
    return operand[0] if transposed else operand[-1]


def _read_whole(graph: "onnx.GraphProto", weights: Mapping[str, "onnx.TensorProto"]) -> set[str]:
    """Weights that some node other than a row selection takes."""
    return {
        name
        for node in graph.node
        for place, name in enumerate(node.input)
        if name in weights and not (node.op_type == "Gather" and place == 0)
    }


def _weight_of(
    node: "onnx.NodeProto", producers: Mapping[str, "onnx.NodeProto"], weights: Mapping[str, "onnx.TensorProto"]
) -> str | None:
    """The weight that a product multiplies with, also through a transposition or a cast."""
    for name in reversed(node.input[:2]):
        while name not in weights and name in producers and producers[name].op_type in _SAME_VALUES:
            name = producers[name].input[0]
        if name in weights:
            return name
    return None


def _nearest_product(output: str, producers: Mapping[str, "onnx.NodeProto"]) -> "onnx.NodeProto | None":
    """The first product upstream of an output, along first operands."""
    node = producers.get(output)
    while node is not None and node.op_type not in _PRODUCTS:
        node = producers.get(node.input[0]) if node.input else None
    return node


def _bytes(tensor: "onnx.TensorProto") -> int:
    import onnx

    return math.prod(tensor.dims) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
