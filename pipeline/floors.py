"""The least work that a model can do: counted from its graph, for a model without a KV cache from one run's shapes.

A multiply-add counts as two operations. Only matrix products, convolutions and attention are counted; all
else is small beside them. Bytes are those of weights that must be read once a step, each tensor once.
"""

import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from passes.onnx_model import DecoderSpec, load_structure
from pipeline.operator_work import ITEMSIZE, product_operations
from plugins.dense.schema import LINEAR, LINEAR_SWIGLU
from plugins.paged_attention.schema import INPUTS, LOGITS, OP_TYPE
from plugins.quant_matmul.cuda_schema import FORMATS, QUANT_LINEAR, QUANT_LINEAR_SWIGLU
from plugins.quant_matmul.schema import INT8_MATMUL, WEIGHT_MATMUL

if TYPE_CHECKING:
    import onnx

_WEIGHTS: Mapping[str, tuple[int, ...]] = {
    "MatMul": (1, 0),
    "Gemm": (1, 0),
    "MatMulIntegerToFloat": (1,),
    INT8_MATMUL.op_type: (2,),
    WEIGHT_MATMUL.op_type: (1,),
    **{spec.op_type: (1,) for spec in (LINEAR, LINEAR_SWIGLU, QUANT_LINEAR, QUANT_LINEAR_SWIGLU)},
}
"""Product to the inputs that may be its weight."""
_PACKED = (INT8_MATMUL.op_type, WEIGHT_MATMUL.op_type)
_LOW_BIT = (QUANT_LINEAR.op_type, QUANT_LINEAR_SWIGLU.op_type)
_COUNTED = {"MatMul", "Gemm", "Conv", "QLinearConv", "MultiHeadAttention"}
_ROTATIONS = tuple(i for i, spec in enumerate(INPUTS) if spec.name in ("cos_cache", "sin_cache"))
_ROW_TABLES = {"Gather": (0,), OP_TYPE: _ROTATIONS}
"""Operator to the inputs of which it reads a few rows only."""
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


@dataclass(frozen=True)
class PlainWork:
    """What a model without a KV cache does for one sample. `activation_bytes` is None where it is unknown.

    operations        of products and convolutions
    weight_bytes      bytes of all weights that a call reads, whatever the batch
    activation_bytes  most bytes of tensors that are alive at one time
    """

    operations: float
    weight_bytes: int
    activation_bytes: float | None


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
    products = [node for node in graph.node if node.op_type in _WEIGHTS]
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
    sizes = {id(node): _products_of(node, weights[name]) for node in products if (name := names[id(node)])}
    head_size = sizes.get(id(head), 0)
    return DecoderWork(
        body_parameters=sum(sizes.values()) - head_size,
        head_parameters=head_size,
        weight_bytes=sum(_bytes(weights[name]) for name in used),
        layers=tuple(layers),
        kv_bytes_per_token=spec.kv.bytes_per_token,
    )


def plain_operations(path: Path, feeds: Mapping[str, NDArray]) -> float:
    """Operations of products and convolutions on these inputs, from the shapes of one profiled, unoptimised run."""
    return _counted_operations(_profiled_calls(path, feeds))


def plain_work(path: Path, feeds: Mapping[str, NDArray], batch: int) -> PlainWork:
    """Count a plain model on inputs of `batch` samples, from the shapes of one profiled, unoptimised run."""
    calls = _profiled_calls(path, feeds)
    alive = _most_alive(path, calls)
    return PlainWork(_counted_operations(calls) / batch, weight_bytes(path), None if alive is None else alive / batch)


def _counted_operations(calls: list[dict[str, Any]]) -> float:
    return sum(product_operations(call) or 0.0 for call in calls if call["op_name"] in _COUNTED)


