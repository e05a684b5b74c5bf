"""Follows the channels that a product of matrices or a convolution makes, to everything that must shrink with them.

A `Span` says where units lie along one axis of a tensor: the axis has parts * units * width entries, and unit u owns
the entries ((p * units + u) * width + w) of every part p. So a feed-forward channel has width 1, an attention head the
head's size, and a packed gate-and-up or query-key-value projection 2 or 3 parts. Axes are counted from the end.

A trace starts at a weight's output channels and spreads, forwards and backwards, until all its ends are weights; it
ends in a Refusal at a graph's input or output and at any operator without a rule (`passes.channel_rules`). Changes
nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from passes.base import Refusal
from passes.pattern import consumers, producer, rank_of, static_dim
from passes.scopes import label


@dataclass(frozen=True)
class Span:
    axis: int
    """Negative: counted from the end."""
    parts: int = 1
    width: int = 1

    def entries(self, units: int, kept: list[int]) -> NDArray:
        """Indices along the axis that the units `kept` own."""
        grid = np.arange(self.parts * units * self.width).reshape(self.parts, units, self.width)
        return grid[:, kept].reshape(-1)


@dataclass(frozen=True)
class Cut:
    """A constant operand of a node that loses the entries of removed units."""

    node: gs.Node
    index: int
    span: Span


@dataclass(frozen=True)
class Count:
    """A number that a node holds: `per_unit` times the number of units. In an attribute, or in a shape operand."""

    node: gs.Node
    per_unit: int
    attribute: str | None = None
    position: int | None = None
    """Index within operand 1; None with no attribute: all of its entries."""


class Coarser(Exception):  # noqa: N818 (control flow of one module)
    """The trace must start again with larger units; `parts` times as many parts at its start."""

    def __init__(self, units: int, parts: int = 1) -> None:
        self.units, self.parts = units, parts


@dataclass
class Trace:
    """Spans found so far, and what must change with them."""

    scope: gs.Graph
    units: int
    spans: dict[int, tuple[gs.Tensor, Span]] = field(default_factory=dict)
    cuts: dict[tuple[int, int, int], Cut] = field(default_factory=dict)
    counts: dict[tuple[int, str | None, int | None], Count] = field(default_factory=dict)
    sources: list[gs.Node] = field(default_factory=list)
    """Nodes whose weight makes the units."""
    is_heads: bool = False
    _pending: list[gs.Tensor] = field(default_factory=list)

    def run(self, rules: "Mapping[tuple[str, str], Rule]") -> None:
        """Spread what `carry` was told; `rules` by domain and operator."""
        local = {id(node) for node in self.scope.nodes}
        outputs = {id(t) for graph in (self.scope, *self.scope.subgraphs(recursive=True)) for t in graph.outputs}
        while self._pending:
            tensor = self._pending.pop()
            if id(tensor) in outputs:
                raise Refusal(f"its units reach the graph's output '{tensor.name}'")
            maker = producer(tensor)
            if maker is None:
                raise Refusal(f"its units reach the graph's input '{tensor.name}'")
            for node in (maker, *consumers(tensor)):
                if id(node) not in local:
                    raise Refusal(f"'{tensor.name}' is also read in another graph, by node {label(node)}")
                rule = rules.get((node.domain, node.op))
                if rule is None:
                    refuse(node, "units cannot be followed through it")
                rule(self, node)

    def span(self, tensor: gs.Tensor | None) -> Span | None:
        found = None if tensor is None else self.spans.get(id(tensor))
        return found[1] if found else None

    def size(self, span: Span) -> int:
        return span.parts * self.units * span.width

    def carry(self, node: gs.Node, tensor: gs.Tensor, span: Span) -> None:
        """Say that `tensor`, an operand or result of `node`, has the units at `span`; a constant is cut."""
        if isinstance(tensor, gs.Constant):
            for index in (i for i, operand in enumerate(node.inputs) if operand is tensor):
                self.cut(node, index, span)
            return
        known = self.span(tensor)
        if known is not None:
            if known != span:
                refuse(node, f"orders the units of '{tensor.name}' in another way than its neighbours")
            return
        rank, size = rank_of(tensor), static_dim(tensor, span.axis)
        if (rank is not None and -span.axis > rank) or (size is not None and size != self.size(span)):
            refuse(node, f"axis {span.axis} of '{tensor.name}' {tensor.shape} should have {self.size(span)} entries")
        self.spans[id(tensor)] = (tensor, span)
        self._pending.append(tensor)

    def align(self, node: gs.Node, index: int, span: Span) -> None:
        """An operand that broadcasts against `span`: it is cut or carries the units where it has that axis."""
        tensor = node.inputs[index]
        rank, size = rank_of(tensor), static_dim(tensor, span.axis)
        if tensor.is_empty() or (rank is not None and -span.axis > rank) or size == 1:
            return
        if size != self.size(span):
            refuse(node, f"operand '{tensor.name}' {tensor.shape} does not say that it has {self.size(span)} units")
        self.carry(node, tensor, span)

    def cut(self, node: gs.Node, index: int, span: Span) -> None:
        tensor = node.inputs[index]
        if not isinstance(tensor, gs.Constant) or static_dim(tensor, span.axis) != self.size(span):
            refuse(node, f"operand '{tensor.name}' is no constant with {self.size(span)} entries on axis {span.axis}")
        if self.cuts.setdefault((id(node), index, span.axis), Cut(node, index, span)).span != span:
            refuse(node, f"orders the units of '{tensor.name}' in two ways")

    def source(self, node: gs.Node, index: int, span: Span) -> None:
        self.cut(node, index, span)
        if not any(known is node for known in self.sources):
            self.sources.append(node)

    def count(self, node: gs.Node, per_unit: int, attribute: str | None = None, position: int | None = None) -> None:
        found = Count(node, per_unit, attribute, position)
        self.counts[(id(node), attribute, position)] = found

    def require_units(self, node: gs.Node, units: int) -> None:
        """The trace's units must be those of `node`; start again if they are finer."""
        if self.units != units:
            if self.units % units:
                refuse(node, f"has {units} units where {self.units} channels come in")
            raise Coarser(units)


def refuse(node: gs.Node, reason: str) -> NoReturn:
    raise Refusal(f"at node {label(node)} ({node.op}): {reason}")


Rule = Callable[[Trace, gs.Node], None]
"""Takes a node of which at least one tensor has a span; says what that means for its other tensors and constants."""
