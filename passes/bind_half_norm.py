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
from passes.fuse_cpu_norm import fuse_residual
from passes.low_form import as_low, give_low, has_type, is_low, low_type, only_low_readers
from passes.pattern import rewrite_nodes
from passes.precision_islands import FP32

_NORM = "SimplifiedLayerNormalization"


class BindHalfNorm:
    """Implements `passes.base.Pass`."""

    name = "bind_half_norm"
    effect = Effect.PRECISION

    def __init__(self, dtype: LowDtype = "float16") -> None:
        self._low = low_type(dtype)

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
        if not has_type(norm.inputs[0], self._low):
            return False
        return fuse_residual(scope, norm, helper.np_dtype_to_tensor_dtype(self._low))
