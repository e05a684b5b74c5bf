"""Values of nodes whose inputs are constants, and what is known of shape arithmetic on dynamic shapes.

Nodes are computed by ONNX's reference implementation, one at a time, in the types and with the meaning that the
graph's opset gives them. Only operators in `OPERATORS` are: deterministic ones, whose reference implementation agrees
with the specification in every opset from OLDEST_OPSET on. So nothing random, no control flow, no other domain,
no strings, and neither QuantizeLinear nor DequantizeLinear: computing those would undo a quantisation.

Operators on FP16 and BF16 are computed in FP32 and rounded once.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter
from onnx_graphsurgeon.ir.tensor import SparseValues

from passes.base import Refusal
from passes.pattern import STANDARD, axes_of, producer, values_of
from passes.weights import INLINE_LIMIT
from plugins.errors import first_line

OPERATORS = frozenset((
    "Abs", "Add", "And", "ArgMax", "ArgMin", "Cast", "CastLike", "Ceil", "Clip", "Compress", "Concat",
    "ConstantOfShape", "Cos", "CumSum", "DepthToSpace", "Div", "Einsum", "Equal", "Erf", "Exp", "Expand", "EyeLike",
    "Flatten", "Floor", "Gather", "GatherElements", "GatherND", "Gemm", "Greater", "GreaterOrEqual", "Identity",
    "IsInf", "IsNaN", "Less", "LessOrEqual", "Log", "MatMul", "Max", "Min", "Mod", "Mul", "Neg", "NonZero", "Not",
    "OneHot", "Or", "Pad", "Pow", "Range", "Reciprocal", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
    "ReduceSum", "Relu", "Reshape", "Round", "ScatterElements", "ScatterND", "Shape", "Sigmoid", "Sign", "Sin",
    "Size", "Slice", "SpaceToDepth", "Split", "Sqrt", "Squeeze", "Sub", "Sum", "Tan", "Tanh", "Tile", "Transpose",
    "Trilu", "Unsqueeze", "Where", "Xor",
))  # fmt: skip
OLDEST_OPSET = 7
"""Before it, broadcasting followed an attribute."""
_SELECTING = ("Compress", "NonZero")
"""How large their results are is known only once they are computed; at most as many rows as an input has elements."""
_LONG = 8
_HALF = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_NUMBERS = frozenset(
    (
        TensorProto.BOOL, TensorProto.FLOAT, TensorProto.DOUBLE, *_HALF,
        TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64,
        TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64,
    )
)  # fmt: skip


def evaluate(
    node: gs.Node, operands: Sequence[gs.Constant | None], opset: int, limit: int | None = None
) -> list[NDArray] | None:
    """Values of a node's outputs, given its inputs (None for an absent one).

    None where that is not done: another operator or type, or results of more than `limit` bytes, which is known
    before anything is read or computed. Raises Refusal where the computation fails or contradicts ONNX's inference.
    """
    if node.op not in OPERATORS or node.domain != STANDARD or opset < OLDEST_OPSET:
        return None
    given = [operand for operand in operands if operand is not None]
    kinds = [_element_type(operand) for operand in given]
    if not _NUMBERS.issuperset(kinds) or any(isinstance(operand._values, SparseValues) for operand in given):
        return None
    model = _model_of(node, operands, opset)
    results = _results(model)
    if results is None or not _NUMBERS.issuperset(kind for kind, _ in results):
        return None
    if node.op in _SELECTING:
        results = [(kind, [None] * len(dims)) for kind, dims in results]
        if limit is not None and sum(operand._values.nbytes for operand in given) * _LONG > limit:
            return None
    elif not all(_fits(kind, dims, limit) for kind, dims in results):
        return None
    widen = node.op not in ("Cast", "CastLike") and not set(_HALF).isdisjoint(kinds)
    feeds = {}
    for name, operand in zip(_input_names(operands), operands, strict=True):
        values = values_of(operand)
        if values is not None:
            feeds[name] = values.astype(np.float32) if widen and _element_type(operand) in _HALF else values
    try:
        with np.errstate(all="ignore"):
            computed = ReferenceEvaluator(model).run(None, feeds)
    except Exception as error:  # the reference implementation's errors have no common base
        raise Refusal(f"its value cannot be computed ({type(error).__name__}: {first_line(error)})") from error
    return [_checked(np.asarray(v), *result, widen) for v, result in zip(computed, results, strict=True)]


def _checked(values: NDArray, kind: int, dims: list[int | None], widened: bool) -> NDArray:
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    if widened and kind in _HALF and values.dtype == np.float32:
        values = values.astype(dtype)
    fits = len(values.shape) == len(dims) and all(d in (None, n) for d, n in zip(dims, values.shape, strict=True))
    if values.dtype != dtype or not fits:
        raise Refusal(f"its value is computed as {values.dtype}{list(values.shape)}, but inferred as {dtype}{dims}")
    return values


def _element_type(tensor: gs.Constant) -> int:
    dtype = tensor.dtype  # ONNX's own number for types that NumPy lacks
    return int(dtype) if isinstance(dtype, int) else int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def _input_names(operands: Sequence[gs.Constant | None]) -> list[str]:
    return ["" if operand is None else f"input{index}" for index, operand in enumerate(operands)]


def _model_of(node: gs.Node, operands: Sequence[gs.Constant | None], opset: int) -> onnx.ModelProto:
    """One node; short integer inputs are initialisers too, as shapes of results may depend on their values."""
    names = _input_names(operands)
    proto = helper.make_node(node.op, names, [f"output{i}" if t.name else "" for i, t in enumerate(node.outputs)])
    proto.attribute.extend(OnnxExporter.export_attributes(node.attrs))
    inputs, initializers = [], []
    for name, operand in zip(names, operands, strict=True):
        if operand is None:
            continue
        kind = _element_type(operand)
        if operand._values.nbytes <= INLINE_LIMIT and kind not in _HALF:
            initializers.append(onnx.numpy_helper.from_array(np.asarray(values_of(operand)), name))
        else:
            inputs.append(helper.make_tensor_value_info(name, kind, operand.shape))
    outputs = [helper.make_empty_tensor_value_info(name) for name in proto.output if name]
    graph = helper.make_graph([proto], "node", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def _results(model: onnx.ModelProto) -> list[tuple[int, list[int | None]]] | None:
    """Element type and dimensions of each output as ONNX infers them; None where it does not."""
    try:
        inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    except onnx.shape_inference.InferenceError:
        return None
    kinds = [value.type.tensor_type for value in inferred.graph.output]
    if not all(kind.elem_type and kind.HasField("shape") for kind in kinds):
        return None
    return [
        (kind.elem_type, [d.dim_value if d.HasField("dim_value") else None for d in kind.shape.dim]) for kind in kinds
    ]


def _fits(kind: int, dims: list[int | None], limit: int | None) -> bool:
    """Whether a result's size is known and within the limit."""
    known = [dim for dim in dims if dim is not None]
    itemsize = helper.tensor_dtype_to_np_dtype(kind).itemsize
    return len(known) == len(dims) and (limit is None or math.prod(known) * itemsize <= limit)


