"""Fuse SiLU, the gate of SwiGLU, into the one elementwise kernel that ONNX Runtime has for it.

SiLU(x) = x * sigmoid(x) (Elfwing et al., 2018), called Swish with a factor beta: x * sigmoid(beta * x) (Ramachandran
et al., 2017). SwiGLU(x) = SiLU(x Wg) * (x Wu) (Shazeer, 2020). x has any shape, beta is one number:

1. `x * Sigmoid(beta * x)` -> `com.microsoft::QuickGelu(x, alpha=beta)`; alpha is 1 where there is no factor;
2. `x / (1 + Exp(-beta * x))`, `x * Reciprocal(1 + Exp(-beta * x))`, `x * (1 / (1 + Exp(-beta * x)))` -> the same;
3. `Swish(x, alpha)` of opset 24 -> the same.

The product with the second projection stays a Mul: ONNX Runtime's CPU provider has no kernel for all of SwiGLU.
Left alone: x * HardSigmoid(x), which is another function; a sigmoid that something else reads as well.

Same formula; the kernel may compute the sigmoid with another approximation.
"""

import onnx_graphsurgeon as gs

from passes.base import Effect, Outcome
from passes.pattern import (
    CONTRIB,
    in_scope,
    is_op,
    only_consumer,
    rewrite_nodes,
    substitute,
)
from passes.polynomial import agrees, polynomial_of, root_of, tolerance_of, variables_of


class FuseSwiglu:
    """Implements `passes.base.Pass`."""

    name = "fuse_swiglu"
    effect = Effect.REORDERS

    def call(self, graph: gs.Graph) -> Outcome:
        return rewrite_nodes(graph, _rewrite, ("Sigmoid", "Exp", "Swish"))


def _rewrite(scope: gs.Graph, node: gs.Node) -> bool:
    if node.op == "Swish":
        substitute(scope, node, "QuickGelu", node.inputs[0], domain=CONTRIB, alpha=float(node.attrs.get("alpha", 1.0)))
        return True
    for x in variables_of(node.inputs[0]):
        polynomial = polynomial_of(node.inputs[0], (x,))
        if polynomial is None or set(polynomial) != {(1,)}:
            continue
        slope = polynomial[(1,)] if node.op == "Sigmoid" else -polynomial[(1,)]
        root = gate_of(scope, x, node) if node.op == "Sigmoid" else _gate_of_exp(scope, x, node)
        if root is not None:
            substitute(scope, root, "QuickGelu", x, domain=CONTRIB, alpha=slope)
            return True
    return False


def gate_of(scope: gs.Graph, x: gs.Tensor, sigmoid: gs.Node) -> gs.Node | None:
    """The node that multiplies `x` by the output of `sigmoid`."""
    return root_of(scope, (x, sigmoid.outputs[0]), {(1, 1): 1.0}, tolerance_of(x))


def _gate_of_exp(scope: gs.Graph, x: gs.Tensor, exp: gs.Node) -> gs.Node | None:
    """The node that yields x / (1 + exp), given the node of exp."""
    total = root_of(scope, (x, exp.outputs[0]), {(0, 0): 1.0, (0, 1): 1.0}, tolerance_of(x))
    if total is None:
        return None
    division = only_consumer(scope, total.outputs[0], "Div", "Reciprocal")
    if division is None or division.inputs[-1] is not total.outputs[0]:
        return None
    if is_op(division, "Div"):
        if division.inputs[0] is x:
            return division if in_scope(scope, division) else None
        if not agrees(polynomial_of(division.inputs[0], (x,)), {(0,): 1.0}, tolerance_of(x)):
            return None
    return gate_of(scope, x, division)
