"""Divides the channels of an activation by factors and multiplies the weights that read them: the same function.

For a tensor x [..., K] that only products read, and factors s [K]: W <- s * W in each of them, and x <- x / s in what
makes it:

1. a norm over the last axis: gamma / s, beta / s; so a Mul by a constant row, as such a norm ends in arithmetic;
2. a product with constant weights, with or without bias: its columns / s;
3. a view that keeps the last dimension, a choice of rows, a Relu, or a guard `Where(IsNaN(a), 0, a)`: what they read;
4. `a * b`, the end of SwiGLU, or kiln::SwiGlu(gate, up): up, or else the other one;
5. attention: its values, of which heads that share them get the same factors.

From 2 on, nothing else may read what is divided. Other producers, such as a residual sum, raise Refusal; there the
division can be a Mul of its own (`divide_here`). Choosing factors is `passes.quantization.activation_scales`' part.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from passes.base import Refusal
from passes.pattern import (
    CONTRIB,
    consumers,
    in_scope,
    input_of,
    insert_before,
    is_op,
    is_output,
    new_constant,
    new_variable,
    only_consumer,
    producer,
    rank_of,
    scalar_of,
    static_dim,
    values_of,
)
from passes.quantization.layers import Layer, layer_of
from passes.quantization.plan import LayerPlan
from passes.quantization.products import product_of, set_weight, stored_weight
from passes.views import VIEWS
from plugins.elementwise.schema import ADD_RMS_NORM, SWIGLU
from plugins.paged_attention import schema as paged

Factors = NDArray[np.float32]
ROWS, COLUMNS = "scaled_rows", "scaled_columns"
"""Suffixes of weights that were multiplied: the graph itself tells what was done."""

_NORMS: Mapping[tuple[str, str], tuple[int, ...]] = {
    ("", "SimplifiedLayerNormalization"): (1,),
    ("", "LayerNormalization"): (1, 2),
    ("", "RMSNormalization"): (1,),
    (ADD_RMS_NORM.domain, ADD_RMS_NORM.op_type): (2,),
    (CONTRIB, "SkipSimplifiedLayerNormalization"): (2,),
    (CONTRIB, "SkipLayerNormalization"): (2, 3),
}
"""Inputs that hold gamma and beta."""


class Rescaled(dict[str, Factors]):
    """What the activation of a layer was divided by since it was calibrated, by the name of the layer's weight.

    A rewrite that is undone takes its weight with it, so that an entry which no longer holds is never found.
    """

    def of(self, layer: Layer) -> Factors | None:
        return self.get(layer.weight)

    def moments(self, layer: Layer, moments: Mapping[str, NDArray]) -> NDArray | None:
        """Second moments [depth, depth] of a layer's activation as it now is; None where there are none."""
        found, factors = moments.get(layer.name), self.of(layer)
        return found if found is None or factors is None else found / np.outer(factors, factors)


@dataclass(frozen=True)
class Source:
    """What a division can go into. Channels with the same number in `tied` must get the same factor."""

    divide: Callable[[Factors], None]
    tied: NDArray[np.int64] | None = None


def readers(scope: gs.Graph, tensor: gs.Tensor) -> list[tuple[gs.Node, Layer]]:
    """The products that read a tensor. Raises Refusal if anything else does, or one was already rescaled."""
    if is_output(scope, tensor):
        raise Refusal(f"its input '{tensor.name}' is an output of the model")
    found = []
    for node in consumers(tensor):
        layer = layer_of(node) if in_scope(scope, node) else None
        if layer is None or layer.kind == "Conv" or layer.activation != tensor.name or node.attrs.get("transA", 0):
            raise Refusal(f"its input '{tensor.name}' is also read by '{node.name}' ({node.op})")
        found.append((node, layer))
    return found


def multiply_rows(scope: gs.Graph, node: gs.Node, layer: Layer, factors: Factors, rescaled: Rescaled) -> None:
    product = product_of(scope, node, layer, LayerPlan())
    before = rescaled.of(layer)
    alpha = np.float32(node.attrs.get("alpha", 1.0))
    new = set_weight(node, layer, product.weight / alpha * factors[:, None], ROWS)
    rescaled[new.name] = factors if before is None else factors * before


