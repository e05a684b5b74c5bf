"""A residual sum and the norm of it become one of ONNX Runtime's skip norms. x and skip have shape [..., H].

1. `n = SimplifiedLayerNormalization(Add(x, skip), gamma [H])` -> `n, , , sum =
   com.microsoft::SkipSimplifiedLayerNormalization(x, skip, gamma)`; `sum` replaces the Add where others read it;
2. `n = LayerNormalization(Add(x, skip), gamma [H], beta [H])` -> `com.microsoft::SkipLayerNormalization(x, skip, gamma,
   beta)` likewise, beta optional;
3. `Add(Add(x, bias [H]), skip)` in rules 1 and 2, bias constant and its sum read by nobody else -> input `bias`.

Both operands of the Add must be known to have one shape, of rank 2 (packed tokens) or 3, in float32 or float16: ONNX
Runtime's kernels refuse other ranks when they run, and take an x smaller than skip for wrong values without a word.
Dimensions are equal if they are the same number or carry the same symbol.

One operator less, but not always less time: ONNX Runtime 1.32's CPU kernels of these operators work element by element
and took two to five times as long as an Add and a norm on [512, 576]. Use it where a measurement says so.

Reorders: x + skip + bias instead of (x + bias) + skip, and the norm's own sums; 16-bit sums are normalised before they
are rounded. Left alone: additions of constants (a bias or positions, no residual), which the float16 kernel may not
index by row; broadcasting additions; norms over several axes, with further outputs or not accumulated in float32; gamma
and beta that nodes compute, as they may depend on the sum.
"""

from collections.abc import Collection

import onnx_graphsurgeon as gs
from onnx import TensorProto, helper

from passes.base import Effect, Outcome, Refusal
from passes.norm_pattern import is_in, type_of, weight_input
from passes.pattern import (
    CONTRIB,
    constant_operand,
    consumers,
    input_of,
    is_output,
    new_constant,
    only_consumer,
    producer,
    rank_of,
    replace_node,
    rewrite_nodes,
    same_shape,
    static_dim,
    take_outputs,
    values_of,
)

OPERATORS = {
    "SimplifiedLayerNormalization": "SkipSimplifiedLayerNormalization",
    "LayerNormalization": "SkipLayerNormalization",
}
RANKS = (2, 3)
TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16)


class FuseSkipNorm:
    """Implements `passes.base.Pass`."""

    name = "fuse_skip_norm"
    effect = Effect.REORDERS

    def call(self, graph: gs.Graph) -> Outcome:
        return rewrite_nodes(graph, _fuse, OPERATORS)


def _fuse(scope: gs.Graph, norm: gs.Node) -> bool:
    total = norm.inputs[0]
    add = producer(total, "Add")
    if add is None or not is_in(scope, add) or any(isinstance(tensor, gs.Constant) for tensor in add.inputs):
        return False
    check_residual(norm, add, TYPES, RANKS)
    x, skip, bias = _operands(scope, add)
    gamma, beta = norm.inputs[1], input_of(norm, 2)
    inputs = [x, skip, gamma]
    if norm.op == "LayerNormalization" and (beta is not None or bias is not None):
        inputs.append(beta if beta is not None else gs.Variable.empty())
    if bias is not None:
        inputs.append(bias)
    shared = len(consumers(total)) > 1 or is_output(scope, total)
    outputs = take_outputs(norm)[:1]
    take_outputs(add)
    if shared:
        outputs += [gs.Variable.empty(), gs.Variable.empty(), total]
    attributes = {"epsilon": float(norm.attrs.get("epsilon", 1e-5))}
    fused = gs.Node(OPERATORS[norm.op], norm.name, attributes, inputs, outputs, domain=CONTRIB)
    replace_node(scope, norm, fused)
    replace_node(scope, add)
    return True


def check_residual(norm: gs.Node, add: gs.Node, types: Collection[int], ranks: Collection[int] = ()) -> None:
    """Refuse what a fused kernel for these types and ranks (any, if none is given) cannot do, or may do wrong."""
    total = norm.inputs[0]
    first, second = add.inputs
    rank = rank_of(total)
    expected = f"one of {ranks}" if ranks else "a known one"
    if rank is None or (ranks and rank not in ranks):
        raise Refusal(f"its input '{total.name}' has rank {rank or 'unknown'}, expected {expected}")
    if not same_shape(first, second) or not same_shape(first, total):
        raise Refusal(f"adds shapes {first.shape} and {second.shape}, not known to be the same")
    weights = [tensor for tensor in norm.inputs[1:3] if not tensor.is_empty()]
    kinds = [type_of(tensor) for tensor in (*add.inputs, *weights)]
    if kinds[0] not in types or len(set(kinds)) > 1:
        expected = " or ".join(str(helper.tensor_dtype_to_np_dtype(kind)) for kind in types)
        raise Refusal(f"is on {', '.join(str(t.dtype) for t in (*add.inputs, *weights))}; expected {expected}")
    if norm.attrs.get("axis", -1) not in (-1, rank - 1) or norm.attrs.get("stash_type", 1) != 1:
        raise Refusal(f"has attributes {dict(norm.attrs)}; expected the last axis, computed in float32")
    if any(not tensor.is_empty() for tensor in norm.outputs[1:]):
        raise Refusal(f"has {len(norm.outputs)} outputs, expected 1")
    for index, tensor in enumerate(weights, 1):
        if weight_input(norm, index) is None or tensor.inputs:
            raise Refusal(f"its weight '{tensor.name}' {tensor.shape} is not a constant [{total.shape[-1]}]")


def _operands(scope: gs.Graph, add: gs.Node) -> tuple[gs.Tensor, gs.Tensor, gs.Constant | None]:
    """(x, skip, bias) of a residual sum; rule 3 finds the bias in either operand."""
    for biased, skip in (add.inputs, add.inputs[::-1]):
        inner = producer(biased, "Add")
        operands = constant_operand(inner) if inner is not None else None
        if operands is None or only_consumer(scope, biased) is not add or not same_shape(operands[0], biased):
            continue
        x, bias = operands
        size = static_dim(biased, -1)
        if type_of(bias) != type_of(x) or list(bias.shape) != [1] * (len(bias.shape) - 1) + [size]:
            continue
        if len(bias.shape) > 1:
            values = values_of(bias)
            assert values is not None
            bias = new_constant(biased, "bias", values.reshape(-1))
        return x, skip, bias
    return add.inputs[0], add.inputs[1], None
