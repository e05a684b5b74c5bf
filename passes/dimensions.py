"""Shapes and moves of dimensions: what is known to be equal, and which dimension of a tensor is which of another.

Never guesses: a symbol equals only itself, and an unknown size nothing.
"""

import math
from collections.abc import Sequence

import onnx_graphsurgeon as gs

from passes.pattern import axes_of, rank_of
from passes.scopes import scopes
from passes.shapes import GENERATED


def unproven(first: Sequence, second: Sequence) -> int:
    """How many pairs of dimensions are not known to be equal; more than all if a pair is known to differ."""
    count = 0
    for one, other in zip(first, second, strict=True):
        if isinstance(one, int) and isinstance(other, int) and one != other:
            return len(first) + 1
        count += one is None or one != other
    return count


def same_size(first: gs.Tensor, axis: int, second: gs.Tensor, other: int) -> bool:
    """Whether two dimensions are known to have one size."""
    if first.shape is None or second.shape is None:
        return False
    return unproven([first.shape[axis]], [second.shape[other]]) == 0


def unify_symbols(graph: gs.Graph) -> None:
    """Replace names that shape inference made up, as for a Reshape's -1, by the sizes that they must stand for.

    A Reshape keeps the number of elements: what is left of its two shapes without the names in both is equal.
    """
    known: dict[str, str | int] = {}
    for scope in scopes(graph):
        for node in scope.nodes:
            for tensor in node.outputs:
                if tensor.shape is not None:
                    tensor.shape = [known.get(size, size) for size in tensor.shape]
            if node.op == "Reshape" and node.domain == "":
                known |= _resolved(node.inputs[0].shape, node.outputs[0].shape)
                if node.outputs[0].shape is not None:
                    node.outputs[0].shape = [known.get(size, size) for size in node.outputs[0].shape]


def _resolved(before: Sequence | None, after: Sequence | None) -> dict[str, str | int]:
    """The one made-up name in a Reshape's result, if its size follows, with that size."""
    if before is None or after is None or None in (*before, *after):
        return {}
    left, open_ = ([size for size in shape if not isinstance(size, int)] for shape in (before, after))
    for name in list(left):
        if name in open_:
            left.remove(name)
            open_.remove(name)
    if len(open_) != 1 or not open_[0].startswith(GENERATED):
        return {}
    whole, rest = (math.prod(size for size in shape if isinstance(size, int)) for shape in (before, after))
    if not left and rest and whole % rest == 0:
        return {open_[0]: whole // rest}
    return {open_[0]: left[0]} if len(left) == 1 and whole == rest else {}


def moved_axes(node: gs.Node) -> list[int | None] | None:
    """For each output dimension the input dimension it is, None where its size is 1; None if it is no such move.

    Transpose, Unsqueeze, Squeeze, Identity, and Reshapes that only add or remove dimensions of size 1.
    """
    rank = rank_of(node.inputs[0]) if node.domain == "" and node.inputs else None
    if rank is None:
        return None
    if node.op == "Identity":
        return list(range(rank))
    if node.op == "Transpose":
        return list(node.attrs.get("perm", range(rank - 1, -1, -1)))
    if node.op in ("Unsqueeze", "Squeeze"):
        axes = axes_of(node)
        if axes is None:
            return None
        total = rank + len(axes) if node.op == "Unsqueeze" else rank
        marked = {axis % total for axis in axes}
        rest = iter(range(rank))
        if node.op == "Squeeze":
            return [axis for axis in rest if axis not in marked]
        return [None if axis in marked else next(rest) for axis in range(total)]
    if node.op == "Reshape" and node.outputs[0].shape is not None:
        return moved_dims(node.inputs[0].shape, node.outputs[0].shape)
    return None


def moved_dims(before: Sequence, after: Sequence) -> list[int | None] | None:
    """`moved_axes` of a Reshape between two shapes of the same number of elements.

    One pair of dimensions need not be known to agree: all others do, so the product decides.
    """
    if len(before) == len(after) and unproven(before, after) <= 1:
        return list(range(len(before)))
    old = [axis for axis, size in enumerate(before) if size != 1]
    new = [axis for axis, size in enumerate(after) if size != 1]
    if len(old) != len(new) or unproven([before[i] for i in old], [after[i] for i in new]) > 1:
        return None
    source = dict(zip(new, old, strict=True))
    return [source.get(axis) for axis in range(len(after))]
