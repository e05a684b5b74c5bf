"""Matching and replacing in graphs: small questions that rules are made of. Knows no particular pattern.

Identity, not equality: onnx-graphsurgeon compares nodes by content and tensors by name, so `in` and `list.index`
are slow and may find another one; everything here compares with `is`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray
from onnx_graphsurgeon.ir.tensor import LazyValues

from passes.base import Outcome, Refusal
from passes.scopes import label, scopes

STANDARD = ""
CONTRIB = "com.microsoft"

Rule = Callable[[gs.Graph, gs.Node], bool]
"""Takes the scope and a candidate node; True when it rewrote something. May raise Refusal to explain a near miss."""


def rewrite_nodes(graph: gs.Graph, rule: Rule, ops: Iterable[str], domain: str = STANDARD) -> Outcome:
    """Offer every node with one of the operators `ops` to `rule`, in all scopes, last node first within each.

    Nodes that an earlier rewrite detached (no outputs left) are skipped.
    """
    outcome, names = Outcome(), frozenset(ops)
    for scope in list(scopes(graph)):
        for node in reversed(list(scope.nodes)):
            if node.op not in names or node.domain != domain or not node.outputs:
                continue
            try:
                outcome.rewrites += bool(rule(scope, node))
            except Refusal as refusal:
                outcome.notes.append(f"{label(node)} ({node.op}): {refusal}")
    return outcome


def is_op(node: gs.Node | None, *ops: str, domain: str = STANDARD) -> bool:
    """Whether a node has one of the operators."""
    return node is not None and node.op in ops and node.domain == domain


def producer(tensor: gs.Tensor, *ops: str, domain: str = STANDARD) -> gs.Node | None:
    """The node that computes `tensor`, if it has one of the operators `ops` (any operator when none is given)."""
    if len(tensor.inputs) != 1:
        return None
    node = tensor.inputs[0]
    return node if not ops or is_op(node, *ops, domain=domain) else None


def consumers(tensor: gs.Tensor) -> list[gs.Node]:
    """The nodes that read a tensor, in any scope, each once."""
    return list({id(node): node for node in tensor.outputs}.values())


def is_output(scope: gs.Graph, tensor: gs.Tensor) -> bool:
    """Whether `tensor` is an output of `scope` or of a subgraph in it."""
    if any(output is tensor for output in scope.outputs):
        return True
    inner = (value for node in scope.nodes for value in node.attrs.values() if isinstance(value, gs.Graph))
    return any(is_output(subgraph, tensor) for subgraph in inner)


def in_scope(scope: gs.Graph, node: gs.Node) -> bool:
    """Whether a node is one of `scope`'s own, not of an enclosing graph or of a subgraph."""
    return any(own is node for own in scope.nodes)


def only_consumer(scope: gs.Graph, tensor: gs.Tensor, *ops: str, domain: str = STANDARD) -> gs.Node | None:
    """The one node that reads `tensor`, with one of the operators `ops`; None if others do or it is an output."""
    nodes = consumers(tensor)
    if len(nodes) != 1 or is_output(scope, tensor):
        return None
    return nodes[0] if not ops or is_op(nodes[0], *ops, domain=domain) else None


def input_of(node: gs.Node, index: int) -> gs.Tensor | None:
    """Input `index`, None where it is absent or left empty."""
    if index >= len(node.inputs) or node.inputs[index].is_empty():
        return None
    return node.inputs[index]


def other_input(node: gs.Node, tensor: gs.Tensor) -> gs.Tensor | None:
    """The other operand of a two-operand node; None when both are `tensor`."""
    found = [operand for operand in node.inputs if operand is not tensor]
    return found[0] if len(node.inputs) == 2 and len(found) == 1 else None


def values_of(tensor: gs.Tensor | None) -> NDArray | None:
    """A constant's values, None for any other tensor. Read-only, and not kept: weights stay on disk."""
    if not isinstance(tensor, gs.Constant):
        return None
    values = tensor._values
    if type(values) is LazyValues:  # its own load() warns of types that NumPy lacks, bfloat16 among them
        return onnx.numpy_helper.to_array(values.tensor)
    return values.load() if isinstance(values, LazyValues) else values


def scalar_of(tensor: gs.Tensor | None) -> float | None:
    """The value of a constant with exactly one element, None for any other tensor."""
    if not isinstance(tensor, gs.Constant) or int(np.prod(tensor.shape)) != 1:
        return None
    values = values_of(tensor)
    return None if values is None else float(values.reshape(()))


def constant_operand(node: gs.Node) -> tuple[gs.Tensor, gs.Constant] | None:
    """(variable, constant) of a commutative two-operand node with exactly one constant operand."""
    constants = [tensor for tensor in node.inputs if isinstance(tensor, gs.Constant)]
    variables = [tensor for tensor in node.inputs if not isinstance(tensor, gs.Constant)]
    return (variables[0], constants[0]) if len(constants) == len(variables) == 1 else None


def scalar_operand(node: gs.Node) -> tuple[gs.Tensor, float] | None:
    """(variable, value) of a commutative two-operand node with exactly one constant operand of one element."""
    operands = constant_operand(node)
    value = scalar_of(operands[1]) if operands else None
    return (operands[0], value) if operands and value is not None else None