@dataclass(frozen=True)
class Axis:
    """A size that is known only at run time and has no name: axis `axis` of the tensor whose identity is `tensor`."""

    tensor: int
    axis: int


Size = int | bool | str | Axis | None
"""An element of shape arithmetic: a number, a named or an unnamed dimension, or None for anything else."""


def dimension(tensor: gs.Tensor, axis: int) -> Size:
    """Size of one axis of a tensor whose rank is known. A name stands for the same size wherever it occurs."""
    size = tensor.shape[axis]
    if isinstance(size, (int, np.integer)) and size >= 0:
        return int(size)
    return size if isinstance(size, str) and size.isidentifier() else Axis(id(tensor), axis)


def sizes_of(tensor: gs.Tensor | None, unsteady: frozenset[int] = frozenset()) -> NDArray | None:
    """What is known of an integer tensor's elements: an array of `Size` in its shape, None if its shape is unknown.

    Follows Shape and Size through the operators that exporters put between it and a Reshape or Expand. Shapes of
    tensors whose identities are in `unsteady` count as unknown.
    """
    if isinstance(tensor, gs.Constant):
        small = tensor._values.nbytes <= INLINE_LIMIT and _element_type(tensor) in _WHOLE
        return np.asarray(values_of(tensor)).astype(object) if small else None
    node = producer(tensor) if tensor is not None and not tensor.is_empty() else None
    if node is None or node.domain != STANDARD:
        return None
    if node.op in ("Shape", "Size"):
        return _shape_of(node, unsteady)
    if node.op not in _ARITHMETIC:
        return None
    operands = [sizes_of(operand, unsteady) for operand in node.inputs]
    if any(o is None for o, tensor in zip(operands, node.inputs, strict=True) if not tensor.is_empty()):
        return None
    try:
        return _ARITHMETIC[node.op](node, operands)
    except (IndexError, ValueError, TypeError):  # sizes that contradict each other, or a number that is not known
        return None


