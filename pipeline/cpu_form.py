"""A graph for a GPU in the form that this machine's CPU can run, to judge what passes made of it.

Every operator on 16-bit tensors runs in FP32 between two Casts, so that its result is rounded once, as the GPU's
operators do; Kiln's CUDA operators become the CPU library's, or the standard operators that they stand for, as
`passes.quantization.cuda_form` has products with weights of 8 or 4 bits. What a graph computes can so be judged without
a GPU; the GPU's kernels cannot, and are not: `kiln tune` does that there.
"""

from collections.abc import Mapping
from pathlib import Path

import onnx
import onnx_graphsurgeon as gs

from passes.graph import graph_from_path, proto_from_graph, tidy
from passes.low_form import has_type
from passes.manager import link_weights
from passes.norm_pattern import type_of
from passes.onnx_model import load_structure
from passes.pattern import STANDARD, replace_uses, values_of
from passes.precision_islands import FP32, LOW_TYPES
from passes.quantization.cuda_form import QuantisedWeight, StandardForm
from passes.quantization.cuda_schemes import DEFAULT_ROWS
from passes.scopes import scopes
from passes.shapes import infer_shapes
from passes.weights import spill
from plugins.dense.schema import LINEAR, LINEAR_SWIGLU
from plugins.errors import KilnError
from plugins.paged_attention.schema import DOMAIN, INPUTS, OP_TYPE
from plugins.quant_matmul.cuda_packing import unpack
from plugins.quant_matmul.cuda_schema import FORMATS, QUANT_LINEAR, QUANT_LINEAR_SWIGLU
from plugins.sampling.schema import FEED_TOKENS, GRAPH_INPUTS, TOKENS

_KEPT = frozenset({"Cast", "Gather", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Shape", "Size"})
"""The CPU has these for every type."""
_ATTENTION_OPERANDS = [spec.name for spec in INPUTS].index("value") + 1
"""The rest are caches, in any type, indices, and tables in FP32."""
_LOW_BIT = (QUANT_LINEAR.op_type, QUANT_LINEAR_SWIGLU.op_type)
_CUDA_ONLY = {(LINEAR.domain, op) for op in (LINEAR.op_type, LINEAR_SWIGLU.op_type, *_LOW_BIT)}


def needs_cpu_form(proto: onnx.ModelProto) -> bool:
    """Whether a serving graph holds operators that only the CUDA library has, or BF16, which the CPU lacks."""
    types = {value.name: value.type.tensor_type.elem_type for value in proto.graph.value_info}
    for node in proto.graph.node:
        kind, given = (node.domain, node.op_type), [types.get(name) for name in (*node.input, *node.output)]
        if kind in _CUDA_ONLY or (kind == (DOMAIN, OP_TYPE) and given[0] not in (None, onnx.TensorProto.FLOAT)):
            return True
        if onnx.TensorProto.BFLOAT16 in given and not (node.op_type in _KEPT and node.domain == STANDARD):
            return True
    return False


def write_cpu_form(path: Path, folder: Path) -> Path:
    """The CPU's form of a graph, in `folder`; weights are linked. Inputs, outputs and caches keep their types.

    Of a graph that chooses tokens only the logits are left.
    """
    graph = graph_from_path(path)
    _without_sampling(graph)
    infer_shapes(graph)
    for scope in scopes(graph):
        _Rewriting(scope).run()
    tidy(graph)
    metadata = {entry.key: entry.value for entry in load_structure(path).metadata_props}
    link_weights(path, folder)
    target = folder / f"cpu-{path.name}"
    spill(graph, folder / f"{target.name}.data")
    target.write_bytes(proto_from_graph(graph, metadata).SerializeToString())
    return target


def _without_sampling(graph: gs.Graph) -> None:
    """Undo `passes.bind_sampling`: logits are what is judged."""
    graph.outputs = [tensor for tensor in graph.outputs if tensor.name != TOKENS]
    graph.inputs = [tensor for tensor in graph.inputs if tensor.name not in GRAPH_INPUTS]
    for node in graph.nodes:
        if (node.domain, node.op) == (FEED_TOKENS.domain, FEED_TOKENS.op_type):
            replace_uses(graph, node.outputs[0], node.inputs[0])


class _Rewriting:
    """One scope's."""

    def __init__(self, scope: gs.Graph) -> None:
        self.scope = scope
        self.nodes: list[gs.Node] = []
        self.wide: dict[int, gs.Tensor] = {}

    def run(self) -> None:
        for node in list(self.scope.nodes):
            if node.op in _KEPT and node.domain == STANDARD:
                self.nodes.append(node)
            elif (node.domain, node.op) == (DOMAIN, OP_TYPE):
                self._widen(node, _ATTENTION_OPERANDS, 1)
            else:
                self._widen(node, len(node.inputs), len(node.outputs))
        self.scope.nodes = self.nodes

    def _widen(self, node: gs.Node, inputs: int, outputs: int) -> None:
        for index in range(min(inputs, len(node.inputs))):
            if _is_low(node.inputs[index]):
                node.inputs[index] = self._as_wide(node.inputs[index])
        after = []
        for index in range(min(outputs, len(node.outputs))):
            low = node.outputs[index]
            if _is_low(low):
                wide = gs.Variable(f"{low.name}/wide", FP32, low.shape)
                node.outputs[index] = wide
                after.append(_cast(wide, low))
        self.nodes += [*self._in_standard_form(node), *after]

    def _as_wide(self, tensor: gs.Tensor) -> gs.Tensor:
        if id(tensor) not in self.wide:
            self.wide[id(tensor)] = wide = gs.Variable(f"{tensor.name}/widened", FP32, tensor.shape)
            self.nodes.append(_cast(tensor, wide))
        return self.wide[id(tensor)]

    def _in_standard_form(self, node: gs.Node) -> list[gs.Node]:
        if (node.domain, node.op) not in _CUDA_ONLY:
            return [node]
        (x, weight, *rest), (y,) = list(node.inputs), list(node.outputs)
        node.inputs.clear()
        node.outputs.clear()
        quantised = None
        if node.op in _LOW_BIT:
            quantised, rest = _weight_of(weight, rest[0], node.attrs), rest[1:]
        swiglu = node.op in (LINEAR_SWIGLU.op_type, QUANT_LINEAR_SWIGLU.op_type)
        return StandardForm(node.name, x, y).run(quantised or weight, rest[0] if rest else None, swiglu)


def _weight_of(packed: gs.Tensor, scale: gs.Tensor, attributes: Mapping[str, int]) -> QuantisedWeight:
    form, values, scales = FORMATS[attributes["format"]], values_of(packed), values_of(scale)
    if values is None or scales is None:
        raise KilnError(
            f"the weight '{packed.name}' is no constant; Kiln's CUDA products are judged with constant ones"
        )
    rows = attributes.get("kernel_rows", DEFAULT_ROWS)
    return QuantisedWeight(unpack(values, form), scales, form, attributes.get("group_size", 0), rows)


def _is_low(tensor: gs.Tensor) -> bool:
    return any(has_type(tensor, low) for low in LOW_TYPES.values())


def _cast(source: gs.Tensor, target: gs.Tensor) -> gs.Node:
    to = type_of(target)
    return gs.Node("Cast", f"{target.name}/cast", {"to": to}, [source], [target], domain=STANDARD)
