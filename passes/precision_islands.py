"""Which nodes of an FP32 graph are computed in 16 bits, and why the others are not.

A node is a candidate if its operator has a 16-bit form: by its ONNX schema at the graph's opset, for contrib operators
by `CONTRIB_CASTABLE`. Of the candidates these stay in FP32 ("islands"):

1. operators of `KEPT`: normalisations, Softmax, exponentials and powers, sums over many values, angles, recurrences,
   dynamic quantisation; Q and D with fixed scales follow what they stand beside;
2. decomposed norm statistics: a square (Mul(x, x) or Pow(x, 2)), the ReduceMean/ReduceSum of it, the elementwise nodes
   from there to the Mul or Div that applies the statistic, and the centring Sub(x, ReduceMean(x)) before the square;
3. what leads to Softmax: additions of masks, selections, scaling by a constant. A mask of -3.4e38 overflows FP16;
4. arithmetic on indices: elementwise nodes, moves and outer products fed by integers only (Cast, Range), such as
   positions, angles and masks. FP16 counts integers to 2048;
5. nodes whose inputs or outputs were measured beyond the limit, and nodes with a constant that 16 bits cannot hold;
6. readers of a D that stays in FP32, as it must before opset 19: a Cast between D and a product keeps backends from
   multiplying in 8 bits;
7. light nodes, those without a product of matrices and without an embedding table, that read FP32 only and would need
   more Casts in 16 bits than in FP32.

Measured ranges come from the caller; nothing is run here. Nodes are compared and stored by identity.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from passes.pattern import CONTRIB, STANDARD, consumers, is_op, producer, scalar_of, static_dim, values_of
from passes.scopes import scopes

FP32 = np.dtype(np.float32)
LOW_TYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


KEPT = _names(
    "LayerNormalization RMSNormalization SimplifiedLayerNormalization InstanceNormalization GroupNormalization "
    "LpNormalization MeanVarianceNormalization LRN Softmax LogSoftmax SoftmaxCrossEntropyLoss Exp Log Pow CumSum "
    "NegativeLogLikelihoodLoss CumProd ReduceSum ReduceProd ReduceSumSquare ReduceL1 ReduceL2 ReduceLogSum "
    "ReduceLogSumExp Sin Cos Tan Asin Acos Atan Sinh Cosh Asinh Acosh Atanh Range Det GridSample AffineGrid DFT STFT "
    "MelWeightMatrix HannWindow HammingWindow BlackmanWindow LSTM GRU RNN RandomNormal RandomUniform RandomNormalLike "
    "RandomUniformLike Bernoulli Multinomial EyeLike DynamicQuantizeLinear "
    "If Loop Scan SequenceMap Cast CastLike BitCast Shape Size Optional RotaryEmbedding"
)
"""Sums are kept because how they accumulate is the backend's choice."""
MOVES = _names(
    "Reshape Transpose Unsqueeze Squeeze Flatten Expand Tile Slice Split Concat Gather GatherND GatherElements "
    "Identity Where Pad DepthToSpace SpaceToDepth Dropout ScatterND ScatterElements Compress"
)
"""Operators that hand values on unchanged."""
_HEAVY = _names("MatMul Gemm Conv ConvTranspose DeformConv Einsum Attention FusedMatMul FusedGemm FusedConv") | {
    "MultiHeadAttention"
}
FOLLOWERS = frozenset({"Cast", "Shape", "Size"})
"""Operators that take any type: they read what there is."""
CONTRIB_CASTABLE = _names("Gelu FastGelu QuickGelu BiasGelu FusedMatMul FusedGemm FusedConv MultiHeadAttention")
"""Contrib operators with one float type for all their float inputs and outputs. Their sums are in FP32."""
_STATISTICS = _names("Add Sub Mul Div Sqrt Reciprocal Pow Max Clip Abs Neg") | MOVES
_ON_INDICES = _STATISTICS | _names("Sin Cos Exp Log Floor Ceil Round Mod Min Sign Relu Clip CumSum")
_MOST_OF_A_SCALE = 2.0**-8
"""Share of a scale that rounding may change: half of a step at the end of an 8-bit range."""
_BLOCK = 2**22
"""Values of a constant that are looked at together."""


