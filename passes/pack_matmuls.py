"""Compute projections of one input together: their weights side by side, one product instead of several.

A projection is `MatMul(x [..., k], W [k, n])`, with or without `Add(., b)`, or `Gemm(x [m, k], W, b)`, transB or not,
with constant W and b; b holds n numbers or one. Projections P1, P2, ... of one x with widths n1, n2, ...:

1. P1, P2, P3 that are query, key and value of one `PagedAttention`, directly or through views (option
   `packed_attention`) -> one projection [..., n1 + n2 + n3], a Reshape to two dimensions unless it has them, and
   `PagedAttention(packed, , , ...)`, whose query input then holds all three (see plugins/paged_attention/schema.py);
2. P1, P2, ... (option `split`), at least `min_group` of them: query, key and value of any attention, gate and up of
   SwiGLU -> one projection [..., n1 + n2 + ...], `Split(axis=-1)` into the same tensors as before.

Biases are packed too; a projection without one gets zeros if another has one. Rule 2 leaves alone what rule 1 packed.
Views are no obstacle in rule 1: they keep the row-major order, and rows of the same width are then the same rows.

A copy of W is made, and W disappears unless something else uses it. Left alone: weights that are not constants of two
dimensions, such as quantised ones behind DequantizeLinear, or a Transpose, which constant folding removes; projections
in different scopes. With arithmetic between projection and attention, such as rotations, only rule 2 applies.

Every dot product keeps its terms; a kernel may add them in blocks that depend on the width.

Whether this pays is a question of the backend. Split copies the whole result: with ONNX Runtime 1.32's CPU provider
that costs more than one wider product saves (2 % against 0.5 % of 512 rows, 576 columns to 960), so there rule 1 alone
is worth having.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from passes.base import Effect, Outcome
from passes.pattern import (
    constant_operand,
    consumers,
    in_scope,
    input_of,
    insert_before,
    is_op,
    min_rank,
    new_constant,
    new_variable,
    only_consumer,
    producer,
    rank_of,
    replace_node,
    rewrite_nodes,
    static_dim,
    values_of,
)
from passes.views import VIEWS
from plugins.paged_attention.schema import DOMAIN, EXPORT_DOMAIN, OP_TYPE

_PRODUCTS = ("MatMul", "Gemm")
_NEGATIVE_AXES_SINCE = 11
_SIZES_AS_INPUT_SINCE = 13


@dataclass(frozen=True)
class Projection:
    """One product with its bias; `last` is the Add of the bias, else the product itself."""

    product: gs.Node
    last: gs.Node
    bias: gs.Constant | None

    @property
    def result(self) -> gs.Tensor:
        return self.last.outputs[0]

    @property
    def weight(self) -> gs.Constant:
        return self.product.inputs[1]

    @property
    def width_axis(self) -> int:
        return 0 if self.product.attrs.get("transB", 0) else 1

    @property
    def width(self) -> int:
        return int(self.weight.shape[self.width_axis])

    @property
    def form(self) -> tuple[object, ...]:
        """What must be equal for two projections of one input to be packed."""
        attrs = self.product.attrs
        inner = self.weight.shape[1 - self.width_axis]
        return self.product.op, self.width_axis, inner, attrs.get("alpha", 1.0), attrs.get("beta", 1.0)


class PackMatMuls:
    """Implements `passes.base.Pass`. The options choose the rules; `min_group` is for the second."""

    name = "pack_matmuls"
    effect = Effect.REORDERS

    def __init__(self, packed_attention: bool = False, split: bool = True, min_group: int = 2) -> None:
        if min_group < 2:
            raise ValueError(f"min_group is {min_group}; a group has at least 2 members")
        self.packed_attention = packed_attention
        self.split = split
        self.min_group = min_group

    def call(self, graph: gs.Graph) -> Outcome:
        outcome = Outcome()
        if self.packed_attention:
            for domain in (EXPORT_DOMAIN, DOMAIN):
                outcome.rewrites += rewrite_nodes(graph, _pack_attention, (OP_TYPE,), domain).rewrites
        if self.split and graph.opset >= _NEGATIVE_AXES_SINCE:
            outcome.rewrites += rewrite_nodes(graph, self._pack_siblings, _PRODUCTS).rewrites
        return outcome

    def _pack_siblings(self, scope: gs.Graph, node: gs.Node) -> bool:
        readers = consumers(node.inputs[0])
        if sum(is_op(reader, node.op) for reader in readers) < self.min_group:
            return False
        own = projection_of(scope, node)
        if own is None or _feeds_packed_attention(scope, own):
            return False
        among = {id(reader) for reader in readers}
        found = [projection_of(scope, other) for other in scope.nodes if id(other) in among and is_op(other, node.op)]
        group = [
            other
            for other in found
            if other is not None
            and other.product.inputs[0] is node.inputs[0]
            and other.form == own.form
            and not _feeds_packed_attention(scope, other)
        ]
        if len(group) < self.min_group:
            return False
        packed = _pack(scope, group, group[0].product)
        sizes = [projection.width for projection in group]
        split = gs.Node("Split", f"{packed.name}/split", {"axis": -1}, [packed])
        if scope.opset >= _SIZES_AS_INPUT_SINCE:
            split.inputs.append(new_constant(packed, "sizes", np.array(sizes, np.int64)))
        else:
            split.attrs["split"] = sizes
        results = [projection.result for projection in group]
        insert_before(scope, group[0].product, split)
        for projection in group:
            _remove(scope, projection)
        split.outputs = results
        return True


def projection_of(scope: gs.Graph, product: gs.Node) -> Projection | None:
    """The projection whose product is `product`, a MatMul or Gemm of `scope`; None if it is none."""
    weight = product.inputs[1]
    if not isinstance(weight, gs.Constant) or len(weight.shape) != 2 or isinstance(product.inputs[0], gs.Constant):
        return None
    alone = Projection(product, product, None)
    if product.op == "Gemm":
        bias = input_of(product, 2)
        if product.attrs.get("transA", 0) or (bias is not None and not _is_row(bias, alone.width, 2)):
            return None
        return Projection(product, product, bias)
    add = only_consumer(scope, product.outputs[0], "Add")
    operands = constant_operand(add) if add is not None and in_scope(scope, add) else None
    if add is None or operands is None or not _is_row(operands[1], alone.width, max(1, min_rank(product.outputs[0]))):
        return alone
    return Projection(product, add, operands[1])


def _is_row(bias: gs.Tensor, width: int, rank: int) -> bool:
    """Whether `bias` is a constant that adds one number per column, or one for all, to a tensor of at least `rank`."""
    if not isinstance(bias, gs.Constant) or len(bias.shape) > rank:
        return False
    return all(size == 1 for size in bias.shape[:-1]) and all(size in (1, width) for size in bias.shape[-1:])


def _pack(scope: gs.Graph, group: Sequence[Projection], place: gs.Node) -> gs.Tensor:
    """Insert one projection that yields the results of `group` side by side, before `place`; returns its result."""
    first = group[0].result
    values = [values_of(projection.weight) for projection in group]
    weight = np.concatenate([value for value in values if value is not None], axis=group[0].width_axis)
    shape = None if first.shape is None else [*first.shape[:-1], sum(projection.width for projection in group)]
    packed = new_variable(first, "packed", shape)
    inputs = [group[0].product.inputs[0], new_constant(first, "packed_weight", weight)]
    biases = _biases(group, weight.dtype)
    bias = [] if biases is None else [new_constant(first, "packed_bias", biases)]
    attrs = dict(group[0].product.attrs)
    name = packed_name([projection.product.name for projection in group])
    if is_op(group[0].product, "Gemm") or not bias:
        insert_before(
            scope, place, gs.Node(group[0].product.op, name or packed.name, attrs, [*inputs, *bias], [packed])
        )
        return packed
    product = new_variable(first, "packed_product", shape)
    insert_before(
        scope,
        place,
        gs.Node("MatMul", name or product.name, attrs, inputs, [product]),
        gs.Node("Add", packed.name, inputs=[product, *bias], outputs=[packed]),
    )
    return packed


def packed_name(names: Sequence[str]) -> str:
    """One name for several, joined below the path that they share: `a.q+k` of `a.q` and `a.k`; empty if one is."""
    paths = [name.split(".") for name in names]
    shared = 0
    while all(len(path) > shared + 1 and path[: shared + 1] == paths[0][: shared + 1] for path in paths):
        shared += 1
    rest = "+".join(".".join(path[shared:]) for path in paths)
    return ".".join([*paths[0][:shared], rest]) if all(names) else ""


def _biases(group: Sequence[Projection], dtype: np.dtype) -> NDArray | None:
    """The biases side by side, zeros where there is none; None if none of the group has one."""
    if all(projection.bias is None for projection in group):
        return None
    rows = []
    for projection in group:
        values = values_of(projection.bias)
        row = np.zeros(1, dtype) if values is None else values.reshape(-1)
        rows.append(np.broadcast_to(row, (projection.width,)))
    return np.concatenate(rows)


def _remove(scope: gs.Graph, projection: Projection) -> None:
    for node in {id(node): node for node in (projection.last, projection.product)}.values():
        replace_node(scope, node)


def _pack_attention(scope: gs.Graph, attention: gs.Node) -> bool:
    sources = [_source(scope, attention, index) for index in range(3)]
    found = [source for source in sources if source is not None]
    if len(found) < 3:
        return False
    group = [projection for projection, _ in found]
    query, key, value = group
    if len({id(projection.product) for projection in group}) < 3 or not (query.form == key.form == value.form):
        return False
    if any(projection.product.inputs[0] is not query.product.inputs[0] for projection in group):
        return False
    heads, kv_heads = attention.attrs.get("num_heads"), attention.attrs.get("kv_num_heads")
    if not heads or not kv_heads or key.width != value.width or query.width * kv_heads != key.width * heads:
        return False
    flat = rank_of(query.result) == 2
    earliest = next(n for n in scope.nodes if any(n is projection.product for projection in group))
    packed = _pack(scope, group, earliest)
    if not flat:
        width = sum(projection.width for projection in group)
        rows = new_variable(packed, "rows", [*(attention.inputs[0].shape or [None])[:1], width])
        target = new_constant(packed, "rows_shape", np.array([-1, width], np.int64))
        insert_before(scope, earliest, gs.Node("Reshape", rows.name, {}, [packed, target], [rows]))
        packed = rows
    for index, tensor in enumerate((packed, gs.Variable.empty(), gs.Variable.empty())):
        attention.inputs[index] = tensor
    for projection, views in found:
        for node in views:
            replace_node(scope, node)
        _remove(scope, projection)
    return True


def _source(scope: gs.Graph, attention: gs.Node, index: int) -> tuple[Projection, list[gs.Node]] | None:
    """The projection that an input of `attention` is, with the views between; None if others read any of it too."""
    tensor, reader, views = input_of(attention, index), attention, list[gs.Node]()
    if tensor is None:
        return None
    width = static_dim(tensor, -1)
    while True:
        if only_consumer(scope, tensor) is not reader:
            return None
        view = producer(tensor, *VIEWS)
        if view is None or not in_scope(scope, view):
            break
        views.append(view)
        tensor, reader = view.inputs[0], view
    add = producer(tensor, "Add")
    operands = constant_operand(add) if add is not None else None
    product = producer(tensor if operands is None else operands[0], *_PRODUCTS)
    projection = projection_of(scope, product) if product is not None and in_scope(scope, product) else None
    return (
        (projection, views)
        if projection is not None and projection.result is tensor and projection.width == width
        else None
    )


def _feeds_packed_attention(scope: gs.Graph, projection: Projection) -> bool:
    """Whether rule 1 made this projection: an attention reads it as query and has no key of its own."""
    tensor = projection.result
    while True:
        reader = only_consumer(scope, tensor)
        if reader is None:
            return False
        if not is_op(reader, *VIEWS):
            return reader.op == OP_TYPE and reader.domain in (EXPORT_DOMAIN, DOMAIN) and input_of(reader, 1) is None
        tensor = reader.outputs[0]
