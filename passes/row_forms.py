"""How operators compute some rows of their result: which rows of which operands they read for it.

Rows lie along one axis: tokens, say, in [batch, tokens, hidden]. A node works on rows alone if row r of its result
depends on its operands' rows r and on what they have no rows of. It then yields the chosen rows of its result, in the
chosen order, from the operands' chosen rows; `row_form` says where these lie. There is no form for operators that mix
rows (convolutions, recurrences, whole attentions, reductions along the axis), nor where sizes do not prove one: an
operand whose size along the axis may be 1 might be spread over all rows.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from passes.dimensions import moved_axes, same_size
from passes.pattern import CONTRIB, STANDARD, axes_of, input_of, rank_of, scalar_of, static_dim, values_of
from plugins.elementwise.schema import ADD_RMS_NORM, SWIGLU


@dataclass(frozen=True)
class RowForm:
    """Operands with rows, as index of the input and axis of it; and constants to put at other inputs' places."""

    operands: dict[int, int]
    constants: dict[int, NDArray] = field(default_factory=dict)


def row_form(node: gs.Node, axis: int, opset: int) -> RowForm | None:
    """The form of `node` for rows along `axis` (not negative) of all its outputs; None where it has none."""
    rule = _RULES.get((node.domain or STANDARD, node.op))
    ranks = {rank_of(tensor) for tensor in node.outputs if not tensor.is_empty()}
    rank = ranks.pop() if len(ranks) == 1 else None
    if rule is None or rank is None or not 0 <= axis < rank:
        return None
    form = rule(node, axis, rank, opset)
    return form if form is not None and form.operands else None


def _aligned(node: gs.Node, axis: int, rank: int, opset: int) -> RowForm | None:
    """Broadcasting operands: those of size 1 along the axis, or without it, belong to every row."""
    if node.attrs.keys() & {"axis", "broadcast"} and opset < 7:
        return None
    operands: dict[int, int] = {}
    for index, tensor in enumerate(node.inputs):
        own = rank_of(tensor)
        if tensor.is_empty():
            continue
        if own is None:
            return None
        place = axis - (rank - own)
        if place >= 0 and static_dim(tensor, place) != 1:
            operands[index] = place
    places = [(node.inputs[index], place) for index, place in operands.items()]
    equal = all(same_size(*places[0], *other) for other in places[1:])
    return RowForm(operands) if equal else None


def _product(node: gs.Node, axis: int, rank: int, opset: int) -> RowForm | None:
    """[..., rows, k] by [..., k, n]: rows of the left operand, or one of the leading axes, which broadcast."""
    left, right = (rank_of(tensor) or 0 for tensor in node.inputs)
    flags = ("transA", "transBatchA", "transBatchB")
    if min(left, right) < 2 or axis == rank - 1 or any(node.attrs.get(flag, 0) for flag in flags):
        return None
    return RowForm({0: left - 2}) if axis == rank - 2 else _aligned(node, axis, rank, opset)


def _gemm(node: gs.Node, axis: int, rank: int, opset: int) -> RowForm | None:
    addend = input_of(node, 2)
    own = 0 if addend is None else rank_of(addend)
    if axis != 0 or own is None:
        return None
    left = {0: 1 if node.attrs.get("transA", 0) else 0}
    if own < 2 or static_dim(addend, 0) == 1:
        return RowForm(left)
    return RowForm(left | {2: 0}) if same_size(node.inputs[0], left[0], addend, 0) else None


def _first(node: gs.Node, axis: int, rank: int, opset: int) -> RowForm | None:
    """Operators of one operand with rows whose others are constants for all of them: quantised weights."""
    rest = all(isinstance(tensor, gs.Constant) or tensor.is_empty() for tensor in node.inputs[1:])
    return RowForm({0: axis}) if rest and axis < rank - 1 else None


def _quantization(node: gs.Node, axis: int, rank: int, opset: int) -> RowForm | None:
    return RowForm({0: axis}) if scalar_of(node.inputs[1]) is not None else None


def _norm(node: gs.Node, axis: int, rank: int, opset: int) -> RowForm | None:
    """Norms over all axes from `axis` on; scales and biases broadcast."""
    return _aligned(node, axis, rank, opset) if axis < node.attrs.get("axis", -1) % rank else None


def _softmax(node: gs.Node, axis: int, rank: int, opset: int) -> RowForm | None:
    along = node.attrs.get("axis", -1 if opset >= 13 else 1) % rank
    return RowForm({0: axis}) if axis < along or (opset >= 13 and axis != along) else None


def _reduction(node: gs.Node, axis: int, rank: int, opset: int) -> RowForm | None:
    axes, own = axes_of(node), rank_of(node.inputs[0])
    if not axes or own is None:
        return None
    reduced = {one % own for one in axes}
    kept = [one for one in range(own) if node.attrs.get("keepdims", 1) or one not in reduced]
    return None if kept[axis] in reduced else RowForm({0: kept[axis]})


def _other_axis(default: int) -> Callable[[gs.Node, int, int, int], RowForm | None]:
    """Operators that join or part tensors along another axis: all operands that are no numbers have the rows."""

    def form(node: gs.Node, axis: int, rank: int, opset: int) -> RowForm | None:
        if node.attrs.get("axis", default) % rank == axis:
            return None
        count = len(node.inputs) if node.op == "Concat" else 1
        return RowForm(dict.fromkeys(range(count), axis))

    return form


def _slice(node: gs.Node, axis: int, rank: int, opset: int) -> RowForm | None:
    axes = axes_of(node, 3)
    return RowForm({0: axis}) if axes and axis not in {one % rank for one in axes} else None