@dataclass(frozen=True)
class Slots:
    """Indices of a node's inputs and outputs that change type when it is computed in 16 bits."""

    inputs: frozenset[int]
    outputs: frozenset[int]


@dataclass(frozen=True)
class Precision:
    """What decides: the 16-bit type, the share 1/margin of its range that may be used, and what was measured."""

    low: np.dtype
    margin: float
    ranges: Mapping[str, float]

    @property
    def _finfo(self) -> Any:
        return ml_dtypes.finfo(self.low)

    def excess(self, name: str) -> str | None:
        """How far a tensor was measured beyond the limit; None if it was not, or not measured."""
        most, value = float(self._finfo.max), self.ranges.get(name, 0.0)
        return None if value <= most / self.margin else f"is {value:.2g}, above {most:.6g}/{self.margin:g}"

    def loss(self, values: NDArray) -> str | None:
        """What a constant would lose, None if it can be stored in `low`.

        Rounding of normal numbers costs at most half of eps, as a share of sum(|values|); more is underflow.
        """
        if self.low == LOW_TYPES["bfloat16"] and (not values.size or np.abs(values).max() <= float(self._finfo.max)):
            return None  # BF16 has FP32's exponents: nothing that is normal underflows
        size = lost = 0.0
        flat = values.reshape(-1)
        for start in range(0, flat.size, _BLOCK):
            block = flat[start : start + _BLOCK]
            with np.errstate(over="ignore", under="ignore"):
                rounded = block.astype(self.low).astype(np.float32)
            finite = np.isfinite(block)
            if (overflown := finite & ~np.isfinite(rounded)).any():
                return f"holds {np.abs(block[overflown]).max():.2g}, beyond {self.low}"
            size += np.abs(block[finite]).sum(dtype=np.float64)
            lost += np.abs((block - rounded)[finite]).sum(dtype=np.float64)
        if lost <= self._finfo.eps * size:
            return None
        return f"would lose {lost / size:.1%} of its magnitude to underflow"

    def loss_of_scales(self, values: NDArray) -> str | None:
        """The same for scales, each of which counts: with one that underflows its whole channel is lost."""
        with np.errstate(over="ignore", under="ignore"):
            rounded = values.astype(self.low).astype(np.float32)
        lost = np.abs(values - rounded) > _MOST_OF_A_SCALE * np.abs(values)
        return f"holds {np.abs(values[lost]).min():.2g}, which {self.low} cannot" if lost.any() else None


def nodes_of(graph: gs.Graph) -> list[gs.Node]:
    """The nodes of all scopes, outer scopes first."""
    return [node for scope in scopes(graph) for node in scope.nodes]


def slots_of(node: gs.Node, opset: int, low: np.dtype) -> Slots | None:
    """What changes type if the node is computed in `low`; None if it cannot be, or reads no FP32."""
    if any(tensor.dtype is None and not tensor.is_empty() for tensor in (*node.inputs, *node.outputs)):
        return None
    floats = [i for i, tensor in enumerate(node.inputs) if tensor.dtype == FP32]
    made = [i for i, tensor in enumerate(node.outputs) if tensor.dtype == FP32]
    if node.domain == CONTRIB and node.op in CONTRIB_CASTABLE:
        return Slots(frozenset(floats), frozenset(made)) if floats and made else None
    if node.domain != STANDARD or node.op in KEPT:
        return None
    schema = _schema(node.op, opset)
    if schema is None:
        return None
    allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    inputs = {i for i in floats if f"tensor({low})" in allowed.get(_formal(schema.inputs, i), ())}
    bound = {_formal(schema.inputs, i) for i in inputs}
    if not inputs or not bound.issuperset(_formal(schema.outputs, i) for i in made):
        return None
    if node.op not in MOVES and any("seq(" in kind for variable in bound for kind in allowed[variable]):
        return None
    return Slots(frozenset(inputs), frozenset(made))


