"""How exporters spell the arithmetic of a normalisation: what the norm fusions share. Makes no operator by itself.

A norm is `core [* scale] [+ bias]` with core = value / sqrt(variance + epsilon), in float16, bfloat16 or float32, maybe
between a Cast of x to a wider type and a Cast back. The operators that replace it compute in float32 (stash_type 1)
and round once at the end, so Casts within may go: the result is as exact as before or more so.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import TensorProto
from onnx_graphsurgeon.exporters.onnx_exporter import dtype_to_onnx

from passes.base import Refusal
from passes.pattern import (
    STANDARD,
    axes_of,
    constant_operand,
    consumers,
    input_of,
    is_op,
    is_output,
    new_constant,
    only_consumer,
    other_input,
    producer,
    rank_of,
    replace_node,
    scalar_of,
    static_dim,
    take_outputs,
    values_of,
)
from passes.scopes import label

_BYTES: dict[int | None, int] = {
    TensorProto.FLOAT16: 2,
    TensorProto.BFLOAT16: 2,
    TensorProto.FLOAT: 4,
    TensorProto.DOUBLE: 8,
}
_NARROW = frozenset[int | None]({TensorProto.FLOAT16, TensorProto.BFLOAT16})
COMPUTED = _NARROW | {TensorProto.FLOAT}
"""Types for which float32 arithmetic within the fused operator loses nothing."""


class Core(NamedTuple):
    """value / sqrt(variance + epsilon) * scale."""

    value: gs.Tensor
    variance: gs.Tensor
    epsilon: float
    scale: gs.Tensor | None = None


@dataclass
class Norm:
    """A norm found: of `wide` in the type that it is computed in, which may be a Cast of `narrow`.

    `sizes` are those of the last dimensions that it goes over, `root` is the last node that belongs to it.
    """

    root: gs.Node
    wide: gs.Tensor | None
    narrow: gs.Tensor | None
    sizes: tuple[int, ...]
    epsilon: float
    scale: gs.Tensor | None = None
    bias: gs.Tensor | None = None
    narrowed: bool = False
    """Whether `root` lies behind the Cast back."""

    @property
    def source(self) -> gs.Tensor | None:
        return self.narrow if self.narrowed else self.wide


def type_of(tensor: gs.Tensor | None) -> int | None:
    """A tensor's ONNX element type."""
    return None if tensor is None or tensor.dtype is None else int(dtype_to_onnx(tensor.dtype))


def is_in(scope: gs.Graph, node: gs.Node) -> bool:
    """Whether a node is one of `scope` itself, not of a graph around it or within."""
    return any(one is node for one in scope.nodes)


def uncast(tensor: gs.Tensor, lossless: bool = False) -> gs.Tensor:
    """What a tensor was before Casts between floating point types, or only before those that keep every value."""
    while (node := producer(tensor, "Cast")) is not None:
        before, after = type_of(node.inputs[0]), type_of(tensor)
        if before not in _BYTES or after not in _BYTES:
            break
        if lossless and before != after and _BYTES[before] >= _BYTES[after]:
            break
        tensor = node.inputs[0]
    return tensor


def same_value(first: gs.Tensor, second: gs.Tensor, depth: int = 4) -> bool:
    """Whether two tensors are one, or copies of the same subtraction, mean or lossless Cast of one."""
    first, second = uncast(first, lossless=True), uncast(second, lossless=True)
    if first is second:
        return True
    one, other = producer(first, "Sub", "ReduceMean"), producer(second, "Sub", "ReduceMean")
    if depth == 0 or one is None or other is None or one.op != other.op:
        return False
    if one.op == "Sub":
        return all(same_value(*pair, depth - 1) for pair in zip(one.inputs, other.inputs, strict=True))
    found, expected = mean_of(first), mean_of(second)
    if found is None or expected is None or found[1] != expected[1]:
        return False
    return same_value(found[0], expected[0], depth - 1)


