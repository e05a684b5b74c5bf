"""Operators that scale and shift each channel: `y[:, c] = scale[c] * x[:, c] + shift[c]`.

One reading for all spellings, composed in float64 so that a chain of them costs one rounding:

- BatchNormalization in inference: `scale = gamma / sqrt(variance + epsilon)`, `shift = beta - mean * scale`
  (Ioffe and Szegedy 2015, algorithm 2, step 12; ONNX operator specification);
- Mul, Add, Sub, Div with a constant that has one value, or one a channel, and does not grow the result by broadcasting.

Does not know what they are folded into.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from passes.base import Refusal
from passes.pattern import in_scope, is_op, only_consumer, producer, rank_of, static_dim, values_of

BINARY = ("Mul", "Add", "Sub", "Div")
MINIMUM_OPSET = 7
"""Before it, BatchNormalization has no clear inference mode and Add's broadcasting is an attribute."""


@dataclass(frozen=True)
class Affine:
    """`scale` and `shift`, float64 [C]."""

    scale: NDArray
    shift: NDArray

    @classmethod
    def identity(cls, channels: int) -> Self:
        return cls(np.ones(channels), np.zeros(channels))

    def then(self, later: "Affine") -> "Affine":
        """This one first, `later` on its result."""
        return Affine(later.scale * self.scale, later.scale * self.shift + later.shift)

    @property
    def scales(self) -> bool:
        return bool((self.scale != 1).any())

    @property
    def shifts(self) -> bool:
        return bool((self.shift != 0).any())


@dataclass(frozen=True)
class Channels:
    """Where the channels of a tensor lie: `count` of them, on the axis before the last `trailing` ones."""

    count: int
    trailing: int
    rank: int | None
    """None where unknown; at least `trailing + 1`."""


@dataclass(frozen=True)
class Link:
    """An affine operator: its node, the input that it scales and shifts, and by what."""

    node: gs.Node
    operand: gs.Tensor
    affine: Affine


def chain_after(scope: gs.Graph, tensor: gs.Tensor, channels: Channels, opset: int) -> tuple[list[gs.Node], Affine]:
    """The affine operators that follow `tensor`, each the only reader of the one before, and what they compute."""
    chain, total = [], Affine.identity(channels.count)
    while (node := only_consumer(scope, tensor)) is not None and in_scope(scope, node):
        affine = affine_of(node, channels, opset)
        if affine is None:
            break
        chain.append(node)
        total = total.then(affine)
        tensor = node.outputs[0]
    return chain, total


def link_before(scope: gs.Graph, tensor: gs.Tensor, channels: Channels, opset: int) -> Link | None:
    """The affine operator that produces `tensor` for one reader only."""
    node = producer(tensor)
    if node is None or not in_scope(scope, node) or only_consumer(scope, tensor) is None:
        return None
    operand = operand_of(node)
    if operand is None or not _keeps_shape(node, operand, channels):
        return None
    affine = affine_of(node, channels, opset)
    return None if affine is None else Link(node, operand, affine)


def operand_of(node: gs.Node) -> gs.Tensor | None:
    """The input that an affine operator scales and shifts; None for other operators."""
    if is_op(node, "BatchNormalization"):
        return node.inputs[0]
    if is_op(node, *BINARY):
        variables = [tensor for tensor in node.inputs if not isinstance(tensor, gs.Constant)]
        return variables[0] if len(variables) == 1 and len(node.inputs) == 2 else None
    return None


def affine_of(node: gs.Node, channels: Channels, opset: int) -> Affine | None:
    """What a node does to its operand with these `channels`; None if it is no affine operator on them."""
    if is_op(node, "BatchNormalization"):
        on_axis_1 = channels.rank is not None and channels.rank - channels.trailing == 2
        if not on_axis_1 or batch_norm_defect(node, opset) or tuple(node.inputs[1].shape) != (channels.count,):
            return None
        return _batch_norm(node)
    if operand_of(node) is None:
        return None
    constant_first = isinstance(node.inputs[0], gs.Constant)
    values = per_channel(node.inputs[0 if constant_first else 1], channels)
    if values is None:
        return None
    ones, zeros = np.ones(channels.count), np.zeros(channels.count)
    if node.op == "Mul":
        return Affine(values, zeros)
    if node.op == "Add":
        return Affine(ones, values)
    if node.op == "Sub":
        return Affine(-ones, values) if constant_first else Affine(ones, -values)
    return None if constant_first or (values == 0).any() else Affine(1 / values, zeros)