def lacks_form(node: gs.Node, opset: int, low: np.dtype) -> bool:
    """Whether a standard operator of FP32 tensors, no island by itself, cannot be computed in `low` at this opset."""
    schema = _schema(node.op, opset) if node.domain == STANDARD and node.op not in KEPT else None
    if schema is None or not any(tensor.dtype == FP32 for tensor in node.inputs):
        return False
    return not any(f"tensor({low})" in c.allowed_type_strs for c in schema.type_constraints)


@functools.cache
def _schema(op: str, opset: int) -> "onnx.defs.OpSchema | None":
    try:
        return onnx.defs.get_schema(op, opset, STANDARD)
    except onnx.defs.SchemaError:
        return None


def _formal(parameters: "Sequence[onnx.defs.OpSchema.FormalParameter]", index: int) -> str:
    """The type variable of an operand; the last parameter repeats."""
    return parameters[min(index, len(parameters) - 1)].type_str


def structural_islands(graph: gs.Graph) -> set[int]:
    """Nodes of rules 2 to 4, by identity."""
    nodes = nodes_of(graph)
    outputs = {id(tensor) for scope in scopes(graph) for tensor in scope.outputs}
    kept: set[int] = set()
    for node in nodes:
        if is_op(node, "ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL2"):
            _keep_statistics(node, kept)
    for node in nodes:
        if is_op(node, "Softmax", "LogSoftmax"):
            _keep_before_softmax(node, kept, outputs)
    _keep_index_arithmetic(nodes, kept)
    return kept


def _keep_statistics(reduction: gs.Node, kept: set[int]) -> None:
    source = reduction.inputs[0]
    if reduction.op in ("ReduceMean", "ReduceSum"):
        square = producer(source, "Mul", "Pow")
        if square is None or not _is_square(square):
            return
        kept.add(id(square))
        source = square.inputs[0]
    kept.add(id(reduction))
    centring = producer(source, "Sub")
    if centring is not None:
        means = [node for operand in centring.inputs if (node := producer(operand, "ReduceMean"))]
        kept.update(id(node) for node in (centring, *means) if means)
    pending = list(reduction.outputs)
    while pending:
        for node in consumers(pending.pop()):
            if id(node) in kept or not is_op(node, *_STATISTICS):
                continue
            kept.add(id(node))
            if node.op not in ("Mul", "Div") or any(isinstance(t, gs.Constant) for t in node.inputs):
                pending += node.outputs


def _is_square(node: gs.Node) -> bool:
    return node.inputs[0] is node.inputs[1] if node.op == "Mul" else scalar_of(node.inputs[1]) == 2


def _keep_before_softmax(softmax: gs.Node, kept: set[int], outputs: set[int]) -> None:
    pending, inside = [softmax.inputs[0]], {id(softmax)}
    while pending:
        tensor = pending.pop()
        node = producer(tensor, "Add", "Sub", "Where", "Mul", "Div")
        if node is None or id(tensor) in outputs or any(id(reader) not in inside for reader in consumers(tensor)):
            continue
        if node.op in ("Mul", "Div") and not any(isinstance(operand, gs.Constant) for operand in node.inputs):
            continue
        inside.add(id(node))
        pending += node.inputs
    kept |= inside


def _keep_index_arithmetic(nodes: list[gs.Node], kept: set[int]) -> None:
    indices: set[int] = set()  # FP32 tensors that depend on no other float than constants
    for node in nodes:
        floats = [t for t in node.inputs if t.dtype == FP32 and not isinstance(t, gs.Constant)]
        numbered = is_op(node, "Range") or (is_op(node, "Cast") and _counts(node.inputs[0]))
        outer = is_op(node, "MatMul") and static_dim(node.inputs[0], -1) == 1
        arithmetic = is_op(node, *_ON_INDICES) or outer
        if numbered or (arithmetic and floats and all(id(tensor) in indices for tensor in floats)):
            kept.add(id(node))
            indices.update(id(tensor) for tensor in node.outputs if tensor.dtype == FP32)


