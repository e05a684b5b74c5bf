"""Fuse GELU in its spellings into one operator, and a bias in front of it too.

Formulas of Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016); x has any shape:

1. `0.5 x (1 + Erf(x / sqrt 2))` -> Gelu, for every order of factors and summands, multiplied out or not;
2. `0.5 x (1 + Tanh(sqrt(2/pi) (x + 0.044715 x^3)))` -> tanh Gelu, likewise, the cube as Pow or as products;
3. `x Sigmoid(sqrt(8/pi) (x + 0.044715 x^3))` -> tanh Gelu, for 1 + tanh z = 2 sigmoid(2 z);
4. `x Sigmoid(1.702 x)` -> `com.microsoft::QuickGelu(x, alpha)` with the graph's own factor; target "contrib" only;
5. `Gelu(x)` of opset 20 -> the target's operator;
6. `Gelu(Add(x, bias [n]))`, x with n as its last dimension, the sum read by nothing else
   -> `com.microsoft::FastGelu(x, bias)` of a tanh Gelu, `com.microsoft::BiasGelu(x, bias)` of the other if asked for:
   ONNX Runtime 1.32's CPU kernel of the former is a seventh faster than Add and FastGelu, that of the latter is up to
   an eighth slower than Add and Gelu ([512, 1536], one thread). Target "contrib" only.

For target "contrib" Gelu is `com.microsoft::Gelu` and tanh Gelu `com.microsoft::FastGelu`, for which ONNX Runtime's CPU
provider has kernels; for "standard" both are Gelu of opset 20, which tells them apart by `approximate`. Constants may
be off by what their dtype and four written digits explain.

Left alone: an intermediate result after Erf, Tanh or Sigmoid that is also read elsewhere; a bias of another length than
the last dimension, for the kernels do not broadcast it; casts between the parts.

Same formula; the kernels multiply in another order and may approximate erf and tanh differently.
"""

import math
from typing import Literal

import onnx_graphsurgeon as gs

from passes.base import Effect, Outcome, Refusal
from passes.graph import tidy
from passes.pattern import (
    CONTRIB,
    constant_operand,
    only_consumer,
    producer,
    rewrite_nodes,
    static_dim,
    substitute,
)
from passes.polynomial import Polynomial, agrees, polynomial_of, root_of, tolerance_of, variables_of

Target = Literal["contrib", "standard"]
Bias = Literal["none", "tanh", "all"]
_CUBIC = 0.044715
_TANH_SLOPE = math.sqrt(2 / math.pi)
_ERF_ARGUMENT: Polynomial = {(1,): math.sqrt(0.5)}
_TANH_ARGUMENT: Polynomial = {(1,): _TANH_SLOPE, (3,): _TANH_SLOPE * _CUBIC}
_SIGMOID_ARGUMENT: Polynomial = {(1,): 2 * _TANH_SLOPE, (3,): 2 * _TANH_SLOPE * _CUBIC}
_QUICK_ARGUMENT: Polynomial = {(1,): 1.702}
_HALF_OF_BOTH: Polynomial = {(1, 0): 0.5, (1, 1): 0.5}
_PRODUCT: Polynomial = {(1, 1): 1.0}

_FORMS = {
    "Erf": ((_ERF_ARGUMENT, _HALF_OF_BOTH, "Gelu"),),
    "Tanh": ((_TANH_ARGUMENT, _HALF_OF_BOTH, "FastGelu"),),
    "Sigmoid": ((_SIGMOID_ARGUMENT, _PRODUCT, "FastGelu"), (_QUICK_ARGUMENT, _PRODUCT, "QuickGelu")),
}
"""By the function f at their core: the argument as a polynomial in x, the whole as one in (x, f), and the operator."""
_TAKES_BIAS: dict[Bias, tuple[str, ...]] = {"none": (), "tanh": ("FastGelu",), "all": ("FastGelu", "Gelu")}
_STANDARD_SINCE = 20


class FuseGelu:
    """Implements `passes.base.Pass`. `target`: whose operators it makes. `bias`: which GELU takes in a bias."""

    name = "fuse_gelu"
    effect = Effect.REORDERS

    def __init__(self, target: Target = "contrib", bias: Bias = "tanh") -> None:
        self.target = target
        self.bias = bias

    def call(self, graph: gs.Graph) -> Outcome:
        outcome = rewrite_nodes(graph, self._fuse_spelling, _FORMS)
        if self.target == "contrib":
            outcome.rewrites += rewrite_nodes(graph, self._fuse_standard, ("Gelu",)).rewrites
        if self.target == "contrib" and self.bias != "none":
            tidy(graph)  # what is left of a spelling reads x as well, and would look like another user of it
            outcome.rewrites += rewrite_nodes(graph, _fuse_bias, _TAKES_BIAS[self.bias], CONTRIB).rewrites
        return outcome

    def _fuse_spelling(self, scope: gs.Graph, node: gs.Node) -> bool:
        for x in variables_of(node.inputs[0]):
            argument = polynomial_of(node.inputs[0], (x,))
            for wanted, whole, op in _FORMS[node.op]:
                if not agrees(argument, wanted, tolerance_of(x)):
                    continue
                root = root_of(scope, (x, node.outputs[0]), whole, tolerance_of(x))
                if root is not None and argument is not None:
                    return self._replace(scope, root, op, x, argument)
        return False

    def _replace(self, scope: gs.Graph, root: gs.Node, op: str, x: gs.Tensor, argument: Polynomial) -> bool:
        if self.target == "contrib":
            attrs = {"alpha": argument[(1,)]} if op == "QuickGelu" else {}
            substitute(scope, root, op, x, domain=CONTRIB, **attrs)
            return True
        if op == "QuickGelu":
            return False
        if scope.opset < _STANDARD_SINCE:
            raise Refusal(f"it ends a GELU, but the graph has opset {scope.opset}; Gelu needs {_STANDARD_SINCE}")
        substitute(scope, root, "Gelu", x, approximate="tanh" if op == "FastGelu" else "none")
        return True

    def _fuse_standard(self, scope: gs.Graph, node: gs.Node) -> bool:
        approximate = node.attrs.get("approximate", "none")
        if approximate not in ("none", "tanh"):
            return False
        substitute(scope, node, "FastGelu" if approximate == "tanh" else "Gelu", node.inputs[0], domain=CONTRIB)
        return True


def _fuse_bias(scope: gs.Graph, node: gs.Node) -> bool:
    add = producer(node.inputs[0], "Add")
    operands = constant_operand(add) if add is not None else None
    if add is None or operands is None or len(node.inputs) > 1 or only_consumer(scope, add.outputs[0]) is None:
        return False
    x, bias = operands
    if len(bias.shape) != 1 or static_dim(x, -1) != bias.shape[0]:
        return False
    substitute(scope, node, "FastGelu" if node.op == "FastGelu" else "BiasGelu", x, bias, domain=CONTRIB)
    return True
