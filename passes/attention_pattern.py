"""Scaled dot-product attention in the spellings of exporters: where query, key, value, scale and mask are.

Knows no operator that could replace it; `passes.fuse_attention` does.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs

from passes.base import Refusal
from passes.evaluate import Size, dimension, sizes_of
from passes.pattern import consumers, is_output, only_consumer, producer, rank_of, scalar_of, scalar_operand, static_dim

HEADS_FORWARD = [0, 2, 1, 3]
_FLOATS = ("float32", "float16", "bfloat16")
_ABSORBS = -1e30
"""Added to any score that is not astronomic, a number below it stays what it is."""


@dataclass(frozen=True)
class Heads:
    """A query, key or value: [batch, seq, heads, size] if `rows`, else [batch, heads, seq, size]."""

    tensor: gs.Tensor
    rows: bool

    @property
    def sequence_axis(self) -> int:
        return 1 if self.rows else 2

    @property
    def heads(self) -> int | None:
        return static_dim(self.tensor, 2 if self.rows else 1)

    @property
    def size(self) -> int | None:
        return static_dim(self.tensor, 3)

    @property
    def batch_and_sequence(self) -> tuple[Size, Size]:
        return dimension(self.tensor, 0), dimension(self.tensor, self.sequence_axis)


@dataclass(frozen=True)
class Scores:
    """What the softmax is taken of: scale * q k^T, and what is added, or a condition with what it puts in."""

    product: gs.Node
    query: Heads
    key: Heads
    scale: float
    mask: gs.Tensor | None = None
    masked: tuple[float, float] | None = None
    """For a condition as mask: what it adds where it is true, and where it is false."""


@dataclass(frozen=True)
class Chain:
    """What follows the softmax: a guard against NaN or none, the product with the value, the Transpose to rows."""

    value: Heads
    transpose: gs.Node
    guarded: bool


def scores_from(tensor: gs.Tensor) -> Scores | None:
    """[Where or Add of a mask] of [scaled] product of query and transposed key."""
    node = producer(tensor, "Add", "Where")
    if node is None:
        return _product_from(tensor)
    if node.op == "Add":
        for scores, mask in (node.inputs, reversed(node.inputs)):
            found = _product_from(scores)
            if found is not None:
                return replace(found, mask=mask)
        return None
    for index, value in ((1, scalar_of(node.inputs[2])), (2, scalar_of(node.inputs[1]))):
        found = _product_from(node.inputs[index]) if value is not None else None
        if found is None or value is None:
            continue
        if not value <= _ABSORBS:
            raise Refusal(f"masked scores become {value:g}; expected at most {_ABSORBS:g}, which absorbs any score")
        masked = (0.0, value) if index == 1 else (value, 0.0)
        return replace(found, mask=node.inputs[0], masked=masked)
    return None


def _product_from(tensor: gs.Tensor) -> Scores | None:
    tensor, scale = _unscaled(tensor)
    product = producer(tensor, "MatMul")
    if product is None:
        return None
    query, query_scale = _unscaled(product.inputs[0])
    turned, turned_scale = _unscaled(product.inputs[1])
    key, key_scale = _key_from(turned)
    if key is None or rank_of(query) != 4:
        return None
    return Scores(product, rows_first(query), key, scale * query_scale * turned_scale * key_scale)


def _unscaled(tensor: gs.Tensor) -> tuple[gs.Tensor, float]:
    """A tensor without products with and quotients by scalars, and their product."""
    scale = 1.0
    while (node := producer(tensor, "Mul", "Div")) is not None:
        found = scalar_operand(node)
        if found is None or (node.op == "Div" and (found[0] is not node.inputs[0] or found[1] == 0)):
            break
        tensor = found[0]
        scale = scale * found[1] if node.op == "Mul" else scale / found[1]
    return tensor, scale


def rows_first(tensor: gs.Tensor) -> Heads:
    node = producer(tensor, "Transpose")
    if node is not None and node.attrs.get("perm") == HEADS_FORWARD:
        return Heads(node.inputs[0], True)
    return Heads(tensor, False)


def _key_from(turned: gs.Tensor) -> tuple[Heads | None, float]:
    """The key whose transpose [batch, heads, size, keys] is given, and a scale between the two."""
    node = producer(turned, "Transpose", "Reshape")
    if node is None:
        return None, 1.0
    if node.op == "Transpose":
        if node.attrs.get("perm") == [0, 2, 3, 1]:
            return Heads(node.inputs[0], True), 1.0
        swapped = node.inputs[0] if node.attrs.get("perm") == [0, 1, 3, 2] else None
    else:
        swapped = _swapped_in_reshapes(node)
    if swapped is None:
        return None, 1.0
    key, scale = _unscaled(swapped)
    return rows_first(key), scale


def _swapped_in_reshapes(last: gs.Node) -> gs.Tensor | None:
    """x of Reshape(Transpose(Reshape(x, [-1, keys, size])), [.., heads, size, keys]), if that swaps its last axes."""
    transpose = producer(last.inputs[0], "Transpose")
    first = producer(transpose.inputs[0], "Reshape") if transpose is not None else None
    if first is None or transpose is None or transpose.attrs.get("perm") != [0, 2, 1] or rank_of(first.inputs[0]) != 4:
        return None
    x, merged, split = first.inputs[0], sizes_of(first.inputs[1]), sizes_of(last.inputs[1])
    if merged is None or split is None or merged.shape != (3,) or split.shape != (4,):
        return None
    batch, heads, keys, size = (dimension(x, axis) for axis in range(4))
    if [*merged[1:]] != [keys, size] or [*split[1:]] != [heads, size, keys] or split[0] not in (batch, -1):
        return None
    return x if 0 not in (heads, keys, size) and merged[0] == -1 else None


def chain_behind(scope: gs.Graph, softmax: gs.Node) -> Chain | None:
    """[Guard against NaN,] product with the value, Transpose."""
    probabilities, guarded = softmax.outputs[0], False
    readers = consumers(probabilities)
    if {reader.op for reader in readers} == {"IsNaN", "Where"} and len(readers) == 2:
        (test,) = (reader for reader in readers if reader.op == "IsNaN")
        (where,) = (reader for reader in readers if reader.op == "Where")
        ours = where.inputs[0] is test.outputs[0] and where.inputs[2] is probabilities
        if not ours or scalar_of(where.inputs[1]) != 0 or only_consumer(scope, test.outputs[0]) is None:
            return None
        probabilities, guarded = where.outputs[0], True
    products = [node for node in consumers(probabilities) if node.op == "MatMul" and node.inputs[0] is probabilities]
    product = products[0] if products else None
    transpose = only_consumer(scope, product.outputs[0], "Transpose") if product is not None else None
    if product is None or transpose is None or transpose.attrs.get("perm") != HEADS_FORWARD:
        return None
    if only_consumer(scope, probabilities) is None or is_output(scope, softmax.outputs[0]):
        raise Refusal(f"the probabilities '{probabilities.name}' are read elsewhere too; expected only by the product")
    return Chain(rows_first(product.inputs[1]), transpose, guarded)


def check_fit(scores: Scores, value: Heads) -> None:
    """Raises Refusal unless query, key and value are known to fit together."""
    parts = {"query": scores.query, "key": scores.key, "value": value}
    for name, part in parts.items():
        if rank_of(part.tensor) != 4 or part.heads is None or part.size is None:
            raise Refusal(f"the {name}'s shape is {part.tensor.shape}; expected a known number and size of heads")
    query, key = scores.query, scores.key
    if query.tensor.dtype is None or np.dtype(query.tensor.dtype).name not in _FLOATS:
        raise Refusal(f"its type is {query.tensor.dtype}; expected one of {', '.join(_FLOATS)}")
    if not query.heads == key.heads == value.heads or query.size != key.size:
        found = ", ".join(f"{name} {part.heads} of {part.size}" for name, part in parts.items())
        raise Refusal(f"heads differ: {found}; expected equal ones")
    batches = [part.batch_and_sequence[0] for part in parts.values()]
    if batches.count(batches[0]) != 3 or key.batch_and_sequence[1] != value.batch_and_sequence[1]:
        found = ", ".join(f"{name} {part.tensor.shape}" for name, part in parts.items())
        raise Refusal(f"batch or number of keys are not known to be equal: {found}")
    if scores.scale == 0 or not math.isfinite(scores.scale):
        raise Refusal(f"the scale is {scores.scale}; expected a finite one other than 0")


def check_readers(scope: gs.Graph, scores: Scores, softmax: gs.Node) -> None:
    """Raises Refusal if something but the softmax reads scores, scaled or masked."""
    tensor = scores.product.outputs[0]
    while (reader := only_consumer(scope, tensor)) is not softmax:
        if reader is None:
            raise Refusal(f"the scores '{tensor.name}' are read elsewhere too; expected only by the softmax")
        tensor = reader.outputs[0]
