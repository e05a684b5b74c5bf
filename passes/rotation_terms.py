"""The symbols that `passes.rotations` calculates with, and what operators that only move elements do to them.

A `Block` is a tensor in symbols: every place of its trailing dimensions holds a sum of terms, the same at all places of
its leading dimensions. A step returns None for what it cannot follow; it never guesses.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from passes.dimensions import moved_axes, moved_dims, unproven
from passes.pattern import axes_of, input_of, producer, rank_of, static_dim, values_of

MOST_COLUMNS = 1024
"""Wider tables are embeddings of words, not of angles."""


@dataclass(frozen=True)
class Entry:
    """A column of a table, as the arithmetic sees it: after Casts to `dtypes`, one after the other."""

    table: gs.Constant
    column: int
    dtypes: tuple[np.dtype, ...] = ()


@dataclass(frozen=True)
class Term:
    """sign * x[x] * entry; either factor may be absent."""

    sign: int
    x: int | None = None
    entry: Entry | None = None


@dataclass(frozen=True)
class Block:
    """A tensor: labels of its leading dimensions and the sums of terms at every place of the trailing ones.

    A label is a dimension of x, or of `ids` where x is no part of the terms; None where the size is 1.
    """

    lead: tuple[int | None, ...]
    terms: NDArray  # of tuple[Term, ...]
    ids: gs.Tensor | None = None

    @property
    def is_angle(self) -> bool:
        return self.ids is not None


def table_rows(gather: gs.Node) -> Block | None:
    """Gather(table [positions, columns], ids, axis=0): columns of the table, labelled with dimensions of the ids."""
    table, ids = gather.inputs
    rank = rank_of(ids)
    if int(gather.attrs.get("axis", 0)) != 0 or len(table.shape) != 2 or table.shape[1] > MOST_COLUMNS or rank is None:
        return None
    if isinstance(ids, gs.Constant) or np.dtype(table.dtype).kind in "iub":
        return None
    lead: tuple[int | None, ...] = tuple(None if static_dim(ids, axis) == 1 else axis for axis in range(rank))
    while (node := producer(ids)) is not None:
        if node.op == "Cast" and _keeps_integers(node):
            moves: list[int | None] | None = list(range(len(node.outputs[0].shape or ())))
        else:
            moves = moved_axes(node) if node.domain == "" else None
        if moves is None or rank_of(node.inputs[0]) is None:
            break
        lead = tuple(None if label is None else moves[label] for label in lead)
        ids = node.inputs[0]
    return Block(lead, cells((Term(1, None, Entry(table, i)),) for i in range(table.shape[1])), ids)


def _keeps_integers(cast: gs.Node) -> bool:
    """Casts of positions between signed integers, never to fewer bits."""
    before, after = cast.inputs[0].dtype, onnx.helper.tensor_dtype_to_np_dtype(int(cast.attrs["to"]))
    return before is not None and before in (np.int32, np.int64) and after in (before, np.int64)


def cells(items: Iterable[tuple[Term, ...]], shape: tuple[int, ...] = (-1,)) -> NDArray:
    """An array whose elements are the tuples; numpy would take them apart by itself."""
    listed = list(items)
    cells = np.empty(len(listed), object)
    for index, item in enumerate(listed):
        cells[index] = item
    return cells.reshape(shape)


def times(terms: tuple[Term, ...], sign: int) -> tuple[Term, ...]:
    return terms if sign == 1 else tuple(Term(-term.sign, term.x, term.entry) for term in terms)


def negative(block: Block | None, sign: int = -1) -> Block | None:
    if block is None:
        return None
    return Block(block.lead, cells((times(t, sign) for t in block.terms.flat), block.terms.shape), block.ids)


def laid_over(angle: Block, x: Block) -> Block | None:
    """An angle with as many leading and trailing dimensions as x, by the rules of broadcasting."""
    lead: list[int | None] = list(angle.lead)
    terms = angle.terms
    while terms.ndim > x.terms.ndim and terms.shape[0] == 1:
        lead, terms = [*lead, None], terms[0]
    while terms.ndim < x.terms.ndim and lead and lead[-1] is None:
        lead, terms = lead[:-1], terms[None]
    while len(lead) > len(x.lead) and lead[0] is None:
        lead = lead[1:]
    lead = [*[None] * (len(x.lead) - len(lead)), *lead]
    fits = terms.ndim == x.terms.ndim and all(a in (1, b) for a, b in zip(terms.shape, x.terms.shape, strict=True))
    return Block(tuple(lead), terms, angle.ids) if fits and len(lead) == len(x.lead) else None


def trailing_axis(block: Block, axis: int) -> int | None:
    """An axis of the tensor as an axis of its terms; None for a leading one."""
    lead = len(block.lead)
    axis = axis if axis >= 0 else axis + lead + block.terms.ndim
    return axis - lead if axis >= lead else None


def _slice(node: gs.Node, output: gs.Tensor, block: Block) -> Block | None:
    given = [_integers(input_of(node, index)) for index in range(1, 5)]
    starts, ends, axes, steps = given
    if starts is None or ends is None or axes is None:
        return None
    terms = block.terms
    for start, end, axis, step in zip(starts, ends, axes, steps or [1] * len(axes), strict=True):
        place = trailing_axis(block, axis)
        if place is None or step < 1:
            return None
        terms = terms[(slice(None),) * place + (slice(start, end, step),)]
    return Block(block.lead, terms, block.ids)


def _split(node: gs.Node, output: gs.Tensor, block: Block) -> Block | None:
    axis = trailing_axis(block, int(node.attrs.get("axis", 0)))
    if axis is None:
        return None
    size, parts = block.terms.shape[axis], len(node.outputs)
    sizes = node.attrs.get("split") or _integers(input_of(node, 1))
    if sizes is None:
        if input_of(node, 1) is not None:
            return None
        part = -(-size // parts)
        sizes = [min(part, size - index * part) for index in range(parts)]
    index = next(i for i, tensor in enumerate(node.outputs) if tensor is output)
    start = sum(sizes[:index])
    return Block(block.lead, block.terms[(slice(None),) * axis + (slice(start, start + sizes[index]),)], block.ids)


def _gather(node: gs.Node, output: gs.Tensor, block: Block) -> Block | None:
    indices, axis = values_of(node.inputs[1]), trailing_axis(block, int(node.attrs.get("axis", 0)))
    if indices is None or axis is None or block.terms.ndim + indices.ndim < 2:
        return None
    size = block.terms.shape[axis]
    if not np.all((indices >= -size) & (indices < size)):
        return None
    return Block(block.lead, np.take(block.terms, indices, axis), block.ids)


def _unsqueeze(node: gs.Node, output: gs.Tensor, block: Block) -> Block | None:
    axes = axes_of(node)
    if axes is None:
        return None
    lead, terms = list(block.lead), block.terms
    for axis in sorted(axis % (len(lead) + terms.ndim + len(axes)) for axis in axes):
        if axis < len(lead):
            lead.insert(axis, None)
        else:
            terms = np.expand_dims(terms, axis - len(lead))
    return Block(tuple(lead), terms, block.ids)


def _squeeze(node: gs.Node, output: gs.Tensor, block: Block) -> Block | None:
    axes = axes_of(node)
    if axes is None:
        return None
    lead, terms = list(block.lead), block.terms
    for axis in sorted((axis % (len(lead) + terms.ndim) for axis in axes), reverse=True):
        if axis >= len(lead) and terms.ndim > 1 and terms.shape[axis - len(lead)] == 1:
            terms = np.squeeze(terms, axis - len(lead))
        elif axis < len(lead) and lead[axis] is None:
            del lead[axis]
        else:
            return None
    return Block(tuple(lead), terms, block.ids)


def _reshape(node: gs.Node, output: gs.Tensor, block: Block) -> Block | None:
    before, after = node.inputs[0].shape, output.shape
    if before is None or after is None or len(before) != len(block.lead) + block.terms.ndim:
        return None
    for rank in range(1, len(after) + 1):
        tail = after[-rank:]
        if not all(isinstance(size, int) and size > 0 for size in tail):
            return None
        if np.prod(tail) != block.terms.size:
            continue
        moves = moved_dims(before[: len(block.lead)], after[:-rank])
        if moves is not None:
            lead = tuple(None if move is None else block.lead[move] for move in moves)
            return Block(lead, block.terms.reshape(tail), block.ids)
    return None


def _transpose(node: gs.Node, output: gs.Tensor, block: Block) -> Block | None:
    lead, rank = len(block.lead), block.terms.ndim
    order = list(node.attrs.get("perm", range(lead + rank - 1, -1, -1)))
    if len(order) != lead + rank or any(axis < lead for axis in order[lead:]):
        return None
    if not block.is_angle and order[:lead] != list(range(lead)):
        return None  # layouts of x are the business of whoever looks for rotations
    terms = block.terms.transpose([axis - lead for axis in order[lead:]])
    return Block(tuple(block.lead[axis] for axis in order[:lead]), terms, block.ids)


def _expand(node: gs.Node, output: gs.Tensor, block: Block) -> Block | None:
    before, after, lead = node.inputs[0].shape, output.shape, len(block.lead)
    if before is None or after is None or len(before) != len(after) or unproven(before[:lead], after[:lead]):
        return None
    tail = after[lead:]
    if len(tail) != block.terms.ndim or not all(isinstance(size, int) for size in tail) or np.prod(tail) > MOST_COLUMNS:
        return None
    return Block(block.lead, np.broadcast_to(block.terms, tail), block.ids)


def _tile(node: gs.Node, output: gs.Tensor, block: Block) -> Block | None:
    repeats, lead = _integers(input_of(node, 1)), len(block.lead)
    if repeats is None or any(count != 1 for count in repeats[:lead]) or np.prod(repeats) > MOST_COLUMNS:
        return None
    return Block(block.lead, np.tile(block.terms, repeats[lead:]), block.ids)


def _cast(node: gs.Node, output: gs.Tensor, block: Block) -> Block | None:
    """Of tables only: casts of x would have to be kept."""
    dtype = onnx.helper.tensor_dtype_to_np_dtype(int(node.attrs["to"]))
    if not block.is_angle:
        return None
    cast = (tuple(Term(t.sign, t.x, _cast_entry(t.entry, dtype)) for t in terms) for terms in block.terms.flat)
    return Block(block.lead, cells(cast, block.terms.shape), block.ids)


def _cast_entry(entry: Entry | None, dtype: np.dtype) -> Entry | None:
    return None if entry is None else Entry(entry.table, entry.column, (*entry.dtypes, dtype))


def _integers(tensor: gs.Tensor | None) -> list[int] | None:
    values = values_of(tensor)
    return None if values is None else [int(value) for value in values.reshape(-1)]


STEPS: Mapping[str, Callable[[gs.Node, gs.Tensor, Block], Block | None]] = {
    "Cast": _cast,
    "Expand": _expand,
    "Gather": _gather,
    "Identity": lambda node, output, block: block,
    "Neg": lambda node, output, block: negative(block),
    "Reshape": _reshape,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
"""What an operator makes of the block of its first input; takes the node and which of its outputs is meant."""