def mean_of(tensor: gs.Tensor) -> tuple[gs.Tensor, list[int]] | None:
    """(x, axes) if a tensor is the mean of x over axes, which stay as dimensions of size 1."""
    node = producer(uncast(tensor), "ReduceMean")
    axes = axes_of(node) if node is not None and node.attrs.get("keepdims", 1) == 1 else None
    return (node.inputs[0], axes) if node is not None and axes else None


def square_of(tensor: gs.Tensor) -> gs.Tensor | None:
    """x if a tensor is Pow(x, 2) or Mul(x, x)."""
    node = producer(uncast(tensor), "Mul", "Pow")
    if node is None or (node.op == "Pow" and _scalar(node.inputs[1]) != 2):
        return None
    return node.inputs[0] if node.op == "Pow" or node.inputs[0] is node.inputs[1] else None


def cores_of(node: gs.Node) -> Iterator[Core]:
    """The ways to read a Mul or Div as a core: Div(value, root), Mul(value, 1 / root), a constant scale with either."""
    pairs = [(node.inputs[0], node.inputs[1])] if node.op == "Div" else [node.inputs[:2], node.inputs[1::-1]]
    for value, factor in pairs:
        found = _root_of(factor) if node.op == "Div" else inverse_root_of(factor)
        if found is not None:
            yield Core(value, *found)
            scaled = producer(value, "Mul")
            operands = constant_operand(scaled) if scaled is not None else None
            if operands is not None:
                yield Core(operands[0], *found, operands[1])
        elif node.op == "Mul" and (scaled_root := scaled_inverse_root_of(factor)) is not None:
            yield Core(value, *scaled_root)


def scaled_inverse_root_of(tensor: gs.Tensor) -> tuple[gs.Tensor, float, gs.Tensor | None] | None:
    """(variance, epsilon, scale) if a tensor is 1 / sqrt(variance + epsilon), maybe times a constant."""
    found = inverse_root_of(tensor)
    if found is not None:
        return (*found, None)
    node = producer(tensor, "Mul")
    operands = constant_operand(node) if node is not None else None
    found = inverse_root_of(operands[0]) if operands is not None else None
    return (*found, operands[1]) if found is not None and operands is not None else None


def inverse_root_of(tensor: gs.Tensor) -> tuple[gs.Tensor, float] | None:
    """(variance, epsilon) of Reciprocal(Sqrt(.)), Div(1, Sqrt(.)) or Pow(., -0.5)."""
    node = producer(uncast(tensor), "Reciprocal", "Div", "Pow")
    if node is None:
        return None
    if node.op == "Pow":
        return _sum_with_epsilon(node.inputs[0]) if _scalar(node.inputs[1]) == -0.5 else None
    if node.op == "Div" and _scalar(node.inputs[0]) != 1:
        return None
    return _root_of(node.inputs[-1])


def _root_of(tensor: gs.Tensor) -> tuple[gs.Tensor, float] | None:
    """(variance, epsilon) of Sqrt(.) or Pow(., 0.5)."""
    node = producer(uncast(tensor), "Sqrt", "Pow")
    if node is None or (node.op == "Pow" and _scalar(node.inputs[1]) != 0.5):
        return None
    return _sum_with_epsilon(node.inputs[0])


def _sum_with_epsilon(tensor: gs.Tensor) -> tuple[gs.Tensor, float] | None:
    node = producer(uncast(tensor), "Add")
    operands = constant_operand(node) if node is not None else None
    epsilon = _scalar(operands[1]) if operands is not None else None
    return (operands[0], epsilon) if operands is not None and epsilon is not None and 0 <= epsilon < 1 else None


def _scalar(tensor: gs.Tensor) -> float | None:
    """A constant of one element that broadcasting with it adds no dimension."""
    return scalar_of(tensor) if (rank_of(tensor) or 0) <= 1 else None


