"""Where two graphs of the same model can be cut through alike.

A cut is a gap between two nodes of A at which every tensor that crosses it exists in B, too, with the same name and
type, and at which B falls apart into the same two halves: nothing that B computes below the cut needs a float that B
computes above it, save through the tensors of the cut. So a fused operator of either side is never cut through.
Integer and boolean helpers, such as shapes and positions, may be needed on both sides; each half computes its own.

Knows nothing of what the operators do. Bodies of If, Loop and Scan belong to their node.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import onnx

from passes.onnx_model import load_structure
from pipeline.bisect.types import element_types
from plugins.errors import KilnError

_FLOATS = {
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.BFLOAT16,
    onnx.TensorProto.DOUBLE,
}


@dataclass(frozen=True)
class Cut:
    """`tensors` cross it; `outputs` of the graph are computed above it."""

    tensors: tuple[str, ...]
    outputs: frozenset[str]


@dataclass(frozen=True)
class Span:
    """What lies between two cuts: everything that `targets` need, down from the tensors `upper`."""

    upper: tuple[str, ...]
    targets: tuple[str, ...]


def spans(outputs: Sequence[str], cuts: Sequence[Cut]) -> list[Span]:
    """The parts that cuts leave of a graph with these outputs, one more than there are cuts."""
    found, above = [], Cut((), frozenset())
    for cut in (*cuts, Cut((), frozenset(outputs))):
        found.append(Span(above.tensors, (*cut.tensors, *sorted(cut.outputs - above.outputs))))
        above = cut
    return found


class Side:
    """One of the two models: its structure, and who makes what. Weights stay in their files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.proto = load_structure(path)
        graph = self.proto.graph
        self.nodes: Sequence[onnx.NodeProto] = _sorted(graph, path)
        self.producer: Mapping[str, int] = {
            name: index for index, node in enumerate(self.nodes) for name in node.output if name
        }
        self.initializers = {tensor.name: tensor for tensor in graph.initializer}
        self.inputs = [value.name for value in graph.input if value.name not in self.initializers]
        self.outputs = [value.name for value in graph.output]

    @cached_property
    def types(self) -> Mapping[str, int]:
        """Element types of tensors, where they can be told."""
        return element_types(self.proto)

    def reads(self, index: int) -> list[str]:
        """What a node reads, its bodies included."""
        return node_reads(self.nodes[index])

    def above(self, targets: Iterable[str], stop: Iterable[str] = ()) -> set[int]:
        """The nodes that `targets` depend on, down from the tensors `stop`, whose makers are not asked for."""
        stopped, wanted, found = set(stop), list(targets), set[int]()
        while wanted:
            name = wanted.pop()
            index = self.producer.get(name)
            if name in stopped or index is None or index in found:
                continue
            found.add(index)
            wanted += self.reads(index)
        return found

    def between(self, span: Span) -> list[int]:
        """The nodes of a span, in order."""
        return sorted(self.above(span.targets, span.upper))

    def makes_floats(self, index: int) -> bool:
        """Also where the type cannot be told."""
        return any(self.types.get(name, onnx.TensorProto.FLOAT) in _FLOATS for name in self.nodes[index].output if name)


def node_reads(node: onnx.NodeProto) -> list[str]:
    """Inputs of a node and whatever its bodies read of the outside."""
    names = [name for name in node.input if name]
    for attribute in node.attribute:
        for body in [attribute.g] if attribute.HasField("g") else list(attribute.graphs):
            own = {value.name for value in body.input} | {tensor.name for tensor in body.initializer}
            own |= {name for inner in body.node for name in inner.output}
            outer = [name for inner in body.node for name in node_reads(inner)]
            names += [name for name in (*outer, *(value.name for value in body.output)) if name not in own]
    return names


def common_cuts(a: Side, b: Side) -> list[Cut]:
    """All cuts in the order of A's nodes. Raises KilnError for models whose inputs or outputs are not alike."""
    for what, of_a, of_b in (("inputs", a.inputs, b.inputs), ("outputs", a.outputs, b.outputs)):
        if of_a != of_b:
            raise KilnError(
                f"{a.path} has the {what} {', '.join(of_a)}, {b.path} has {', '.join(of_b)}; "
                "give two graphs of one model"
            )
    cuts: list[Cut] = []
    for index, live in _live_sets(a):
        done = frozenset(name for name in a.outputs if a.producer.get(name, len(a.nodes)) <= index)
        cut = Cut(tuple(sorted(live)), done)
        alike = all(a.types.get(name) == b.types.get(name, a.types.get(name)) for name in live)
        if live and alike and _cuts_through(a, cut) and _cuts_through(b, cut) and (not cuts or cuts[-1] != cut):
            cuts.append(cut)
    return cuts


def _live_sets(side: Side) -> Iterable[tuple[int, set[str]]]:
    """After each node but the last: the floats made so far that are needed later."""
    last_use: dict[str, int] = {}
    for index in range(len(side.nodes)):
        for name in side.reads(index):
            last_use[name] = index
    live: set[str] = set()
    for index, node in enumerate(side.nodes[:-1]):
        live |= {name for name in node.output if last_use.get(name, -1) > index and side.makes_floats(index)}
        live = {name for name in live if last_use[name] > index}
        yield index, set(live)


def _cuts_through(side: Side, cut: Cut) -> bool:
    if not all(name in side.producer for name in cut.tensors):
        return False
    lower = side.above((name for name in side.outputs if name not in cut.outputs), cut.tensors)
    upper = side.above((*cut.tensors, *cut.outputs))
    return bool(lower) and not any(side.makes_floats(index) for index in lower & upper)


def _sorted(graph: onnx.GraphProto, path: Path) -> list[onnx.NodeProto]:
    """ONNX demands topological order; a file that breaks it cannot be cut by position."""
    known = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer} | {""}
    for node in graph.node:
        for name in node_reads(node):
            if name not in known:
                raise KilnError(
                    f"{path}: node {node.name or node.op_type} reads '{name}' before it is made; sort the graph"
                )
        known.update(node.output)
    return list(graph.node)
