"""More layers for a serving graph: repeats those between its last attentions, each with initialisers of its own.

Layers are found by what depends on what, not by names, so that any graph of the passes will do whose layers are alike
but for the first and the last. The added initialisers lie where those they repeat lie in the file of weights: on disk
nothing grows, while an engine that loads the graph holds each layer's weights once more and reads them in every step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from passes.onnx_model import DECODER_METADATA, DecoderSpec
from plugins.errors import KilnError
from plugins.paged_attention.schema import OP_TYPE, KvSpec

if TYPE_CHECKING:
    import onnx

FEWEST = 3
"""Layers that a graph must have: a first one, a last one, and one more to compare that with."""


def deepen(model: "onnx.ModelProto", decoder: DecoderSpec, layers: int) -> DecoderSpec:
    """Bring a graph to `layers` layers, in place; gives its new description, which its metadata then hold.

    Raises KilnError for a graph with too few layers, or whose last two differ.
    """
    graph, have = model.graph, len(decoder.kv.layers)
    attentions = [place for place, node in enumerate(graph.node) if node.op_type == OP_TYPE]
    if have < FEWEST or len(attentions) != have or layers < have:
        raise KilnError(
            f"the graph has {have} layers with {len(attentions)} attentions and is to have {layers}; expected at least "
            f"{FEWEST}, an attention each, and no fewer afterwards"
        )
    needed = [_ancestors(graph.node, place) for place in attentions[-3:]]
    before, last = ([graph.node[place] for place in sorted(needed[i + 1] - needed[i])] for i in range(2))
    block = _block(before, last, {tensor.name for tensor in graph.initializer}, decoder.kv)
    deeper = replace(
        decoder, kv=replace(decoder.kv, layers=(*decoder.kv.layers, *decoder.kv.layers[-1:] * (layers - have)))
    )
    first = [node for place, node in enumerate(graph.node) if place in needed[-1]]
    rest = [node for place, node in enumerate(graph.node) if place not in needed[-1]]
    added = [block.repeated(node, layer, deeper.kv) for layer in range(have, layers) for node in block.nodes]
    nodes = [*first, *added, *(_renamed(node, block.ends(layers)) for node in rest)]
    _add_weights(graph, block, range(have, layers))
    _add_caches(graph, deeper.kv, have)
    del graph.node[:]
    graph.node.extend(nodes)
    for entry in model.metadata_props:
        if entry.key == DECODER_METADATA:
            entry.value = deeper.to_json()
    return deeper


@dataclass(frozen=True)
class _Block:
    """What is repeated: the nodes after the second-last attention that the last one, of layer `number`, needs.

    outputs  names that the nodes make, the caches' apart
    weights  initialisers of this layer alone
    carried  what the nodes take from the layer before, and what they make of it for the next one
    """

    number: int
    nodes: "Sequence[onnx.NodeProto]"
    outputs: frozenset[str]
    weights: frozenset[str]
    carried: dict[str, str]

    def name(self, name: str, layer: int) -> str:
        """Of an output or a weight in a later layer."""
        return name if layer == self.number else f"{name}/{layer}"

    def repeated(self, node: "onnx.NodeProto", layer: int, kv: KvSpec) -> "onnx.NodeProto":
        names = {name: self.name(name, layer) for name in self.outputs | self.weights}
        names |= {taken: self.name(made, layer - 1) for taken, made in self.carried.items()}
        names |= _cache_names(kv, self.number, layer)
        copy = _renamed(node, names)
        copy.name = self.name(node.name, layer)
        return copy

    def ends(self, layers: int) -> dict[str, str]:
        """What stands in for this layer's outputs after the last of `layers`."""
        return {name: self.name(name, layers - 1) for name in self.outputs}


def _ancestors(nodes: "Sequence[onnx.NodeProto]", place: int) -> set[int]:
    """Places of a node and of all that it depends on."""
    makers = {name: place for place, node in enumerate(nodes) for name in node.output if name}
    found, open_ = {place}, [place]
    while open_:
        new = {makers[name] for name in nodes[open_.pop()].input if name in makers} - found
        found |= new
        open_ += new
    return found


def _block(
    before: "Sequence[onnx.NodeProto]", last: "Sequence[onnx.NodeProto]", initializers: set[str], kv: KvSpec
) -> _Block:
    """Compare the nodes of the last two layers. Raises KilnError for different ones."""
    number = len(kv.layers) - 1
    if list(map(_kind, before)) != list(map(_kind, last)):
        kinds = [", ".join(node.op_type for node in nodes) for nodes in (before, last)]
        raise KilnError(
            f"the last layers of the graph differ: {kinds[0]}; then {kinds[1]}; expected the same operators"
        )
    onwards = {
        old: new
        for one, other in zip(before, last, strict=True)
        for old, new in zip((*one.input, *one.output), (*other.input, *other.output), strict=True)
        if old != new
    }
    caches = _cache_names(kv, number, number)
    outputs = frozenset(name for node in last for name in node.output if name) - set(caches)
    weights = frozenset(onwards.values()) & initializers
    taken = {name for node in last for name in node.input} & set(onwards.values())
    carried = {name: onwards[name] for name in taken - outputs - weights - set(caches) if name in onwards}
    if strange := sorted(taken - outputs - weights - set(caches) - set(carried)):
        raise KilnError(f"the last layer takes {', '.join(strange)} from further back than the layer before it")
    return _Block(number, last, outputs, weights, carried)


def _kind(node: "onnx.NodeProto") -> tuple[object, ...]:
    """What must be the same of two nodes: all but names."""
    attributes = sorted(attribute.SerializeToString(deterministic=True) for attribute in node.attribute)
    return node.domain, node.op_type, len(node.input), len(node.output), attributes


def _cache_names(kv: KvSpec, layer: int, other: int) -> dict[str, str]:
    """Names of one layer's cache, inputs and outputs, to those of another one's."""
    pairs = zip(kv.tensors(layer), kv.tensors(other), strict=True)
    return {name: to for one, two in pairs for name, to in ((one.name, two.name), (one.output_name, two.output_name))}


def _renamed(node: "onnx.NodeProto", names: dict[str, str]) -> "onnx.NodeProto":
    import onnx

    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.input[:] = [names.get(name, name) for name in node.input]
    copy.output[:] = [names.get(name, name) for name in node.output]
    return copy


def _add_weights(graph: "onnx.GraphProto", block: _Block, layers: range) -> None:
    for tensor in [tensor for tensor in graph.initializer if tensor.name in block.weights]:
        for layer in layers:
            copy = graph.initializer.add()
            copy.CopyFrom(tensor)
            copy.name = block.name(tensor.name, layer)


def _add_caches(graph: "onnx.GraphProto", kv: KvSpec, have: int) -> None:
    """Inputs and outputs of the added layers' caches, in the order of a graph that was exported with them."""
    for values in (graph.input, graph.output):
        known = {value.name: value for value in values}
        for layer in range(have, len(kv.layers)):
            for name, to in _cache_names(kv, have - 1, layer).items():
                if name in known:
                    copy = values.add()
                    copy.CopyFrom(known[name])
                    copy.name = to
