"""Fuse scaled dot-product attention (arXiv 1706.03762, eq. 1) of plain graphs into one operator.

1. Transpose(softmax(q k^T * scale [+ mask]) v) [-> Reshape [batch, seq, heads*size]]
   -> MultiHeadAttention(q, k, v, attention_bias=mask; num_heads, scale)  target "onnxruntime", com.microsoft
   -> Attention(q, k, v, mask; q_num_heads, kv_num_heads, scale)          target "standard", opset 23
   q [batch, seq, heads*size], k, v [batch, keys, heads*size]; where the next node did not want that shape,
   Reshape to [batch, seq, heads, size] follows.

The scale is a Mul or Div by a scalar behind the product, or on q, on k, or on both, as torch splits it. k^T is a
Transpose of k, that Transpose merged with the one that brings heads forward, or Reshape-Transpose-Reshape over merged
batch and heads. The mask is an Add of a tensor that broadcasts to [batch, heads, seq, keys], a causal constant too; or
Where(condition, scores, value), either way round, with a value that absorbs scores, -1e30 and below: it becomes
Where(condition, 0, value). Both operators need [.., seq, keys] in full, so [batch, 1, 1, keys] is expanded, once for
all layers. Where(IsNaN(p), 0, p), torch's guard for rows in which everything is masked, moves behind the operator: such
a row of p is NaN throughout, and so is its result; the two differ where v itself is not finite. Without
that guard such a row is NaN before; ONNX Runtime's Attention makes it 0, its MultiHeadAttention NaN.

Batch, heads and sizes have to be known to agree, by number or by name. Left alone: attention over another axis,
scores or probabilities that something else reads, grouped or merged heads ([batch*heads, seq, size]), casts around the
softmax, and Attention nodes that are there already. REORDERS: the softmax may be computed in blocks, and split scales
are multiplied into one.
"""

from typing import Literal

import numpy as np
import onnx_graphsurgeon as gs

from passes.attention_pattern import (
    HEADS_FORWARD,
    Chain,
    Heads,
    Scores,
    chain_behind,
    check_fit,
    check_readers,
    scores_from,
)
from passes.base import Effect, Outcome, Refusal
from passes.dimensions import moved_dims, unify_symbols
from passes.evaluate import Size, dimension
from passes.pattern import (
    CONTRIB,
    insert_before,
    new_constant,
    new_variable,
    only_consumer,
    producer,
    rank_of,
    replace_node,
    rewrite_nodes,
    static_dim,
    take_outputs,
)


class FuseAttention:
    """Implements `passes.base.Pass`."""

    name = "fuse_attention"
    effect = Effect.REORDERS

    def __init__(self, target: Literal["onnxruntime", "standard"] = "onnxruntime") -> None:
        self.target = target

    def call(self, graph: gs.Graph) -> Outcome:
        if self.target == "standard" and graph.opset < 23:
            return Outcome(notes=[f"Attention is standard from opset 23; the graph has {graph.opset}"])
        unify_symbols(graph)
        return rewrite_nodes(graph, _Rule(graph.inputs, self.target == "standard").apply, ("Softmax",))