def _gather(node: gs.Node, axis: int, rank: int, opset: int) -> RowForm | None:
    """Rows of the indices, as in an embedding's look-up, or of the data beside the axis that is looked up in."""
    data, indices = (rank_of(tensor) for tensor in node.inputs)
    if data is None or indices is None:
        return None
    along = node.attrs.get("axis", 0) % data
    if along <= axis < along + indices:
        return RowForm({1: axis - along})
    return RowForm({0: axis if axis < along else axis - indices + 1})


def _moved(node: gs.Node, axis: int, rank: int, opset: int) -> RowForm | None:
    axes = moved_axes(node)
    source = None if axes is None else axes[axis]
    return None if source is None else RowForm({0: source})


def _reshape(node: gs.Node, axis: int, rank: int, opset: int) -> RowForm | None:
    """Views that keep the rows one axis. The new target has -1 there, or copies the size, and says all others."""
    before, after, target = node.inputs[0].shape, node.outputs[0].shape, values_of(input_of(node, 1))
    if before is None or after is None or target is None:
        return None
    source = _source(before, after, axis)
    if source is None:
        return None
    sizes = [int(size) for size in target.reshape(-1)]
    copies = not node.attrs.get("allowzero", 0)
    for place, size in enumerate(sizes):
        if place == axis or (size == 0 and copies) or size > 0:
            continue
        known = static_dim(node.outputs[0], place)
        if not known:  # no rows at all would leave two sizes open
            return None
        sizes[place] = known
    if not (sizes[axis] == 0 and copies and source == axis):
        if sizes[axis] != -1 and any(size == 0 for place, size in enumerate(sizes) if place != axis):
            return None  # what is copied may be 0, and then -1 says nothing
        sizes[axis] = -1
    constants = {} if sizes == target.reshape(-1).tolist() else {1: np.array(sizes, np.int64)}
    return RowForm({0: source}, constants)


def _source(before: Sequence, after: Sequence, axis: int) -> int | None:
    """The axis of `before` that is `axis` of `after`, row-major: the same size, and as much before and behind it.

    Two of the three decide: the number of elements is the same.
    """
    for source, size in enumerate(before):
        pairs = [
            (before[:source], after[:axis]),
            ([size], [after[axis]]),
            (before[source + 1 :], after[axis + 1 :]),
        ]
        if sum(_same_product(*pair) for pair in pairs) >= 2:
            return source
    return None


def _same_product(first: Sequence, second: Sequence) -> bool:
    """Whether two lists of sizes are known to have one product."""
    if None in (*first, *second):
        return False
    products = [math.prod(size for size in sizes if not isinstance(size, str)) for sizes in (first, second)]
    symbols = [sorted(size for size in sizes if isinstance(size, str)) for sizes in (first, second)]
    return products[0] == products[1] and symbols[0] == symbols[1]


_Rule = Callable[[gs.Node, int, int, int], RowForm | None]
"""Node, axis, rank of the outputs, opset."""

_ELEMENTWISE = (
    "Abs", "Acos", "Acosh", "Add", "And", "Asin", "Asinh", "Atan", "Atanh", "BitShift", "Cast", "Ceil", "Celu",
    "Clip", "Cos", "Cosh", "Div", "Elu", "Equal", "Erf", "Exp", "Floor", "Gelu", "Greater", "GreaterOrEqual",
    "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Less", "LessOrEqual", "Log", "Max",
    "Mean", "Min", "Mish", "Mod", "Mul", "Neg", "Not", "Or", "PRelu", "Pow", "Reciprocal", "Relu", "Round", "Selu",
    "Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Sub", "Sum", "Swish", "Tan",
    "Tanh", "ThresholdedRelu", "Where", "Xor",
)  # fmt: skip
_NORMS = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
_SKIP_NORMS = ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
_REDUCTIONS = tuple(f"Reduce{kind}" for kind in ("L1", "L2", "LogSumExp", "Max", "Mean", "Min", "Sum", "SumSquare"))

_RULES: dict[tuple[str, str], _Rule] = {
    **{(STANDARD, op): _aligned for op in _ELEMENTWISE},
    **{(CONTRIB, op): _aligned for op in ("BiasGelu", "FastGelu", "Gelu", "QuickGelu")},
    **{(STANDARD, op): _norm for op in _NORMS},
    **{(CONTRIB, op): _norm for op in _SKIP_NORMS},
    **{(STANDARD, op): _reduction for op in _REDUCTIONS},
    **{(STANDARD, op): _moved for op in ("Transpose", "Unsqueeze", "Squeeze")},
    **{(STANDARD, op): _softmax for op in ("Softmax", "LogSoftmax")},
    **{(STANDARD, op): _quantization for op in ("QuantizeLinear", "DequantizeLinear")},
    (ADD_RMS_NORM.domain, ADD_RMS_NORM.op_type): _norm,
    (SWIGLU.domain, SWIGLU.op_type): _aligned,
    (STANDARD, "MatMul"): _product,
    (CONTRIB, "FusedMatMul"): _product,
    (CONTRIB, "MatMulNBits"): _first,
    (STANDARD, "Gemm"): _gemm,
    (STANDARD, "Concat"): _other_axis(0),
    (STANDARD, "Split"): _other_axis(0),
    (STANDARD, "Slice"): _slice,
    (STANDARD, "Gather"): _gather,
    (STANDARD, "Reshape"): _reshape,
}

SUMMING = frozenset(
    (
        *("MatMul", "FusedMatMul", "MatMulNBits", "Gemm", "Softmax", "LogSoftmax", ADD_RMS_NORM.op_type),
        *_NORMS,
        *_SKIP_NORMS,
        *_REDUCTIONS,
    )
)
"""Operators that do more than move or change single elements."""