def norm_over(root: gs.Node, x: gs.Tensor, axes: list[int], epsilon: float) -> Norm:
    """What is known of a norm of `x` once its arithmetic matched; refuses types, axes and sizes that do not fit."""
    rank = rank_of(x)
    if rank is None and max(axes) >= 0:
        raise Refusal(f"a norm over axes {axes} of '{x.name}', whose rank is unknown")
    negative = sorted(axis if axis < 0 or rank is None else axis - rank for axis in axes)
    if negative != list(range(-len(axes), 0)):
        raise Refusal(f"a norm over axes {axes} of '{x.name}', expected the last ones")
    sizes = [_last_size(x)] if len(axes) == 1 else [static_dim(x, axis) for axis in negative]
    known = tuple(size for size in sizes if size is not None)
    if len(known) < len(sizes):
        raise Refusal(f"the size of '{x.name}' {x.shape} along axes {axes} is unknown; export with a fixed one")
    computed, given = type_of(root.outputs[0]), uncast(x, lossless=True)
    if computed not in _BYTES:
        raise Refusal(f"the type of '{root.outputs[0].name}' is {root.outputs[0].dtype}, expected a known float type")
    x = given if type_of(given) == computed else x
    wide = x if type_of(x) == computed and computed in COMPUTED else None
    narrow = given if type_of(given) in _NARROW and type_of(given) != computed else None
    return Norm(root, wide, narrow, known, epsilon)


def _last_size(tensor: gs.Tensor, depth: int = 3) -> int | None:
    """Size of the last dimension, also of a tensor of unknown rank to which a vector was added, or that a MatMul made.

    Where one operand's last dimension is n > 1, that of an elementwise result is n.
    """
    size = static_dim(tensor, -1)
    node = producer(tensor, "Add", "Sub", "Mul", "Div", "MatMul")
    if size is not None or node is None or depth == 0:
        return size
    if node.op == "MatMul":
        return static_dim(node.inputs[1], -1) if rank_of(node.inputs[1]) == 2 else None
    sizes = [_last_size(operand, depth - 1) for operand in node.inputs]
    return next((size for size in sizes if size is not None and size > 1), None)


def weighted(norm: Norm, scale: gs.Tensor | None = None, bias: gs.Tensor | None = None) -> bool:
    """Take weights that the matched arithmetic already holds; False if they are none of this norm."""
    if not all(tensor is None or _is_weight(norm, tensor) for tensor in (scale, bias)):
        return False
    norm.scale, norm.bias = scale, bias
    return True


def follow(scope: gs.Graph, norm: Norm, biased: bool) -> None:
    """Extend a norm by the Mul with its weight, the Add of its bias and the Cast back, as far as they are there.

    A weight before the Cast back is taken past it only if the narrow type holds its values.
    """
    while (step := only_consumer(scope, norm.root.outputs[0])) is not None:
        output = norm.root.outputs[0]
        other = other_input(step, output)
        if not is_in(scope, step):
            return
        if is_op(step, "Cast") and type_of(step.outputs[0]) == type_of(output):
            pass
        elif is_op(step, "Cast") and norm.narrow is not None and not norm.narrowed:
            back, weights = step.outputs[0], (norm.scale, norm.bias)
            if type_of(back) != type_of(norm.narrow) or not all(_fits(weight, back) for weight in weights):
                return
            norm.narrowed = True
        elif is_op(step, "Mul") and norm.scale is None and norm.bias is None and _is_weight(norm, other):
            norm.scale = other
        elif is_op(step, "Add") and biased and norm.bias is None and _is_weight(norm, other):
            norm.bias = other
        else:
            return
        norm.root = step


def _is_weight(norm: Norm, tensor: gs.Tensor | None) -> bool:
    """Whether a tensor has the normalised dimensions' shape; a constant may lead with ones if x has the rank for it."""
    if tensor is None or tensor.shape is None or type_of(tensor) != type_of(norm.root.outputs[0]):
        return False
    shape, extra = tuple(tensor.shape), len(tensor.shape) - len(norm.sizes)
    if shape == norm.sizes:
        return True
    rank = next((len(t.shape) for t in (norm.wide, norm.narrow) if t is not None and t.shape is not None), 0)
    return isinstance(tensor, gs.Constant) and shape == (1,) * extra + norm.sizes and len(shape) <= rank


