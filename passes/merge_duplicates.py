"""Keep one of each: initialisers of equal content, and nodes that compute the same from the same tensors.

1. `a, b` (initialisers of one element type, shape and content) -> `a`, in all scopes;
2. `y = f(x, ..), z = f(x, ..)` (one operator, equal attributes, the same input tensors) -> `y`, and y for z. A subgraph
   may use a node of a graph around it, not the other way round, nor one of a sibling branch. Where y and z are both
   outputs of their graph, `z = Identity(y)` keeps the name.

Operands of Add, Mul, And, Or, Xor, Equal and the Bitwise operators may be swapped; those of operators with more
operands, of Max and of Min may not, since the result could depend on the order. Attributes that hold tensors are
compared by content.

Exact: content is compared byte by byte, so 0.0 and -0.0, or two kinds of NaN, are different. Left alone: random
operators, Dropout, nodes with subgraphs, strings, sparse tensors, and operators of other domains except those of
com.microsoft that are known to be functions of their inputs (PagedAttention writes into a cache and is none).

Weights are read only to be compared with others of the same type and shape, first a page of each, and are not kept.
"""

import hashlib
import struct
from collections.abc import Hashable, Iterable

import numpy as np
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.ir.tensor import SparseValues

from passes.base import Effect, Outcome
from passes.graph import tidy
from passes.pattern import CONTRIB, STANDARD, consumers, replace_uses, values_of
from passes.scopes import scopes
from passes.views import learn_type
from passes.weights import FileValues

COMMUTATIVE = frozenset(("Add", "Mul", "And", "Or", "Xor", "Equal", "BitwiseAnd", "BitwiseOr", "BitwiseXor"))
NOT_FUNCTIONS = frozenset(
    ("Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
)
NO_GAIN = frozenset(("Constant", "Identity"))
"""These remain only where a graph output needs its name."""
CONTRIB_FUNCTIONS = frozenset(
    (
        *("BiasGelu", "FastGelu", "Gelu", "QuickGelu", "BiasSplitGelu"),
        *("FusedConv", "FusedGemm", "FusedMatMul", "NhwcFusedConv", "NhwcMaxPool", "TransposeMatMul"),
        *("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "RotaryEmbedding", "EmbedLayerNormalization"),
        *("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "MatMulNBits"),
        *("QGemm", "QLinearAdd", "QLinearMul", "QLinearConcat", "QLinearConv", "QLinearSigmoid", "QLinearSoftmax"),
        *("QLinearLeakyRelu", "QLinearAveragePool", "QLinearGlobalAveragePool", "QLinearReduceMean"),
    )
)
_SAMPLE = 4096
_Seen = dict[Hashable, gs.Node]


class MergeDuplicates:
    """Implements `passes.base.Pass`."""

    name = "merge_duplicates"
    effect = Effect.EXACT

    def call(self, graph: gs.Graph) -> Outcome:
        tidy(graph)
        rewrites = _merge_constants(graph)
        return Outcome(rewrites + _merge_nodes(graph, {}))


def _merge_constants(graph: gs.Graph) -> int:
    merged = 0
    for alike in _alike(graph):
        first, *rest = alike
        for other in rest:
            for node in consumers(other):
                for index, tensor in enumerate(node.inputs):
                    if tensor is other:
                        node.inputs[index] = first
        merged += len(rest)
    return merged


def _alike(graph: gs.Graph) -> Iterable[list[gs.Constant]]:
    """Groups of constants of equal content. Each sieve sees only what the coarser ones before it left together."""
    used = {id(t): t for scope in scopes(graph) for n in scope.nodes for t in n.inputs if isinstance(t, gs.Constant)}
    groups = [[t for t in used.values() if not isinstance(t._values, SparseValues) and t.dtype != np.dtype(object)]]
    for key in (_kind, _sample, _digest):
        finer: list[list[gs.Constant]] = []
        for group in groups:
            parts: dict[Hashable, list[gs.Constant]] = {}
            for tensor in group:
                parts.setdefault(key(tensor), []).append(tensor)
            finer += [part for part in parts.values() if len(part) > 1]
        groups = finer
    return groups


def _kind(tensor: gs.Constant) -> Hashable:
    return str(tensor.dtype), tuple(tensor.shape), str(tensor.export_dtype)


def _sample(tensor: gs.Constant) -> Hashable:
    return bytes(_content(tensor)[:_SAMPLE])


def _digest(tensor: gs.Constant) -> Hashable:
    return hashlib.sha256(_content(tensor)).digest()


def _content(tensor: gs.Constant) -> memoryview:
    """A constant's bytes, mapped where they lie in a file."""
    values = tensor._values
    if isinstance(values, FileValues):
        return values.mapped()
    array = values_of(tensor)
    return memoryview(b"" if array is None else array.tobytes())


def _merge_nodes(scope: gs.Graph, outer: _Seen) -> int:
    """Merge within `scope`, whose nodes are sorted, and then within its subgraphs, which see what it computes."""
    seen, merged = dict(outer), 0
    named = {id(output) for subgraph in scope.subgraphs(recursive=True) for output in subgraph.outputs}
    for node in list(scope.nodes):
        key = _signature(node)
        if key is None or any(id(tensor) in named for tensor in node.outputs):
            continue  # a subgraph may name a tensor from outside as its own output
        first = seen.setdefault(key, node)
        if first is not node:
            for old, new in zip(list(node.outputs), list(first.outputs), strict=True):
                if not old.is_empty():
                    learn_type(new, old)
                    replace_uses(scope, old, new)
            node.inputs.clear()
            node.outputs.clear()
            scope.nodes[:] = [other for other in scope.nodes if other is not node]
            merged += 1
    return merged + sum(_merge_nodes(subgraph, seen) for node in scope.nodes for subgraph in node.subgraphs())


def _signature(node: gs.Node) -> Hashable | None:
    """What two nodes that compute the same have in common; None for a node that stays."""
    known = node.domain == STANDARD and node.op not in NOT_FUNCTIONS | NO_GAIN
    if not known and not (node.domain == CONTRIB and node.op in CONTRIB_FUNCTIONS):
        return None
    attributes = []
    for name, value in sorted(node.attrs.items()):
        frozen = _frozen(value)
        if frozen is None:
            return None
        attributes.append((name, frozen))
    inputs = [None if tensor.is_empty() else id(tensor) for tensor in node.inputs]
    while inputs and inputs[-1] is None:
        inputs.pop()
    if node.domain == STANDARD and node.op in COMMUTATIVE and not attributes:
        inputs.sort(key=lambda number: number or 0)
    outputs = tuple(tensor.is_empty() for tensor in node.outputs)
    return node.domain, node.op, tuple(attributes), tuple(inputs), outputs


def _frozen(value: object) -> Hashable | None:
    """An attribute's value with its type, floats by their bits; None for graphs and what else cannot be compared."""
    if isinstance(value, (bool, int, str, np.integer, np.dtype, type)):
        return type(value).__name__, str(value)
    if isinstance(value, float):
        return "float", struct.pack("<d", value)
    if isinstance(value, (list, tuple)):
        parts = tuple(_frozen(part) for part in value)
        return None if None in parts else parts
    if isinstance(value, np.ndarray):
        value = gs.Constant("", value)
    if isinstance(value, gs.Constant) and value.dtype != np.dtype(object):
        return None if isinstance(value._values, SparseValues) else (_kind(value), _digest(value))
    return None
