"""How a node runs channels-last: which inputs hold images, and what changes beside their layout.

An image is a tensor of rank 4, `[N, C, H, W]` here and `[N, H, W, C]` in a form. A form computes the same bits as the
node it replaces: integers, copies and element by element functions do in any layout. Left out, because ONNX Runtime's
CPU kernels sum or round in another order there: floating-point pools, ReduceMean and ReduceSum, cubic and antialiased
Resize, and linear Resize of 8-bit values. Knows nothing of regions (`passes.layout_nhwc`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from passes.pattern import CONTRIB, STANDARD, axes_of, input_of, is_op, rank_of, static_dim, values_of

TO_NHWC, TO_NCHW = (0, 2, 3, 1), (0, 3, 1, 2)

IsImage = Callable[[gs.Tensor], bool]
"""Whether a tensor is known to have rank 4."""


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


UNARY = words("""
    Abs Cast Ceil Celu Clip Cos Elu Erf Exp Floor Gelu HardSigmoid HardSwish Identity IsInf IsNaN LeakyRelu Log Mish Neg
    Not Reciprocal Relu Round Selu Sigmoid Sign Sin Softplus Softsign Sqrt Swish Tanh ThresholdedRelu
""")
VARIADIC = words("""
    Add And BitShift Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min Mod Mul Or Pow PRelu Sub Sum Where
    Xor
""")


@dataclass(frozen=True)
class Form:
    """A node's channels-last spelling."""

    images: tuple[int, ...]
    """Inputs that hold images."""
    op: str
    domain: str
    attrs: Mapping[str, Any] = field(default_factory=dict)
    """Attributes that change; None removes one."""
    constants: Mapping[int, Callable[[NDArray], NDArray]] = field(default_factory=dict)
    """Constant inputs that change, and how."""


def form_of(node: gs.Node, is_image: IsImage, opset: int) -> Form | None:
    """The form of a node, None where it has none or too little is known. Every output of a form is an image."""
    if node.domain == STANDARD:
        return _standard_form(node, is_image, opset)
    if node.domain == CONTRIB:
        return _contrib_form(node, is_image)
    return None


def is_quantised_conv(node: gs.Node) -> bool:
    """Whether a node is a QLinearConv over images that still runs channels-first."""
    known = is_op(node, "QLinearConv") or is_op(node, "QLinearConv", domain=CONTRIB)
    return known and not node.attrs.get("channels_last", 0) and rank_of(node.inputs[3]) == 4


def is_eight_bit(tensor: gs.Tensor) -> bool:
    return tensor.dtype is not None and np.dtype(tensor.dtype) in (np.uint8, np.int8)


def moved_axis(axis: int) -> int:
    """Where dimension `axis` of `[N, C, H, W]` lies in `[N, H, W, C]`."""
    return TO_NHWC.index(axis % 4)


def new_transpose(source: gs.Tensor, target: gs.Tensor, order: tuple[int, ...]) -> gs.Node:
    return gs.Node("Transpose", f"{target.name}/transpose", {"perm": list(order)}, [source], [target], domain=STANDARD)


def _standard_form(node: gs.Node, is_image: IsImage, opset: int) -> Form | None:
    if is_quantised_conv(node):
        return Form((0,), "QLinearConv", CONTRIB, {"channels_last": 1})
    if node.op in VARIADIC:
        return _broadcast(node, is_image, range(len(node.inputs)))
    if not node.inputs or (node.op != "Concat" and not is_image(node.inputs[0])):
        return None
    if node.op in UNARY:
        return Form((0,), node.op, STANDARD)
    if node.op in _OTHERS:
        return _OTHERS[node.op](node, is_image, opset)
    return None


def _contrib_form(node: gs.Node, is_image: IsImage) -> Form | None:
    if is_quantised_conv(node):
        return Form((0,), "QLinearConv", CONTRIB, {"channels_last": 1})
    if node.op in ("QLinearAdd", "QLinearMul"):  # A, scale, zero point, B, scale, zero point
        return _broadcast(node, is_image, (0, 3))
    if node.op == "QLinearConcat":  # scale and zero point of the result, then three inputs an operand
        return _concat(node, is_image, range(2, len(node.inputs), 3))
    if not node.inputs or not is_image(node.inputs[0]):
        return None
    if node.op in ("QLinearSigmoid", "QLinearLeakyRelu"):
        return Form((0,), node.op, CONTRIB)
    if node.op in ("QLinearGlobalAveragePool", "QLinearAveragePool") and not node.attrs.get("channels_last", 0):
        return Form((0,), node.op, CONTRIB, {"channels_last": 1})
    return None


def _broadcast(node: gs.Node, is_image: IsImage, operands: Iterable[int]) -> Form | None:
    """Operands are images, constants of rank at most 4, which are permuted, or scalars."""
    images, constants = [], {}
    for index in operands:
        tensor = node.inputs[index]
        rank = rank_of(tensor)
        if isinstance(tensor, gs.Constant):
            if rank is None or rank > 4:
                return None
            if rank > 1 or int(np.prod(tensor.shape)) != 1:
                constants[index] = _permute
        elif is_image(tensor):
            images.append(index)
        elif rank != 0:
            return None
    return Form(tuple(images), node.op, node.domain, {}, constants) if images else None