def _most_alive(path: Path, calls: list[dict[str, Any]]) -> float | None:
    """Most bytes of node outputs that are alive at one time, in graph order; None where a size is not known.

    Constants and what only they make count as well: they are small beside activations.
    """
    graph = load_structure(path).graph
    sizes: dict[str, list[int]] = {call["node"]: _output_sizes(call) for call in calls}
    last = {name: place for place, node in enumerate(graph.node) for name in node.input}
    kept = {output.name for output in graph.output}
    alive: dict[str, int] = {}
    most = 0
    for place, node in enumerate(graph.node):
        if node.op_type == "Constant":
            continue
        made = sizes.get(node.name)
        outputs = [name for name in node.output if name]
        if not node.name or made is None or len(made) < len(outputs):
            return None
        alive.update(zip(outputs, made, strict=False))
        most = max(most, sum(alive.values()))
        for name in [name for name in alive if last.get(name, place) <= place and name not in kept]:
            del alive[name]
    return float(most)


def _output_sizes(call: Mapping[str, Any]) -> list[int]:
    """Bytes of each output of a profiled node."""
    return [
        math.prod(shape) * ITEMSIZE.get(kind, 4)  # rarer types have 4, or are no tensors
        for entry in call["output_type_shape"]
        for kind, shape in entry.items()
    ]


def _profiled_calls(path: Path, feeds: Mapping[str, NDArray]) -> list[dict[str, Any]]:
    """The kernels of one unoptimised run with the types and shapes of their operands, and their `node`'s name."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.enable_profiling = True
    options.add_session_config_entry("session.disable_prepacking", "1")  # packed weights have no shape in a profile
    with tempfile.TemporaryDirectory(prefix="kiln-floors-") as folder:
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        session.run(None, dict(feeds))
        events = json.loads(Path(session.end_profiling()).read_text())
    kernels = [event for event in events if event["name"].endswith("_kernel_time") and "op_name" in event["args"]]
    return [{**event["args"], "node": event["name"].removesuffix("_kernel_time")} for event in kernels]


def weight_bytes(path: Path) -> int:
    """Bytes of the tables that a plain model reads whole: all weights but those it only selects rows of."""
    graph = load_structure(path).graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    return sum(_bytes(weights[name]) for name in _read_whole(graph, weights))


def _read_whole(graph: "onnx.GraphProto", weights: Mapping[str, "onnx.TensorProto"]) -> set[str]:
    """Weights that some node other than a row selection takes."""
    return {
        name
        for node in graph.node
        for place, name in enumerate(node.input)
        if name in weights and place not in _ROW_TABLES.get(node.op_type, ())
    }


def _weight_of(
    node: "onnx.NodeProto", producers: Mapping[str, "onnx.NodeProto"], weights: Mapping[str, "onnx.TensorProto"]
) -> str | None:
    """The weight that a product multiplies with, also through a transposition or a cast."""
    for name in (node.input[index] for index in _WEIGHTS[node.op_type] if index < len(node.input)):
        while name not in weights and name in producers and producers[name].op_type in _SAME_VALUES:
            name = producers[name].input[0]
        if name in weights:
            return name
    return None


def _products_of(node: "onnx.NodeProto", weight: "onnx.TensorProto") -> int:
    """Multiply-adds of one row; of Kiln's packed weights with what fills them up."""
    numbers = {attribute.name: attribute.i for attribute in node.attribute}
    if node.op_type in _PACKED:
        return math.prod(weight.dims) * 8 // numbers.get("bits", 8)
    is_int4 = node.op_type in _LOW_BIT and FORMATS[numbers["format"]] == "int4"
    return math.prod(weight.dims) * (2 if is_int4 else 1)


def _nearest_product(output: str, producers: Mapping[str, "onnx.NodeProto"]) -> "onnx.NodeProto | None":
    """The first product upstream of an output, along first operands."""
    node = producers.get(output)
    while node is not None and node.op_type not in _WEIGHTS:
        node = producers.get(node.input[0]) if node.input else None
    return node


def _bytes(tensor: "onnx.TensorProto") -> int:
    import onnx

    return math.prod(tensor.dims) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
