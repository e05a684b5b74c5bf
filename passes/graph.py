"""ONNX files as onnx-graphsurgeon graphs and back, in one normal form, with weights left on disk.

The normal form that passes may rely on:

1. model-local functions are inlined;
2. tensor names are unique over the main graph and all subgraphs;
3. constants are `gs.Constant` tensors: a Constant node remains only where it is a graph's own output;
4. initialisers that are also graph inputs (IR version 3) are constants, no inputs;
5. the standard domain is "" and never "ai.onnx" or None;
6. an unknown size is None and never -1 or "?", which would pass for one size everywhere.

Weights stay in their files (`passes.weights`) until somebody asks for them (`passes.pattern.values_of`).
"""

from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import onnx_graphsurgeon as gs
from numpy.typing import NDArray
from onnx_graphsurgeon.ir.tensor import LazyValues

from passes.onnx_model import check_tensors, external_files, known_size, load_structure
from passes.scopes import label, scopes, subgraphs_of
from passes.weights import constants_of, place
from plugins.errors import KilnError, first_line


def graph_from_path(path: Path) -> gs.Graph:
    """Read an ONNX file in normal form. Raises KilnError for what is not readable."""
    proto = load_structure(path)
    external_files(path, proto)
    check_tensors(path, proto)
    try:
        return graph_from_proto(proto, path.parent)
    except KilnError:
        raise
    except Exception as error:  # a graph that is damaged, but not so that protobuf notices
        raise KilnError(
            f"{path}: its graph cannot be read ({type(error).__name__}: {first_line(error)}); export it again"
        ) from error


def graph_from_proto(proto: onnx.ModelProto, folder: Path | None = None) -> gs.Graph:
    """A model in normal form; `folder` holds its external data. Raises KilnError for what graphs cannot carry."""
    _refuse_lossy(proto.graph)
    if proto.functions:
        proto = onnx.inliner.inline_local_functions(proto)
    elif any(opset.domain == "ai.onnx" for opset in proto.opset_import):
        copy = onnx.ModelProto()
        copy.CopyFrom(proto)
        proto = copy
    for opset in proto.opset_import:
        if opset.domain == "ai.onnx":
            opset.domain = ""
    graph = gs.import_onnx(proto)
    _make_names_unique(graph)
    for scope in scopes(graph):
        _forget_unknown_sizes(scope)
        for node in scope.nodes:
            if node.domain in (None, "ai.onnx"):
                node.domain = ""
        constants_from_nodes(scope)
    if folder is not None:
        for tensor in constants_of(graph):
            place(tensor, folder)
    return graph


def proto_from_graph(graph: gs.Graph, metadata: dict[str, str] | None = None) -> onnx.ModelProto:
    """The model of a graph; constants of `FileValues` stay references to their files."""
    model = gs.export_onnx(graph, do_type_check=False)
    kept = {tensor.name for tensor in model.graph.initializer}
    for tensor in (*graph.outputs, *(t for scope in graph.subgraphs(recursive=True) for t in scope.outputs)):
        if isinstance(tensor, gs.Constant):
            raise ValueError(f"constant '{tensor.name}' is a graph's output; a node must produce it")
    for subgraph in subgraphs_of(model.graph):
        moved = [tensor for tensor in subgraph.initializer if tensor.name not in kept]
        model.graph.initializer.extend(moved)
        kept.update(tensor.name for tensor in moved)
        del subgraph.initializer[:]
        local = {name for node in subgraph.node for name in node.output} - {value.name for value in subgraph.output}
        known = [value for value in subgraph.value_info if value.name in local]
        del subgraph.value_info[:]
        subgraph.value_info.extend(known)
    used = {node.domain for scope in (model.graph, *subgraphs_of(model.graph)) for node in scope.node} | {""}
    domains = {opset.domain: opset.version for opset in model.opset_import if opset.domain in used}
    del model.opset_import[:]
    model.opset_import.extend(onnx.helper.make_opsetid(*item) for item in domains.items())
    if metadata:
        onnx.helper.set_model_props(model, metadata)
    return model


def tidy(graph: gs.Graph) -> None:
    """Remove nodes that nothing uses and sort the rest topologically. Raises KilnError for a cycle."""
    graph.cleanup()
    for scope in scopes(graph):
        _sort(scope)


