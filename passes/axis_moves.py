"""How operators compute on permuted operands: which attributes and constants change, and how the result is permuted.

Let `v = Transpose(w, permutation)`, so that axis a of v is axis permutation[a] of w. For a node that reads v, `move_of`
says how the same node computes on w instead: every operand in `Move.operands` has to come permuted in the same way, and
each output is then `Transpose(new output, Move.result)` of what the node gave before, or the same where that is None.

A move is exact. A sum over several axes moves only where these stay in their order among each other, and so do its
elements; since runtimes add neighbouring and distant elements by different kernels, `adds_elements` tells of sums whose
bits may change. There is no move for operators whose meaning depends on positions of axes (convolutions,
pools, BatchNormalization, MatMul), nor for interpolating Resize, which runtimes have for few layouts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray
from onnx import TensorProto

from passes.pattern import CONTRIB, STANDARD, axes_of, input_of, is_op, rank_of, static_dim, values_of
from passes.views import Permutation, element_type, is_identity


@dataclass(frozen=True)
class Move:
    """What changes when a node's operands come permuted."""

    operands: tuple[int, ...]
    result: Permutation | None
    attrs: dict[str, Any] = field(default_factory=dict)
    constants: dict[int, NDArray] = field(default_factory=dict)
    """Other inputs, by index."""


def move_of(node: gs.Node, permutation: Permutation, opset: int) -> Move | None:
    """How a node computes on permuted operands; None where it does not."""
    rule = _RULES.get((node.domain or STANDARD, node.op))
    return rule(node, permutation, opset) if rule is not None else None


def adds_elements(node: gs.Node) -> bool:
    """Whether a node adds up floating-point elements of one operand, other than Softmax, which is along one axis."""
    element = element_type(node.inputs[0].dtype)
    integers = (TensorProto.INT8, TensorProto.INT32, TensorProto.INT64, TensorProto.UINT8)
    return node.op in _ADDING and element not in integers


def move_to(node: gs.Node, permutation: Permutation, opset: int) -> Move | None:
    """How a node gives a permuted result; None where it does not.

    An Unsqueeze or Reshape can where the permutation only moves axes of size 1: its operand stays, its numbers change.
    """
    rank = len(permutation)
    if is_op(node, "Unsqueeze") and (axes := axes_of(node)):
        axes = [axis % rank for axis in axes]
        if _keeps_order(permutation, [axis for axis in range(rank) if axis not in axes]):
            return _with_axes(node, sorted(permutation[axis] for axis in axes), permutation, operands=())
    if is_op(node, "Reshape") and (target := values_of(input_of(node, 1))) is not None and target.size == rank:
        literal = node.attrs.get("allowzero", 0) or target.all()
        if literal and _keeps_order(permutation, [axis for axis, size in enumerate(target.tolist()) if size != 1]):
            return Move((), permutation, constants={1: permuted_vector(target, permutation)})
    move = move_of(node, permutation, opset)
    return move if move is not None and move.result == permutation else None


def _keeps_order(permutation: Permutation, axes: Sequence[int]) -> bool:
    """Whether a permutation leaves some axes in their order among each other; `axes` rise."""
    moved = [permutation[axis] for axis in axes]
    return moved == sorted(moved)


def permuted_constant(values: NDArray, permutation: Permutation) -> NDArray:
    """The operand w for the constant v, which broadcasting first gives leading axes of size 1."""
    full = values.reshape((1,) * (len(permutation) - values.ndim) + values.shape)
    return np.transpose(full, [permutation.index(axis) for axis in range(len(permutation))])


def _unary(node: gs.Node, permutation: Permutation, opset: int) -> Move | None:
    return Move((0,), permutation)


def _one_operand(node: gs.Node, permutation: Permutation, opset: int) -> Move | None:
    return Move((0,), permutation) if len(node.inputs) == 1 else None


def _dropout(node: gs.Node, permutation: Permutation, opset: int) -> Move | None:
    training = input_of(node, 2)
    inference = opset >= 7 and (training is None or not np.any(values_of(training) is None or values_of(training)))
    return Move((0,), permutation) if inference else None


def _elementwise(node: gs.Node, permutation: Permutation, opset: int) -> Move | None:
    if node.attrs.keys() & {"axis", "broadcast"}:
        return None  # broadcasting as before opset 7
    operands = []
    for index, tensor in enumerate(node.inputs):
        rank, constant = rank_of(tensor), isinstance(tensor, gs.Constant)
        if rank is None or rank > len(permutation) or (rank not in (0, len(permutation)) and not constant):
            return None
        if rank > 0 and not (constant and int(np.prod(tensor.shape)) == 1):
            operands.append(index)
    return Move(tuple(operands), permutation)


