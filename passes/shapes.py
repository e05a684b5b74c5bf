"""Types and shapes of tensors, as far as ONNX's own inference finds them."""

from collections.abc import Collection

import onnx
import onnx_graphsurgeon as gs

from passes.graph import proto_from_graph
from passes.scopes import scopes, subgraphs_of
from passes.weights import weights_apart

GENERATED = "inferred__"
"""How names of sizes begin that shape inference made up; each stands for one size in the whole graph."""


def infer_shapes(graph: gs.Graph) -> None:
    """Give tensors the dtypes and shapes that ONNX's inference finds; what is known already stays."""
    with weights_apart(graph):
        proto = proto_from_graph(graph)
    small = {t.name: t for t in proto.graph.initializer if t.data_location != onnx.TensorProto.EXTERNAL}
    for subgraph in subgraphs_of(proto.graph):  # inference knows a constant's values only in the graph that holds it
        used = {name for node in subgraph.node for name in node.input}
        subgraph.initializer.extend(tensor for name, tensor in small.items() if name in used)
    for scope in reversed([proto.graph, *subgraphs_of(proto.graph)]):  # inner ones first: their nodes are copied
        hide_values_of_slices(scope, small)
    try:
        inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    except Exception:  # an operator of another domain may confuse it; passes then find fewer shapes
        return
    values = {
        value.name: value
        for scope in (inferred.graph, *subgraphs_of(inferred.graph))
        for value in (*scope.value_info, *scope.output)
        if value.type.HasField("tensor_type")
    }
    _rename_generated(graph, list(values.values()))
    for scope in scopes(graph):
        for node in scope.nodes:
            for tensor in node.outputs:
                if tensor.name in values and isinstance(tensor, gs.Variable):
                    _annotate(tensor, values[tensor.name])


def hide_values_of_slices(scope: onnx.GraphProto, constants: Collection[str]) -> None:
    """Let inference not know the values of a Slice whose bounds are no constants: ONNX 1.23 takes such bounds for 0.

    Two Transposes keep type and shape of any tensor, and inference follows no values through them.
    """
    nodes = []
    for node in scope.node:
        nodes.append(node)
        if node.op_type == "Slice" and any(name and name not in constants for name in node.input[1:]):
            output, sliced, reversed_ = node.output[0], *(f"{node.output[0]}/{n}" for n in ("sliced", "reversed"))
            node.output[0] = sliced
            nodes.append(onnx.helper.make_node("Transpose", [sliced], [reversed_]))
            nodes.append(onnx.helper.make_node("Transpose", [reversed_], [output]))
    copies = onnx.GraphProto(node=nodes)
    scope.ClearField("node")
    scope.MergeFrom(copies)


def _rename_generated(graph: gs.Graph, values: list[onnx.ValueInfoProto]) -> None:
    """Give sizes that this inference named itself names of their own: it does not know those in subgraphs, say."""
    tensors = [tensor for scope in scopes(graph) for node in scope.nodes for tensor in node.outputs]
    taken = [size[len(GENERATED) :] for t in tensors for size in t.shape or () if str(size).startswith(GENERATED)]
    number = 1 + max((int(digits) for digits in taken if digits.isdigit()), default=-1)
    names: dict[str, str] = {}
    for value in values:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param.startswith("unk__"):
                names.setdefault(dim.dim_param, f"{GENERATED}{number + len(names)}")
                dim.dim_param = names[dim.dim_param]


def _annotate(tensor: gs.Variable, value: onnx.ValueInfoProto) -> None:
    kind = value.type.tensor_type
    if tensor.dtype is None and kind.elem_type:
        tensor.dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
    if not kind.HasField("shape"):
        return
    dims = [d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in kind.shape.dim]
    if tensor.shape is None:
        tensor.shape = dims
    elif len(tensor.shape) == len(dims):
        tensor.shape = [
            new if isinstance(new, int) and not isinstance(old, int) else old
            for old, new in zip(tensor.shape, dims, strict=True)
        ]
