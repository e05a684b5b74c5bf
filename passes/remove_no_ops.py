"""Remove operators that change nothing.

A node whose output is bit for bit a tensor that exists already gives way to that tensor:

1. `Identity(x)`, and `Dropout(x)` outside training with its mask unused -> `x`;
2. `Cast(x)` to the type of x -> `x`;
3. `Reshape`, `Flatten`, `Squeeze`, `Unsqueeze` to the shape that x provably has already, x being the input or what the
   input is a view of: static shapes, targets like [0, 0, -1] or Shape(x), `Squeeze(Unsqueeze(x, axes), axes)` -> `x`;
4. `Transpose(x, [0, 1, ..])` -> `x`;
5. `Slice` from 0 to the end in steps of 1, `Pad` by 0, `Tile` by 1, `Expand` to a shape that x covers -> `x`;
6. `Concat`, `Sum`, `Mean`, `Max`, `Min` of one input, `Split` into one output -> `x`;
7. `x + -0.0`, `x - 0`, `x * 1`, `x / 1`, `x ** 1`, `x and true`, `x or false`, `x xor false`, with integers also
   `x + 0`, where the constant does not enlarge x -> `x`;
8. `ReduceSum|Mean|Max|Min|Prod` over no axes with noop_with_empty_axes -> `x`;
9. `AveragePool`, `MaxPool` of one element with stride 1 and no padding -> `x`;
10. `Resize`, `Upsample` of mode nearest by scales of 1 or to the own static sizes -> `x`;
11. `Not(Not(x))`, `Neg(Neg(x))` -> `x`; `f(f(x))` -> `f(x)` for Relu, Abs, Ceil, Floor, Round, Sign and for Clip with
    the same bounds;
12. `Clip` without bounds, of integers -> `x`;
13. `Where(constant of one truth value, x, y)` -> x or y, where nothing enlarges it.

A node that undoes or repeats part of its producer skips it:

14. `Cast(Cast(x, B), C)` -> `Cast(x, C)`, where B holds every value of x's type exactly;
15. `Reshape(view(x), t)` -> `Reshape(x, t')`, where the zeros of t, which copy dimensions, are resolved;
16. `Transpose(Transpose(x, p), q)` -> `Transpose(x, p[q])`.

Exact by IEEE 754 and the operators' definitions; a signalling NaN may stay one where arithmetic would have quieted it.
Rule 9 lets NaN through, which ONNX leaves open and ONNX Runtime's MaxPool turns into the largest number.
Left alone because they are not exact: `x + 0.0` (makes 0.0 of -0.0), Clip of floats without bounds (makes the largest
number of an infinity), Resize with interpolation (0 * infinity), Cast of floats by way of floats to integers (undefined
out of range). Graph inputs and outputs keep their names: an Identity that joins two such tensors stays.
"""

from collections.abc import Callable

import numpy as np
import onnx_graphsurgeon as gs
from onnx import TensorProto

from passes.base import Effect, Outcome
from passes.pattern import (
    axes_of,
    consumers,
    input_of,
    is_output,
    producer,
    replace_uses,
    rewrite_nodes,
    static_dim,
    values_of,
)
from passes.views import (
    VIEWS,
    broadcasts_into,
    compose_transposes,
    element_type,
    is_identity,
    learn_type,
    permutation_of,
    same_as_viewed,
    shorten_reshape,
)

