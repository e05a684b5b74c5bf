"""Where Q and D stand wrongly for TensorRT, by rule: which fusion each such place breaks, and at which node.

TensorRT multiplies in 8 bits only what it can fuse with the Q and D around it (TensorRT's guide, "Q/DQ layer-placement
recommendations"); elsewhere it computes in floating point and converts besides, which is how INT8 becomes slower than
FP16. With `Q` = QuantizeLinear, `D` = DequantizeLinear, and a product a Conv, ConvTranspose, MatMul or Gemm:

1. type: Q and D of int8 without zero points, or of FP8; TensorRT reads uint8 as int8 and clips what is above 127, and
   takes neither zero points nor the int32 that ONNX Runtime keeps biases in;
2. product: both operands come from D, the activation through operators at most that keep 8-bit values as they are;
3. scales: one for an activation; for a weight one, or one for each output;
4. activation function: no Q and D between a product and the function or norm that would be fused into it;
5. addition: where a quantised convolution ends in an addition, the other summand comes from D as well;
6. sharing: readers of one tensor share one Q, or they cannot be merged into one product;
7. packing: query, key and value are not one product whose result is taken apart into three: the builder takes such a
   product apart with it, weights included, which then are float (found with MiniLM and PP-OCR's reader). It merges
   products of one tensor by itself. Pairs such as SmolLM2's gate and up stay in 8 bits.

`tests/engines/tensorrt` asks a real builder about 1 to 3 and 7. Changes nothing and knows no scheme or plan.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx
import onnx_graphsurgeon as gs

from passes.pattern import consumers, input_of, is_op, only_consumer, producer, values_of
from passes.quantization.qdq_placement import EXACT
from passes.scopes import label, scopes
from plugins.errors import KilnError

_PRODUCTS = ("Conv", "ConvTranspose", "MatMul", "Gemm")
_FUSED_BEHIND = ("Relu", "Clip", "LeakyRelu", "Sigmoid", "HardSwish", "HardSigmoid", "BatchNormalization", "Add")
_STORED = "8-bit tensor"
_PARTS = 3
"""Of what is packed for attention: query, key and value."""
_FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
_COMMUTING = (*EXACT, "Slice")
"""Operators past which TensorRT moves Q and D."""


@dataclass(frozen=True)
class Fault:
    """`node` does not get `fusion`, for a `reason`; `advice` says what to place instead."""

    node: str
    operator: str
    fusion: str
    reason: str
    advice: str

    def sentence(self) -> str:
        """For people."""
        return f"{self.node} ({self.operator}): no {self.fusion}: {self.reason}; {self.advice}"


def placement_faults(graph: gs.Graph) -> list[Fault]:
    """All of them, in the order of the rules and nodes; subgraphs included. Empty for a graph without Q and D."""
    faults: list[Fault] = []
    for scope in scopes(graph):
        stored = [node for node in scope.nodes if is_op(node, "QuantizeLinear", "DequantizeLinear")]
        faults += [fault for node in stored for fault in _type_faults(node)]
        for node in scope.nodes:
            if is_op(node, *_PRODUCTS):
                faults += _product_faults(node)
                faults += [*_behind_faults(scope, node), *_packing_faults(scope, node)]
            elif is_op(node, "Add"):
                faults += _addition_faults(scope, node)
        faults += _sharing_faults(stored)
    return faults


def require_readable(faults: Sequence[Fault]) -> None:
    """Raise KilnError for what TensorRT would refuse or read as other values; the other faults only cost time."""
    wrong = [fault for fault in faults if fault.fusion == _STORED]
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise KilnError(f"TensorRT reads other 8-bit values: {'. '.join(f.sentence() for f in wrong[:3])}{more}")


def quantised_products(graph: gs.Graph) -> list[gs.Node]:
    """Products of the main graph that multiply in 8 bits if TensorRT fuses what it should."""
    return [
        node
        for node in graph.nodes
        if is_op(node, *_PRODUCTS) and _source(node.inputs[0]) is not None and _source(node.inputs[1]) is not None
    ]


def _type_faults(node: gs.Node) -> list[Fault]:
    zero, dtype = input_of(node, 2), _stored_type(node)
    values = values_of(zero)
    advice = "store it as int8 without a zero point, or as FP8"
    if dtype not in (np.dtype(np.int8), _FLOAT8):
        wrong = "a bias stays float" if dtype == np.dtype(np.int32) else advice
        reason = f"it stores {dtype}, which TensorRT reads as int8" + ("" if zero else " (the type without zero point)")
        return [Fault(label(node), node.op, _STORED, reason, wrong)]
    if values is None or np.any(np.asarray(values, np.float32) != 0):
        return [Fault(label(node), node.op, _STORED, "its zero point is not 0", advice)]
    return []


def _product_faults(node: gs.Node) -> list[Fault]:
    activation, weight = (_source(tensor) for tensor in node.inputs[:2])
    if activation is None and weight is None:
        return []
    fusion, name = f"8-bit {node.op}", label(node)
    if activation is None or weight is None:
        lacking, index = ("its activation", 0) if activation is None else ("its other operand", 1)
        between = _between(node.inputs[index])
        reason = f"{lacking}, {node.inputs[index].name}, does not come from DequantizeLinear"
        if between is not None:
            reason = f"{label(between)} ({between.op}) stands between DequantizeLinear and it"
        return [Fault(name, node.op, fusion, reason, "quantise both operands right before it, or neither")]
    types = [_stored_type(source) for source in (activation, weight)]
    if types[0] != types[1]:
        reason = f"it multiplies {types[0]} by {types[1]}"
        return [Fault(name, node.op, fusion, reason, "store both in one type")]
    if _per_channel(activation):
        advice = "give the activation one scale"
        return [Fault(name, node.op, fusion, "its activation has a scale for each channel", advice)]
    wanted = _output_axis(node)
    axis = int(weight.attrs.get("axis", 1))
    rank = len(weight.inputs[0].shape or ())
    if _per_channel(weight) and wanted is not None and axis % max(rank, 1) != wanted:
        reason = f"its weight's scales run along axis {axis}"
        return [Fault(name, node.op, fusion, reason, f"give a scale to each output, along axis {wanted}")]
    return []


def _behind_faults(scope: gs.Graph, node: gs.Node) -> list[Fault]:
    """Q and D between a product and what would be fused into it."""
    quantiser = only_consumer(scope, node.outputs[0], "QuantizeLinear")
    if quantiser is None:
        return []
    faults = []
    for dequantiser in consumers(quantiser.outputs[0]):
        for reader in consumers(dequantiser.outputs[0]) if is_op(dequantiser, "DequantizeLinear") else []:
            if is_op(reader, *_FUSED_BEHIND) and _is_fused_with(reader, dequantiser.outputs[0]):
                reason = f"{label(quantiser)} (QuantizeLinear) stands between it and {label(reader)}"
                advice = f"quantise behind {label(reader)}"
                faults.append(Fault(label(node), node.op, f"{node.op} with {reader.op}", reason, advice))
    return faults


def _packing_faults(scope: gs.Graph, node: gs.Node) -> list[Fault]:
    if node.op not in ("MatMul", "Gemm") or any(_source(tensor) is None for tensor in node.inputs[:2]):
        return []
    tensor = node.outputs[0]
    while (reader := only_consumer(scope, tensor, "Add", "Reshape", "Transpose")) is not None:
        if reader.op == "Add" and not any(isinstance(read, gs.Constant) for read in reader.inputs):
            break
        tensor = reader.outputs[0]
    parts = [reader for reader in consumers(tensor) if is_op(reader, "Slice", "Gather")]
    split = only_consumer(scope, tensor, "Split")
    if max(len(parts), len(split.outputs) if split is not None else 0) < _PARTS:
        return []
    taken = split if split is not None else parts[0]
    reason = f"{label(taken)} ({taken.op}) takes its result apart"
    advice = "keep it float, or one product each: TensorRT merges products of one tensor itself"
    return [Fault(label(node), node.op, f"8-bit {node.op}", reason, advice)]


def _is_fused_with(reader: gs.Node, result: gs.Tensor) -> bool:
    """An addition is fused with one product only: where the other summand is one, `result` is its residual."""
    if not is_op(reader, "Add"):
        return True
    other = reader.inputs[1] if reader.inputs[0] is result else reader.inputs[0]
    return producer(other, *_PRODUCTS) is None


def _addition_faults(scope: gs.Graph, node: gs.Node) -> list[Fault]:
    for index in (1, 0):
        convolution = producer(node.inputs[index], "Conv")
        if convolution is None or only_consumer(scope, node.inputs[index]) is None:
            continue
        if any(_source(operand) is None for operand in convolution.inputs[:2]):
            continue
        other = node.inputs[1 - index]
        if isinstance(other, gs.Constant) or _source(other) is not None:
            return []
        reason = f"the other summand of {label(node)}, {other.name}, is float"
        advice = f"let {label(node)} read it behind Q and D"
        return [Fault(label(convolution), "Conv", "Conv with Add", reason, advice)]
    return []


def _sharing_faults(stored: list[gs.Node]) -> list[Fault]:
    by_tensor: dict[int, list[gs.Node]] = defaultdict(list)
    for node in stored:
        if node.op == "QuantizeLinear":
            by_tensor[id(node.inputs[0])].append(node)
    faults = []
    for first, *others in by_tensor.values():
        if others:
            names = ", ".join(label(node) for node in (first, *others))
            reason = f"{first.inputs[0].name} is quantised {1 + len(others)} times, by {names}"
            faults.append(
                Fault(label(others[0]), "QuantizeLinear", "merging of its readers", reason, "let them share one Q")
            )
    return faults


def _source(tensor: gs.Tensor) -> gs.Node | None:
    """The D that `tensor` comes from, through operators that keep 8-bit values; None where it comes from elsewhere."""
    node = producer(tensor)
    while node is not None and is_op(node, *_COMMUTING):
        node = producer(node.inputs[0])
    return node if node is not None and is_op(node, "DequantizeLinear") else None


def _between(tensor: gs.Tensor) -> gs.Node | None:
    """The operator that keeps `tensor` from coming from D, where there is just one."""
    node = producer(tensor)
    while node is not None and is_op(node, *_COMMUTING):
        node = producer(node.inputs[0])
    return node if node is not None and any(_source(read) is not None for read in node.inputs) else None


def _stored_type(node: gs.Node) -> np.dtype:
    """What a Q or D stores: the type of its zero point, uint8 where it has none."""
    zero = input_of(node, 2)
    if zero is None or zero.dtype is None:
        return np.dtype(np.uint8)
    known = zero.dtype if not isinstance(zero.dtype, int) else onnx.helper.tensor_dtype_to_np_dtype(zero.dtype)
    return np.dtype(known)


def _per_channel(dequantiser: gs.Node) -> bool:
    scale = values_of(dequantiser.inputs[1])
    return scale is not None and np.asarray(scale).size > 1


def _output_axis(node: gs.Node) -> int | None:
    """Axis of the weight that counts outputs; None where it has no two dimensions."""
    if node.op == "Conv":
        return 0
    if node.op == "ConvTranspose":
        return 1
    if node.op == "Gemm":
        return 0 if node.attrs.get("transB", 0) else 1
    rank = len(node.inputs[1].shape or ())
    return rank - 1 if rank >= 2 else None
