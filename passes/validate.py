"""Is a graph sound? Refuses what graph passes and backends would trip over later, naming the node.

1. every tensor that a node reads is a graph input, a constant, or produced by exactly one node that it can see;
2. no node depends on its own output;
3. operators of the standard domain exist, with their required attributes and permitted input types.

Knows nothing of other domains' operators, nor of those that ONNX Runtime adds to the standard domain.
"""

import onnx
import onnx_graphsurgeon as gs

from passes.graph import proto_from_graph, tidy
from passes.scopes import label, subgraphs_of
from plugins.errors import KilnError, first_line

RUNTIME_OPERATORS = frozenset({"LayerNormalization", "SimplifiedLayerNormalization"})
"""Operators that ONNX Runtime has in the standard domain at any opset, ONNX itself later (17) or never."""


def check_graph(graph: gs.Graph) -> None:
    """Raise KilnError for the first defect found. Removes dead nodes and sorts the rest on the way."""
    _check_producers(graph, frozenset())
    tidy(graph)
    proto = proto_from_graph(graph)
    _check_operators(proto)
    try:
        onnx.shape_inference.infer_shapes(proto, check_type=True)
    except onnx.shape_inference.InferenceError as error:
        raise KilnError(f"the graph has a type error: {first_line(error)}; export the model again") from error


def _check_producers(scope: gs.Graph, outer: frozenset[int]) -> None:
    """`outer` holds the identities of tensors that enclosing graphs give."""
    produced = {id(tensor) for node in scope.nodes for tensor in node.outputs}
    visible = outer | produced | {id(tensor) for tensor in scope.inputs}
    for node in scope.nodes:
        for tensor in node.outputs:
            if len(tensor.inputs) > 1 and not tensor.is_empty():
                names = " and ".join(f"'{label(maker)}'" for maker in tensor.inputs)
                raise KilnError(f"nodes {names} both produce '{tensor.name}'; each tensor must have one producer")
        for tensor in node.inputs:
            if not (isinstance(tensor, gs.Constant) or tensor.is_empty() or id(tensor) in visible):
                raise KilnError(
                    f"node '{label(node)}' ({node.op}) reads '{tensor.name}', which is neither an input, nor an "
                    "initialiser, nor any node's output; export the model again"
                )
        for subgraph in node.subgraphs():
            _check_producers(subgraph, visible)
    for tensor in scope.outputs:
        if id(tensor) not in visible and not isinstance(tensor, gs.Constant):
            raise KilnError(f"graph output '{tensor.name}' is produced by no node; export the model again")


def _check_operators(proto: onnx.ModelProto) -> None:
    versions = {opset.domain: opset.version for opset in proto.opset_import}
    context = onnx.checker.DEFAULT_CONTEXT
    opsets, ir_version = context.opset_imports, context.ir_version
    context.opset_imports, context.ir_version = versions, proto.ir_version
    try:
        for graph in (proto.graph, *subgraphs_of(proto.graph)):
            for node in graph.node:
                controls = any(attribute.HasField("g") for attribute in node.attribute)
                added = node.op_type in RUNTIME_OPERATORS and not onnx.defs.has(node.op_type, versions.get("", 1))
                if node.domain == "" and controls:  # a subgraph's nodes are checked one by one
                    _check_attributes(node, versions.get("", 1))
                elif node.domain == "" and not added:
                    _check_node(node, context)
    finally:
        context.opset_imports, context.ir_version = opsets, ir_version


def _check_attributes(node: onnx.NodeProto, version: int) -> None:
    found = {attribute.name for attribute in node.attribute}
    schema = onnx.defs.get_schema(node.op_type, version) if onnx.defs.has(node.op_type, version) else None
    if schema is None:
        raise KilnError(f"node '{node.name or node.op_type}': opset {version} has no operator {node.op_type}")
    for name, attribute in schema.attributes.items():
        if attribute.required and name not in found:
            raise KilnError(f"node '{node.name or node.op_type}' ({node.op_type}) has no '{name}'; export it again")


def _check_node(node: onnx.NodeProto, context: onnx.checker.C.CheckerContext) -> None:
    try:
        onnx.checker.check_node(node, context)
    except onnx.checker.ValidationError as error:
        name = node.name or (node.output[0] if node.output else node.op_type)
        raise KilnError(f"node '{name}' ({node.op_type}) is malformed: {first_line(error)}") from error
