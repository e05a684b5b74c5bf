"""RMS norms of a 16-bit graph take and give 16 bits, with the residual sum before them in one operator, for CUDA.

`passes.cast_precision` keeps norms in FP32, between two Casts: three passes over memory. x, skip have shape [..., H]:

1. `Cast16(SimplifiedLayerNormalization(Cast32(Add(x, skip)), gamma))` -> `kiln::AddRmsNorm(x, skip, gamma)`, whose
   second output replaces the Add where others read it;
2. `Cast16(SimplifiedLayerNormalization(Cast32(x), gamma))` -> `SimplifiedLayerNormalization(x, gamma)` in 16 bits.

gamma is a constant and is rounded to the type. The operators compute in FP32 inside (plugins/elementwise/schema.py).
All readers of the norm must want 16 bits. Left alone: broadcasting additions, norms over several axes or with further
outputs.
"""

import onnx_graphsurgeon as gs
from onnx import helper

from passes.base import Effect, Outcome
from passes.cast_precision import LowDtype
from passes.fuse_skip_norm import check_residual
from passes.low_form import FP32, LOW_TYPES, as_low, give_low, has_type, is_low, only_low_readers
from passes.pattern import consumers, in_scope, is_output, producer, replace_node, rewrite_nodes, take_outputs
from plugins.elementwise.schema import ADD_RMS_NORM

_NORM = "SimplifiedLayerNormalization"


class BindHalfNorm:
    """Implements `passes.base.Pass`."""

    name = "bind_half_norm"
    effect = Effect.PRECISION

    def __init__(self, dtype: LowDtype = "float16") -> None:
        if dtype not in LOW_TYPES:
            raise ValueError(f"dtype is {dtype!r}; expected {' or '.join(LOW_TYPES)}")
        self._low = LOW_TYPES[dtype]

    def call(self, graph: gs.Graph) -> Outcome:
        outcome = rewrite_nodes(graph, self._narrow, (_NORM,))
        fused = rewrite_nodes(graph, self._fuse, (_NORM,))
        return Outcome(outcome.rewrites + fused.rewrites, notes=[*outcome.notes, *fused.notes])

    def _narrow(self, scope: gs.Graph, norm: gs.Node) -> bool:
        """Rule 2, and the first half of rule 1."""
        x, gamma, low = norm.inputs[0], norm.inputs[1], self._low
        if x.dtype != FP32 or not isinstance(gamma, gs.Constant) or len(norm.outputs) > 1:
            return False
        if not is_low(x, low) or not only_low_readers(scope, norm.outputs[0], low):
            return False
        for index in (0, 1):
            norm.inputs[index] = as_low(scope, norm, index, low)
        give_low(scope, norm, 0, low)
        return True

    def _fuse(self, scope: gs.Graph, norm: gs.Node) -> bool:
        """Rule 1, of a norm in 16 bits."""
        total = norm.inputs[0]
        add = producer(total, "Add")
        if not has_type(total, self._low) or add is None or not in_scope(scope, add):
            return False
        check_residual(norm, add, (helper.np_dtype_to_tensor_dtype(self._low),))
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