def axes_of(node: gs.Node, index: int = 1) -> list[int] | None:
    """Axes of a reduction, Squeeze or Unsqueeze, from the attribute or from constant input `index`; None if unknown."""
    if "axes" in node.attrs:
        return list(node.attrs["axes"])
    values = values_of(input_of(node, index))
    return None if values is None else [int(axis) for axis in values.reshape(-1)]


def rank_of(tensor: gs.Tensor) -> int | None:
    """Number of dimensions, None where it is unknown."""
    return None if tensor.shape is None else len(tensor.shape)


def min_rank(tensor: gs.Tensor, depth: int = 6) -> int:
    """Number of dimensions that `tensor` has at least, where its shape is unknown from what computes it."""
    if tensor.shape is not None:
        return len(tensor.shape)
    node = producer(tensor)
    if node is None or depth == 0:
        return 0
    if is_op(node, "Conv", "BatchNormalization"):
        return 3 if node.op == "Conv" else 1
    if is_op(node, "Add", "Sub", "Mul", "Div"):  # broadcasting takes the larger rank
        return max(min_rank(operand, depth - 1) for operand in node.inputs)
    return 0


def static_dim(tensor: gs.Tensor, axis: int) -> int | None:
    """Size of one dimension, None where it is unknown or symbolic."""
    if tensor.shape is None or not -len(tensor.shape) <= axis < len(tensor.shape):
        return None
    size = tensor.shape[axis]
    return int(size) if isinstance(size, (int, np.integer)) and size >= 0 else None


def same_shape(first: gs.Tensor, second: gs.Tensor) -> bool:
    """Whether two shapes are known to be equal, dimension by dimension: the same size or the same symbol."""
    if first.shape is None or second.shape is None or len(first.shape) != len(second.shape):
        return False
    pairs = list(zip(first.shape, second.shape, strict=True))
    return all(one == other and (bool(one) if isinstance(one, str) else (one or 0) > 0) for one, other in pairs)


def new_constant(beside: gs.Tensor, suffix: str, values: NDArray) -> gs.Constant:
    """A constant named after a tensor whose name is unique, so that names stay unique and builds repeatable."""
    return gs.Constant(f"{beside.name}/{suffix}", np.asarray(values, order="C"))


def new_variable(beside: gs.Tensor, suffix: str, shape: Sequence[Any] | None = None, dtype: Any = None) -> gs.Variable:
    """A variable named after a tensor whose name is unique; its dtype is that tensor's unless given."""
    return gs.Variable(f"{beside.name}/{suffix}", beside.dtype if dtype is None else dtype, shape)


def replace_node(scope: gs.Graph, old: gs.Node, *new: gs.Node) -> None:
    """Put `new` nodes at the place of `old`, which loses its inputs. `take_outputs` gives them its outputs first."""
    index = next(i for i, node in enumerate(scope.nodes) if node is old)
    for node in new:
        node.domain = node.domain or STANDARD
    scope.nodes[index : index + 1] = new
    old.inputs.clear()
    old.outputs.clear()


def substitute(
    scope: gs.Graph, old: gs.Node, op: str, *inputs: gs.Tensor, domain: str = STANDARD, **attrs: Any
) -> None:
    """Let one new node, under the same name, compute the outputs of `old` from `inputs`."""
    replace_node(scope, old, gs.Node(op, old.name, attrs, list(inputs), take_outputs(old), domain))


def insert_before(scope: gs.Graph, place: gs.Node, *new: gs.Node) -> None:
    """Put `new` nodes in front of `place`."""
    index = next(i for i, node in enumerate(scope.nodes) if node is place)
    for node in new:
        node.domain = node.domain or STANDARD
    scope.nodes[index:index] = new


def take_outputs(node: gs.Node) -> list[gs.Tensor]:
    """Detach a node from its outputs and return them, so that a new node can produce them under the same names."""
    outputs = list(node.outputs)
    node.outputs.clear()
    return outputs


def replace_uses(scope: gs.Graph, old: gs.Tensor, new: gs.Tensor) -> None:
    """Let every reader of `old` read `new` instead. A graph output keeps its name.

    `old` must be produced in `scope`. Where it is an output of `scope`, `new` takes its name if a node of `scope`
    produces it and it is no output itself; else an Identity stands between.
    """
    for node in consumers(old):
        for index, tensor in enumerate(node.inputs):
            if tensor is old:
                node.inputs[index] = new
    for index, output in enumerate(scope.outputs):
        if output is not old:
            continue
        local = any(node is made for made in new.inputs for node in scope.nodes)
        if local and not is_output(scope, new):
            old.name, new.name = f"{old.name}/replaced", old.name
            scope.outputs[index] = new
        else:
            for maker in list(old.inputs):
                maker.outputs[next(i for i, t in enumerate(maker.outputs) if t is old)] = gs.Variable(
                    f"{old.name}/replaced", old.dtype, old.shape
                )
            scope.nodes.append(
                gs.Node("Identity", f"{old.name}/identity", inputs=[new], outputs=[old], domain=STANDARD)
            )