def _counts(tensor: gs.Tensor) -> bool:
    """Whether a tensor holds integers or truth values."""
    dtype = tensor.dtype
    return dtype is not None and not isinstance(dtype, int) and np.dtype(dtype).kind in "iub"


def refuse_by_value(node: gs.Node, slots: Slots, precision: Precision) -> str | None:
    """Rule 5: why a candidate must stay in FP32, None if it may be cast."""
    tensors = [node.inputs[i] for i in sorted(slots.inputs)] + [node.outputs[i] for i in sorted(slots.outputs)]
    for tensor in tensors:
        if excess := precision.excess(tensor.name):
            side = "output" if any(tensor is output for output in node.outputs) else "input"
            return f"max |{side} '{tensor.name}'| {excess}: kept in FP32"
    scales = is_op(node, "QuantizeLinear", "DequantizeLinear")
    for tensor in tensors:
        values = values_of(tensor)
        loss = None if values is None else precision.loss_of_scales(values) if scales else precision.loss(values)
        if loss is not None:
            return f"constant '{tensor.name}' {loss}: kept in FP32"
    return None


def keep_beside_dequantised(graph: gs.Graph, low: dict[int, Slots]) -> None:
    """Rule 6: take out of `low` what reads a DequantizeLinear that is not in it, also behind nodes that move values."""
    pending = [tensor for node in nodes_of(graph) if _stays(node, low) for tensor in node.outputs]
    while pending:
        for node in consumers(pending.pop()):
            if low.pop(id(node), None) is not None and node.op in MOVES:
                pending += node.outputs


def _stays(node: gs.Node, low: Mapping[int, Slots]) -> bool:
    return is_op(node, "DequantizeLinear") and id(node) not in low


def follow_neighbours(graph: gs.Graph, low: dict[int, Slots], unsafe: set[int], low_inputs: set[int]) -> None:
    """Rule 7: take light nodes out of `low` where FP32 costs no Cast.

    What moves a value of an `unsafe` node stays with it. Any other light node joins `low` if it reads a 16-bit value,
    or if its readers in `low` would need as many Casts as its inputs. `low_inputs`: graph inputs that are 16-bit.
    """
    candidates = [node for node in nodes_of(graph) if id(node) in low]
    for node in candidates:
        makers = [producer(tensor) for tensor in node.inputs]
        if node.op in MOVES and any(maker is not None and id(maker) in unsafe for maker in makers):
            unsafe.add(id(node))
            low.pop(id(node))
    light = [node for node in candidates if id(node) in low and _is_light(node)]
    undecided = {id(node): low.pop(id(node)) for node in light}

    def is_low(tensor: gs.Tensor) -> bool:
        maker = producer(tensor)
        return id(tensor) in low_inputs or (maker is not None and id(maker) in low)

    def read_low(tensor: gs.Tensor) -> bool:
        return any(
            id(reader) in low and any(reader.inputs[i] is tensor for i in low[id(reader)].inputs)
            for reader in consumers(tensor)
        )

    def gains(node: gs.Node, slots: Slots) -> bool:
        variables = {id(t): t for i in slots.inputs if not isinstance(t := node.inputs[i], gs.Constant)}
        if any(is_low(tensor) for tensor in variables.values()):
            return True
        saved = sum(read_low(node.outputs[i]) for i in slots.outputs)
        return saved > 0 and saved >= sum(not read_low(tensor) for tensor in variables.values())

    changed = True
    while changed:
        changed = False
        for node in light:
            if id(node) in undecided and gains(node, undecided[id(node)]):
                low[id(node)] = undecided.pop(id(node))
                changed = True


def _is_light(node: gs.Node) -> bool:
    return node.op not in _HEAVY and not (is_op(node, "Gather") and isinstance(node.inputs[0], gs.Constant))