_TO_THE_END = 2**31 - 1
"""Exporters write the end of a slice as the largest integer of 32 or of 64 bits."""
_EXACT_MODES = ("half_pixel", "asymmetric", "pytorch_half_pixel", "align_corners")
_INTEGERS: dict[int | None, tuple[int, int]] = {  # least and greatest value
    TensorProto.INT8: (-(2**7), 2**7 - 1),
    TensorProto.INT16: (-(2**15), 2**15 - 1),
    TensorProto.INT32: (-(2**31), 2**31 - 1),
    TensorProto.INT64: (-(2**63), 2**63 - 1),
    TensorProto.UINT8: (0, 2**8 - 1),
    TensorProto.UINT16: (0, 2**16 - 1),
    TensorProto.UINT32: (0, 2**32 - 1),
    TensorProto.UINT64: (0, 2**64 - 1),
    TensorProto.BOOL: (0, 1),
}
_FLOATS: dict[int | None, tuple[int, int]] = {  # significant bits and exponent bits
    TensorProto.FLOAT16: (11, 5),
    TensorProto.BFLOAT16: (8, 8),
    TensorProto.FLOAT: (24, 8),
    TensorProto.DOUBLE: (53, 11),
}


class RemoveNoOps:
    """Implements `passes.base.Pass`."""

    name = "remove_no_ops"
    effect = Effect.EXACT

    def call(self, graph: gs.Graph) -> Outcome:
        outcome = Outcome()
        while (sweep := rewrite_nodes(graph, _rewrite, (*_COPIES, *_SHORTCUTS))).changed:
            outcome.rewrites += sweep.rewrites
        return outcome


def _rewrite(scope: gs.Graph, node: gs.Node) -> bool:
    output = node.outputs[0]
    if not output.outputs and not is_output(scope, output):
        return False
    source = _COPIES[node.op](node, scope.opset) if node.op in _COPIES else None
    unused = not any(tensor.outputs or is_output(scope, tensor) for tensor in node.outputs[1:])
    if source is not None and unused and give_way(scope, node, source):
        return True
    return node.op in _SHORTCUTS and _SHORTCUTS[node.op](node)


def give_way(scope: gs.Graph, node: gs.Node, source: gs.Tensor) -> bool:
    """Let `source` stand for the node's output. False where only what is there now could do so."""
    output = node.outputs[0]
    if any(tensor is output for inner in scope.subgraphs(recursive=True) for tensor in inner.outputs):
        return False
    if any(tensor is output for tensor in scope.outputs):
        local = any(maker is other for maker in source.inputs for other in scope.nodes)
        if node.op == "Identity" and (not local or is_output(scope, source)):
            return _bypass(output, source)
    learn_type(source, output)
    replace_uses(scope, output, source)
    node.inputs.clear()
    node.outputs.clear()
    scope.nodes[:] = [other for other in scope.nodes if other is not node]
    return True


def _bypass(output: gs.Tensor, source: gs.Tensor) -> bool:
    """The Identity has to stay for its name; other readers need not wait for it."""
    for reader in (readers := consumers(output)):
        for index, tensor in enumerate(reader.inputs):
            if tensor is output:
                reader.inputs[index] = source
    return bool(readers)


def _first_input(node: gs.Node, opset: int) -> gs.Tensor:
    return node.inputs[0]


def _dropout(node: gs.Node, opset: int) -> gs.Tensor | None:
    if opset < 7:
        return node.inputs[0] if node.attrs.get("is_test", 0) else None
    training = input_of(node, 2)
    return node.inputs[0] if training is None or _all_equal(values_of(training), 0) else None


def _cast(node: gs.Node, opset: int) -> gs.Tensor | None:
    to = node.attrs.get("to")
    same = not isinstance(to, str) and to is not None and element_type(node.inputs[0].dtype) == element_type(to)
    return node.inputs[0] if same else None


def _view(node: gs.Node, opset: int) -> gs.Tensor | None:
    return same_as_viewed(node)


def _transpose(node: gs.Node, opset: int) -> gs.Tensor | None:
    permutation = permutation_of(node)
    return node.inputs[0] if permutation is not None and is_identity(permutation) else None