def _concat(node: gs.Node, permutation: Permutation, opset: int) -> Move | None:
    axis = permutation[node.attrs.get("axis", 1)]
    return Move(tuple(range(len(node.inputs))), permutation, {"axis": axis})


def _along(default: int) -> Callable[[gs.Node, Permutation, int], Move | None]:
    """Operators of one operand that work along `axis`."""
    return lambda node, permutation, opset: Move(
        (0,), permutation, {"axis": permutation[node.attrs.get("axis", default)]}
    )


def _softmax(node: gs.Node, permutation: Permutation, opset: int) -> Move | None:
    if opset >= 13:
        return _along(-1)(node, permutation, opset)
    last = len(permutation) - 1  # before, all axes from `axis` on were one
    return Move((0,), permutation) if node.attrs.get("axis", 1) % (last + 1) == last == permutation[last] else None


def _without(permutation: Permutation, axes: Sequence[int]) -> Permutation | None:
    """What is left of a permutation when `axes` of the result disappear; None if that is no permutation at all."""
    kept = [permutation[axis] for axis in range(len(permutation)) if axis not in axes]
    left = tuple(sorted(kept).index(axis) for axis in kept)
    return None if is_identity(left) else left


def _arg(node: gs.Node, permutation: Permutation, opset: int) -> Move | None:
    axis = node.attrs.get("axis", 0) % len(permutation)
    result = permutation if node.attrs.get("keepdims", 1) else _without(permutation, [axis])
    return Move((0,), result, {"axis": permutation[axis]})


def _extreme(node: gs.Node, permutation: Permutation, opset: int) -> Move | None:
    axes = axes_of(node)
    if not axes:
        return None
    axes = [axis % len(permutation) for axis in axes]
    result = permutation if node.attrs.get("keepdims", 1) else _without(permutation, axes)
    return _with_axes(node, [permutation[axis] for axis in axes], result)


def _sum(node: gs.Node, permutation: Permutation, opset: int) -> Move | None:
    """Only where the reduced axes keep their order among each other, and so their elements the order of the sum."""
    axes = axes_of(node)
    ordered = _keeps_order(permutation, sorted(axis % len(permutation) for axis in axes or []))
    return _extreme(node, permutation, opset) if ordered else None


def _with_axes(node: gs.Node, axes: list[int], result: Permutation | None, operands: tuple[int, ...] = (0,)) -> Move:
    if "axes" in node.attrs:
        return Move(operands, result, {"axes": axes})
    return Move(operands, result, constants={1: np.array(axes, np.int64)})


def _squeeze(node: gs.Node, permutation: Permutation, opset: int) -> Move | None:
    axes = axes_of(node)
    if not axes:
        return None
    axes = [axis % len(permutation) for axis in axes]
    return _with_axes(node, [permutation[axis] for axis in axes], _without(permutation, axes))


def _unsqueeze(node: gs.Node, permutation: Permutation, opset: int) -> Move | None:
    """New axes stay where they are, the others are permuted among themselves."""
    axes = axes_of(node)
    if not axes:
        return None
    rank = len(permutation) + len(axes)
    new = {axis % rank for axis in axes}
    others = [axis for axis in range(rank) if axis not in new]
    places = iter(others[axis] for axis in permutation)
    return Move((0,), tuple(axis if axis in new else next(places) for axis in range(rank)))


def _slice(node: gs.Node, permutation: Permutation, opset: int) -> Move | None:
    if opset < 10:
        axes = node.attrs.get("axes", range(len(node.attrs["starts"])))
        return Move((0,), permutation, {"axes": [permutation[axis] for axis in axes]})
    given = values_of(input_of(node, 3))
    count = static_dim(node.inputs[1], 0)
    if given is None and (input_of(node, 3) is not None or count is None):
        return None
    axes = range(count or 0) if given is None else given.tolist()
    return Move((0,), permutation, constants={3: np.array([permutation[axis] for axis in axes], np.int64)})


def _pad(node: gs.Node, permutation: Permutation, opset: int) -> Move | None:
    if input_of(node, 3) is not None:
        axes = values_of(node.inputs[3])
        moved = None if axes is None else np.array([permutation[axis] for axis in axes.tolist()], axes.dtype)
        return None if moved is None else Move((0,), permutation, constants={3: moved})
    pads = node.attrs.get("pads") if opset < 11 else values_of(input_of(node, 1))
    if pads is None:
        return None
    both = permuted_vector(np.array(pads, np.int64).reshape(2, -1), permutation)
    if opset < 11:
        return Move((0,), permutation, {"pads": both.reshape(-1).tolist()})
    return Move((0,), permutation, constants={1: both.reshape(-1)})


