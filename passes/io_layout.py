"""Take and give images as cameras and displays do, channels-last (`--io-layout nhwc`). Names stay.

1. graph input `x [N, C, H, W]` that reaches a convolution -> input `x [N, H, W, C]`, `Transpose(x; 0, 3, 1, 2)`;
2. graph output `y [N, C, H, W]` that a convolution reaches -> `Transpose(.; 0, 2, 3, 1)`, output `y [N, H, W, C]`.

"Reaches" is meant along operators that take images to images (elementwise, Q/DQ, pools, normalisation, Resize, Pad,
Concat). Exact, and a change of the interface: `permuted` says how, for whoever feeds the model or compares outputs.
The Transposes stand at the graph's edge: `passes.sink_transposes` moves or cancels them. Left alone: inputs and outputs
of unknown rank or of other types than FP32, FP16, BF16 and 8 bits. A Transpose ends the way to a convolution, and so
does a channels-last convolution, so that a second call changes nothing.
"""

import json
from collections.abc import Callable, Iterable

import ml_dtypes
import numpy as np
import onnx_graphsurgeon as gs

from passes.base import Effect, Outcome
from passes.nhwc_forms import TO_NCHW, TO_NHWC, UNARY, VARIADIC, new_transpose, words
from passes.pattern import consumers, new_variable, rank_of

_CONVOLUTIONS = words("Conv ConvInteger ConvTranspose DeformConv FusedConv QLinearConv")
_IMAGE_TO_IMAGE = (
    UNARY
    | VARIADIC
    | words("""
        AveragePool BatchNormalization Concat DequantizeLinear GlobalAveragePool GlobalMaxPool InstanceNormalization LRN
        LpPool MaxPool Pad QLinearAdd QLinearAveragePool QLinearConcat QLinearGlobalAveragePool QLinearLeakyRelu
        QLinearMul QLinearSigmoid QuantizeLinear Resize Slice Softmax Split Upsample
    """)
)
_DTYPES = tuple(np.dtype(kind) for kind in (np.float32, np.float16, ml_dtypes.bfloat16, np.uint8, np.int8))


IO_LAYOUT = "kiln.io_layout"
"""Metadata of a model: JSON of `permuted`."""


class IoLayoutNhwc:
    """Implements `passes.base.Pass`; an instance serves one graph."""

    name = "io_layout_nhwc"
    effect = Effect.EXACT

    def __init__(self) -> None:
        self.permuted: dict[str, list[int]] = {}
        """Inputs and outputs that calls permuted: `new = old.transpose(permutation)`."""

    def call(self, graph: gs.Graph) -> Outcome:
        outcome = Outcome()
        for tensor in image_inputs(graph):
            _permute_input(graph, tensor)
            self.permuted[tensor.name] = list(TO_NHWC)
            outcome.rewrites += 1
        for tensor in image_outputs(graph):
            _permute_output(graph, tensor)
            self.permuted[tensor.name] = list(TO_NHWC)
            outcome.rewrites += 1
        if self.permuted:
            outcome.metadata[IO_LAYOUT] = json.dumps(self.permuted, sort_keys=True)
        return outcome


def image_inputs(graph: gs.Graph) -> list[gs.Tensor]:
    """Inputs `[N, C, H, W]` that reach a convolution."""

    def reached(tensor: gs.Tensor) -> Iterable[gs.Node]:
        return (node for node in consumers(tensor) if node.op not in _CONVOLUTIONS or node.inputs[0] is tensor)

    return [
        tensor
        for tensor in graph.inputs
        if _is_image(tensor)
        and not any(output is tensor for output in graph.outputs)
        and _meets_convolution(tensor, reached, lambda node: node.outputs)
    ]


def image_outputs(graph: gs.Graph) -> list[gs.Tensor]:
    """Outputs `[N, C, H, W]` that a convolution reaches."""
    made = {id(tensor) for node in graph.nodes for tensor in node.outputs}
    distinct = {id(tensor): tensor for tensor in graph.outputs if id(tensor) in made}
    return [
        tensor
        for tensor in distinct.values()
        if _is_image(tensor) and _meets_convolution(tensor, lambda t: t.inputs, lambda node: node.inputs)
    ]


def _is_image(tensor: gs.Tensor) -> bool:
    return rank_of(tensor) == 4 and tensor.dtype is not None and np.dtype(tensor.dtype) in _DTYPES


def _meets_convolution(
    start: gs.Tensor,
    nodes_at: Callable[[gs.Tensor], Iterable[gs.Node]],
    beyond: Callable[[gs.Node], Iterable[gs.Tensor]],
) -> bool:
    """Whether the way from `start`, over nodes that keep an image an image, comes to a channels-first convolution."""
    seen: set[int] = set()
    stack = [start]
    while stack:
        for node in nodes_at(stack.pop()):
            if id(node) in seen or node.attrs.get("channels_last", 0):
                continue
            seen.add(id(node))
            if node.op in _CONVOLUTIONS:
                return True
            if node.op in _IMAGE_TO_IMAGE:
                stack += [t for t in beyond(node) if not isinstance(t, gs.Constant) and rank_of(t) in (4, None)]
    return False


def _permute_input(graph: gs.Graph, tensor: gs.Tensor) -> None:
    inner = new_variable(tensor, "nchw", tensor.shape)
    for node in consumers(tensor):
        for index, operand in enumerate(node.inputs):
            if operand is tensor:
                node.inputs[index] = inner
    for scope in graph.subgraphs(recursive=True):
        scope.outputs = [inner if output is tensor else output for output in scope.outputs]
    tensor.shape = [tensor.shape[axis] for axis in TO_NHWC]
    graph.nodes.insert(0, new_transpose(tensor, inner, TO_NCHW))


def _permute_output(graph: gs.Graph, tensor: gs.Tensor) -> None:
    inner = new_variable(tensor, "nchw", tensor.shape)
    maker = tensor.inputs[0]
    maker.outputs[next(i for i, made in enumerate(maker.outputs) if made is tensor)] = inner
    for node in consumers(tensor):
        for index, operand in enumerate(node.inputs):
            if operand is tensor:
                node.inputs[index] = inner
    for scope in graph.subgraphs(recursive=True):
        scope.outputs = [inner if output is tensor else output for output in scope.outputs]
    tensor.shape = [tensor.shape[axis] for axis in TO_NHWC]
    graph.nodes.append(new_transpose(inner, tensor, TO_NHWC))
