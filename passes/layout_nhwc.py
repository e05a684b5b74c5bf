"""Run convolutions channels-last (NHWC) where a backend really does, with Transposes only at the borders.

Target `cpu-int8`, ONNX Runtime's CPU provider, whose 8-bit convolutions are channels-last inside:

1. `QLinearConv(x [N, C, H, W])` -> `com.microsoft::QLinearConv(x [N, H, W, C])` with `channels_last=1`;
   weights stay `[M, C/group, kH, kW]`;
2. connected nodes with a channels-last form (`passes.nhwc_forms`: pools of 8-bit values, elementwise operators, Concat,
   Q/DQ, Pad, Resize, ...) follow into the region;
3. `Transpose(0, 2, 3, 1)` where an image enters a region, `Transpose(0, 3, 1, 2)` where one leaves it.

A region is a maximal connected set of such nodes with at least one convolution in it. Floating-point nodes at its rim
stay outside, so that a Transpose moves bytes and not floats. Exact: integer sums do not depend on order, and the forms
keep bits. Convolutions between Q and DQ have to become QLinearConv first (`passes.fuse_qdq`).

ONNX Runtime makes the same regions itself at its highest optimisation level, and is then as fast without this pass;
done here, they are in the artefact, whatever the level, and meet the Transposes of `passes.io_layout`.

The other targets leave the graph as it is, because the layout is the backend's own decision there:

- `cpu`: ONNX Runtime has no FP32 channels-last convolution for x86, and at load time blocks channels by itself
  (NCHWc), which is faster than any channels-last spelling of the graph that it can run (`scripts/bench_layout.py`);
- `cuda`: the provider transforms the graph itself when its option `prefer_nhwc` is set: see `provider_options`;
- `tensorrt`: layouts inside are tactics; only the bindings' formats are ours to choose: see `tensor_formats`.
"""

import numpy as np
import onnx_graphsurgeon as gs

from passes.base import Effect, Outcome
from passes.io_layout import image_inputs, image_outputs
from passes.nhwc_forms import TO_NCHW, TO_NHWC, Form, form_of, is_eight_bit, is_quantised_conv, new_transpose
from passes.pattern import (
    CONTRIB,
    consumers,
    is_op,
    new_constant,
    new_variable,
    producer,
    rank_of,
    values_of,
)
from passes.scopes import scopes

TARGETS = ("cpu", "cpu-int8", "cuda", "tensorrt")
_CHANNELS_LAST = {"float32": "HWC", "uint8": "HWC", "float16": "HWC8", "bfloat16": "HWC8"}
"""TensorRT's channels-last `TensorFormat` for a dtype (NvInferRuntimeBase.h). HWC8 pads C to a multiple of 8."""


class LayoutNhwc:
    """Implements `passes.base.Pass`."""

    name = "layout_nhwc"
    effect = Effect.EXACT

    def __init__(self, target: str = "cpu") -> None:
        if target not in TARGETS:
            raise ValueError(f"target '{target}' is unknown; expected one of {', '.join(TARGETS)}")
        self.target = target
        self.provider_options: dict[str, str] = {}
        """After a call for `cuda`: what the session must set."""
        self.tensor_formats: dict[str, str] = {}
        """After a call for `tensorrt`: binding -> name of the `TensorFormat` that makes its bytes channels-last."""

    def call(self, graph: gs.Graph) -> Outcome:
        outcome = Outcome()
        if self.target == "cpu-int8":
            for scope in list(scopes(graph)):
                _convert(scope, outcome)
        elif any(is_op(node, "Conv", "ConvTranspose") for scope in scopes(graph) for node in scope.nodes):
            outcome.notes.append(self._leave(graph))
        return outcome

    def _leave(self, graph: gs.Graph) -> str:
        """Record what the backend needs to know; says why the graph stays."""
        if self.target == "cpu":
            return "left in NCHW: ONNX Runtime's CPU provider blocks FP32 channels itself and has no kernel for NHWC"
        if self.target == "cuda":
            self.provider_options = {"prefer_nhwc": "1"}
            return "left in NCHW: the CUDA provider converts it under its option prefer_nhwc=1"
        images = [*image_inputs(graph), *image_outputs(graph)]
        names = {tensor.name: np.dtype(tensor.dtype).name for tensor in images if tensor.dtype is not None}
        self.tensor_formats = {t: _CHANNELS_LAST[dtype] for t, dtype in names.items() if dtype in _CHANNELS_LAST}
        return "left in NCHW: TensorRT picks layouts itself; channels-last bindings are a matter of their formats"


def _convert(scope: gs.Graph, outcome: Outcome) -> None:
    loose = sum(1 for node in scope.nodes if is_op(node, "Conv") and _between_qdq(node))
    if loose:
        outcome.notes.append(f"{loose} convolutions left between DequantizeLinear and QuantizeLinear: fuse them before")
    if not any(is_quantised_conv(node) for node in scope.nodes):
        return
    forms = _forms(scope)
    inside = _with_convolution(scope, _without_rim(scope, forms))
    _rewrite(scope, inside)
    outcome.rewrites += len(inside)


def _between_qdq(conv: gs.Node) -> bool:
    following = consumers(conv.outputs[0])
    return producer(conv.inputs[0], "DequantizeLinear") is not None and any(
        is_op(node, "QuantizeLinear") for node in following
    )


