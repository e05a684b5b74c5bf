"""Parts of a graph that compute a row from each element of one integer tensor: found, and run on other elements.

Such a part consists of operators that act element by element, move elements, or multiply matrices; none of them can
look at all elements, as a maximum does. Sizes that it needs (for an Expand, say) may come from any tensor, if they are
numbers or sizes that the integer tensor has too: then they are known for every other shape of it.

Whether rows are really independent of each other is not known here: a MatMul or Reshape can mix them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from passes.base import Refusal
from passes.evaluate import Axis, dimension, evaluate, sizes_of
from passes.pattern import producer, scalar_of
from passes.scopes import label

_ELEMENTWISE = frozenset((
    "Abs", "Add", "And", "Cast", "Ceil", "Clip", "Cos", "Div", "Equal", "Exp", "Floor", "Greater", "GreaterOrEqual",
    "Less", "LessOrEqual", "Log", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Pow", "Reciprocal", "Sin", "Sqrt",
    "Sub", "Where",
))  # fmt: skip
_MOVEMENT = frozenset((
    "Concat", "Expand", "Identity", "Reshape", "Slice", "Squeeze", "Tile", "Transpose", "Unsqueeze",
))  # fmt: skip
_ROWWISE = _ELEMENTWISE | _MOVEMENT | {"Einsum", "MatMul"}
_SIZED = frozenset(("Expand", "Reshape", "Slice", "Squeeze", "Tile", "Unsqueeze"))
"""Their inputs after the first are sizes."""
_CHUNKS = 64
"""Runs over which a table may be computed if the positions have a static shape."""


@dataclass(frozen=True)
class RowwisePart:
    """The nodes from positions to a cosine or sine, inputs before what reads them."""

    positions: gs.Tensor
    end: gs.Tensor
    steps: list[gs.Node]
    opset: int
    limit: int

    def run(self, positions: NDArray) -> NDArray:
        """The result for positions in a shape that the graph allows."""
        sizes = {dimension(self.positions, axis): size for axis, size in enumerate(positions.shape)}
        values = {id(self.positions): gs.Constant("positions", positions.astype(self.positions.dtype))}
        for node in self.steps:
            operands = operands_of(node, values)
            for index, operand in enumerate(operands):
                if operand is not None and not isinstance(operand, gs.Constant):
                    operands[index] = gs.Constant(operand.name, self._bound(operand, sizes))
            results = evaluate(node, operands, self.opset, self.limit)
            if results is None:
                raise Refusal(f"'{label(node)}' ({node.op}) between '{self.positions.name}' and it cannot be computed")
            values[id(node.outputs[0])] = gs.Constant(node.outputs[0].name, results[0])
        return np.asarray(values[id(self.end)].values)

    def _bound(self, tensor: gs.Tensor, sizes: dict[int | str | Axis | None, int]) -> NDArray:
        known = sizes_of(tensor)
        wanted = [] if known is None else [s if isinstance(s, int) else sizes.get(s) for s in known.flat]
        if known is None or None in wanted:
            raise Refusal(f"the size '{tensor.name}' is not known from the shape of '{self.positions.name}' alone")
        return np.array(wanted, np.int64).reshape(known.shape)

    @property
    def shape(self) -> list[int | None]:
        """Sizes of the axes of the positions, None for those that vary. Raises Refusal where they vary together."""
        dims = [dimension(self.positions, axis) for axis in range(len(self.positions.shape))]
        names = [dim for dim in dims if not isinstance(dim, int)]
        if len(set(names)) < len(names):
            raise Refusal(f"axes of '{self.positions.name}' {list(self.positions.shape)} have the same size by name")
        return [dim if isinstance(dim, int) else None for dim in dims]

    def short(self, count: int) -> NDArray:
        """Positions below `count` in a shape that they may have: each axis that varies is short, of its own size."""
        shape = [axis + 2 if size is None else size for axis, size in enumerate(self.shape)]
        return np.random.default_rng(1).integers(0, count, shape)

    def rows(self, positions: NDArray) -> NDArray:
        """[len(positions), dim], computed in as few runs as the shape of the graph's positions allows."""
        sizes = self.shape
        shape = [size or 1 for size in sizes]
        chunk = math.prod(shape)
        if None in sizes:
            shape[sizes.index(None)] = -(-len(positions) // chunk)
            chunk = math.prod(shape)
        chunks = -(-len(positions) // chunk)
        if chunks > _CHUNKS:
            raise Refusal(f"a table from '{self.positions.name}' {list(self.positions.shape)} takes {chunks} runs")
        padded = np.resize(positions, (chunks, *shape))
        parts = [self.run(part) for part in padded]
        if any(part.size != chunk * part.shape[-1] for part in parts):
            raise Refusal(f"its shape is {parts[0].shape} for positions {tuple(shape)}, not a row for each position")
        return np.concatenate([part.reshape(chunk, -1) for part in parts])[: len(positions)]


def positions_of(tensor: gs.Tensor) -> gs.Tensor | None:
    """The one integer tensor that `tensor` is computed from row by row; None if there is none, or something else."""
    found = {id(leaf): leaf for leaf in _leaves(tensor)}
    (leaf,) = found.values() if len(found) == 1 else (None,)
    return leaf if leaf is not None and _is_integer(leaf) else None


def _leaves(tensor: gs.Tensor) -> Iterator[gs.Tensor]:
    """The variables that a row-wise computation starts from."""
    if isinstance(tensor, gs.Constant) or tensor.is_empty():
        return
    node = producer(tensor)
    if node is None or node.op not in _ROWWISE or node.domain:
        yield tensor
        return
    inner = {id(leaf): leaf for operand in _rows_in(node) for leaf in _leaves(operand)}
    if _is_integer(tensor):
        leaves = list(inner.values())
        if len(leaves) != 1 or not _is_integer(leaves[0]) or not _keeps_positions(node, leaves[0]):
            yield tensor
            return
    yield from inner.values()


def _keeps_positions(node: gs.Node, leaf: gs.Tensor) -> bool:
    """Whether what an integer node makes of `leaf` is better looked up by `leaf`: its bound must be known to hold."""
    if node.op in ("Identity", "Cast", "Squeeze", "Unsqueeze"):
        return True
    source = not leaf.inputs or producer(leaf, "Range") is not None
    constants = [tensor for tensor in node.inputs if isinstance(tensor, gs.Constant)]
    return source and node.op in _ELEMENTWISE and all(scalar_of(tensor) is not None for tensor in constants)


def _rows_in(node: gs.Node) -> list[gs.Tensor]:
    return node.inputs[:1] if node.op in _SIZED else list(node.inputs)


def _is_integer(tensor: gs.Tensor) -> bool:
    return tensor.dtype in (np.dtype(np.int32), np.dtype(np.int64))


def steps_between(positions: gs.Tensor, end: gs.Tensor) -> list[gs.Node]:
    """The nodes that compute `end` from `positions`, inputs before what reads them; not those that compute sizes."""
    steps: dict[int, gs.Node] = {}

    def visit(tensor: gs.Tensor) -> None:
        node = producer(tensor)
        if node is None or tensor is positions or id(node) in steps:
            return
        for operand in _rows_in(node):
            visit(operand)
        steps[id(node)] = node

    visit(end)
    return list(steps.values())


def operands_of(node: gs.Node, values: dict[int, gs.Constant]) -> list[gs.Tensor | None]:
    """A node's inputs, values in place of tensors where they are known by identity; None for an absent one."""
    return [None if tensor.is_empty() else values.get(id(tensor), tensor) for tensor in node.inputs]
