"""What Transpose, Reshape and its kin do to a tensor: permutations, and shapes that are provably the same.

`Transpose(x, perm)` has `shape[i] = x.shape[perm[i]]`: axis i of the result is axis perm[i] of x. A view (Reshape,
Flatten, Squeeze, Unsqueeze) keeps the elements in row-major order and gives them another shape.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from passes.pattern import axes_of, input_of, is_op, new_constant, producer, rank_of, static_dim, values_of

VIEWS = ("Reshape", "Flatten", "Squeeze", "Unsqueeze")

Permutation = tuple[int, ...]


def permutation_of(node: gs.Node) -> Permutation | None:
    """A Transpose's permutation; None where it is the default, a reversal, of an unknown rank."""
    if "perm" in node.attrs:
        return tuple(node.attrs["perm"])
    rank = rank_of(node.inputs[0])
    return None if rank is None else tuple(reversed(range(rank)))


def composed(first: Permutation, second: Permutation) -> Permutation:
    """The permutation of Transpose(Transpose(x, first), second)."""
    return tuple(first[axis] for axis in second)


def inverse(permutation: Permutation) -> Permutation:
    return tuple(permutation.index(axis) for axis in range(len(permutation)))


def is_identity(permutation: Permutation) -> bool:
    return permutation == tuple(range(len(permutation)))


def compose_transposes(node: gs.Node) -> bool:
    """Transpose(Transpose(x, p), q) -> Transpose(x, p[q]): `node`, the second, then reads x."""
    inner = producer(node.inputs[0], "Transpose")
    if inner is None:
        return False
    first, second = permutation_of(inner), permutation_of(node)
    if first is None or second is None:
        return False
    node.attrs["perm"] = list(composed(first, second))
    node.inputs[0] = inner.inputs[0]
    return True


def element_type(dtype: object) -> int | None:
    """ONNX's number of an element type that graphs hold as number, numpy type or not at all."""
    if dtype is None or isinstance(dtype, (int, np.integer)):
        return None if dtype is None else int(dtype)
    return int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))  # type: ignore[call-overload]


def learn_type(tensor: gs.Tensor, equal: gs.Tensor) -> None:
    """Give `tensor` what is known of the element type and the sizes of one with the same content.

    Names of sizes stay, and so do the sizes of a tensor that no node makes: an input's are the graph's interface.
    """
    if not isinstance(tensor, gs.Variable):
        return
    if tensor.dtype is None:
        tensor.dtype = equal.dtype
    if not tensor.inputs or equal.shape is None:
        return
    if tensor.shape is None:
        tensor.shape = equal.shape
    elif len(tensor.shape) == len(equal.shape):
        pairs = zip(tensor.shape, equal.shape, strict=True)
        tensor.shape = [new if old is None or isinstance(new, int) else old for old, new in pairs]


def broadcasts_into(shape: Sequence[object], tensor: gs.Tensor) -> bool:
    """Whether an operand of `shape` provably leaves the shape of `tensor` as it is."""
    rank = rank_of(tensor)
    if rank is None:
        return len(shape) == 0
    return len(shape) <= rank and all(
        size == 1 or (isinstance(size, (int, np.integer)) and size == static_dim(tensor, index - len(shape)))
        for index, size in enumerate(shape)
    )


def same_shape_of_view(source: gs.Tensor, view: gs.Tensor) -> bool:
    """Whether two tensors of equally many elements provably have one shape: one dimension may be unknown.

    Names of symbolic dimensions prove nothing: shape inference makes up new ones that may repeat.
    """
    if source.shape is None or view.shape is None or len(source.shape) != len(view.shape):
        return False
    pairs = [(static_dim(source, axis), static_dim(view, axis)) for axis in range(len(view.shape))]
    known = [pair for pair in pairs if None not in pair]
    if any(before != after for before, after in known):
        return False
    return len(known) == len(pairs) or (len(known) == len(pairs) - 1 and all(before for before, _ in known))


def viewed(node: gs.Node) -> Iterator[gs.Tensor]:
    """The tensors that `node`, a view, is a view of: its input, what that is a view of, and so on."""
    current: gs.Node | None = node
    while current is not None:
        yield current.inputs[0]
        current = producer(current.inputs[0], *VIEWS)