def _shape_of(node: gs.Node, unsteady: frozenset[int]) -> NDArray | None:
    tensor = node.inputs[0]
    if tensor.shape is None or id(tensor) in unsteady:
        return None
    sizes = [dimension(tensor, axis) for axis in range(len(tensor.shape))]
    if node.op == "Size":
        numbers = [size for size in sizes if isinstance(size, int)]
        return _array(math.prod(numbers) if len(numbers) == len(sizes) else None)
    return _array(sizes[node.attrs.get("start", 0) : node.attrs.get("end", len(sizes))])


def _array(sizes: object) -> NDArray:
    return np.array(sizes, dtype=object)


def _gather(node: gs.Node, operands: list[NDArray]) -> NDArray:
    return _array(np.take(operands[0], operands[1].astype(np.int64), axis=node.attrs.get("axis", 0)))


def _slice(node: gs.Node, operands: list[NDArray]) -> NDArray | None:
    data = operands[0]
    bounds = [np.atleast_1d(o).astype(np.int64) for o in operands[1:]]
    if len(bounds) < 2 or data.ndim != 1:
        return None  # before opset 10, bounds were attributes
    step = int(bounds[3][0]) if len(bounds) > 3 else 1
    return data[int(bounds[0][0]) : int(bounds[1][0]) : step] if step > 0 else None


def _concat(node: gs.Node, operands: list[NDArray]) -> NDArray:
    return np.concatenate(operands, axis=node.attrs["axis"])


def _relabel(node: gs.Node, operands: list[NDArray]) -> NDArray | None:
    """Squeeze, Unsqueeze and Reshape between a scalar and a vector."""
    data = operands[0]
    if node.op == "Unsqueeze":
        return data.reshape(1) if data.ndim == 0 and axes_of(node) in ([0], [-1]) else None
    if node.op == "Squeeze":
        return data.reshape(()) if data.shape == (1,) else None
    shape = [int(size) for size in operands[1]]
    return data.reshape(shape) if data.ndim <= 1 and shape in ([], [-1], [1]) else None


def _cast(node: gs.Node, operands: list[NDArray]) -> NDArray | None:
    return operands[0] if node.attrs.get("to") in (TensorProto.INT32, TensorProto.INT64) else None


def _mul(node: gs.Node, operands: list[NDArray]) -> NDArray:
    return _elementwise(lambda a, b: a * b if isinstance(a, int) and isinstance(b, int) else None, *operands)


def _equal(node: gs.Node, operands: list[NDArray]) -> NDArray:
    def equal(a: Size, b: Size) -> bool | None:
        if isinstance(a, int) and isinstance(b, int):
            return a == b
        dim, number = (a, b) if isinstance(b, int) else (b, a)
        negative = isinstance(number, int) and number < 0 and isinstance(dim, (str, Axis))
        return False if negative else None  # a dimension is never negative

    return _elementwise(equal, *operands)


def _where(node: gs.Node, operands: list[NDArray]) -> NDArray:
    return _elementwise(lambda test, a, b: (a if test else b) if isinstance(test, int) else None, *operands)


def _elementwise(function: Callable[..., Size], *operands: NDArray) -> NDArray:
    return np.asarray(np.frompyfunc(function, len(operands), 1)(*operands), dtype=object)


_WHOLE = frozenset((TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL))
_ARITHMETIC = {
    "Gather": _gather, "Slice": _slice, "Concat": _concat, "Squeeze": _relabel, "Unsqueeze": _relabel,
    "Reshape": _relabel, "Cast": _cast, "Identity": lambda node, operands: operands[0], "Mul": _mul,
    "Equal": _equal, "Where": _where,
}  # fmt: skip
SIZE_OPERATORS = frozenset(_ARITHMETIC) | {"Shape", "Size"}
