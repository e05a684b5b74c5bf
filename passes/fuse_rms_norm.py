"""RMSNorm written as arithmetic becomes one operator. H is the size of the last axis, f the statistics of x [..., H].

1. `Mul(x, f) [-> Mul(., weight [H])]` -> `SimplifiedLayerNormalization(x, weight)`, or a constant weight of ones, with
   f = 1 / sqrt(ReduceMean(x^2, last axis) + epsilon), x^2 as Pow(x, 2) or Mul(x, x), and 1 / sqrt(.) as
   Reciprocal(Sqrt(.)), Div(1, Sqrt(.)) or Pow(., -0.5); also `Div(x, Sqrt(.))`, and weight multiplied with x or f;
2. rule 1 on 16-bit x between `Cast(x, wider type)` and `Cast(., type of x)` -> the operator on x itself, without Casts.
   A weight before the Cast back stays there, and the Casts with it, if the narrow type cannot hold its values, as those
   of Gemma's 1 + weight;
3. `RMSNormalization` <-> `SimplifiedLayerNormalization`, whichever the target has.

Target "contrib" is ONNX Runtime, which has SimplifiedLayerNormalization in the standard domain at every opset; target
"standard" is RMSNormalization of opset 23 (its formula: Zhang and Sennrich, arXiv:1910.07467).

Reorders: both accumulate in float32 (stash_type 1) and multiply by 1 / root or divide by it. Arithmetic in 16 bits gets
more exact. Left alone: float64; sums and L2 norms (no mean); epsilon outside of the root; other axes than the last; a
size of the last axis that is unknown; x with its mean subtracted (LayerNorm); intermediates that others read.
"""

from typing import Literal

import onnx_graphsurgeon as gs

from passes.base import Effect, Outcome, Refusal
from passes.norm_pattern import (
    COMPUTED,
    cores_of,
    follow,
    mean_of,
    norm_over,
    replace_norm,
    same_value,
    square_of,
    type_of,
    uncast,
    weight_input,
    weighted,
)
from passes.pattern import producer, rewrite_nodes

Target = Literal["contrib", "standard"]
OPERATORS: dict[Target, str] = {"contrib": "SimplifiedLayerNormalization", "standard": "RMSNormalization"}
STANDARD_SINCE = 23


class FuseRmsNorm:
    """Implements `passes.base.Pass`."""

    name = "fuse_rms_norm"
    effect = Effect.REORDERS

    def __init__(self, target: Target = "contrib") -> None:
        self.target = target

    def call(self, graph: gs.Graph) -> Outcome:
        fused = rewrite_nodes(graph, self._fuse, ("Mul", "Div"))
        converted = rewrite_nodes(graph, self._convert, set(OPERATORS.values()) - {OPERATORS[self.target]})
        return Outcome(fused.rewrites + converted.rewrites, fused.notes + converted.notes)

    def _fuse(self, scope: gs.Graph, node: gs.Node) -> bool:
        for core in cores_of(node):
            mean = mean_of(core.variance)
            base = square_of(mean[0]) if mean is not None else None
            if mean is None or base is None or not same_value(base, core.value) or _is_centred(core.value):
                continue
            norm = norm_over(node, core.value, mean[1], core.epsilon)
            if len(norm.sizes) > 1:
                raise Refusal(f"an RMS norm over axes {mean[1]}, expected the last one only")
            if not weighted(norm, core.scale):
                continue
            self._check_opset(scope)
            follow(scope, norm, biased=False)
            replace_norm(scope, norm, OPERATORS[self.target])
            return True
        return False

    def _convert(self, scope: gs.Graph, node: gs.Node) -> bool:
        self._check_opset(scope)
        x, scale = node.inputs[:2]
        if len(node.outputs) > 1:
            raise Refusal(f"has {len(node.outputs)} outputs, expected 1")
        if node.attrs.get("stash_type", 1) != 1 or type_of(x) not in COMPUTED:
            raise Refusal(f"computes in type {node.attrs.get('stash_type', 1)} on {x.dtype}, expected float32")
        if weight_input(node, 1) is None:
            raise Refusal(f"its scale '{scale.name}' {scale.shape} is not known to have the normalised axes' shape")
        if self.target == "standard" and type_of(scale) != type_of(x):
            raise Refusal(f"its scale is {scale.dtype}, its input {x.dtype}; expected one type")
        node.op = OPERATORS[self.target]
        node.attrs = {"axis": -1, "epsilon": 1e-5, **node.attrs, "stash_type": 1}
        return True

    def _check_opset(self, scope: gs.Graph) -> None:
        if self.target == "standard" and scope.opset < STANDARD_SINCE:
            raise Refusal(f"opset {scope.opset} has no RMSNormalization; convert the model to opset {STANDARD_SINCE}")


def _is_centred(value: gs.Tensor) -> bool:
    """Whether a value is x - mean(x), so that its RMS norm is a LayerNorm of x."""
    node = producer(uncast(value, lossless=True), "Sub")
    mean = mean_of(node.inputs[1]) if node is not None else None
    return node is not None and mean is not None and same_value(mean[0], node.inputs[0])