def per_channel(tensor: gs.Tensor, channels: Channels) -> NDArray | None:
    """A constant as float64 [C] if it broadcasts to one value a channel and leaves the other operand's shape alone."""
    if not isinstance(tensor, gs.Constant):
        return None
    known_rank = channels.trailing + 1 if channels.rank is None else channels.rank
    sizes = list(reversed(tensor.shape))
    if len(sizes) > known_rank or any(size != 1 for i, size in enumerate(sizes) if i != channels.trailing):
        return None
    if int(np.prod(sizes)) not in (1, channels.count):
        return None
    values = values_of(tensor)
    return None if values is None else np.broadcast_to(values.reshape(-1).astype(np.float64), (channels.count,))


def batch_norm_defect(node: gs.Node, opset: int) -> str | None:
    """Why a BatchNormalization is no affine operator; None when it is one."""
    extra = [tensor for tensor in node.outputs[1:] if not tensor.is_empty()]
    if node.attrs.get("training_mode", 0) or (extra and opset < 14):
        return (
            "it is in training mode, so its statistics come from each batch; "
            "call model.eval() before the export, or export with training=TrainingMode.EVAL"
        )
    if extra:
        return f"it has {1 + len(extra)} outputs outside training mode, expected 1; export the model again"
    if not node.attrs.get("spatial", 1):
        return "spatial=0 normalises each element, not each channel; export to opset 9 or later"
    for name, tensor in zip(("scale", "bias", "mean", "variance"), node.inputs[1:5], strict=True):
        if not isinstance(tensor, gs.Constant):
            return f"its {name} '{tensor.name}' is computed, expected a constant; fold constants first"
    denominator = _denominator(node)
    bad = np.flatnonzero(~(np.isfinite(denominator) & (denominator > 0)))
    if bad.size:
        return (
            f"variance + epsilon of channel {bad[0]} is {denominator[bad[0]]:g}, expected a positive finite number; "
            "its running statistics are damaged: train it further or export another checkpoint"
        )
    return None


def stored(values: NDArray, dtype: np.dtype, channel: NDArray, what: str) -> NDArray:
    """Float64 `values` rounded once to `dtype`. Raises Refusal where one overflows; `channel`, broadcast, names it."""
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = values.astype(dtype)
    bad = np.argwhere(~np.isfinite(rounded.astype(np.float64)))
    if len(bad):
        place = tuple(bad[0])
        raise Refusal(
            f"the folded {what} of channel {np.broadcast_to(channel, values.shape)[place]} would be "
            f"{values[place]:g}, which {dtype.name} cannot hold; keep the model in float32"
        )
    return rounded


def numpy_dtype(tensor: gs.Tensor) -> np.dtype:
    """A tensor's dtype; onnx-graphsurgeon gives an enumeration value for types that NumPy itself lacks."""
    dtype = tensor.dtype
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(dtype) if isinstance(dtype, int) else dtype)


def is_float_constant(tensor: gs.Tensor) -> bool:
    """Whether a tensor is a constant of float16, bfloat16, float32 or float64; does not read it."""
    if not isinstance(tensor, gs.Constant):
        return False
    return numpy_dtype(tensor).name in ("float16", "bfloat16", "float32", "float64")


def _keeps_shape(node: gs.Node, operand: gs.Tensor, channels: Channels) -> bool:
    """Whether a node's operand has the rank and channels of its result, so that the constant did not expand it."""
    if node.op == "BatchNormalization":
        return True
    if channels.rank is None or rank_of(operand) != channels.rank:
        return False
    constant = next(tensor for tensor in node.inputs if tensor is not operand)
    return int(np.prod(constant.shape)) == 1 or static_dim(operand, -1 - channels.trailing) == channels.count


def _denominator(node: gs.Node) -> NDArray:
    variance = values_of(node.inputs[4])
    assert variance is not None
    return variance.reshape(-1).astype(np.float64) + node.attrs.get("epsilon", 1e-5)


def _batch_norm(node: gs.Node) -> Affine:
    gamma, beta, mean = (np.asarray(values_of(tensor)).astype(np.float64) for tensor in node.inputs[1:4])
    scale = gamma / np.sqrt(_denominator(node))
    return Affine(scale, beta - mean * scale)