def same_as_viewed(node: gs.Node) -> gs.Tensor | None:
    """The tensor among `viewed` that a view provably equals, shape and all."""
    if node.op == "Squeeze" and axes_of(node) == []:
        return None  # nothing by ONNX, every dimension of one by ONNX Runtime
    target = input_of(node, 1) if node.op == "Reshape" else None
    measure = producer(target, "Shape") if target is not None else None
    for tensor in viewed(node):
        if same_shape_of_view(tensor, node.outputs[0]) or (
            measure is not None and not measure.attrs and measure.inputs[0] is tensor
        ):
            return tensor
    if node.op == "Reshape" and _target_keeps(node):
        return node.inputs[0]
    return _inverse_view(node)


def _target_keeps(node: gs.Node) -> bool:
    """Reshape to [0, 0, -1] and the like: each dimension is copied or known to be the same, one may be left open."""
    target, rank = values_of(input_of(node, 1)), rank_of(node.inputs[0])
    if target is None or rank != target.size:
        return False
    copies = not node.attrs.get("allowzero", 0)
    changed = [
        size
        for axis, size in enumerate(target.reshape(-1).tolist())
        if not (size == 0 and copies) and size != static_dim(node.inputs[0], axis)
    ]
    return changed in ([], [-1])


def _inverse_view(node: gs.Node) -> gs.Tensor | None:
    """Squeeze of Unsqueeze, or the other way round, of the same axes: both count them in the larger shape."""
    pairs = {"Squeeze": "Unsqueeze", "Unsqueeze": "Squeeze"}
    inner = producer(node.inputs[0], pairs[node.op]) if node.op in pairs else None
    if inner is None:
        return None
    ours, theirs = axes_of(node), axes_of(inner)
    if not ours or not theirs:
        return None
    rank = rank_of(inner.inputs[0])
    if rank is not None:
        larger = rank + (len(theirs) if node.op == "Squeeze" else 0)
        ours, theirs = [axis % larger for axis in ours], [axis % larger for axis in theirs]
    return inner.inputs[0] if sorted(ours) == sorted(theirs) else None


def shorten_reshape(node: gs.Node) -> bool:
    """Reshape(view(x), t) -> Reshape(x, t'): zeros of t, which copy dimensions of the view, become what they copy."""
    inner, target = producer(node.inputs[0], *VIEWS), input_of(node, 1)
    if inner is None or target is None:
        return False
    if not node.attrs.get("allowzero", 0):
        sizes = values_of(target)
        resolved = None if sizes is None else _without_copies(inner, [int(size) for size in sizes.reshape(-1)])
        if sizes is None or resolved is None:
            return False
        if resolved != sizes.reshape(-1).tolist():
            node.inputs[1] = new_constant(node.outputs[0], "shape", np.array(resolved, np.int64))
    node.inputs[0] = inner.inputs[0]
    return True


def _without_copies(inner: gs.Node, target: list[int]) -> list[int] | None:
    """A target for the input of `inner` that means what `target` means for its output; None where that is unknown."""
    resolved = list(target)
    for axis in [axis for axis, size in enumerate(target) if size == 0]:
        size = static_dim(inner.outputs[0], axis)
        if size:
            resolved[axis] = size
        elif not _keeps_dimension(inner, axis):
            resolved[axis] = -1
    opened = resolved.count(-1) > target.count(-1)  # beside a copied size of 0 it would have no one value
    return None if resolved.count(-1) > 1 or (opened and 0 in resolved) else resolved


def _keeps_dimension(inner: gs.Node, axis: int) -> bool:
    """Whether dimension `axis` of a view's output is dimension `axis` of its input."""
    if is_op(inner, "Reshape"):
        target = values_of(input_of(inner, 1))
        return target is not None and not inner.attrs.get("allowzero", 0) and int(target.reshape(-1)[axis]) == 0
    if is_op(inner, "Flatten"):
        return axis == 0 and inner.attrs.get("axis", 1) == 1 and bool(rank_of(inner.inputs[0]))
    axes = axes_of(inner)
    return axes is not None and len(axes) > 0 and min(axes) > axis