def _permute(values: NDArray) -> NDArray:
    """`[C, H, W]` and the like, which broadcast against images, get their leading ones and the new order."""
    return values.reshape((1,) * (4 - values.ndim) + values.shape).transpose(TO_NHWC)


def _reorder(values: NDArray) -> NDArray:
    """One value a dimension, or several rows of them (pads)."""
    return values.reshape(-1, 4)[:, TO_NHWC].reshape(values.shape)


def _move_axes(axes: NDArray) -> NDArray:
    return np.array([moved_axis(int(axis)) for axis in axes.reshape(-1)], axes.dtype).reshape(axes.shape)


def _concat(node: gs.Node, is_image: IsImage, operands: Iterable[int]) -> Form | None:
    form = _broadcast(node, is_image, operands)
    return form and Form(form.images, form.op, form.domain, {"axis": moved_axis(node.attrs["axis"])}, form.constants)


def _standard_concat(node: gs.Node, is_image: IsImage, opset: int) -> Form | None:
    return _concat(node, is_image, range(len(node.inputs)))


def _quantisation(node: gs.Node, is_image: IsImage, opset: int) -> Form | None:
    """Q or DQ, for the whole tensor or along one axis."""
    rank = rank_of(node.inputs[1])
    if node.attrs.get("block_size", 0) or rank not in (0, 1):
        return None
    per_axis = rank == 1 and opset >= 13
    return Form((0,), node.op, STANDARD, {"axis": moved_axis(node.attrs.get("axis", 1))} if per_axis else {})


def _softmax(node: gs.Node, is_image: IsImage, opset: int) -> Form | None:
    if opset < 13:  # up to then it flattens all dimensions from `axis` on
        return None
    return Form((0,), node.op, STANDARD, {"axis": moved_axis(node.attrs.get("axis", -1))})


def _split(node: gs.Node, is_image: IsImage, opset: int) -> Form | None:
    return Form((0,), node.op, STANDARD, {"axis": moved_axis(node.attrs.get("axis", 0))})


def _extreme(node: gs.Node, is_image: IsImage, opset: int) -> Form | None:
    """ReduceMax and ReduceMin that keep their dimensions: the only reductions that no order of evaluation changes."""
    axes = axes_of(node)
    if not axes or not node.attrs.get("keepdims", 1):
        return None
    if "axes" in node.attrs:
        return Form((0,), node.op, STANDARD, {"axes": [moved_axis(axis) for axis in axes]})
    return Form((0,), node.op, STANDARD, {}, {1: _move_axes})


def _max_pool(node: gs.Node, is_image: IsImage, opset: int) -> Form | None:
    if not is_eight_bit(node.inputs[0]) or len(node.outputs) != 1:
        return None
    return Form((0,), "NhwcMaxPool", CONTRIB, {"storage_order": None})


def _slice(node: gs.Node, is_image: IsImage, opset: int) -> Form | None:
    if values_of(input_of(node, 3)) is None:
        return None
    return Form((0,), node.op, STANDARD, {}, {3: _move_axes})


def _pad(node: gs.Node, is_image: IsImage, opset: int) -> Form | None:
    axes = input_of(node, 3)
    changed = 1 if axes is None else 3
    if values_of(input_of(node, changed)) is None:
        return None
    return Form((0,), node.op, STANDARD, {}, {changed: _reorder if axes is None else _move_axes})


def _resize(node: gs.Node, is_image: IsImage, opset: int) -> Form | None:
    roi = values_of(input_of(node, 1))
    given = [index for index in (2, 3) if (t := input_of(node, index)) is not None and t.shape not in ((0,), [0])]
    if opset < 11 or (input_of(node, 1) is not None and (roi is None or roi.size)) or len(given) != 1:
        return None
    values = values_of(node.inputs[given[0]])
    if values is None or not (node.attrs.get("mode", "nearest") == "nearest" or _keeps_bits(node, given[0], values)):
        return None
    if "axes" in node.attrs:
        return Form((0,), node.op, STANDARD, {"axes": [moved_axis(axis) for axis in node.attrs["axes"]]})
    return Form((0,), node.op, STANDARD, {}, {given[0]: _reorder})


def _keeps_bits(node: gs.Node, index: int, values: NDArray) -> bool:
    """Whether a Resize is linear over H and W alone, in FP32: ONNX Runtime has one formula for both layouts there."""
    image = node.inputs[0]
    axes = [axis % 4 for axis in node.attrs.get("axes", range(4))]
    fixed = [value for axis, value in zip(axes, values, strict=True) if axis < 2]
    unchanged = [1.0, 1.0] if index == 2 else [static_dim(image, axis) for axis in (0, 1)]
    return (
        node.attrs["mode"] == "linear"
        and not node.attrs.get("antialias", 0)
        and image.dtype is not None
        and np.dtype(image.dtype) == np.float32
        and fixed == [unchanged[axis] for axis in axes if axis < 2]
    )


_OTHERS: dict[str, Callable[[gs.Node, IsImage, int], Form | None]] = {
    "Concat": _standard_concat,
    "DequantizeLinear": _quantisation,
    "LogSoftmax": _softmax,
    "MaxPool": _max_pool,
    "Pad": _pad,
    "QuantizeLinear": _quantisation,
    "ReduceMax": _extreme,
    "ReduceMin": _extreme,
    "Resize": _resize,
    "Slice": _slice,
    "Softmax": _softmax,
    "Split": _split,
}