def is_rescaled(layer: Layer) -> bool:
    return layer.weight.endswith(f"/{ROWS}")


def divide_here(scope: gs.Graph, tensor: gs.Tensor, nodes: Sequence[gs.Node], factors: Factors) -> None:
    """Let the products `nodes`, which read `tensor`, read its product with 1 / factors, a Mul of its own."""
    first = next(node for node in scope.nodes if any(node is reader for reader in nodes))
    scaled = new_variable(tensor, "scaled", tensor.shape)
    inverse = new_constant(tensor, "inverse_scales", (1 / factors).astype(stored_weight(first).dtype))
    for node in nodes:
        for index, read in enumerate(node.inputs):
            if read is tensor:
                node.inputs[index] = scaled
    insert_before(scope, first, gs.Node("Mul", scaled.name, {}, [tensor, inverse], [scaled]))


def source_of(scope: gs.Graph, tensor: gs.Tensor, width: int, rescaled: Rescaled) -> Source:
    """Where a division of `tensor` by factors of its last dimension, `width`, can go. Raises Refusal if nowhere."""
    node = producer(tensor)
    if node is None or not in_scope(scope, node):
        raise Refusal(f"nothing computes '{tensor.name}' that could be scaled")
    if (node.domain, node.op) in _NORMS and node.outputs[0] is tensor:
        return _norm(node, tensor, width)
    if is_op(node, *VIEWS, "Relu") or _is_guard(node) or _chooses_rows(node):
        return _inner(scope, node.inputs[2 if node.op == "Where" else 0], width, node, rescaled)
    if is_op(node, "Mul") and (weights := [i for i in (0, 1) if _is_row(node.inputs[i], width)]):
        return _weighted(node, tensor, weights[0])
    if is_op(node, "Mul") or is_op(node, SWIGLU.op_type, domain=SWIGLU.domain):
        return _gated(scope, node, width, rescaled)
    if node.op in (paged.OP_TYPE, "MultiHeadAttention") and node.outputs[0] is tensor:
        return _attention(scope, node, width, rescaled)
    return _product(scope, node, tensor, width, rescaled)


def _norm(node: gs.Node, tensor: gs.Tensor, width: int) -> Source:
    inputs = [index for index in _NORMS[node.domain, node.op] if input_of(node, index) is not None]
    for index in inputs:
        values = values_of(node.inputs[index])
        if values is None or values.shape != (width,):
            raise Refusal(f"the norm '{node.name}' has a weight that is no constant [{width}]")

    def divide(factors: Factors) -> None:
        for index in inputs:
            old = values_of(node.inputs[index])
            assert old is not None
            node.inputs[index] = new_constant(tensor, f"scaled_{index}", (old / factors).astype(old.dtype))

    return Source(divide)


def _is_row(tensor: gs.Tensor, width: int) -> bool:
    values = values_of(tensor)
    return values is not None and values.shape == (width,)


def _weighted(node: gs.Node, tensor: gs.Tensor, index: int) -> Source:
    """A Mul by a constant row, as an RMS norm that is written as arithmetic ends."""

    def divide(factors: Factors) -> None:
        old = values_of(node.inputs[index])
        assert old is not None
        node.inputs[index] = new_constant(tensor, f"scaled_{index}", (old / factors).astype(old.dtype))

    return Source(divide)


def _inner(scope: gs.Graph, inner: gs.Tensor, width: int, node: gs.Node, rescaled: Rescaled) -> Source:
    """The source of a tensor that `node` alone reads, for its result of the same channels."""
    if is_op(node, *VIEWS) and static_dim(inner, -1) != width:
        raise Refusal(f"'{node.name}' ({node.op}) changes the last dimension of '{inner.name}'")
    allowed = [node, producer(node.inputs[0])] if node.op == "Where" else [node]
    others = [reader for reader in consumers(inner) if not any(reader is known for known in allowed)]
    if others or is_output(scope, inner):
        raise Refusal(f"'{inner.name}' is also read by {others[0].name if others else 'whoever runs the model'}")
    return source_of(scope, inner, width, rescaled)