def _slice(node: gs.Node, opset: int) -> gs.Tensor | None:
    if opset < 10:
        starts, ends = node.attrs["starts"], node.attrs["ends"]
        axes, steps = node.attrs.get("axes"), None
    else:
        given = [values_of(input_of(node, index)) for index in range(1, 5)]
        if any(values is None and input_of(node, index) is not None for index, values in enumerate(given, start=1)):
            return None
        starts, ends, axes, steps = (None if values is None else values.reshape(-1).tolist() for values in given)
    axes, steps = axes or range(len(starts)), steps or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = static_dim(node.inputs[0], axis)
        from_first = start == 0 or (size is not None and start <= -size)
        to_last = end >= _TO_THE_END or (size is not None and end >= size)
        if step != 1 or not from_first or not to_last:
            return None
    return node.inputs[0]


def _single(node: gs.Node, opset: int) -> gs.Tensor | None:
    return node.inputs[0] if len(node.inputs) == 1 else None


def _split(node: gs.Node, opset: int) -> gs.Tensor | None:
    return node.inputs[0] if len(node.outputs) == 1 else None


def _pad(node: gs.Node, opset: int) -> gs.Tensor | None:
    pads = node.attrs.get("pads") if opset < 11 else values_of(input_of(node, 1))
    return node.inputs[0] if pads is not None and not np.any(pads) else None


def _expand(node: gs.Node, opset: int) -> gs.Tensor | None:
    target, measure = values_of(input_of(node, 1)), producer(node.inputs[1], "Shape")
    own = measure is not None and not measure.attrs and measure.inputs[0] is node.inputs[0]
    covered = target is not None and broadcasts_into(target.reshape(-1).tolist(), node.inputs[0])
    return node.inputs[0] if own or covered else None


def _tile(node: gs.Node, opset: int) -> gs.Tensor | None:
    return node.inputs[0] if opset >= 6 and _all_equal(values_of(input_of(node, 1)), 1) else None


def _arithmetic(node: gs.Node, opset: int) -> gs.Tensor | None:
    neutral, commutes = _NEUTRAL[node.op]
    for index in (1, 0) if commutes else (1,):
        source, operand = node.inputs[1 - index], node.inputs[index]
        if not isinstance(operand, gs.Constant) or not broadcasts_into(operand.shape, source):
            continue
        values = values_of(operand)
        if values is None or not _all_equal(values, neutral):
            continue
        signed_zero = neutral == 0 and values.dtype.kind not in "iub"
        if not signed_zero or (np.signbit(values) == (node.op == "Add")).all():
            return source
    return None


def _reduce(node: gs.Node, opset: int) -> gs.Tensor | None:
    no_axes = axes_of(node) == [] or ("axes" not in node.attrs and input_of(node, 1) is None)
    return node.inputs[0] if node.attrs.get("noop_with_empty_axes", 0) and no_axes else None


def _pool(node: gs.Node, opset: int) -> gs.Tensor | None:
    ones = [*node.attrs["kernel_shape"], *node.attrs.get("strides", [])]
    return node.inputs[0] if set(ones) == {1} and not any(node.attrs.get("pads", [])) else None


def _resize(node: gs.Node, opset: int) -> gs.Tensor | None:
    if node.attrs.get("mode", "nearest") != "nearest":
        return None
    if node.attrs.get("coordinate_transformation_mode", "half_pixel") not in _EXACT_MODES:
        return None
    if opset < 9 and node.op == "Upsample":
        return node.inputs[0] if set(node.attrs.get("scales", [])) == {1.0} else None
    if _all_equal(values_of(input_of(node, 1 if opset < 11 else 2)), 1):
        return node.inputs[0]
    sizes = values_of(input_of(node, 3))
    if sizes is None or node.attrs.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        return None
    axes = node.attrs.get("axes", range(sizes.size))
    same = all(size == static_dim(node.inputs[0], axis) for axis, size in zip(axes, sizes.tolist(), strict=True))
    return node.inputs[0] if same else None


def _undone(node: gs.Node, opset: int) -> gs.Tensor | None:
    inner = producer(node.inputs[0], node.op)
    return inner.inputs[0] if inner is not None else None


def _repeated(node: gs.Node, opset: int) -> gs.Tensor | None:
    return node.inputs[0] if producer(node.inputs[0], node.op) is not None else None


