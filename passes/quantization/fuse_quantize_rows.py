"""Kiln's norm and SwiGLU quantise their rows themselves, so that the float result never goes to memory.

1. `q, scale = kiln::QuantizeRows(n)`, `n, sum = kiln::AddRmsNorm(x, skip, gamma)` -> `q, scale, sum =
   kiln::AddRmsNormQuantize(x, skip, gamma)`;
2. `q, scale = kiln::QuantizeRows(kiln::SwiGlu(gate, up))` -> `kiln::SwiGluQuantize(gate, up)`.

The same bits as the two operators. Runs after the passes that make the float ones. Left alone: results that something
else reads in float as well.
"""

import onnx_graphsurgeon as gs

from passes.base import Effect, Outcome
from passes.pattern import in_scope, only_consumer, producer, replace_node, rewrite_nodes, take_outputs
from plugins.elementwise.schema import ADD_RMS_NORM, SWIGLU
from plugins.quant_matmul.schema import ADD_RMS_NORM_QUANTIZE, QUANTIZE_ROWS, SWIGLU_QUANTIZE

_FUSED = {
    (ADD_RMS_NORM.domain, ADD_RMS_NORM.op_type): ADD_RMS_NORM_QUANTIZE,
    (SWIGLU.domain, SWIGLU.op_type): SWIGLU_QUANTIZE,
}


class FuseQuantizeRows:
    """Implements `passes.base.Pass`."""

    name = "fuse_quantize_rows"
    effect = Effect.EXACT

    def call(self, graph: gs.Graph) -> Outcome:
        return rewrite_nodes(graph, _fuse, (QUANTIZE_ROWS.op_type,), QUANTIZE_ROWS.domain)


def _fuse(scope: gs.Graph, rows: gs.Node) -> bool:
    value = rows.inputs[0]
    maker = producer(value)
    spec = None if maker is None else _FUSED.get((maker.domain, maker.op))
    if maker is None or spec is None or not in_scope(scope, maker):
        return False
    attributes = {**maker.attrs, "group_size": int(rows.attrs.get("group_size", 0))}
    if maker.outputs[0] is not value or only_consumer(scope, value) is not rows:
        return False
    inputs, extra = list(maker.inputs), take_outputs(maker)[1:]
    outputs = [*take_outputs(rows), *extra]
    replace_node(scope, maker, gs.Node(spec.op_type, maker.name, attributes, inputs, outputs, domain=spec.domain))
    replace_node(scope, rows)
    return True
