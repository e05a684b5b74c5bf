"""Masks and position tables become constants; rotations that are computed from positions become look-ups.

1. `chain of constants -> mask or table` -> constant of at most `size_limit` bytes, where the chain has a Range,
   ConstantOfShape, EyeLike, Trilu, Cos, Sin or comparison in it and starts from small constants: causal masks,
   sinusoidal tables, caches of cosines. It ends before an Expand, Tile, ConstantOfShape or Range that would come last:
   those are cheaper to compute than to store.
2. `f(positions)` -> `Gather(table, positions)` [-> Unsqueeze], with table [max_positions, dim], axis 0, where f ends in
   Cos or Sin [-> Cast, Neg, arithmetic with constants, Concat with itself] and depends on nothing but constants and one
   integer tensor `positions` of rank 1 or more. Anything row-wise is f: the outer product as Mul, MatMul or Einsum,
   halves by Concat, offsets, attention scaling; linear, NTK, YaRN and Llama 3 scaling differ in their constants only.

`positions` is a graph input or a Range if one is found behind integer arithmetic; else the integer tensor itself that
is cast to floating point. It has to lie in [0, max_positions): Gather fails loudly above; below 0 it would wrap
around, so positions are never negative (padded ones neither). Without `max_positions` there is no rule 2.

A table is computed by running those very nodes on 0, 1, ..., max_positions - 1 with ONNX's reference implementation
in the types of the graph. It is used only if a permutation of the positions gives the same bits, permuted, and so does
a short tensor of other sizes: f is then row-wise. Nodes that mix rows (a frequency that depends on the largest
position, say) are not in the list of operators either. REORDERS: a backend's cosine may have another last bit.
"""

import hashlib
from dataclasses import dataclass, field

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from passes.base import Effect, Outcome, Refusal
from passes.evaluate import evaluate
from passes.pattern import (
    in_scope,
    is_output,
    new_constant,
    new_variable,
    only_consumer,
    replace_node,
    replace_uses,
    rewrite_nodes,
    scalar_of,
    take_outputs,
)
from passes.position_tables import RowwisePart, operands_of, positions_of, steps_between
from passes.scopes import label, scopes

_COMPARISONS = frozenset(("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"))
_MAKERS = _COMPARISONS | {"Range", "ConstantOfShape", "EyeLike", "Trilu", "Cos", "Sin"}
"""What tells the chain of a mask or table from arithmetic on weights."""
_CHEAP = frozenset(("Expand", "Tile", "ConstantOfShape", "Range", "Identity"))
_LEAF_LIMIT = 2**20
"""Bytes of a constant that a chain of rule 1 may start from: larger ones are weights."""


class HoistTables:
    """Implements `passes.base.Pass`."""

    name = "hoist_tables"
    effect = Effect.REORDERS

    def __init__(self, max_positions: int | None = None, size_limit: int = 64 * 2**20) -> None:
        self.max_positions = max_positions
        """Positions are below it; None where no bound is known."""
        self.size_limit = size_limit
        """Bytes of one table."""

    def call(self, graph: gs.Graph) -> Outcome:
        outcome = _fold_tables(graph, self.size_limit)
        if self.max_positions is not None:
            lookups = _Lookups(self.max_positions, self.size_limit)
            found = rewrite_nodes(graph, lookups.rule, ("Cos", "Sin"))
            outcome.rewrites += found.rewrites
            outcome.notes += found.notes
        return outcome


# Rule 1


def _fold_tables(graph: gs.Graph, limit: int) -> Outcome:
    outcome, values, made = Outcome(), dict[int, gs.Constant](), set[int]()
    chain = []
    for scope in scopes(graph):
        for node in scope.nodes:
            operands = operands_of(node, values)
            if len(node.outputs) != 1 or not all(t is None or isinstance(t, gs.Constant) for t in operands):
                continue
            if not all(map(_is_small, node.inputs)):
                continue
            try:
                results = evaluate(node, operands, scope.opset, limit)
            except Refusal as refusal:
                outcome.notes.append(f"{label(node)} ({node.op}): {refusal}")
                continue
            if results is not None:
                tensor = node.outputs[0]
                values[id(tensor)] = new_constant(tensor, "table", results[0])
                chain.append((scope, node))
                if node.op in _MAKERS or any(id(t) in made for t in node.inputs):
                    made.add(id(tensor))
    outcome.rewrites = sum(_put_table(scope, node, values, made) for scope, node in reversed(chain))
    return outcome


def _is_small(tensor: gs.Tensor) -> bool:
    return not isinstance(tensor, gs.Constant) or tensor._values.nbytes <= _LEAF_LIMIT


