"""Let paged attention multiply bfloat16 numbers, in prefill, where that is most of the work.

1. `kiln::PagedAttention(...)` -> the same with `compute_dtype` (plugins/paged_attention/schema.py): "bfloat16" or
   "float32".

Caches, inputs and outputs keep their types, sums and softmax stay FP32. Left alone: a node that has the type already,
and the exported operator in another domain, whose attributes are not ours: `passes.bind_attention` runs before.
"""

from typing import Literal

import onnx_graphsurgeon as gs

from passes.base import Effect, Outcome
from passes.scopes import scopes
from plugins.paged_attention.schema import COMPUTE_DTYPES, DOMAIN, OP_TYPE

_ATTRIBUTE = "compute_dtype"


class AttentionPrecision:
    """Implements `passes.base.Pass`."""

    name = "attention_precision"
    effect = Effect.PRECISION

    def __init__(self, dtype: Literal["float32", "bfloat16"] = "bfloat16") -> None:
        if dtype not in COMPUTE_DTYPES:
            raise ValueError(f"dtype is {dtype!r}; expected {' or '.join(COMPUTE_DTYPES)}")
        self.value = COMPUTE_DTYPES.index(dtype)

    def call(self, graph: gs.Graph) -> Outcome:
        outcome = Outcome()
        for scope in scopes(graph):
            for node in scope.nodes:
                if (node.op, node.domain) == (OP_TYPE, DOMAIN) and node.attrs.get(_ATTRIBUTE, 0) != self.value:
                    node.attrs[_ATTRIBUTE] = self.value
                    outcome.rewrites += 1
        return outcome