def permuted_vector(values: NDArray, permutation: Permutation) -> NDArray:
    """One value for each axis of v, along the last dimension, in the order of the axes of w."""
    return values[..., [permutation.index(axis) for axis in range(len(permutation))]]


def _quantisation(node: gs.Node, permutation: Permutation, opset: int) -> Move | None:
    scale_rank = rank_of(node.inputs[1])
    if scale_rank not in (0, 1) or node.attrs.get("block_size", 0):
        return None
    if scale_rank == 0:
        return Move((0,), permutation)
    axis = node.attrs.get("axis", 1)
    if not -len(permutation) <= axis < len(permutation):
        return None
    return Move((0,), permutation, {"axis": permutation[axis]})


def _resize(node: gs.Node, permutation: Permutation, opset: int) -> Move | None:
    if node.attrs.get("mode", "nearest") != "nearest" or opset < 10:
        return None
    if node.attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        return None
    if "axes" in node.attrs:
        return Move((0,), permutation, {"axes": [permutation[axis] for axis in node.attrs["axes"]]})
    for index in (1,) if opset < 11 else (3, 2):
        values = values_of(input_of(node, index))
        if values is not None and values.size == len(permutation):
            return Move((0,), permutation, constants={index: permuted_vector(values, permutation)})
    return None


def _reshape(node: gs.Node, permutation: Permutation, opset: int) -> Move | None:
    """Where the permutation moves axes of size 1 only, the elements keep their order and any new shape is as good."""
    target = values_of(input_of(node, 1))
    large = [axis for axis in range(len(permutation)) if static_dim(node.inputs[0], axis) != 1]
    if target is None or not _keeps_order(permutation, large):
        return None
    sizes = [int(size) for size in target.reshape(-1)]
    if not node.attrs.get("allowzero", 0):
        for axis in [axis for axis, size in enumerate(sizes) if size == 0 and permutation[axis] != axis]:
            size = static_dim(node.inputs[0], axis)
            if not size:
                return None
            sizes[axis] = size
    return Move((0,), None, constants={1: np.array(sizes, np.int64)})


def _flatten(node: gs.Node, permutation: Permutation, opset: int) -> Move | None:
    rank = len(permutation)
    axis = node.attrs.get("axis", 1)
    axis = axis + rank if axis < 0 else axis
    large = [place for place in range(rank) if static_dim(node.inputs[0], place) != 1]
    apart = all((place < axis) == (permutation[place] < axis) for place in large)
    return Move((0,), None) if apart and _keeps_order(permutation, large) else None


_UNARY = (
    *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BitwiseNot", "Cast", "Ceil", "Celu", "Clip", "Cos"),
    *("Cosh", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN"),
    *("LeakyRelu", "Log", "Mish", "Neg", "Not", "Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign"),
    *("Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Swish", "Tan", "Tanh", "ThresholdedRelu"),
)
_ELEMENTWISE = (
    *("Add", "And", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Div", "Equal", "Greater", "GreaterOrEqual"),
    *("Less", "LessOrEqual", "Max", "Mean", "Min", "Mod", "Mul", "Or", "PRelu", "Pow", "Sub", "Sum", "Where", "Xor"),
)
_SUMS = tuple(f"Reduce{kind}" for kind in ("L1", "L2", "LogSum", "LogSumExp", "Mean", "Prod", "Sum", "SumSquare"))
_ADDING = frozenset((*_SUMS, "LpNormalization"))
_STANDARD_RULES: dict[str, Callable[[gs.Node, Permutation, int], Move | None]] = {
    **dict.fromkeys(_UNARY, _unary),
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    "Dropout": _dropout,
    "Concat": _concat,
    "Split": _along(0),
    "LpNormalization": _along(-1),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), _softmax),
    **dict.fromkeys(("ArgMax", "ArgMin"), _arg),
    **dict.fromkeys(("ReduceMax", "ReduceMin"), _extreme),
    **dict.fromkeys(_SUMS, _sum),
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Slice": _slice,
    "Pad": _pad,
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), _quantisation),
    **dict.fromkeys(("Resize", "Upsample"), _resize),
    "Reshape": _reshape,
    "Flatten": _flatten,
}
_RULES = {
    **{(STANDARD, op): rule for op, rule in _STANDARD_RULES.items()},
    **{(CONTRIB, op): _one_operand for op in ("FastGelu", "Gelu", "QuickGelu")},
    **{(CONTRIB, op): _quantisation for op in ("QuantizeLinear", "DequantizeLinear")},
}
