"""Casts between FP32 and a 16-bit type around a node that comes to work in 16 bits: what passes for GPUs share.

`passes.cast_precision` leaves FP32 islands between two Casts. A pass that replaces an island by an operator with a
16-bit form takes the tensors from outside the Casts, so that these disappear.
"""

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from passes.norm_pattern import type_of
from passes.pattern import STANDARD, consumers, in_scope, insert_before, is_output, producer, values_of
from passes.precision_islands import FP32, LOW_TYPES


def low_type(name: str) -> np.dtype:
    """The 16-bit type of a name. Raises ValueError for another name, as the options of passes do."""
    if name not in LOW_TYPES:
        raise ValueError(f"dtype is {name!r}; expected {' or '.join(LOW_TYPES)}")
    return LOW_TYPES[name]


def has_type(tensor: gs.Tensor, dtype: np.dtype) -> bool:
    """Whether a tensor is of a type; graphs that were read keep BF16 as ONNX's number, as NumPy has no such type."""
    kind = type_of(tensor)
    return kind is not None and kind == onnx.helper.np_dtype_to_tensor_dtype(dtype)


def is_low(tensor: gs.Tensor, dtype: np.dtype) -> bool:
    """Whether a tensor is FP32 behind a Cast from `dtype`, or already of it."""
    return has_type(tensor, dtype) or _source(tensor, dtype) is not None


def as_low(scope: gs.Graph, node: gs.Node, index: int, dtype: np.dtype) -> gs.Tensor:
    """The operand of a node in `dtype`: what a Cast to FP32 was made from, a rounded constant, or behind a new Cast."""
    tensor = node.inputs[index]
    if has_type(tensor, dtype):
        return tensor
    if (source := _source(tensor, dtype)) is not None:
        return source
    for reader in consumers(tensor):
        if _casts_to(reader, dtype) and in_scope(scope, reader):
            return reader.outputs[0]
    values = values_of(tensor)
    if values is not None:
        return gs.Constant(f"{tensor.name}/{node.outputs[0].name}/{dtype}", values.astype(dtype))
    low = gs.Variable(f"{tensor.name}/{node.outputs[0].name}/{dtype}", dtype, tensor.shape)
    insert_before(scope, node, _cast(tensor, low))
    return low


def only_low_readers(scope: gs.Graph, tensor: gs.Tensor, dtype: np.dtype) -> bool:
    """Whether all that read an FP32 tensor are Casts to `dtype`."""
    readers = consumers(tensor)
    return bool(readers) and not is_output(scope, tensor) and all(_casts_to(reader, dtype) for reader in readers)


def give_low(scope: gs.Graph, node: gs.Node, index: int, dtype: np.dtype) -> None:
    """Let a node's output, FP32 until now, be of `dtype`: its Casts to that type disappear, others read a new Cast."""
    wide = node.outputs[index]
    wide.dtype = FP32
    low = gs.Variable(f"{wide.name}/made_{dtype}", dtype, wide.shape)
    node.outputs[index] = low
    for reader in consumers(wide):
        if _casts_to(reader, dtype) and in_scope(scope, reader) and not is_output(scope, reader.outputs[0]):
            cast = reader.outputs[0]
            reader.inputs.clear()
            reader.outputs.clear()
            for user in consumers(cast):
                for place, operand in enumerate(user.inputs):
                    if operand is cast:
                        user.inputs[place] = low
    if consumers(wide) or is_output(scope, wide):
        place = next(i for i, one in enumerate(scope.nodes) if one is node)
        scope.nodes.insert(place + 1, _cast(low, wide))


def _source(tensor: gs.Tensor, dtype: np.dtype) -> gs.Tensor | None:
    cast = producer(tensor, "Cast")
    return cast.inputs[0] if cast is not None and has_type(cast.inputs[0], dtype) else None


def _casts_to(node: gs.Node, dtype: np.dtype) -> bool:
    return node.op == "Cast" and node.domain == STANDARD and has_type(node.outputs[0], dtype)


def _cast(source: gs.Tensor, target: gs.Tensor) -> gs.Node:
    to = type_of(target)
    return gs.Node("Cast", f"{target.name}/cast", {"to": to}, [source], [target], domain=STANDARD)