class _Rule:
    def __init__(self, inputs: list[gs.Tensor], standard: bool) -> None:
        self.inputs, self.standard = inputs, standard
        self.biases: dict[tuple, gs.Tensor] = {}

    def apply(self, scope: gs.Graph, softmax: gs.Node) -> bool:
        axis = softmax.attrs.get("axis", -1 if scope.opset >= 13 else 1)
        scores = scores_from(softmax.inputs[0]) if axis in (-1, 3) else None
        chain = chain_behind(scope, softmax) if scores is not None else None
        if scores is None or chain is None:
            return False
        check_fit(scores, chain.value)
        check_readers(scope, scores, softmax)
        self._replace(scope, scores, chain, self._bias(scope, softmax, scores))
        return True

    def _replace(self, scope: gs.Graph, scores: Scores, chain: Chain, mask: gs.Tensor | None) -> None:
        """Put the operator where the Transpose stands, or the Reshape behind it."""
        value, place = chain.value, chain.transpose
        reshape = only_consumer(scope, place.outputs[0], "Reshape")
        flat = reshape is not None and _is_flat(place.outputs[0], reshape.outputs[0], scores.query.heads, value.size)
        if reshape is not None and flat:
            place = reshape
        out = place.outputs[0]
        heads, nodes = scores.query.heads, list[gs.Node]()
        operands = [
            _flattened(operand, out, name, nodes)
            for operand, name in ((scores.query, "query"), (scores.key, "key"), (value, "value"))
        ]
        take_outputs(place)
        result = out if flat and not chain.guarded else new_variable(out, "attention")
        if self.standard:
            attrs = {"q_num_heads": heads, "kv_num_heads": heads, "scale": scores.scale}
            operands += [mask] if mask is not None else []
            nodes.append(gs.Node("Attention", f"{out.name}/fused", attrs, operands, [result]))
        else:
            empty = gs.Variable.empty()
            operands += [empty, empty, mask] if mask is not None else []
            attrs = {"num_heads": heads, "scale": scores.scale}
            nodes.append(gs.Node("MultiHeadAttention", f"{out.name}/fused", attrs, operands, [result], domain=CONTRIB))
        if chain.guarded:
            bad, zero = new_variable(out, "bad", dtype=bool), new_constant(out, "zero", np.zeros((), out.dtype))
            checked = out if flat else new_variable(out, "checked")
            nodes.append(gs.Node("IsNaN", bad.name, inputs=[result], outputs=[bad]))
            nodes.append(gs.Node("Where", f"{out.name}/checked", inputs=[bad, zero, result], outputs=[checked]))
            result = checked
        if not flat:
            shape = new_constant(out, "shape", np.array([0, 0, heads, value.size]))
            nodes.append(gs.Node("Reshape", out.name + "/heads", inputs=[result, shape], outputs=[out]))
        replace_node(scope, place, *nodes)

    def _bias(self, scope: gs.Graph, softmax: gs.Node, scores: Scores) -> gs.Tensor | None:
        """The mask as [batch or 1, heads or 1, seq, keys] to be added, made once for all layers that share it."""
        mask, query = scores.mask, scores.query
        if mask is None:
            return None
        batch, sequence = query.batch_and_sequence
        full = [batch, query.heads, sequence, scores.key.batch_and_sequence[1]]
        given = [] if mask.shape is None else [dimension(mask, axis) for axis in range(len(mask.shape))]
        sizes = [1] * (4 - len(given)) + given
        if mask.shape is None or len(sizes) != 4 or not all(a in (1, b) for a, b in zip(sizes, full, strict=True)):
            raise Refusal(f"the mask's shape {mask.shape} is not known to broadcast to the scores' {full}")
        missing = [
            None if size == wanted else self._measure(mask, part, wanted)
            for size, wanted, part in zip(sizes[2:], full[2:], (query, scores.key), strict=True)
        ]
        measured = [place and (id(place[0]), place[1]) for place in missing]
        key = (id(scope), id(mask), scores.masked, *measured)
        if key not in self.biases:
            nodes: list[gs.Node] = []
            made = _Maker(softmax.outputs[0], nodes)
            bias = mask if scores.masked is None else made.choice(mask, scores.masked, query.tensor.dtype)
            if len(given) < 4:
                bias = made.widened(bias, 4 - len(given), scope.opset >= 13)
            if missing != [None, None]:
                bias = made.expanded(bias, missing)
            insert_before(scope, softmax, *nodes)
            self.biases[key] = bias
        return self.biases[key]

    def _measure(self, mask: gs.Tensor, part: Heads, size: Size) -> tuple[gs.Tensor, int]:
        """Where a sequence's size is read: at the mask or an input if they have it, as no layer has made those."""
        for tensor in (mask, *self.inputs):
            for axis in range(rank_of(tensor) or 0):
                if isinstance(size, str) and dimension(tensor, axis) == size:
                    return tensor, axis
        return part.tensor, part.sequence_axis


