"""LayerNorm written as arithmetic becomes one operator. S are the last axes of x [..., S], m = ReduceMean(x, S).

1. `Mul(Sub(x, m), f) [-> Mul(., gamma [S])] [-> Add(., beta [S])]` -> `LayerNormalization(x, gamma, beta)`, with a
   constant gamma of ones and no beta where they are absent, and f = 1 / sqrt(ReduceMean(Sub(x, m)^2, S) + epsilon),
   the square as Pow(., 2) or Mul(., .), and 1 / sqrt(.) as Reciprocal(Sqrt(.)), Div(1, Sqrt(.)) or Pow(., -0.5); also
   `Div(Sub(x, m), Sqrt(.))` and gamma multiplied with Sub(x, m) or f first. Sub(x, m) and m may be there twice;
2. `Add(Mul(x, g), Sub(beta, Mul(m, g)))` with g = f or Mul(f, gamma) (TensorFlow's batch_normalization) -> the same;
   also `Sub(Mul(x, g), Mul(m, g))` and `Add(Mul(x, g), Neg(Mul(m, g)))`, without beta;
3. rules 1 and 2 on 16-bit x between `Cast(x, wider type)` and `Cast(., type of x)`, or with the Cast behind the Sub ->
   the operator on x itself, without Casts. Weights before the Cast back stay there, and the Casts with them, if the
   narrow type cannot hold their values.

LayerNormalization is standard from opset 17 on (formula: its specification, after Ba et al., arXiv:1607.06450); ONNX
Runtime has it in the standard domain at every opset, so below 17 it is made for target "contrib" only.

Reorders: the operator accumulates in float32 (stash_type 1), with its own order of sums. Arithmetic in 16 bits gets
more exact. Left alone: float64; a variance computed as mean(x^2) - mean(x)^2, which cancels where the operator does
not; axes that are not the last ones or whose sizes are unknown; several axes without weights of their shape, which may
be an instance norm; InstanceNorm and GroupNorm; intermediates that others read.
"""

from typing import Literal

import onnx_graphsurgeon as gs

from passes.base import Effect, Outcome, Refusal
from passes.norm_pattern import (
    Norm,
    cores_of,
    follow,
    mean_of,
    norm_over,
    replace_norm,
    same_value,
    scaled_inverse_root_of,
    square_of,
    uncast,
    weighted,
)
from passes.pattern import is_op, producer, rewrite_nodes

Target = Literal["contrib", "standard"]
OPERATOR = "LayerNormalization"
STANDARD_SINCE = 17


class FuseLayerNorm:
    """Implements `passes.base.Pass`."""

    name = "fuse_layer_norm"
    effect = Effect.REORDERS

    def __init__(self, target: Target = "contrib") -> None:
        self.target = target

    def call(self, graph: gs.Graph) -> Outcome:
        return rewrite_nodes(graph, self._fuse, ("Mul", "Div", "Add", "Sub"))

    def _fuse(self, scope: gs.Graph, node: gs.Node) -> bool:
        norm = _expanded(node) if node.op in ("Add", "Sub") else _plain(node)
        if norm is None:
            return False
        if self.target == "standard" and scope.opset < STANDARD_SINCE:
            raise Refusal(f"opset {scope.opset} has no LayerNormalization; convert the model to opset {STANDARD_SINCE}")
        follow(scope, norm, biased=True)
        if len(norm.sizes) > 1 and norm.scale is None and norm.bias is None:
            raise Refusal(f"a norm over {len(norm.sizes)} axes without weights of shape {list(norm.sizes)}")
        replace_norm(scope, norm, OPERATOR)
        return True


def _plain(node: gs.Node) -> Norm | None:
    """Rule 1: the node is the Mul or Div of x - mean with the root."""
    for core in cores_of(node):
        found = _centred(core.variance)
        if found is None or not same_value(found[1].outputs[0], core.value):
            continue
        axes, centring = found
        norm = norm_over(node, centring.inputs[0], axes, core.epsilon)
        if weighted(norm, core.scale):
            return norm
    return None


def _expanded(node: gs.Node) -> Norm | None:
    """Rule 2: the node adds x * g and beta - mean * g, or subtracts mean * g."""
    pairs = [node.inputs, node.inputs[::-1]] if node.op == "Add" else [node.inputs]
    for scaled, shift in pairs:
        product, beta, offset = producer(scaled, "Mul"), None, producer(shift, "Mul")
        if node.op == "Add":
            inner = producer(shift, "Sub", "Neg")
            beta = inner.inputs[0] if is_op(inner, "Sub") and inner is not None else None
            offset = producer(inner.inputs[-1], "Mul") if inner is not None else None
        if product is None or offset is None:
            continue
        for x, factor in (product.inputs, product.inputs[::-1]):
            root = scaled_inverse_root_of(factor)
            means = [t for t in offset.inputs if t is not factor]
            found = _centred(root[0]) if root is not None and len(means) == 1 else None
            if root is None or found is None:
                continue
            axes, centring = found
            if same_value(centring.inputs[0], x) and same_value(centring.inputs[1], means[0]):
                norm = norm_over(node, x, axes, root[1])
                if weighted(norm, root[2], beta):
                    return norm
    return None


def _centred(variance: gs.Tensor) -> tuple[list[int], gs.Node] | None:
    """(axes, the Sub of x and its mean) if a tensor is the mean of that difference's square over the same axes."""
    _refuse_moments(variance)
    mean = mean_of(variance)
    base = square_of(mean[0]) if mean is not None else None
    node = producer(uncast(base, lossless=True), "Sub") if base is not None else None
    inner = mean_of(node.inputs[1]) if node is not None else None
    if mean is None or node is None or inner is None or not same_value(inner[0], node.inputs[0]):
        return None
    if sorted(inner[1]) != sorted(mean[1]):
        raise Refusal(f"its mean is over axes {inner[1]}, its variance over {mean[1]}; expected the same")
    return mean[1], node


def _refuse_moments(variance: gs.Tensor) -> None:
    node = producer(uncast(variance), "Sub")
    squares = mean_of(node.inputs[0]) if node is not None else None
    base, mean = (square_of(squares[0]), square_of(node.inputs[1])) if node is not None and squares else (None, None)
    of = mean_of(mean) if mean is not None else None
    if base is not None and of is not None and same_value(base, of[0]):
        raise Refusal("its variance is mean(x^2) - mean(x)^2, which cancels; expected mean((x - mean(x))^2)")
