"""Keep keys, or keys and values, as INT8 in the KV cache of a serving graph.

1. `kiln::PagedAttention` over the graph inputs key_cache.i and value_cache.i -> the same over int8 caches; `k_scale`
   and `v_scale` are new graph inputs key_scale.i and value_scale.i, updated as key_scale_out.i and value_scale_out.i.
2. The decoder description in the model's metadata follows, and its `max_context` is lowered to the limit, where one is
   given: accuracy was shown up to there only, and the engine refuses longer requests.

The operator makes a scale for each token and KV head when it stores a row (plugins/paged_attention/schema.py), so
nothing is calibrated. All layers change or none: the graph is left alone, with a note, where anything but one bound
attention of the main graph uses a layer's cache (`passes.bind_attention` runs before), and where it is int8 already.
"""

from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs

from passes.base import Effect, Outcome, Refusal
from passes.low_form import has_type
from passes.onnx_model import DECODER_METADATA, DecoderSpec
from passes.scopes import label
from plugins.paged_attention.schema import DOMAIN, INPUTS, OP_TYPE, OUTPUTS, CacheTensor

_INPUTS = [spec.name for spec in INPUTS]
_OUTPUTS = [spec.name for spec in OUTPUTS]


class QuantizeCache:
    """Implements `passes.base.Pass`.

    `decoder`: the graph's own; without one there is no cache. `values` False quantises keys only. `max_context`: tokens
    up to which accuracy was shown, None for as many as before.
    """

    name = "quantize_cache"
    effect = Effect.QUANTISES

    def __init__(self, decoder: DecoderSpec | None = None, values: bool = True, max_context: int | None = None) -> None:
        if max_context is not None and max_context < 1:
            raise ValueError(f"max_context is {max_context}; expected at least 1 token")
        self.decoder, self.values, self.max_context = decoder, values, max_context

    def call(self, graph: gs.Graph) -> Outcome:
        if self.decoder is None:
            return Outcome(notes=["the model has no KV cache"])
        kv = self.decoder.kv
        quantised = replace(kv, dtype="int8", value_dtype=None if self.values else kv.dtypes[1])
        try:
            nodes = [attention_over(graph, kv.tensors(layer)) for layer in range(len(kv.layers))]
        except Refusal as reason:
            return Outcome(notes=[str(reason)])
        outcome = Outcome()
        for layer, node in enumerate(nodes):
            for tensor in quantised.tensors(layer):
                if tensor not in kv.tensors(layer):
                    _bind(graph, node, tensor)
                    outcome.rewrites += 1
        limit = min(self.decoder.max_context, self.max_context or self.decoder.max_context)
        decoder = replace(self.decoder, kv=quantised, max_context=limit)
        outcome.metadata[DECODER_METADATA] = decoder.to_json()
        return outcome


def attention_over(graph: gs.Graph, tensors: tuple[CacheTensor, ...]) -> gs.Node:
    """The one node that uses a layer's cache. Raises Refusal where that is not a bound attention."""
    inputs, outputs = ({tensor.name: tensor for tensor in io} for io in (graph.inputs, graph.outputs))
    nodes: list[gs.Node] = []
    for tensor in tensors:
        given, result = inputs.get(tensor.name), outputs.get(tensor.output_name)
        if given is None or result is None:
            raise Refusal(f"the graph lacks {tensor.name} or {tensor.output_name}")
        if not has_type(given, np.dtype(tensor.dtype)):
            raise Refusal(f"{tensor.name} is {given.dtype}; expected {tensor.dtype}")
        users = [node for node in (*given.outputs, *result.inputs, *result.outputs) if node not in nodes]
        nodes += [node for index, node in enumerate(users) if node not in users[:index]]
    if len(nodes) != 1 or (nodes[0].op, nodes[0].domain) != (OP_TYPE, DOMAIN) or nodes[0] not in graph.nodes:
        found = ", ".join(f"{node.op} '{label(node)}'" for node in nodes) or "nothing"
        raise Refusal(f"{tensors[0].name} and its layer's cache are used by {found}; expected one {DOMAIN}::{OP_TYPE}")
    return nodes[0]


def _bind(graph: gs.Graph, node: gs.Node, tensor: CacheTensor) -> None:
    """Give a cache its new type, or the node a new operand: scales have the cache's shape without the head's size."""
    slots = [(node.inputs, _INPUTS.index(tensor.operand)), (node.outputs, _OUTPUTS.index(f"{tensor.operand}_out"))]
    shape = list(node.inputs[_INPUTS.index("key_cache")].shape[:2]) + list(tensor.row_shape)
    for (operands, index), name, io in zip(
        slots, (tensor.name, tensor.output_name), (graph.inputs, graph.outputs), strict=True
    ):
        if index < len(operands) and not operands[index].is_empty():
            operands[index].dtype = np.dtype(tensor.dtype)
            continue
        while len(operands) <= index:
            operands.append(gs.Variable.empty())
        operands[index] = gs.Variable(name, np.dtype(tensor.dtype), shape)
        io.append(operands[index])