def _fits(weight: gs.Tensor | None, like: gs.Tensor) -> bool:
    """Whether the type of `like` holds a constant's values exactly; no other tensor's values are known."""
    values = values_of(weight)
    if weight is None or values is None:
        return weight is None
    narrow = values.astype(_numpy_type(like))
    return bool(np.array_equal(narrow.astype(np.float64), values.astype(np.float64)))


def replace_norm(scope: gs.Graph, norm: Norm, op: str) -> None:
    """Put operator `op` of the standard domain at the place of a norm. Refuses one that others look into."""
    source = norm.source
    if source is None:
        raise Refusal(f"computed in {norm.root.outputs[0].dtype}; expected float32, or 16 bits before and after")
    _refuse_shared(scope, norm)
    y = norm.root.outputs[0]
    ones = new_constant(y, "scale", np.ones(norm.sizes, _numpy_type(source)))
    inputs = [source, ones if norm.scale is None else _weight(norm, "scale", norm.scale, source)]
    if norm.bias is not None:
        inputs.append(_weight(norm, "bias", norm.bias, source))
    attributes = {"axis": -len(norm.sizes), "epsilon": norm.epsilon, "stash_type": 1}
    outputs = take_outputs(norm.root)
    replace_node(scope, norm.root, gs.Node(op, norm.root.name, attributes, inputs, outputs, domain=STANDARD))


def _weight(norm: Norm, name: str, tensor: gs.Tensor, source: gs.Tensor) -> gs.Tensor:
    """A weight in the shape and type that the operator wants; the tensor itself where it is so already."""
    if tuple(tensor.shape) == norm.sizes and type_of(tensor) == type_of(source):
        return tensor
    values = values_of(tensor)
    assert values is not None  # `follow` takes others only in the right shape and type
    return new_constant(norm.root.outputs[0], name, values.reshape(norm.sizes).astype(_numpy_type(source)))


def _numpy_type(tensor: gs.Tensor) -> np.dtype:
    return onnx.helper.tensor_dtype_to_np_dtype(dtype_to_onnx(tensor.dtype))


def _refuse_shared(scope: gs.Graph, norm: Norm) -> None:
    """A norm replaces its nodes only if nobody else reads what they compute; Casts of its input may stay for others."""
    ends = [t for t in (norm.wide, norm.narrow, norm.scale, norm.bias) if t is not None]
    inner: dict[int, gs.Node] = {id(norm.root): norm.root}
    pending = list(norm.root.inputs)
    while pending:
        tensor = pending.pop()
        node = None if any(tensor is end for end in ends) else producer(tensor)
        if node is None or id(node) in inner or (node.op == "Cast" and any(node.inputs[0] is end for end in ends)):
            continue
        inner[id(node)] = node
        pending += node.inputs
    for node in inner.values():
        for tensor in node.outputs if node is not norm.root else ():
            others = [reader for reader in consumers(tensor) if id(reader) not in inner]
            if others or is_output(scope, tensor):
                reader_name = f"node '{label(others[0])}'" if others else "an output"
                raise Refusal(f"its intermediate '{tensor.name}' is also {'read by ' if others else ''}{reader_name}")


def weight_input(node: gs.Node, index: int) -> gs.Tensor | None:
    """Input `index` of a fused norm if its shape is that of the normalised dimensions, known and nothing broadcast."""
    tensor, axis = input_of(node, index), int(node.attrs.get("axis", -1))
    x = node.inputs[0]
    if tensor is None or tensor.shape is None or x.shape is None:
        return None
    sizes = [static_dim(x, at) for at in range(axis if axis < 0 else axis - len(x.shape), 0)]
    return tensor if list(tensor.shape) == sizes else None
