"""Finds what can be removed from a graph as a whole: channels, attention heads, residual branches.

A group is a set of units of which any may go without the rest of the graph being touched: it knows how heavy its
units are and how to remove them. Kinds:

- `ffn`: channels between products of matrices, through biases, activations and gates;
- `conv`: channels between convolutions (and what reads them), through batch norms, activations, depthwise
  convolutions, pools, squeeze-and-excite and residual additions, whose two sides then shrink together;
- `heads`: attention heads, with their columns of query, key and value and their rows of the output projection; with
  shared key/value heads a unit is one of those with all its query heads;
- `layers`: residual branches of one graph, in order; removing one turns Add(x, f(x)) into x. A transformer's layer has
  two, attention and feed-forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from passes.base import Refusal
from passes.channel_rules import RULES, shape_entry
from passes.channel_trace import Coarser, Count, Cut, Span, Trace
from passes.pattern import (
    insert_before,
    is_op,
    is_output,
    new_constant,
    new_variable,
    producer,
    rank_of,
    replace_uses,
    values_of,
)
from passes.scopes import label, scopes

WEIGHTED = ("MatMul", "Gemm", "Conv", "ConvTranspose")
"""Operators whose operand 1, where constant, is a weight: groups start there, and only these weights are weighed."""


class Group(Protocol):
    """Units that may be removed. `name` is that of the kind and of the first node that makes the units."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def units(self) -> int: ...

    def norms(self) -> NDArray:
        """Per unit the sum of the L2 norms of its slices of weights; float64 [units]."""
        ...

    def keep(self, kept: Sequence[int]) -> None:
        """Remove all units but `kept`, which are sorted. The group is of no use afterwards."""
        ...


@dataclass(frozen=True)
class ChannelGroup:
    """Implements `Group` for channels and heads."""

    name: str
    kind: str
    units: int
    scope: gs.Graph
    cuts: tuple[Cut, ...]
    counts: tuple[Count, ...]
    tensors: tuple[tuple[gs.Tensor, Span], ...]
    """The tensors between the weights, whose shapes shrink."""

    def norms(self) -> NDArray:
        total = np.zeros(self.units)
        for cut in self.cuts:
            if cut.index != 1 or not is_op(cut.node, *WEIGHTED):
                continue
            values = values_of(cut.node.inputs[1])
            assert values is not None
            rows = np.moveaxis(values, cut.span.axis, 0).reshape(cut.span.parts, self.units, cut.span.width, -1)
            total += np.sqrt(np.square(rows, dtype=np.float64).sum(axis=(0, 2, 3)))
        return total

    def keep(self, kept: Sequence[int]) -> None:
        chosen = list(kept)
        for cut in self.cuts:
            _cut(cut, cut.span.entries(self.units, chosen))
        for count in self.counts:
            _set_count(self.scope, count, count.per_unit * len(chosen))
        for tensor, span in self.tensors:
            if tensor.shape is not None:
                shape = list(tensor.shape)
                shape[span.axis] = span.parts * len(chosen) * span.width
                tensor.shape = shape


@dataclass(frozen=True)
class Branch:
    """A residual branch: `addition` is Add(skip, f(skip)), `nodes` compute f."""

    scope: gs.Graph
    addition: gs.Node
    skip: gs.Tensor
    nodes: tuple[gs.Node, ...]


@dataclass(frozen=True)
class LayerGroup:
    """Implements `Group` for the residual branches of one graph."""

    name: str
    branches: tuple[Branch, ...]
    kind: str = "layers"

    @property
    def units(self) -> int:
        return len(self.branches)

    def norms(self) -> NDArray:
        return np.array([sum(map(_norm, branch.nodes)) for branch in self.branches])

    def keep(self, kept: Sequence[int]) -> None:
        # The last first: what an earlier branch hands on is then still what a later one skips from.
        for index in reversed([index for index in range(self.units) if index not in kept]):
            branch = self.branches[index]
            replace_uses(branch.scope, branch.addition.outputs[0], branch.skip)


def find_groups(graph: gs.Graph) -> tuple[list[Group], dict[str, str]]:
    """The groups of all scopes, and for each other weight's node the reason why its channels cannot be removed."""
    found: list[Group] = []
    reasons: dict[str, str] = {}
    for scope in scopes(graph):
        done: set[int] = set()
        for node in scope.nodes:
            if not is_op(node, *WEIGHTED) or not isinstance(node.inputs[1], gs.Constant) or id(node) in done:
                continue
            if rank_of(node.inputs[1]) != 2 and node.op in ("MatMul", "Gemm"):
                continue  # a batch of matrices
            try:
                trace = _trace(scope, node)
            except Refusal as refusal:
                reasons[label(node)] = str(refusal)
                continue
            done.update(id(maker) for tensor, _ in trace.spans.values() for maker in tensor.inputs)
            if trace.units > 1:
                found.append(_group(scope, node, trace))
        branches, refused = _branches(scope)
        reasons.update(refused)
        if branches:
            found.append(LayerGroup("layers" if scope is graph else f"layers:{scope.name}", tuple(branches)))
    return found, reasons


