"""A residual sum and the RMS norm of it become Kiln's own CPU operator. x and skip have shape [..., H].

1. `n = SimplifiedLayerNormalization(Add(x, skip), gamma [H])` -> `n, sum = kiln::AddRmsNorm(x, skip, gamma)`; `sum`
   replaces the Add where others read it, else it is left out.

Both operands of the Add must be known to have one shape, in float32: dimensions are equal if they are the same number
or carry the same symbol. gamma is a constant or comes from outside; a node might compute it from the sum.

The sum keeps its bits; the norm's own sum is taken in another order and in float64. Left alone: broadcasting additions;
norms over several axes or with further outputs. ONNX Runtime's own operator (`passes.fuse_skip_norm`) is slower on a
CPU than the two nodes: `scripts/bench_elementwise.py` compares them.
"""

import onnx_graphsurgeon as gs
from onnx import TensorProto

from passes.base import Effect, Outcome
from passes.fuse_skip_norm import check_residual
from passes.pattern import consumers, in_scope, is_output, producer, replace_node, rewrite_nodes, take_outputs
from plugins.elementwise.schema import ADD_RMS_NORM


class BindAddRmsNorm:
    """Implements `passes.base.Pass`."""

    name = "bind_add_rms_norm"
    effect = Effect.REORDERS

    def call(self, graph: gs.Graph) -> Outcome:
        return rewrite_nodes(graph, _fuse, ("SimplifiedLayerNormalization",))


def _fuse(scope: gs.Graph, norm: gs.Node) -> bool:
    return fuse_residual(scope, norm, TensorProto.FLOAT)


def fuse_residual(scope: gs.Graph, norm: gs.Node, element: int) -> bool:
    """Rule 1 for tensors of one of ONNX's types; False where nothing is added. Raises Refusal, which says why not."""
    total = norm.inputs[0]
    add = producer(total, "Add")
    if add is None or not in_scope(scope, add):
        return False
    check_residual(norm, add, (element,))
    shared = len(consumers(total)) > 1 or is_output(scope, total)
    inputs = [*add.inputs, norm.inputs[1]]
    outputs = take_outputs(norm)[:1]
    take_outputs(add)
    outputs += [total] if shared else []
    attributes = {"epsilon": float(norm.attrs.get("epsilon", 1e-5))}
    fused = gs.Node(ADD_RMS_NORM.op_type, norm.name, attributes, inputs, outputs, domain=ADD_RMS_NORM.domain)
    replace_node(scope, norm, fused)
    replace_node(scope, add)
    return True