def _forms(scope: gs.Graph) -> dict[int, Form]:
    """Forms by node. Ranks and dtypes follow along nodes of other domains, where ONNX's inference stops."""
    images = {
        id(tensor)
        for node in scope.nodes
        for tensor in (*node.inputs, *node.outputs)
        if rank_of(tensor) == 4 and not isinstance(tensor, gs.Constant)
    }
    images |= {id(node.inputs[0]) for node in scope.nodes if is_quantised_conv(node)}
    forms = {}
    for node in scope.nodes:
        form = form_of(node, lambda tensor: id(tensor) in images, scope.opset)
        if form is None:
            continue
        forms[id(node)] = form
        images.update(id(tensor) for tensor in node.outputs)
        if node.domain == CONTRIB and node.outputs[0].dtype is None:  # all of them return what they read
            node.outputs[0].dtype = node.inputs[form.images[0]].dtype
    return forms


def _without_rim(scope: gs.Graph, forms: dict[int, Form]) -> dict[int, Form]:
    """Drop nodes on wide (not 8-bit) values that no inner node reads, then those that read no inner node's result."""
    inside = dict(forms)
    for node in reversed(scope.nodes):
        if id(node) in inside and all(_is_wide(tensor) for tensor in node.outputs):
            readers = [reader for tensor in node.outputs for reader in consumers(tensor)]
            if not any(id(reader) in inside for reader in readers):
                del inside[id(node)]
    for node in scope.nodes:
        images = [node.inputs[index] for index in inside[id(node)].images] if id(node) in inside else []
        if images and all(_is_wide(tensor) and not _made_by(tensor, inside) for tensor in images):
            del inside[id(node)]
    return inside


def _is_wide(tensor: gs.Tensor) -> bool:
    return tensor.dtype is not None and not is_eight_bit(tensor)


def _made_by(tensor: gs.Tensor, nodes: dict[int, Form]) -> bool:
    return any(id(maker) in nodes for maker in tensor.inputs)


def _with_convolution(scope: gs.Graph, inside: dict[int, Form]) -> dict[int, Form]:
    """The nodes of those connected sets that hold a convolution."""
    neighbours: dict[int, list[int]] = {node: [] for node in inside}
    for node in scope.nodes:
        for index in inside[id(node)].images if id(node) in inside else ():
            for maker in node.inputs[index].inputs:
                if id(maker) in inside:
                    neighbours[id(node)].append(id(maker))
                    neighbours[id(maker)].append(id(node))
    reached: set[int] = set()
    stack = [id(node) for node in scope.nodes if is_quantised_conv(node)]
    while stack:
        node = stack.pop()
        if node not in reached:
            reached.add(node)
            stack += neighbours[node]
    return {node: form for node, form in inside.items() if node in reached}


def _rewrite(scope: gs.Graph, inside: dict[int, Form]) -> None:
    """Give every image at an inner node a channels-last twin; Transposes join twins where a border lies between."""
    outputs = {id(tensor) for graph in (scope, *scope.subgraphs(recursive=True)) for tensor in graph.outputs}
    twins: dict[int, gs.Tensor] = {}
    leaving: dict[int, list[gs.Node]] = {}
    for node in scope.nodes:
        for index, tensor in enumerate(node.outputs if id(node) in inside else ()):
            twin = new_variable(tensor, "nhwc", _permuted(tensor))
            twins[id(tensor)] = node.outputs[index] = twin
            if id(tensor) in outputs or any(_reads_nchw(reader, tensor, inside) for reader in consumers(tensor)):
                leaving.setdefault(id(node), []).append(new_transpose(twin, tensor, TO_NCHW))
    nodes = []
    for node in scope.nodes:
        if id(node) in inside:
            nodes += _switch(node, inside[id(node)], twins)
        nodes += [node, *leaving.get(id(node), [])]
    scope.nodes = nodes


def _reads_nchw(reader: gs.Node, tensor: gs.Tensor, inside: dict[int, Form]) -> bool:
    images = inside[id(reader)].images if id(reader) in inside else ()
    return any(operand is tensor and index not in images for index, operand in enumerate(reader.inputs))


def _switch(node: gs.Node, form: Form, twins: dict[int, gs.Tensor]) -> list[gs.Node]:
    """Turn a node into its form; returns Transposes of images that come from outside and have no twin yet."""
    entering = []
    name = node.outputs[0]
    for index in form.images:
        tensor = node.inputs[index]
        if id(tensor) not in twins:
            twins[id(tensor)] = new_variable(name, f"image{index}", _permuted(tensor), tensor.dtype)
            entering.append(new_transpose(tensor, twins[id(tensor)], TO_NHWC))
        node.inputs[index] = twins[id(tensor)]
    for index, change in form.constants.items():
        values = values_of(node.inputs[index])
        assert values is not None
        node.inputs[index] = new_constant(name, f"constant{index}", change(values))
    node.op, node.domain = form.op, form.domain
    for key, value in form.attrs.items():
        if value is None:
            node.attrs.pop(key, None)
        else:
            node.attrs[key] = value
    return entering


def _permuted(tensor: gs.Tensor) -> list | None:
    return None if tensor.shape is None else [tensor.shape[axis] for axis in TO_NHWC]
