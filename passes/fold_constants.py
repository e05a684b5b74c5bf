"""Compute at build time what does not depend on the model's inputs, in all scopes.

1. `op(constants)` -> constant, for the operators of `passes.evaluate`, if the result has at most `size_limit` bytes
   or is no larger than the constants that nothing else reads: so a weight's Transpose is folded, but an Expand that
   blows up, or the Transpose of a weight that is also used as it is, is not.
2. `Identity(constant)` -> the constant.
3. shape arithmetic of which every element is known -> constant: Shape (`start` and `end` included), Size, and what
   Gather, Slice, Concat, Squeeze, Unsqueeze, Reshape, Cast, Mul, Equal and Where make of them. Elements are known one
   by one: with x [batch, 3, 224], Gather(Shape(x), 1) is 3.
4. `If(constant)` -> the nodes of the branch taken, in the scope of the If.
5. `CastLike(x, y)` with y of known type -> `Cast(x, to)`, which then may be folded.

Left alone: random operators, control flow other than 4, other domains' operators, strings, quantising and
dequantising. Nodes in the body of a Loop, Scan or SequenceMap are folded if they depend on constants or on shapes
from outside; shapes in the body itself may differ from one iteration to the next, whatever its annotations say.

Results of folding are read into memory; other weights are not. Rules 2 to 5 keep every bit, and so does 1 for movement,
integers and IEEE's basic operations. The rest of 1 REORDERS: a dot product or a cosine may end in another last bit
than a backend's.
"""

from collections.abc import Iterator

import onnx_graphsurgeon as gs
from onnx_graphsurgeon.exporters.onnx_exporter import dtype_to_onnx

from passes.base import Effect, Outcome, Refusal
from passes.evaluate import SIZE_OPERATORS, evaluate, sizes_of
from passes.graph import constants_from_nodes
from passes.pattern import consumers, is_op, is_output, new_constant, replace_uses, scalar_of, take_outputs
from passes.scopes import label, scopes
from passes.shapes import infer_shapes


class FoldConstants:
    """Implements `passes.base.Pass`."""

    name = "fold_constants"
    effect = Effect.REORDERS

    def __init__(self, size_limit: int = 2**20) -> None:
        self.size_limit = size_limit
        """Bytes of a result that may be larger than what it replaces."""

    def call(self, graph: gs.Graph) -> Outcome:
        notes: dict[str, None] = {}
        outcome = Outcome(sum(_name_type(node) for scope in scopes(graph) for node in scope.nodes))
        while rewrites := self._sweep(graph, notes):
            outcome.rewrites += rewrites
            infer_shapes(graph)  # a Reshape to a shape that is known now has a shape that is known now
        outcome.notes += notes
        return outcome

    def _sweep(self, graph: gs.Graph, notes: dict[str, None]) -> int:
        rewrites, unsteady = 0, frozenset(_in_loops(graph))
        for scope in list(scopes(graph)):
            gone = set()
            for node in list(scope.nodes):
                try:
                    results = self._results(scope, node, unsteady)
                except Refusal as refusal:
                    notes[f"{label(node)} ({node.op}): {refusal}"] = None
                    continue
                if results is not None:
                    _put(scope, node, results)
                    gone.add(id(node))
            scope.nodes = [node for node in scope.nodes if id(node) not in gone]
            rewrites += len(gone) + sum(_inline_branch(scope, node) for node in list(scope.nodes) if is_op(node, "If"))
        return rewrites

    def _results(self, scope: gs.Graph, node: gs.Node, unsteady: frozenset[int]) -> list[gs.Constant] | None:
        """Constants for a node's outputs, None where it stays."""
        operands = [None if tensor.is_empty() else tensor for tensor in node.inputs]
        if not all(tensor is None or isinstance(tensor, gs.Constant) for tensor in operands):
            return _known_sizes(node, unsteady)
        if is_op(node, "Identity"):
            return None if is_output(scope, node.outputs[0]) else operands
        limit = max(self.size_limit, _bytes_freed(node))
        values = evaluate(node, operands, scope.opset, limit)
        return values and [new_constant(t, "folded", v) for t, v in zip(_outputs(node), values, strict=True)]


def _name_type(node: gs.Node) -> bool:
    """Turn CastLike into Cast."""
    if not is_op(node, "CastLike") or node.inputs[1].dtype is None:
        return False
    node.op, node.attrs = "Cast", {"to": dtype_to_onnx(node.inputs[1].dtype), **node.attrs}
    node.inputs.pop()
    return True


def _known_sizes(node: gs.Node, unsteady: frozenset[int]) -> list[gs.Constant] | None:
    tensor = node.outputs[0]
    if node.op not in SIZE_OPERATORS or tensor.dtype is None:
        return None
    sizes = sizes_of(tensor, unsteady)
    if sizes is None or not all(isinstance(size, int) for size in sizes.flat):
        return None
    return [new_constant(tensor, "folded", sizes.astype(tensor.dtype))]


def _outputs(node: gs.Node) -> list[gs.Tensor]:
    return [tensor for tensor in node.outputs if not tensor.is_empty()]


def _bytes_freed(node: gs.Node) -> int:
    """Bytes of the constants that only `node` reads."""
    operands = {id(t): t for t in node.inputs if isinstance(t, gs.Constant) and len(consumers(t)) == 1}
    return sum(tensor._values.nbytes for tensor in operands.values())


def _put(scope: gs.Graph, node: gs.Node, constants: list[gs.Constant]) -> None:
    """Let readers of a node's outputs read constants; the node is detached."""
    node.inputs.clear()
    outputs = _outputs(node)
    take_outputs(node)
    for tensor, constant in zip(outputs, constants, strict=True):
        replace_uses(scope, tensor, constant)


def _in_loops(graph: gs.Graph, looping: bool = False) -> Iterator[int]:
    """Identities of tensors made in bodies that run several times."""
    for node in graph.nodes:
        if looping:
            yield from map(id, node.outputs)
        for subgraph in node.subgraphs():
            repeated = looping or node.op != "If"
            if repeated:
                yield from map(id, subgraph.inputs)
            yield from _in_loops(subgraph, repeated)


def _inline_branch(scope: gs.Graph, node: gs.Node) -> bool:
    condition = scalar_of(node.inputs[0])
    if condition is None:
        return False
    taken, other = node.attrs["then_branch"], node.attrs["else_branch"]
    if not condition:
        taken, other = other, taken
    results, outputs = list(taken.outputs), take_outputs(node)
    index = next(i for i, candidate in enumerate(scope.nodes) if candidate is node)
    scope.nodes[index : index + 1] = taken.nodes
    taken.nodes, taken.outputs = [], []
    node.inputs.clear()
    _discard(other)
    for output, result in zip(outputs, results, strict=True):
        if not output.is_empty():
            replace_uses(scope, output, result)
    constants_from_nodes(scope)
    return True


def _discard(graph: gs.Graph) -> None:
    """Detach nodes, so that tensors that outlive them do not count them as readers."""
    for scope in list(scopes(graph)):
        for node in scope.nodes:
            node.inputs.clear()
            node.outputs.clear()
        scope.nodes, scope.outputs = [], []
