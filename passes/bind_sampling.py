"""Choose tokens inside a serving graph, and take those of the step before without the host (`plugins.sampling`).

1. graph output `logits` [rows, vocabulary] -> it stays, and `kiln::Sample` makes the graph output `tokens` of it, with
   the graph inputs `temperature`, `top_k`, `top_p`, `min_p`, `seed`, `sample_position` [rows];
2. every reader of graph input `input_ids` -> reads `kiln::FeedTokens(input_ids, feed, previous_tokens)`, with the graph
   inputs `feed` [tokens] and `previous_tokens` [max_rows].

Exact: what was there keeps its bits; inner tensors with one of these names get another. A graph without these two, or
that has the operators already, is left alone.
"""

import numpy as np
import onnx_graphsurgeon as gs

from passes.base import Effect, Outcome
from passes.pattern import consumers
from passes.scopes import scopes
from plugins.paged_attention.schema import LOGITS
from plugins.sampling.schema import FEED_TOKENS, SAMPLE
from plugins.spec import OperatorSpec, TensorSpec

_IDS = FEED_TOKENS.inputs[0].name
_NAMES = {spec.name for operator in (SAMPLE, FEED_TOKENS) for spec in (*operator.inputs[1:], *operator.outputs)}


class BindSampling:
    """Implements `passes.base.Pass`."""

    name = "bind_sampling"
    effect = Effect.EXACT

    def call(self, graph: gs.Graph) -> Outcome:
        outcome = Outcome()
        if any(node.op == SAMPLE.op_type and node.domain == SAMPLE.domain for node in graph.nodes):
            return outcome
        ids = next((tensor for tensor in graph.inputs if tensor.name == _IDS), None)
        logits = next((tensor for tensor in graph.outputs if tensor.name == LOGITS), None)
        if ids is None or logits is None:
            outcome.notes.append(f"no input {_IDS} or no output {LOGITS}: no serving graph")
            return outcome
        if ids.dtype != np.int32 or logits.dtype != np.float32:
            outcome.notes.append(f"{_IDS} is {ids.dtype}, {LOGITS} {logits.dtype}; expected int32 and float32")
            return outcome
        if taken := sorted(_NAMES & {tensor.name for tensor in (*graph.inputs, *graph.outputs)}):
            outcome.notes.append(f"has inputs or outputs called {', '.join(taken)} already")
            return outcome
        for scope in scopes(graph):
            for tensor in scope.tensors().values():
                if tensor.name in _NAMES:
                    tensor.name = f"{tensor.name}/inner"
        readers = consumers(ids)
        fed = _add(graph, FEED_TOKENS, ids)
        for node in readers:
            node.inputs = [fed if tensor is ids else tensor for tensor in node.inputs]
        graph.outputs.append(_add(graph, SAMPLE, logits))
        outcome.rewrites = 2
        return outcome


def _add(graph: gs.Graph, operator: OperatorSpec, first: gs.Tensor) -> gs.Tensor:
    """Add an operator whose other inputs become the graph's; gives its output."""
    others = [_variable(spec) for spec in operator.inputs[1:]]
    made = _variable(operator.outputs[0])
    made.shape = [first.shape[0]]
    node = gs.Node(operator.op_type, made.name, {}, [first, *others], [made], operator.domain)
    graph.inputs.extend(others)
    graph.nodes.insert(0 if operator is FEED_TOKENS else len(graph.nodes), node)
    return made


def _variable(spec: TensorSpec) -> gs.Variable:
    return gs.Variable(spec.name, np.dtype(spec.dtypes[0]), list(spec.shape))
