"""What one operator call does at least, from the shapes that ONNX Runtime's profile gives: operations and bytes.

The profile must come from a session without prepacked weights, which have no shape in it. A multiply-add counts as two
operations; where nothing is multiplied, one for each element of the output. Knows nothing of time.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from plugins.dense.schema import LINEAR, LINEAR_SWIGLU
from plugins.paged_attention.schema import OP_TYPE
from plugins.quant_matmul.cuda_schema import QUANT_LINEAR, QUANT_LINEAR_SWIGLU, WeightFormat
from plugins.quant_matmul.schema import INT8_MATMUL, WEIGHT_MATMUL
from plugins.sampling.schema import FEED_TOKENS, SAMPLE

Arithmetic = Literal["fp32", "16-bit", "int8", "float8"]
Shape = tuple[int, ...]

_BY_LAST_AXIS = {
    "MatMul",
    "FusedMatMul",
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "DynamicQuantizeMatMul",
    "QLinearMatMul",
    "MatMulNBits",
    INT8_MATMUL.op_type,
    WEIGHT_MATMUL.op_type,
    LINEAR.op_type,
    QUANT_LINEAR.op_type,
}
_HALVES = {LINEAR_SWIGLU.op_type, QUANT_LINEAR_SWIGLU.op_type}
"""Two such products, of which one output is made."""
_GEMM = {"Gemm", "FusedGemm", "QGemm"}
_KERNEL_INPUT = {"Conv": 1, "FusedConv": 1, "NhwcFusedConv": 1, "ConvInteger": 1, "QLinearConv": 3}
"""Convolution to the input that holds its kernels, [outputs, inputs of the group, ...]."""
_INTEGER = {
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "DynamicQuantizeMatMul",
    "QLinearMatMul",
    "QGemm",
    "ConvInteger",
    "QLinearConv",
    INT8_MATMUL.op_type,
}
_VIEWS = {"Reshape", "Unsqueeze", "Squeeze", "Flatten", "Identity"}
"""The output is the input's memory under another shape."""
_ROW_TABLES = {"Gather", "GatherElements", "GatherND"}
_HALF = {"float16", "bfloat16"}
_FLOAT = {"float", *_HALF}
ITEMSIZE: Mapping[str, int] = {
    **{"float": 4, "float16": 2, "bfloat16": 2, "double": 8},
    **{"int8": 1, "uint8": 1, "int32": 4, "int64": 8, "bool": 1},
}
"""Bytes of an element by ONNX Runtime's names in a profile."""


@dataclass(frozen=True)
class SequenceStep:
    """What a packed step does for one sequence: `new` tokens after `past`."""

    new: int
    past: int

    def pairs(self, window: int | None) -> int:
        """(query, key) pairs of causal attention, in a sliding window perhaps."""
        if window is None or self.past + self.new <= window:
            return self.new * self.past + self.new * (self.new + 1) // 2
        return sum(min(self.past + place + 1, window) for place in range(self.new))

    def reach(self, window: int | None) -> int:
        """Positions of the cache that are read at least once."""
        whole = self.past + self.new
        return whole if window is None else min(whole, window + self.new - 1)


@dataclass(frozen=True)
class LowBitProduct:
    """A product with weights of 8 or 4 bits on a GPU (plugins/quant_matmul/cuda_schema.py)."""

    format: WeightFormat
    kernel_rows: int

    def arithmetic(self, rows: int) -> Arithmetic:
        """What so many rows are multiplied in: numbers of 16 bits, or of 8 where they are quantised, too."""
        if self.format == "int4" or rows <= self.kernel_rows:
            return "16-bit"
        return "int8" if self.format == "int8" else "float8"


@dataclass(frozen=True)
class CallWork:
    """Of one call. `rows` is how many rows a product multiplies with its weight; 0 where nothing is multiplied.

    weights      bytes of constants that are read
    cache        bytes of keys and values that are read or written
    activations  bytes of other inputs and of outputs
    """

    operations: float
    arithmetic: Arithmetic
    rows: int
    weights: int
    cache: int
    activations: int

    @property
    def bytes(self) -> int:
        return self.weights + self.cache + self.activations

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.operations / self.bytes if self.bytes else 0.0

    @property
    def is_product(self) -> bool:
        return self.rows > 0


