"""Attend in 16 bits, over a cache of 16 bits: the form that the CUDA operator has (plugins/paged_attention/schema.py).

1. `kiln::PagedAttention` on FP32 query, key and value -> the same in 16 bits, and so is its output; tables of cos and
   sin stay FP32, as do sums and softmax inside.
2. The graph's caches become 16-bit inputs and outputs, and the decoder description in the model's metadata follows.

All layers change or none: the graph is left alone, with a note, where anything but one bound attention uses a layer's
cache (`passes.bind_attention` runs before), or the cache is INT8. Runs after `passes.cast_precision`, whose Casts
around the operator disappear.
"""

from dataclasses import replace

import onnx_graphsurgeon as gs

from passes.base import Effect, Outcome, Refusal
from passes.cast_precision import LowDtype
from passes.low_form import as_low, give_low, has_type, low_type
from passes.onnx_model import DECODER_METADATA, DecoderSpec
from passes.precision_islands import FP32
from passes.quantize_cache import attention_over
from passes.scopes import scopes
from plugins.paged_attention.schema import INPUTS, OUTPUTS

_INPUTS = [spec.name for spec in INPUTS]
_OUTPUTS = [spec.name for spec in OUTPUTS]
_OPERANDS = [_INPUTS.index(name) for name in ("query", "key", "value")]


class CastAttention:
    """Implements `passes.base.Pass`. `decoder`: the graph's own; without one there is no cache."""

    name = "cast_attention"
    effect = Effect.PRECISION

    def __init__(self, decoder: DecoderSpec | None = None, dtype: LowDtype = "float16") -> None:
        self.decoder, self.dtype = decoder, dtype
        self._low = low_type(dtype)

    def call(self, graph: gs.Graph) -> Outcome:
        if self.decoder is None:
            return Outcome(notes=["the model has no KV cache"])
        kv = self.decoder.kv
        if "int8" in kv.dtypes:
            return Outcome(notes=["the cache is INT8 already"])
        try:
            nodes = [attention_over(graph, kv.tensors(layer)) for layer in range(len(kv.layers))]
        except Refusal as reason:
            return Outcome(notes=[str(reason)])
        outcome = Outcome(rewrites=sum(self._cast(graph, node) for node in nodes))
        if outcome.rewrites:
            decoder = replace(self.decoder, kv=replace(kv, dtype=self.dtype, value_dtype=None))
            outcome.metadata[DECODER_METADATA] = decoder.to_json()
        return outcome

    def _cast(self, graph: gs.Graph, node: gs.Node) -> bool:
        scope = next(scope for scope in scopes(graph) if any(own is node for own in scope.nodes))
        changed = False
        for index in _OPERANDS:
            if index < len(node.inputs) and not node.inputs[index].is_empty() and node.inputs[index].dtype == FP32:
                node.inputs[index] = as_low(scope, node, index, self._low)
                changed = True
        if node.outputs[0].dtype is None:  # nobody says: it has the query's type
            node.outputs[0].dtype = FP32 if changed else self._low
        if node.outputs[0].dtype == FP32:
            give_low(scope, node, 0, self._low)
            changed = True
        for operand in ("key_cache", "value_cache"):
            for tensor in (node.inputs[_INPUTS.index(operand)], node.outputs[_OUTPUTS.index(f"{operand}_out")]):
                changed |= not has_type(tensor, self._low)
                tensor.dtype = self._low
        return changed
