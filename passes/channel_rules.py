"""What units on one tensor of a node mean for its other tensors, its constants and its attributes: one rule a kind.

Used by `passes.channel_trace`, which defines spans and calls the rules. Operators that mix units, such as
normalisation over them, have no rule; a rule refuses where its operator's shapes or options are not known.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import onnx_graphsurgeon as gs

from passes.channel_trace import Coarser, Rule, Span, Trace, refuse
from passes.pattern import CONTRIB, STANDARD, axes_of, input_of, producer, rank_of, static_dim, values_of
from plugins.paged_attention.schema import DOMAIN, OP_TYPE


def _paged(_: Trace, node: gs.Node) -> None:
    refuse(
        node,
        "the number of KV heads is part of the cache's layout and of the decoder's description, which a pass over the "
        "graph alone cannot change",
    )


def _elementwise(trace: Trace, node: gs.Node) -> None:
    """Any number of operands that broadcast against each other."""
    tensors = [*node.inputs, node.outputs[0]]
    span = next(found for tensor in tensors if (found := trace.span(tensor)))
    if len(node.outputs) != 1:
        refuse(node, "has a second output")
    trace.carry(node, node.outputs[0], span)
    for index in range(len(node.inputs)):
        trace.align(node, index, span)


def _along(trace: Trace, node: gs.Node) -> None:
    """Operators over other axes than the units': `axis` must not be the span's."""
    _, span = _through(trace, node)
    rank = rank_of(node.inputs[0])
    axis = int(node.attrs.get("axis", -1))
    axis = axis - rank if axis >= 0 and rank is not None else axis
    if axis >= 0 or axis == span.axis or trace.scope.opset < 13:
        refuse(node, "works along the units, or along an axis that is not known")


def _pool(trace: Trace, node: gs.Node) -> None:
    tensor, span = _through(trace, node)
    rank = rank_of(tensor)
    if rank is None or span.axis != 1 - rank or len(node.outputs) != 1:
        refuse(node, "does not treat its channels one by one")


def _resize(trace: Trace, node: gs.Node) -> None:
    _, span = _through(trace, node)
    scales = values_of(input_of(node, 2))
    if scales is None or scales.size < -span.axis or scales[span.axis] != 1 or "axes" in node.attrs:
        refuse(node, "may resize the units' axis")


def _pad(trace: Trace, node: gs.Node) -> None:
    _, span = _through(trace, node)
    pads = values_of(input_of(node, 1))
    if pads is None or input_of(node, 3) is not None or pads.reshape(2, -1)[:, span.axis].any():
        refuse(node, "may pad the units' axis")


def _through(trace: Trace, node: gs.Node) -> tuple[gs.Tensor, Span]:
    """Input 0 and output 0 have the units in the same place."""
    span = trace.span(node.inputs[0]) or trace.span(node.outputs[0])
    if span is None:
        refuse(node, "has the units in another operand than its first")
    trace.carry(node, node.inputs[0], span)
    trace.carry(node, node.outputs[0], span)
    return node.inputs[0], span


def _matmul(trace: Trace, node: gs.Node) -> None:
    left, right = node.inputs
    output = node.outputs[0]
    if isinstance(left, gs.Constant):
        refuse(node, "its weight is the left operand")
    if isinstance(right, gs.Constant):
        if rank_of(right) != 2:
            refuse(node, "its weight is no matrix")
        for tensor, other in ((left, output), (output, left)):
            span = trace.span(tensor)
            if span is not None and span.axis != -1:
                trace.carry(node, other, span)
        if (span := trace.span(left)) is not None and span.axis == -1:
            trace.cut(node, 1, replace(span, axis=-2))
        if (span := trace.span(output)) is not None and span.axis == -1:
            trace.source(node, 1, span)
        return
    span = next(found for tensor in (left, right, output) if (found := trace.span(tensor)))
    if span.axis > -3:
        refuse(node, "multiplies the units with each other")
    trace.is_heads = True
    trace.carry(node, output, span)
    trace.align(node, 0, span)
    trace.align(node, 1, span)


def _gemm(trace: Trace, node: gs.Node) -> None:
    if node.attrs.get("transA", 0):
        refuse(node, "its input is transposed")
    transposed = bool(node.attrs.get("transB", 0))
    for tensor, is_output in ((node.inputs[0], False), (node.outputs[0], True)):
        span = trace.span(tensor)
        if span is None:
            continue
        if span.axis != -1:
            refuse(node, "has the units in its rows")
        place = replace(span, axis=-1 if is_output != transposed else -2)
        if is_output:
            trace.source(node, 1, place)
            if input_of(node, 2) is not None:
                trace.align(node, 2, span)
        else:
            trace.cut(node, 1, place)


def _conv(trace: Trace, node: gs.Node) -> None:
    weight = node.inputs[1]
    rank, group = rank_of(weight), int(node.attrs.get("group", 1))
    if not isinstance(weight, gs.Constant) or rank is None:
        refuse(node, "its weight is no constant")
    given, made = trace.span(node.inputs[0]), trace.span(node.outputs[0])
    if any(span is not None and span.axis != 1 - rank for span in (given, made)):
        refuse(node, "has the units in another axis than its channels")
    maps, reads = (-rank, 1 - rank) if node.op == "Conv" else (1 - rank, -rank)
    if group == 1:
        if given is not None:
            trace.cut(node, 1, replace(given, axis=reads))
    elif node.op == "Conv" and group == weight.shape[0] and weight.shape[1] == 1:  # one filter per channel
        made = given or made
        assert made is not None
        trace.carry(node, node.inputs[0], made)
        trace.carry(node, node.outputs[0], made)
        trace.count(node, made.parts * made.width, "group")
    else:
        refuse(node, f"its channels are in {group} groups")
    if made is not None:
        (trace.source if group == 1 else trace.cut)(node, 1, replace(made, axis=maps))
        if input_of(node, 2) is not None:
            trace.cut(node, 2, replace(made, axis=-1))


def _batch_norm(trace: Trace, node: gs.Node) -> None:
    _pool(trace, node)
    for index in range(1, 5):
        trace.cut(node, index, replace(_through(trace, node)[1], axis=-1))


def _reduce(trace: Trace, node: gs.Node) -> None:
    axes, rank = axes_of(node), rank_of(node.inputs[0])
    if axes is None or rank is None:
        refuse(node, "its axes are not known")
    reduced = {axis % rank - rank for axis in axes}
    if node.attrs.get("keepdims", 1):
        places = {axis: axis for axis in range(-rank, 0) if axis not in reduced}
    else:
        places = {a: a + sum(b > a for b in reduced) for a in range(-rank, 0) if a not in reduced}
    _map_axes(trace, node, places)


def _transpose(trace: Trace, node: gs.Node) -> None:
    rank = rank_of(node.inputs[0])
    if "perm" not in node.attrs and rank is None:
        refuse(node, "its number of axes is not known")
    perm = node.attrs.get("perm") or list(reversed(range(rank or 0)))
    _map_axes(trace, node, {axis - len(perm): place - len(perm) for place, axis in enumerate(perm)})


def _map_axes(trace: Trace, node: gs.Node, places: dict[int, int]) -> None:
    """`places` maps axes of the input to axes of the output."""
    back = {place: axis for axis, place in places.items()}
    for tensor, other, mapping in ((node.inputs[0], node.outputs[0], places), (node.outputs[0], node.inputs[0], back)):
        span = trace.span(tensor)
        if span is not None:
            if span.axis not in mapping:
                refuse(node, "removes the axis of the units")
            trace.carry(node, other, replace(span, axis=mapping[span.axis]))


def _reshape(trace: Trace, node: gs.Node) -> None:
    given, made = node.inputs[0], node.outputs[0]
    before, after = trace.span(given), trace.span(made)
    if before is not None:
        after = _reshaped(trace, node, before, given, made)
        trace.carry(node, made, after)
    else:
        assert after is not None
        before = _reshaped(trace, node, after, made, given)
        trace.carry(node, given, before)
    if node.op == "Reshape":
        _count_in_shape(trace, node, before, after)


def _count_in_shape(trace: Trace, node: gs.Node, before: Span, after: Span) -> None:
    """The entry of a Reshape's shape that is the number of units; -1 needs no change, 0 copies the input's size."""
    ranks = rank_of(node.inputs[0]), rank_of(node.outputs[0])
    assert None not in ranks
    position = after.axis + (ranks[1] or 0)
    found = shape_entry(node, position)
    if found is None:
        refuse(node, f"entry {position} of its shape is computed")
    value = found[2]
    if value == 0 and not node.attrs.get("allowzero", 0):
        if before.axis + (ranks[0] or 0) != position or trace.size(before) != trace.size(after):
            refuse(node, f"entry {position} of its shape copies the size of another axis")
    elif value != -1:
        trace.count(node, after.parts * after.width, position=position)


def shape_entry(node: gs.Node, position: int) -> tuple[int | None, int, int] | None:
    """Where entry `position` of a Reshape's shape is written, and its value; None where it is computed.

    (index, place, value): in operand `index` of the Concat that makes the shape, at `place`; None without a Concat.
    """
    shape = node.inputs[1]
    if (values := values_of(shape)) is not None:
        return None, position, int(values[position])
    concat = producer(shape, "Concat")
    for index, piece in enumerate(concat.inputs if concat else ()):
        size = static_dim(piece, 0)
        if size is None:
            return None
        if position < size:
            values = values_of(piece)
            return None if values is None else (index, position, int(values[position]))
        position -= size
    return None


def _reshaped(trace: Trace, node: gs.Node, span: Span, source: gs.Tensor, target: gs.Tensor) -> Span:
    """Where the units at `span` of `source` lie in `target`, which has the same elements in the same order.

    A unit owns `run` elements in a row; all units of all parts own `extent`. An axis of the target with `stride`
    elements per entry has the units if it covers the extent, or a whole number of extents, and the stride divides
    the run. A stride that is longer than the run makes larger units.
    """
    trailing = [static_dim(source, axis) for axis in range(span.axis + 1, 0)]
    if target.shape is None or source.shape is None or None in trailing:
        refuse(node, "its shapes are not known")
    run = span.width * math.prod(size or 0 for size in trailing)
    larger = None
    for axis, stride, size in _strides(target):
        covered, one = stride * size, trace.units * run
        extent = span.parts * one
        if covered % one or (extent % covered and covered % extent):
            continue
        if run % stride == 0:
            return Span(axis, covered // one, run // stride)
        if size > 1 and stride % run == 0 and trace.units % (stride // run) == 0 and covered == extent:
            larger = Coarser(trace.units * run // stride)
    if larger is None:
        refuse(node, f"{source.shape} becomes {target.shape}, which mixes the units with other axes")
    raise larger


def _strides(tensor: gs.Tensor) -> Iterator[tuple[int, int, int]]:
    """(axis, elements per entry, size) of the last axes, as far as their sizes are known."""
    stride = 1
    for axis in range(-1, -1 - (rank_of(tensor) or 0), -1):
        size = static_dim(tensor, axis)
        if size is None:
            return
        yield axis, stride, size
        stride *= size


def _split(trace: Trace, node: gs.Node) -> None:
    rank, pieces = rank_of(node.inputs[0]), len(node.outputs)
    axis = int(node.attrs.get("axis", 0))
    if axis >= 0:
        if rank is None:
            refuse(node, "its number of axes is not known")
        axis -= rank
    given = trace.span(node.inputs[0])
    span = given or next(found for tensor in node.outputs if (found := trace.span(tensor)))
    if span.axis != axis:
        for tensor in (node.inputs[0], *node.outputs):
            trace.carry(node, tensor, span)
        return
    if "split" in node.attrs:
        refuse(node, "its sizes are an attribute, as before opset 13")
    sizes = {static_dim(tensor, axis) for tensor in node.outputs}
    if len(sizes) != 1 or None in sizes:
        refuse(node, "its pieces are not equally large")
    if given is not None and given.parts % pieces:
        if given.parts * trace.units % pieces or given.parts != 1:
            refuse(node, f"cuts {trace.units} units into {pieces} pieces")
        raise Coarser(trace.units // pieces, pieces)
    parts = given.parts // pieces if given is not None else span.parts
    trace.carry(node, node.inputs[0], replace(span, parts=parts * pieces))
    for tensor in node.outputs:
        trace.carry(node, tensor, replace(span, parts=parts))
    if input_of(node, 1) is not None:
        trace.count(node, parts * span.width)


def _concat(trace: Trace, node: gs.Node) -> None:
    rank, axis = rank_of(node.outputs[0]), int(node.attrs["axis"])
    span = next(found for tensor in (*node.inputs, *node.outputs) if (found := trace.span(tensor)))
    if rank is None or axis % rank - rank == span.axis:
        refuse(node, "puts the units beside others")
    trace.carry(node, node.outputs[0], span)
    for index, tensor in enumerate(node.inputs):
        if isinstance(tensor, gs.Constant):
            trace.cut(node, index, span)
        else:
            trace.carry(node, tensor, span)


def _attention(trace: Trace, node: gs.Node) -> None:
    """Attention (opset 23) and MultiHeadAttention. A unit is a key/value head with the query heads that read it."""
    own = node.domain == CONTRIB
    rank = rank_of(node.inputs[0])
    if len(node.inputs) < 3 or rank not in (3, 4) or (own and rank != 3) or len(node.outputs) != 1:
        refuse(node, "only with query, key and value apart and without a cache can its heads be removed")
    if any(input_of(node, index) is not None for index in ((6, 7) if own else (4, 5))):
        refuse(node, "it has a cache, whose layout its heads are part of")
    if rank == 4:
        heads, kv_heads = static_dim(node.inputs[0], 1), static_dim(node.inputs[1], 1)
    else:
        heads = node.attrs.get("num_heads" if own else "q_num_heads")
        kv_heads = heads if own else node.attrs.get("kv_num_heads")
    if not heads or not kv_heads or heads % kv_heads:
        refuse(node, f"its numbers of heads are {heads} and {kv_heads}")
    trace.is_heads = True
    trace.require_units(node, kv_heads)
    shared = heads // kv_heads
    for tensor, each in zip((*node.inputs[:3], node.outputs[0]), (shared, 1, 1, shared), strict=True):
        size = 1 if rank == 4 else static_dim(tensor, -1)
        if size is None or (rank == 3 and size % (kv_heads * each)):
            refuse(node, f"the size of a head in '{tensor.name}' is not known")
        trace.carry(node, tensor, Span(-3, 1, each) if rank == 4 else Span(-1, 1, size // kv_heads))
    if (bias := 5 if own else 3) < len(node.inputs):
        trace.align(node, bias, Span(-3, 1, shared))
    if own and input_of(node, 3) is not None:  # query's, key's and value's biases in a row
        size = static_dim(node.inputs[3], 0)
        if size is None or size % (3 * kv_heads):
            refuse(node, "its bias is not three equal parts")
        trace.cut(node, 3, Span(-1, 3, size // (3 * kv_heads)))
    for name in ("num_heads", "q_num_heads", "kv_num_heads"):
        if name in node.attrs:
            trace.count(node, 1 if name == "kv_num_heads" else shared, name)


def _rules() -> dict[tuple[str, str], Rule]:
    groups: dict[Rule, str] = {
        _elementwise: "Add Sub Mul Div Pow Max Min Where PRelu Relu LeakyRelu Elu Selu Celu Sigmoid HardSigmoid "
        "HardSwish Tanh Erf Gelu Mish Swish Softplus Softsign ThresholdedRelu Abs Neg Sqrt Exp Log Identity Clip Cast "
        "IsNaN",
        _along: "Softmax LogSoftmax",
        _pool: "GlobalAveragePool GlobalMaxPool AveragePool MaxPool LpPool",
        _reduce: "ReduceMean ReduceMax ReduceMin ReduceSum",
        _reshape: "Reshape Flatten Squeeze Unsqueeze",
        _conv: "Conv ConvTranspose",
    }
    single: dict[str, Rule] = {
        "MatMul": _matmul,
        "Gemm": _gemm,
        "BatchNormalization": _batch_norm,
        "Resize": _resize,
        "Pad": _pad,
        "Transpose": _transpose,
        "Split": _split,
        "Concat": _concat,
        "Attention": _attention,
    }
    rules: dict[tuple[str, str], Rule] = {(STANDARD, op): rule for rule, ops in groups.items() for op in ops.split()}
    rules.update({(STANDARD, op): rule for op, rule in single.items()})
    rules.update({(CONTRIB, op): _elementwise for op in ("Gelu", "FastGelu", "QuickGelu", "BiasGelu")})
    rules[(CONTRIB, "MultiHeadAttention")] = _attention
    rules.update({(domain, OP_TYPE): _paged for domain in (CONTRIB, DOMAIN)})
    return rules


RULES: Mapping[tuple[str, str], Rule] = _rules()