def _refuse_lossy(graph: onnx.GraphProto) -> None:
    """onnx-graphsurgeon drops some kinds of attribute; a model that has one must not lose it unseen."""
    kinds = onnx.AttributeProto
    lossy = {
        kinds.TYPE_PROTO,
        kinds.TYPE_PROTOS,
        kinds.SPARSE_TENSOR,
        kinds.SPARSE_TENSORS,
        kinds.TENSORS,
        kinds.GRAPHS,
    }
    for scope in (graph, *subgraphs_of(graph)):
        for node in scope.node:
            for attribute in node.attribute:
                if attribute.type in lossy:
                    raise KilnError(
                        f"node '{node.name or node.output[0]}' ({node.op_type}): attribute '{attribute.name}' is a "
                        f"{kinds.AttributeType.Name(attribute.type)}, which graph passes cannot carry; "
                        "export the model without it"
                    )


def _make_names_unique(graph: gs.Graph) -> None:
    """Two branches may use one name for different tensors; a later one gets a number."""
    owners: dict[str, gs.Tensor] = {}
    for scope in scopes(graph):
        for tensor in [
            *scope.inputs,
            *(t for node in scope.nodes for t in (*node.inputs, *node.outputs)),
            *scope.outputs,
        ]:
            if tensor.is_empty() or owners.setdefault(tensor.name, tensor) is tensor:
                continue
            number = 2
            while f"{tensor.name}__{number}" in owners:
                number += 1
            tensor.name = f"{tensor.name}__{number}"
            if isinstance(tensor, gs.Constant) and type(tensor._values) is LazyValues:
                own = onnx.TensorProto()  # exporting writes the name into the message, which is the caller's
                own.CopyFrom(tensor._values.tensor)
                tensor._values = LazyValues(own)
            owners[tensor.name] = tensor


def _forget_unknown_sizes(scope: gs.Graph) -> None:
    for tensor in (*scope.inputs, *(tensor for node in scope.nodes for tensor in node.outputs)):
        if isinstance(tensor, gs.Variable) and tensor.shape is not None:
            tensor.shape = [known_size(size) for size in tensor.shape]


def constants_from_nodes(scope: gs.Graph) -> None:
    """Make Constant nodes of one scope constant tensors, but for those that are its outputs."""
    outputs = {id(tensor) for tensor in scope.outputs}
    kept = []
    for node in scope.nodes:
        values = _constant_values(node) if node.op == "Constant" and id(node.outputs[0]) not in outputs else None
        if values is None:
            kept.append(node)
            continue
        output = node.outputs[0]
        node.outputs.clear()
        constant = gs.Constant(output.name, values)
        for consumer in list(output.outputs):
            for index, tensor in enumerate(consumer.inputs):
                if tensor is output:
                    consumer.inputs[index] = constant
    scope.nodes = kept


def _constant_values(node: gs.Node) -> "NDArray | LazyValues | None":
    """What a Constant node yields, in one of the spellings of opset 12; None for strings, sparse and references."""
    for name, value in node.attrs.items():
        if name == "value" and isinstance(value, gs.Constant):
            return value._values
        if name in ("value_float", "value_floats") and not isinstance(value, gs.Node.AttributeRef):
            return np.array(value, np.float32)
        if name in ("value_int", "value_ints") and not isinstance(value, gs.Node.AttributeRef):
            return np.array(value, np.int64)
    return None


def _sort(scope: gs.Graph) -> None:
    """Stable topological order: a node goes after what it, or a subgraph of it, reads in this scope."""
    position = {id(node): index for index, node in enumerate(scope.nodes)}
    done: set[int] = set()
    order: list[gs.Node] = []
    for root in scope.nodes:
        stack = [(root, iter(_feeders(root, position)))] if id(root) not in done else []
        path = {id(root)}
        while stack:
            node, feeders = stack[-1]
            for feeder in feeders:
                if id(feeder) in path:
                    raise KilnError(
                        f"node '{label(feeder)}' ({feeder.op}) depends on its own output: the graph has a cycle"
                    )
                if id(feeder) not in done:
                    path.add(id(feeder))
                    stack.append((feeder, iter(_feeders(feeder, position))))
                    break
            else:
                stack.pop()
                path.discard(id(node))
                done.add(id(node))
                order.append(node)
    scope.nodes = order


def _feeders(node: gs.Node, position: dict[int, int]) -> list[gs.Node]:
    tensors = [*node.inputs]
    for subgraph in node.subgraphs(recursive=True):
        tensors += [tensor for inner in subgraph.nodes for tensor in inner.inputs] + subgraph.outputs
    return [producer for tensor in tensors for producer in tensor.inputs if id(producer) in position]