def _trace(scope: gs.Graph, node: gs.Node) -> Trace:
    """Follow a node's output channels, with as many units as possible."""
    axis = -1 if node.op in ("MatMul", "Gemm") else 1 - (rank_of(node.inputs[1]) or 0)
    weight = node.inputs[1]
    place = {"MatMul": -1, "Gemm": 0 if node.attrs.get("transB", 0) else 1, "Conv": 0, "ConvTranspose": 1}[node.op]
    units, parts = int(weight.shape[place]), 1
    while True:
        trace = Trace(scope, units)
        try:
            width = int(weight.shape[place]) // (units * parts)
            trace.carry(node, node.outputs[0], Span(axis, parts, width))
            trace.run(RULES)
            return trace
        except Coarser as coarser:
            units, parts = coarser.units, parts * coarser.parts


def _group(scope: gs.Graph, node: gs.Node, trace: Trace) -> ChannelGroup:
    convolves = any(is_op(source, "Conv", "ConvTranspose") for source in trace.sources)
    kind = "heads" if trace.is_heads else "conv" if convolves else "ffn"
    return ChannelGroup(
        f"{kind}:{label(node)}",
        kind,
        trace.units,
        scope,
        tuple(trace.cuts.values()),
        tuple(trace.counts.values()),
        tuple(trace.spans.values()),
    )


def _cut(cut: Cut, entries: NDArray) -> None:
    """Take `entries` of a constant. It keeps its name if no other node reads it."""
    old = cut.node.inputs[cut.index]
    values = values_of(old)
    assert values is not None
    values = np.ascontiguousarray(np.take(values, entries, axis=cut.span.axis))
    alone = len(old.outputs) == 1
    name = old.name if alone else f"{cut.node.outputs[0].name}/pruned{cut.index}"
    cut.node.inputs[cut.index] = gs.Constant(name, values)


def _set_count(scope: gs.Graph, count: Count, value: int) -> None:
    node = count.node
    if count.attribute is not None:
        node.attrs[count.attribute] = value
        return
    if count.position is None:
        sizes = values_of(node.inputs[1])
        assert sizes is not None
        node.inputs[1] = new_constant(node.outputs[0], "sizes", np.full_like(sizes, value))
        return
    entry = shape_entry(node, count.position)
    assert entry is not None
    index, place, _ = entry
    concat = None if index is None else producer(node.inputs[1], "Concat")
    values = np.array(values_of(node.inputs[1] if concat is None else concat.inputs[index]))
    values[place] = value
    constant = new_constant(node.outputs[0], "shape", values)
    if concat is None:
        node.inputs[1] = constant
        return
    made = new_variable(node.outputs[0], "sizes", node.inputs[1].shape, node.inputs[1].dtype)
    inputs = [constant if i == index else piece for i, piece in enumerate(concat.inputs)]
    insert_before(scope, node, gs.Node("Concat", made.name, dict(concat.attrs), inputs, [made]))
    node.inputs[1] = made


def _norm(node: gs.Node) -> float:
    values = values_of(node.inputs[1]) if is_op(node, *WEIGHTED) else None
    return 0.0 if values is None else float(np.sqrt(np.square(values, dtype=np.float64).sum()))


def _branches(scope: gs.Graph) -> tuple[list[Branch], dict[str, str]]:
    position = {id(node): index for index, node in enumerate(scope.nodes)}
    found: list[Branch] = []
    refused: dict[str, str] = {}
    for node in scope.nodes:
        if not is_op(node, "Add") or any(isinstance(tensor, gs.Constant) for tensor in node.inputs):
            continue
        for skip, other in (node.inputs, node.inputs[::-1]):
            nodes = _between(skip, other, position)
            if not any(is_op(inner, *WEIGHTED) and isinstance(inner.inputs[1], gs.Constant) for inner in nodes):
                continue
            try:
                _check_branch(scope, node, skip, nodes)
                found.append(Branch(scope, node, skip, tuple(nodes)))
            except Refusal as refusal:
                refused[label(node)] = str(refusal)
            break
    return found, refused


def _between(skip: gs.Tensor, end: gs.Tensor, position: dict[int, int]) -> list[gs.Node]:
    """The nodes on all ways from `skip` to `end`; none if `end` does not depend on `skip`."""
    first = max((position.get(id(maker), -1) for maker in skip.inputs), default=-1)
    before: dict[int, gs.Node] = {}
    pending = [end]
    while pending:
        for maker in pending.pop().inputs:
            if id(maker) not in before and position.get(id(maker), -1) > first:
                before[id(maker)] = maker
                pending += maker.inputs
    reached, nodes = {id(skip)}, []
    for node in sorted(before.values(), key=lambda node: position[id(node)]):
        if any(id(tensor) in reached for tensor in node.inputs):
            nodes.append(node)
            reached.update(id(tensor) for tensor in node.outputs)
    return nodes


def _check_branch(scope: gs.Graph, node: gs.Node, skip: gs.Tensor, nodes: list[gs.Node]) -> None:
    """Refuse where the addition may broadcast `skip`, or where the branch makes one of the graph's outputs."""
    shape = node.outputs[0].shape
    known = shape is not None and not any(dim is None or (not isinstance(dim, str) and dim < 0) for dim in shape)
    if not known or skip.shape is None or list(shape) != list(skip.shape):
        raise Refusal(f"'{skip.name}' {skip.shape} may not have the shape {shape} of its sum with the branch")
    for tensor in (made for inner in nodes for made in inner.outputs):
        if is_output(scope, tensor):
            raise Refusal(f"its branch makes the graph's output '{tensor.name}', such as a cache")