def _clip(node: gs.Node, opset: int) -> gs.Tensor | None:
    source, bounds = node.inputs[0], [input_of(node, 1), input_of(node, 2)]
    if opset >= 11 and bounds[0] is bounds[1] is None and element_type(source.dtype) in _INTEGERS:
        return source
    inner = producer(source, "Clip")
    if inner is None or inner.attrs != node.attrs:
        return None
    same = all(ours is theirs for ours, theirs in zip(bounds, (input_of(inner, 1), input_of(inner, 2)), strict=True))
    return source if same else None


def _where(node: gs.Node, opset: int) -> gs.Tensor | None:
    condition = values_of(node.inputs[0])
    if condition is None or not condition.size or condition.min() != condition.max():
        return None
    source, other = (node.inputs[1], node.inputs[2]) if condition.min() else (node.inputs[2], node.inputs[1])
    fits = other.shape is not None and broadcasts_into(other.shape, source)
    return source if fits and broadcasts_into(condition.shape, source) else None


def _shorten_cast(node: gs.Node) -> bool:
    inner = producer(node.inputs[0], "Cast")
    if inner is None:
        return False
    first, between, last = (element_type(t.dtype) for t in (inner.inputs[0], inner.outputs[0], node.outputs[0]))
    if not _holds(between, first) or last not in {*_INTEGERS, *_FLOATS}:
        return False
    if between in _FLOATS and last in _INTEGERS and not (first in _INTEGERS and _holds(last, first)):
        return False
    node.inputs[0] = inner.inputs[0]
    return True


def _holds(outer: int | None, inner: int | None) -> bool:
    """Whether every value of element type `inner` is one of `outer`."""
    if inner in _INTEGERS and outer in _INTEGERS:
        bounds, values = _INTEGERS[outer], _INTEGERS[inner]
        return bounds[0] <= values[0] and values[1] <= bounds[1]
    if inner in _INTEGERS and outer in _FLOATS:
        return max(-_INTEGERS[inner][0], _INTEGERS[inner][1]) <= 2 ** _FLOATS[outer][0]
    return (
        inner in _FLOATS
        and outer in _FLOATS
        and all(a >= b for a, b in zip(_FLOATS[outer], _FLOATS[inner], strict=True))
    )


def _all_equal(values: "np.ndarray | None", number: float) -> bool:
    return values is not None and bool((values == number).all())


_NEUTRAL: dict[str, tuple[float | bool, bool]] = {  # operator: neutral operand, whether it may be the first one
    "Add": (0, True),
    "Sub": (0, False),
    "Mul": (1, True),
    "Div": (1, False),
    "Pow": (1, False),
    "And": (True, True),
    "Or": (False, True),
    "Xor": (False, True),
}
_COPIES: dict[str, Callable[[gs.Node, int], gs.Tensor | None]] = {
    "Identity": _first_input,
    "Dropout": _dropout,
    "Cast": _cast,
    **dict.fromkeys(VIEWS, _view),
    "Transpose": _transpose,
    "Slice": _slice,
    "Pad": _pad,
    "Tile": _tile,
    "Expand": _expand,
    **dict.fromkeys(("Concat", "Sum", "Mean", "Max", "Min"), _single),
    "Split": _split,
    **dict.fromkeys(_NEUTRAL, _arithmetic),
    **dict.fromkeys(("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"), _reduce),
    **dict.fromkeys(("AveragePool", "MaxPool"), _pool),
    **dict.fromkeys(("Resize", "Upsample"), _resize),
    **dict.fromkeys(("Not", "Neg"), _undone),
    **dict.fromkeys(("Relu", "Abs", "Ceil", "Floor", "Round", "Sign"), _repeated),
    "Clip": _clip,
    "Where": _where,
}
_SHORTCUTS: dict[str, Callable[[gs.Node], bool]] = {
    "Cast": _shorten_cast,
    "Reshape": shorten_reshape,
    "Transpose": compose_transposes,
}