def _is_guard(node: gs.Node) -> bool:
    """Where(IsNaN(a), 0, a)."""
    if not is_op(node, "Where"):
        return False
    test = producer(node.inputs[0], "IsNaN")
    return test is not None and test.inputs[0] is node.inputs[2] and scalar_of(node.inputs[1]) == 0


def _chooses_rows(node: gs.Node) -> bool:
    return is_op(node, "Gather") and node.attrs.get("axis", 0) == 0 and (rank_of(node.inputs[0]) or 0) > 1


def _gated(scope: gs.Graph, node: gs.Node, width: int, rescaled: Rescaled) -> Source:
    if node.inputs[0] is node.inputs[1]:
        raise Refusal(f"'{node.name}' squares its input")
    operands = [node.inputs[1]] if node.domain else [node.inputs[1], node.inputs[0]]  # kiln::SwiGlu: up alone
    refusal = Refusal(f"neither operand of '{node.name}' ({node.op}) can be scaled")
    for operand in operands:
        try:
            return _inner(scope, operand, width, node, rescaled)
        except Refusal as reason:
            refusal = reason
    raise refusal


def _attention(scope: gs.Graph, node: gs.Node, width: int, rescaled: Rescaled) -> Source:
    heads = int(node.attrs["num_heads"])
    kv_heads = int(node.attrs.get("kv_num_heads", heads))
    is_packed = node.op == paged.OP_TYPE and input_of(node, 2) is None
    values = input_of(node, 0 if is_packed else 2)
    bias = input_of(node, 3) if node.op != paged.OP_TYPE else None
    if values is None or width % heads or bias is not None:
        raise Refusal(f"the attention '{node.name}' has values that cannot be scaled")
    size = width // heads
    kept = kv_heads * size
    channels = np.arange(width)
    tied = channels // size // (heads // kv_heads) * size + channels % size
    total = width + 2 * kept if is_packed else kept
    if only_consumer(scope, values) is not node:
        raise Refusal(f"'{values.name}' is also read by others than the attention")
    inner = source_of(scope, values, total, rescaled)
    if inner.tied is not None:
        raise Refusal(f"what makes '{values.name}' ties its channels")

    def divide(factors: Factors) -> None:
        whole = np.ones(total, np.float32)
        own = np.ones(kept, np.float32)
        own[tied] = factors
        whole[total - kept :] = own
        inner.divide(whole)

    return Source(divide, None if heads == kv_heads else tied)


def _product(scope: gs.Graph, node: gs.Node, tensor: gs.Tensor, width: int, rescaled: Rescaled) -> Source:
    add = node if is_op(node, "Add") else None
    if add is not None:
        variables = [operand for operand in node.inputs if not isinstance(operand, gs.Constant)]
        inner = producer(variables[0], "MatMul") if len(variables) == 1 else None
        if inner is None or not in_scope(scope, inner):
            raise Refusal(f"'{tensor.name}' is a sum, which cannot be scaled")
        node = inner
    layer = layer_of(node)
    if layer is None or layer.kind == "Conv" or node.attrs.get("transA", 0) or node.inputs[1].inputs:
        raise Refusal(f"'{tensor.name}' comes from '{node.name}' ({node.op}), which cannot be scaled")
    product = product_of(scope, node, layer, LayerPlan())
    if product.result is not tensor or layer.width != width:
        raise Refusal(f"'{tensor.name}' is a sum, which cannot be scaled")

    def divide(factors: Factors) -> None:
        alpha, beta = (np.float32(node.attrs.get(name, 1.0)) for name in ("alpha", "beta"))
        before, bias = rescaled.of(layer), product.bias
        new = set_weight(node, layer, product.weight / alpha / factors, _suffix(layer))
        if before is not None:
            rescaled[new.name] = before
        if bias is not None:
            holder, index = (node, 2) if add is None else (add, 1 if isinstance(add.inputs[1], gs.Constant) else 0)
            scaled = (bias / beta / factors).astype(product.dtype)
            holder.inputs[index] = new_constant(tensor, "scaled_bias", scaled)

    return Source(divide)


def _suffix(layer: Layer) -> str:
    """Columns that are divided after rows were multiplied leave the mark of the latter."""
    return f"{COLUMNS}/{ROWS}" if is_rescaled(layer) else COLUMNS
