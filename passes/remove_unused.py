"""Remove what no output of the graph depends on.

1. nodes whose outputs nothing reads, in all scopes, and with them initialisers that only they read -> nothing;
2. outputs that an operator may omit and nothing reads (mask of Dropout, indices of MaxPool, last states of LSTM) ->
   omitted;
3. an output of an If that nothing reads -> gone from both branches, with the work for it;
4. a scan output of a Loop that nothing reads -> gone from the body, with the work for it.

Exact: what is left computes as before. The rewrites of the outcome are the nodes, outputs and initialisers removed.

Which outputs may be omitted is read from ONNX's operator definitions. Left alone: graph inputs, which are the model's
interface; BatchNormalization, whose number of outputs selects training before opset 14; outputs that have to stay
because the next ones are told by position (Split, TopK); Loop's carried values; Scan; other domains. An If whose
condition is constant is another pass's.
"""

import onnx
import onnx_graphsurgeon as gs

from passes.base import Effect, Outcome
from passes.graph import tidy
from passes.pattern import STANDARD, is_op, is_output
from passes.scopes import scopes


class RemoveUnused:
    """Implements `passes.base.Pass`."""

    name = "remove_unused"
    effect = Effect.EXACT

    def call(self, graph: gs.Graph) -> Outcome:
        before = _count(graph)
        omitted = 0
        tidy(graph)
        while found := sum(_omit_outputs(scope, node) for scope in scopes(graph) for node in scope.nodes):
            omitted += found
            tidy(graph)
        return Outcome(before - _count(graph) + omitted)


def _count(graph: gs.Graph) -> int:
    """Nodes, and initialisers that some node reads."""
    nodes = [node for scope in scopes(graph) for node in scope.nodes]
    return len(nodes) + len({id(t) for node in nodes for t in node.inputs if isinstance(t, gs.Constant)})


def _omit_outputs(scope: gs.Graph, node: gs.Node) -> int:
    """Outputs of one node that were omitted."""
    unused = [
        index
        for index, tensor in enumerate(node.outputs)
        if not tensor.is_empty() and not tensor.outputs and not is_output(scope, tensor)
    ]
    if not unused or len(unused) == len(node.outputs):
        return 0
    if is_op(node, "If", "Loop"):
        return _omit_results(node, unused)
    return _omit_optional(node, scope.opset, unused)


def _omit_optional(node: gs.Node, opset: int, unused: list[int]) -> int:
    if node.domain != STANDARD or node.op == "BatchNormalization" or not onnx.defs.has(node.op, opset):
        return 0
    declared = onnx.defs.get_schema(node.op, opset).outputs
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    omitted = [index for index in unused if index < len(declared) and declared[index].option == optional]
    for index in omitted:
        node.outputs[index] = gs.Variable.empty()
    while node.outputs[-1].is_empty():
        del node.outputs[-1]
    return len(omitted)


def _omit_results(node: gs.Node, unused: list[int]) -> int:
    """Drop results of an If, or scan outputs of a Loop, by position: here and in the subgraphs."""
    if node.op == "If":
        skipped, first = 0, 0
    else:
        skipped, first = 1, len(node.inputs) - 2  # the body yields its condition first; carried values precede scans
    omitted = [index for index in unused if index >= first]
    for index in reversed(omitted):
        del node.outputs[index]
        for body in node.subgraphs():
            del body.outputs[skipped + index]
    return len(omitted)