NO_WORK = CallWork(0.0, "fp32", 0, 0, 0, 0)
"""Of a view; and what stands where the work is not known."""


def product_operations(call: Mapping[str, Any]) -> float | None:
    """Two for each multiply-add: elements of the output times the length of the sum behind each; None: no product.

    `call` are the arguments of a kernel's event in a profile.
    """
    name, inputs, outputs = call["op_name"], _shapes(call, "input"), _shapes(call, "output")
    if name == "MultiHeadAttention":  # [batch, queries, hidden] and [batch, keys, hidden]; two products
        return 4.0 * math.prod(inputs[0]) * inputs[1][1]
    if name in _KERNEL_INPUT:
        length = math.prod(inputs[_KERNEL_INPUT[name]][1:])  # channels of the group, and the kernel
    elif name in _GEMM:
        length = math.prod(inputs[0]) // outputs[0][0]  # whichever way the first operand lies
    elif name in _BY_LAST_AXIS:
        length = inputs[0][-1]
    elif name in _HALVES:
        length = 2 * inputs[0][-1]
    else:
        return None
    return 2.0 * math.prod(outputs[0]) * length


def call_work(
    call: Mapping[str, Any],
    sequences: Sequence[SequenceStep] = (),
    window: int | None = None,
    low_bit: LowBitProduct | None = None,
) -> CallWork:
    """The work of one call; `sequences` are those of the step, for attention over a paged cache, `window` is its.

    `low_bit` is what the graph says of a product with weights of 8 or 4 bits on a GPU.
    """
    name, outputs = call["op_name"], _shapes(call, "output")
    if name == OP_TYPE:
        return _attention_work(call, sequences, window)
    weights, moved = int(call["parameter_size"]), int(call["activation_size"]) + int(call["output_size"])
    if name in _VIEWS:
        return NO_WORK
    operations = product_operations(call)
    if operations is not None:
        columns = outputs[0][-1]
        if name in _KERNEL_INPUT:  # a convolution is a product with a row for each place
            columns = _shapes(call, "input")[_KERNEL_INPUT[name]][0]
        rows = max(math.prod(outputs[0]) // max(columns, 1), 1)
        arithmetic = low_bit.arithmetic(rows) if low_bit else _arithmetic(call)
        return CallWork(operations, arithmetic, rows, weights, 0, moved)
    if name in _ROW_TABLES:  # of a table only the rows that come out
        weights = min(weights, int(call["output_size"]))
    if name == FEED_TOKENS.op_type:  # an id, where it comes from, and perhaps one of the tokens before
        moved = 3 * int(call["output_size"])
    computed = _shapes(call, "input")[:1] if name == SAMPLE.op_type else outputs
    return CallWork(float(sum(math.prod(shape) for shape in computed)), "fp32", 0, weights, 0, moved)


def _arithmetic(call: Mapping[str, Any]) -> Arithmetic:
    if call["op_name"] in _INTEGER:
        return "int8"
    return "16-bit" if next(iter(call["input_type_shape"][0])) in _HALF else "fp32"


def _attention_work(call: Mapping[str, Any], sequences: Sequence[SequenceStep], window: int | None) -> CallWork:
    """Two products over the pairs; keys and values are read once and the new ones written once."""
    inputs = [(kind, tuple(shape)) for entry in call["input_type_shape"] for kind, shape in entry.items()]
    ((kind, output),) = call["output_type_shape"][0].items()
    written = math.prod(output) * ITEMSIZE[kind]
    row = sum(math.prod(shape[2:]) * ITEMSIZE[kind] for kind, shape in inputs if len(shape) > 2)  # with INT8's scales
    pairs = sum(sequence.pairs(window) for sequence in sequences)
    touched = sum(sequence.reach(window) + sequence.new for sequence in sequences)
    fresh = sum(math.prod(shape) * ITEMSIZE[kind] for kind, shape in inputs if len(shape) == 2 and kind in _FLOAT)
    tables = int(call["parameter_size"])  # rotations: of each table one row a token
    fresh = max(fresh - tables, written)
    operations = 4.0 * output[-1] * pairs
    return CallWork(operations, _arithmetic(call), output[0], 0, row * touched, fresh + written)


def _shapes(call: Mapping[str, Any], side: Literal["input", "output"]) -> list[Shape]:
    return [tuple(shape) for entry in call[f"{side}_type_shape"] for shape in entry.values()]
