"""The gate of SwiGLU and its product with the second projection become Kiln's own CPU operator.

gate and up have one shape:

1. `com.microsoft::QuickGelu(gate, alpha) * up` -> `kiln::SwiGlu(gate, up, alpha)`.

Runs after `passes.fuse_swiglu`, which makes QuickGelu of every spelling. Left alone: a QuickGelu that something else
reads as well; products that broadcast; 16-bit types, which the operator lacks.

Same formula, gate * sigmoid(alpha * gate) * up; the sigmoid has another approximation.
"""

import onnx_graphsurgeon as gs
from onnx import TensorProto

from passes.base import Effect, Outcome, Refusal
from passes.norm_pattern import type_of
from passes.pattern import CONTRIB, in_scope, only_consumer, other_input, rewrite_nodes, same_shape, substitute
from plugins.elementwise.schema import SWIGLU


class BindSwiglu:
    """Implements `passes.base.Pass`."""

    name = "bind_swiglu"
    effect = Effect.REORDERS

    def call(self, graph: gs.Graph) -> Outcome:
        return rewrite_nodes(graph, _fuse, ("QuickGelu",), domain=CONTRIB)


def _fuse(scope: gs.Graph, activation: gs.Node) -> bool:
    gate, activated = activation.inputs[0], activation.outputs[0]
    product = only_consumer(scope, activated, "Mul")
    up = other_input(product, activated) if product is not None else None
    if product is None or up is None or not in_scope(scope, product):
        return False
    if not same_shape(gate, up):
        raise Refusal(f"multiplies shapes {gate.shape} and {up.shape}, not known to be the same")
    if any(type_of(tensor) != TensorProto.FLOAT for tensor in (gate, up)):
        raise Refusal(f"is on {gate.dtype} and {up.dtype}; expected float32")
    alpha = float(activation.attrs.get("alpha", 1.702))  # the default of com.microsoft::QuickGelu
    substitute(scope, product, SWIGLU.op_type, gate, up, domain=SWIGLU.domain, alpha=alpha)
    return True