def _put_table(scope: gs.Graph, node: gs.Node, values: dict[int, gs.Constant], made: set[int]) -> bool:
    """Replace a chain's last node by its value. Called for readers first: those that are replaced read nothing more."""
    tensor = node.outputs[0]
    exposed = is_output(scope, tensor)
    if not exposed and all(id(out) in values for reader in tensor.outputs for out in reader.outputs):
        return False  # only steps of the chain read it
    table = values.pop(id(tensor))
    if node.op in _CHEAP or id(tensor) not in made:
        return False
    replace_node(scope, node)
    replace_uses(scope, tensor, table)
    return True


# Rule 2


@dataclass
class _Lookups:
    """Tables and look-ups made so far: layers that compute the same rotation share them."""

    max_positions: int
    size_limit: int
    tables: dict[bytes, gs.Constant] = field(default_factory=dict)
    gathered: dict[tuple[bytes, int, int, tuple[int, ...]], tuple[gs.Tensor, gs.Tensor]] = field(default_factory=dict)

    def rule(self, scope: gs.Graph, node: gs.Node) -> bool:
        positions = positions_of(node.outputs[0])
        if positions is None or not positions.shape:
            return False
        node = _last(scope, node)
        end = node.outputs[0]
        rotation = RowwisePart(positions, end, steps_between(positions, end), scope.opset, 4 * self.size_limit)
        table, axes = self._table(rotation)
        key = hashlib.sha256(f"{table.dtype}{table.shape}".encode() + table.tobytes()).digest()
        constant = self.tables.setdefault(key, new_constant(end, "table", table))
        place = (key, id(positions), id(scope), axes)
        if place in self.gathered:
            replace_node(scope, node)
            replace_uses(scope, end, self.gathered[place][1])
        else:
            _look_up(scope, node, constant, positions, axes)
            self.gathered[place] = (positions, end)  # keeps both alive, so that identities stay theirs
        return True

    def _table(self, rotation: RowwisePart) -> tuple[NDArray, tuple[int, ...]]:
        """Rows for all positions, and the axes at which the result has ones that looked-up rows lack."""
        short = rotation.short(self.max_positions)
        sample = rotation.run(short)
        axes = _inserted_axes(sample.shape, short.shape)
        if axes is None:
            raise Refusal(f"its shape is {sample.shape} for positions {short.shape}, not a row for each position")
        size = self.max_positions * sample.shape[-1] * sample.itemsize
        if size > self.size_limit:
            raise Refusal(f"a table of {self.max_positions} positions takes {size} bytes, above {self.size_limit}")
        everything = np.arange(self.max_positions)
        table = rotation.rows(everything)
        order = np.random.default_rng(0).permutation(everything)
        rows = np.expand_dims(table[short], axes)
        if not (_same_bits(rotation.rows(order), table[order]) and _same_bits(sample, rows)):
            raise Refusal(f"a row depends on other elements of '{rotation.positions.name}' than its own")
        return table, axes


def _same_bits(left: NDArray, right: NDArray) -> bool:
    return left.shape == right.shape and left.tobytes() == right.tobytes()


def _inserted_axes(shape: tuple[int, ...], positions: tuple[int, ...]) -> tuple[int, ...] | None:
    """Where `shape` has ones that [*positions, dim] lacks; None if that is not the only difference."""
    wanted, axes = [*positions, shape[-1] if shape else 1], []
    for axis, size in enumerate(shape):
        if wanted and size == wanted[0]:
            wanted.pop(0)
        elif size == 1:
            axes.append(axis)
        else:
            return None
    return None if wanted or shape[-1] == 1 else tuple(axes)


def _look_up(scope: gs.Graph, node: gs.Node, table: gs.Constant, positions: gs.Tensor, axes: tuple[int, ...]) -> None:
    (end,) = take_outputs(node)
    gather = gs.Node("Gather", f"{end.name}/look_up", {"axis": 0}, [table, positions])
    if not axes:
        gather.outputs = [end]
        replace_node(scope, node, gather)
        return
    rows = new_variable(end, "rows", [*positions.shape, table.shape[1]], table.dtype)
    gather.outputs = [rows]
    unsqueeze = gs.Node("Unsqueeze", f"{end.name}/unsqueeze", inputs=[rows], outputs=[end])
    if scope.opset < 13:
        unsqueeze.attrs["axes"] = list(axes)
    else:
        unsqueeze.inputs.append(new_constant(end, "axes", np.array(axes, np.int64)))
    replace_node(scope, node, gather, unsqueeze)


def _last(scope: gs.Graph, node: gs.Node) -> gs.Node:
    """Follow a cosine or sine over what still belongs into the table."""
    while True:
        tensor = node.outputs[0]
        reader = only_consumer(scope, tensor, "Cast", "Neg", "Mul", "Div", "Add", "Sub", "Concat")
        if reader is None or not in_scope(scope, reader):
            return node
        others = [t for t in reader.inputs if t is not tensor]
        if not all(scalar_of(t) is not None for t in others) or (reader.op == "Concat" and others):
            return node
        node = reader