class _Maker:
    """Makes nodes for a mask, named after `beside`."""

    def __init__(self, beside: gs.Tensor, nodes: list[gs.Node]) -> None:
        self.beside, self.nodes = beside, nodes

    def choice(self, condition: gs.Tensor, values: tuple[float, float], dtype: np.dtype) -> gs.Tensor:
        """Where(condition, *values)"""
        named = zip(("if_true", "if_false"), values, strict=True)
        operands = [new_constant(self.beside, name, np.array(value, dtype)) for name, value in named]
        return self._node("Where", "bias", [condition, *operands], dtype)

    def widened(self, bias: gs.Tensor, count: int, as_input: bool) -> gs.Tensor:
        """Unsqueeze `count` dimensions in front; their axes are an input from opset 13."""
        axes = list(range(count))
        if as_input:
            return self._node("Unsqueeze", "wide", [bias, new_constant(self.beside, "axes", np.array(axes))])
        return self._node("Unsqueeze", "wide", [bias], axes=axes)

    def expanded(self, bias: gs.Tensor, missing: list[tuple[gs.Tensor, int] | None]) -> gs.Tensor:
        """Expand the last two dimensions to the given (tensor, axis), None where nothing is missing."""
        sizes: list[gs.Tensor] = [new_constant(self.beside, "ones", np.array([1, 1]))]
        for place, name in zip(missing, ("seq", "keys"), strict=True):
            if place is None:
                sizes.append(new_constant(self.beside, f"{name}_kept", np.array([1])))
                continue
            axis = new_constant(self.beside, f"{name}_axis", np.array([place[1]]))
            shape = self._node("Shape", f"{name}_shape", [place[0]], np.int64)
            sizes.append(self._node("Gather", name, [shape, axis], np.int64, axis=0))
        target = self._node("Concat", "full_shape", sizes, np.int64, axis=0)
        return self._node("Expand", "full", [bias, target])

    def _node(self, op: str, suffix: str, inputs: list[gs.Tensor], dtype: object = None, **attrs: object) -> gs.Tensor:
        result = new_variable(self.beside, suffix, dtype=dtype)
        self.nodes.append(gs.Node(op, result.name, attrs, inputs, [result]))
        return result


def _is_flat(split: gs.Tensor, flat: gs.Tensor, heads: int | None, size: int | None) -> bool:
    """Whether `flat`, of as many elements, is [batch, seq, heads*size] of `split` [batch, seq, heads, size]."""
    if heads is None or size is None or rank_of(split) != 4 or rank_of(flat) != 3:
        return False
    return static_dim(flat, 2) == heads * size and moved_dims(split.shape[:2], flat.shape[:2]) == [0, 1]


def _flattened(part: Heads, out: gs.Tensor, name: str, nodes: list[gs.Node]) -> gs.Tensor:
    """[batch, seq, heads*size], the projection itself where that is known to have this shape."""
    tensor = part.tensor
    view = producer(tensor, "Reshape") if part.rows else None
    if view is not None and _is_flat(tensor, view.inputs[0], part.heads, part.size):
        return view.inputs[0]
    if not part.rows:
        rows = new_variable(out, f"{name}_rows")
        nodes.append(gs.Node("Transpose", rows.name, {"perm": HEADS_FORWARD}, [tensor], [rows]))
        tensor = rows
    flat = new_variable(out, name)
    shape = new_constant(out, f"{name}_shape", np.array([0, 0, -1]))
    nodes.append(gs.Node("Reshape", flat.name, inputs=[tensor, shape], outputs=[flat]))
    return flat
