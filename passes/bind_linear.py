"""Products with 16-bit weights become Kiln's CUDA operators (plugins/dense/schema.py). x has shape [..., k]:

1. `Split(MatMul(x, W [k, 2n]), [n, n])` into gate and up, then `QuickGelu(gate, alpha=1) * up` ->
   `kiln::LinearSwiGlu(x, W^T)`: the gated halves are never written;
2. `MatMul(x, W [k, n])` -> `kiln::Linear(x, W^T)`; with `Add(., b [n])` after it `kiln::Linear(x, W^T, b)`.

W and b are constants in the 16-bit type; W is transposed once, here. Where W is the Transpose of a constant, that one
is taken: a head may share the embedding. `rows`: up to so many rows take Kiln's own kernels, more take cuBLAS; see
`kernel_rows` there. Left alone: depths that are no multiple of 8, and batched weights.

Every dot product keeps its terms, summed in FP32 in another order.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray
from onnx_graphsurgeon.ir.tensor import LazyValues

from passes.base import Effect, Outcome
from passes.low_form import has_type
from passes.pattern import (
    CONTRIB,
    in_scope,
    is_op,
    only_consumer,
    other_input,
    producer,
    replace_node,
    rewrite_nodes,
    static_dim,
    take_outputs,
    values_of,
)
from passes.precision_islands import LOW_TYPES
from plugins.dense.schema import KERNEL_ROWS, LINEAR, LINEAR_SWIGLU

_ITEMSIZE = 2
_TILE = 256
_VECTOR = 8
"""Values that a kernel reads at a time: depth, and SwiGLU's width, are multiples of it."""


class BindLinear:
    """Implements `passes.base.Pass`."""

    name = "bind_linear"
    effect = Effect.REORDERS

    def __init__(self, rows: int = 0) -> None:
        if not 0 <= rows <= KERNEL_ROWS:
            raise ValueError(f"rows is {rows}; expected 0 to {KERNEL_ROWS}")
        self.rows = rows

    def call(self, graph: gs.Graph) -> Outcome:
        gated = rewrite_nodes(graph, self._gated, ("QuickGelu",), domain=CONTRIB)
        plain = rewrite_nodes(graph, self._plain, ("MatMul",))
        return Outcome(gated.rewrites + plain.rewrites, notes=[*gated.notes, *plain.notes])

    def _gated(self, scope: gs.Graph, activation: gs.Node) -> bool:
        gate = gate_of(scope, activation)
        weight = None if gate is None else _weight_by_output(gate.matmul)
        if gate is None or weight is None:
            return False
        operands = [gate.matmul.inputs[0], weight]
        self._bind(scope, LINEAR_SWIGLU.op_type, gate.product, gate.matmul, operands)
        for node in (activation, gate.split, gate.matmul):
            replace_node(scope, node)
        return True

    def _plain(self, scope: gs.Graph, matmul: gs.Node) -> bool:
        weight = _weight_by_output(matmul)
        if weight is None:
            return False
        last, operands = matmul, [matmul.inputs[0], weight]
        width = weight.shape[0]
        add = only_consumer(scope, matmul.outputs[0], "Add")
        bias = other_input(add, matmul.outputs[0]) if add is not None and in_scope(scope, add) else None
        if add is not None and isinstance(bias, gs.Constant) and list(bias.shape) == [width]:
            last = add
            operands.append(bias)
        self._bind(scope, LINEAR.op_type, last, matmul, operands)
        if last is add:
            replace_node(scope, matmul)
        return True

    def _bind(self, scope: gs.Graph, op: str, last: gs.Node, matmul: gs.Node, operands: list[gs.Tensor]) -> None:
        """One node instead of `last`, under the product's name: plans of quantisation know it by that."""
        attributes = {"kernel_rows": self.rows}
        replace_node(scope, last, gs.Node(op, matmul.name, attributes, operands, take_outputs(last), LINEAR.domain))


@dataclass(frozen=True)
class Gate:
    """The nodes of SwiGLU over one packed product, without the activation."""

    matmul: gs.Node
    split: gs.Node
    product: gs.Node


def gate_of(scope: gs.Graph, activation: gs.Node) -> Gate | None:
    """What rule 1 matches around a QuickGelu of `scope`, whatever its type; None where that is something else."""
    split = producer(activation.inputs[0], "Split")
    if split is None or float(activation.attrs.get("alpha", 1.702)) != 1.0 or len(split.outputs) != 2:
        return None
    gate, up = split.outputs
    product = only_consumer(scope, activation.outputs[0], "Mul")
    matmul = producer(split.inputs[0], "MatMul")
    if activation.inputs[0] is not gate or product is None or matmul is None:
        return None
    alone = only_consumer(scope, split.inputs[0]) is split and only_consumer(scope, gate) is activation
    if not alone or only_consumer(scope, up) is not product or other_input(product, activation.outputs[0]) is not up:
        return None
    width, half = static_dim(matmul.inputs[1], 1), static_dim(gate, -1)
    if width is None or half is None or width != 2 * half or half % _VECTOR:
        return None
    return Gate(matmul, split, product) if all(in_scope(scope, node) for node in (split, product, matmul)) else None


def gated_products(graph: gs.Graph) -> set[str]:
    """Names of the products of the main graph that rule 1 takes once they are in 16 bits."""
    activations = [node for node in graph.nodes if is_op(node, "QuickGelu", domain=CONTRIB)]
    return {gate.matmul.name for node in activations if (gate := gate_of(graph, node)) is not None}


def _weight_by_output(matmul: gs.Node) -> gs.Constant | None:
    """The constant weight [n, k] of a product; None where it has none that the operators take."""
    x, weight = matmul.inputs
    turned = producer(weight, "Transpose")
    if turned is not None:
        if list(turned.attrs.get("perm", (1, 0))) != [1, 0]:
            return None
        weight = turned.inputs[0]
    if not isinstance(weight, gs.Constant) or len(weight.shape) != 2 or isinstance(x, gs.Constant):
        return None
    typed = any(has_type(x, low) and has_type(weight, low) for low in LOW_TYPES.values())
    if not typed or weight.shape[0 if turned is None else 1] % _VECTOR:
        return None
    return weight if turned is not None else _transposed(matmul.outputs[0].name, weight)


def _transposed(product: str, weight: gs.Constant) -> gs.Constant:
    return gs.Constant(f"{product}/weight_by_output", _Transposed(weight))


class _Transposed(LazyValues):
    """Another constant's values with the axes swapped, made each time they are asked for."""

    def __init__(self, source: gs.Constant) -> None:
        self._source, self.dtype, self.shape = source, source.dtype, list(source.shape)[::-1]
        self.nbytes = int(np.prod(self.shape)) * _ITEMSIZE

    @property
    def tensor(self) -> onnx.TensorProto:
        return onnx.numpy_helper.from_array(self.load())

    def load(self) -> NDArray[Any]:
        values = values_of(self._source)
        assert values is not None
        rows, columns = values.shape
        turned = np.empty((columns, rows), values.dtype)
        bits, source = turned.view(np.uint16), values.view(np.uint16)  # NumPy moves integers faster than BF16
        for row in range(0, rows, _TILE):  # tiles that fit a cache: ten times as fast as one assignment
            for column in range(0, columns, _TILE):
                tile = source[row : row + _TILE, column : column + _TILE]
                bits[column : column + _TILE, row : row + _TILE] = tile.T
        return turned
