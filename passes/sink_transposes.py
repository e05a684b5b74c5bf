"""Move Transposes through operators that do not care about the order of axes, so that they meet and cancel.

1. `Transpose(Transpose(x, p), q)` -> `Transpose(x, p[q])`, and nothing where that is the identity;
2. a region of nodes that can compute on permuted operands (`passes.axis_moves`: elementwise operators, Concat, Split,
   Slice, Pad, reductions, Softmax, Squeeze, Unsqueeze, Q/DQ, ...), with Transposes at its border -> the same region
   without them, its axes renamed, constants permuted ahead of time, and Transposes only where a neighbour outside needs
   the old order. For example `Transpose(Relu(Transpose(x, p)), p^-1)` -> `Relu(x)`, and
   `Add(Transpose(x, p), Transpose(y, p))` -> `Transpose(Add(x, y), p)`.

A region is moved only if fewer Transposes are left in all, and of the regions that save as many the smallest is taken.
That choice is a minimum cut: each movable node is on one of two sides, permuted or not; a tensor costs one Transpose if
its producer and one of its readers are on different sides; a Transpose by the permutation is a producer on the permuted
side, one by the inverse a reader there. So the result is the best for one permutation at a time. Since the number of
Transposes falls with every move, the pass ends, and a second call finds nothing.

Exact: the same numbers are computed from the same numbers, at other places in memory. Sums of floating-point elements
(ReduceMean and its kin) are part of a region only with `through_sums`, since a backend may add them by another kernel
there, in another order. Left alone: a Transpose that no counterpart cancels (moving it gains nothing), regions across
the border of a subgraph, operands of unknown rank.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import onnx_graphsurgeon as gs

from passes.axis_moves import Move, adds_elements, move_of, move_to, permuted_constant
from passes.base import Effect, Outcome
from passes.graph import tidy
from passes.minimum_cut import UNCUT, minimum_cut
from passes.pattern import STANDARD, consumers, insert_before, is_op, producer, values_of
from passes.remove_no_ops import give_way
from passes.scopes import scopes
from passes.views import Permutation, compose_transposes, inverse, is_identity, permutation_of

PERMUTED, PLAIN = "permuted", "plain"
"""The two sides: source and sink of the cut."""


class SinkTransposes:
    """Implements `passes.base.Pass`."""

    name = "sink_transposes"

    def __init__(self, through_sums: bool = False) -> None:
        self.through_sums = through_sums

    @property
    def effect(self) -> Effect:
        return Effect.REORDERS if self.through_sums else Effect.EXACT

    def call(self, graph: gs.Graph) -> Outcome:
        outcome = Outcome()
        tidy(graph)
        while made := sum(_fold(scope) or self._move_one_region(graph, scope) for scope in list(scopes(graph))):
            outcome.rewrites += made
            tidy(graph)
        return outcome

    def _move_one_region(self, graph: gs.Graph, scope: gs.Graph) -> int:
        """Rule 2 on the first region of a scope that saves Transposes."""
        place = _Place.of(scope, self.through_sums)
        tried: set[tuple[int, Permutation]] = set()
        for node in scope.nodes:
            permutation = permutation_of(node) if is_op(node, "Transpose") else None
            if permutation is None or is_identity(permutation):
                continue
            for tensor, wanted in ((node.outputs[0], permutation), (node.inputs[0], inverse(permutation))):
                if (id(tensor), wanted) in tried or isinstance(tensor, gs.Constant):
                    continue
                region = _Region(place, tensor, wanted)
                tried |= {(number, region.permutations[number]) for number in region.tensors}
                moved = region.best()
                if moved:
                    region.move(moved, _Names(graph))
                    return 1
        return 0


def _fold(scope: gs.Graph) -> int:
    """Rule 1 on every Transpose of a scope."""
    folded = 0
    for node in [node for node in scope.nodes if is_op(node, "Transpose")]:
        folded += compose_transposes(node)
        permutation = permutation_of(node)
        if permutation is not None and is_identity(permutation):
            folded += give_way(scope, node, node.inputs[0])
    return folded


class _Names:
    """Names that neither a tensor nor a node of a graph has."""

    def __init__(self, graph: gs.Graph) -> None:
        nodes = [node for scope in scopes(graph) for node in scope.nodes]
        tensors = [tensor for node in nodes for tensor in (*node.inputs, *node.outputs)]
        tensors += [tensor for scope in scopes(graph) for tensor in (*scope.inputs, *scope.outputs)]
        self.used = {tensor.name for tensor in tensors} | {node.name for node in nodes}

    def new(self, tensor: gs.Tensor, suffix: str) -> str:
        name, number = f"{tensor.name}/{suffix}", 2
        while name in self.used:
            name, number = f"{tensor.name}/{suffix}{number}", number + 1
        self.used.add(name)
        return name


@dataclass(frozen=True)
class _Place:
    """Where a region may grow: among the nodes of one scope, known by their ids."""

    scope: gs.Graph
    local: frozenset[int]
    outputs: frozenset[int]
    """Tensors that are outputs of the scope or of a subgraph in it, which keep their names and their order of axes."""
    through_sums: bool

    @classmethod
    def of(cls, scope: gs.Graph, through_sums: bool) -> "_Place":
        graphs = (scope, *scope.subgraphs(recursive=True))
        outputs = frozenset(id(tensor) for graph in graphs for tensor in graph.outputs)
        return cls(scope, frozenset(id(node) for node in scope.nodes), outputs, through_sums)


class _Region:
    """Tensors that could be permuted together with `seed`, and the nodes between them that could compute on them so."""

    def __init__(self, place: _Place, seed: gs.Tensor, permutation: Permutation) -> None:
        self.place = place
        self.tensors: dict[int, gs.Tensor] = {id(seed): seed}
        self.permutations: dict[int, Permutation] = {id(seed): permutation}
        self.moves: dict[int, Move] = {}
        self.nodes: dict[int, tuple[gs.Node, Permutation]] = {}
        queue = [seed]
        while queue:
            tensor = queue.pop()
            for node in (*tensor.inputs, *consumers(tensor)):
                if id(node) in self.place.local and id(node) not in self.moves:
                    queue += self._join(node, tensor)

    def _join(self, node: gs.Node, via: gs.Tensor) -> list[gs.Tensor]:
        """Let a node take part if it can and agrees with the others; the tensors that join with it."""
        permutation = self.permutations[id(via)]
        made_here = any(tensor is via for tensor in node.outputs)
        move = (move_to if made_here else move_of)(node, permutation, self.place.scope.opset)
        if move is None or (adds_elements(node) and not self.place.through_sums):
            return []
        operands = [node.inputs[index] for index in move.operands]
        made = [] if move.result is None else [(t, move.result) for t in node.outputs if not t.is_empty()]
        joining = [(t, permutation) for t in operands if not isinstance(t, gs.Constant)] + made
        reached = any(t is via and p == permutation for t, p in joining)
        if not reached or any(self.permutations.get(id(t), p) != p for t, p in joining):
            return []
        self.moves[id(node)], self.nodes[id(node)] = move, (node, permutation)
        new = {id(t): (t, p) for t, p in joining if id(t) not in self.tensors}
        self.tensors.update((number, t) for number, (t, _) in new.items())
        self.permutations.update((number, p) for number, (_, p) in new.items())
        return [t for t, _ in new.values()]

    def _undoes(self, node: gs.Node, tensor: gs.Tensor) -> bool:
        """Whether a node of the scope is a Transpose that yields a tensor's permuted form."""
        local = id(node) in self.place.local and is_op(node, "Transpose") and node.inputs[0] is tensor
        return local and permutation_of(node) == inverse(self.permutations[id(tensor)])

    def _maker(self, tensor: gs.Tensor) -> Hashable:
        """The side of a tensor's producer, or the producer's number if it may be on either."""
        node = producer(tensor)
        if node is None:
            return PLAIN
        if is_op(node, "Transpose") and permutation_of(node) == self.permutations[id(tensor)]:
            both = id(node.inputs[0]) in self.tensors and self._undoes(node, node.inputs[0])
            return PLAIN if both else PERMUTED
        move = self.moves.get(id(node))
        return id(node) if move is not None and move.result == self.permutations[id(tensor)] else PLAIN

    def _readers(self, tensor: gs.Tensor) -> set[Hashable]:
        """The same for its readers; a graph output is read plainly."""
        sides: set[Hashable] = {PLAIN} if id(tensor) in self.place.outputs else set()
        for node in consumers(tensor):
            if self._undoes(node, tensor):
                sides.add(PERMUTED)
                continue
            operands = self.moves[id(node)].operands if id(node) in self.moves else ()
            sides |= {id(node) if i in operands else PLAIN for i, t in enumerate(node.inputs) if t is tensor}
        return sides

    def best(self) -> set[Hashable]:
        """The nodes to move so that the fewest Transposes are left; empty if no choice saves one."""
        now = 0
        edges: list[tuple[Hashable, Hashable, int]] = []
        for number, tensor in self.tensors.items():
            maker, readers = self._maker(tensor), self._readers(tensor)
            now += bool(readers - {PERMUTED}) if maker == PERMUTED else PERMUTED in readers
            edges += _edges(number, maker, readers)
        fewest, side = minimum_cut(edges, PERMUTED, PLAIN)
        return {number for number in side if number in self.moves} if fewest < now else set()

    def move(self, moved: set[Hashable], names: _Names) -> None:
        """Let the nodes in `moved` compute on permuted tensors, and give everybody else what it read before."""
        forms, undone = {}, []
        for number, tensor in list(self.tensors.items()):
            maker, readers = self._maker(tensor), self._readers(tensor)
            transposes = [node for node in consumers(tensor) if self._undoes(node, tensor)]
            if maker == PERMUTED or maker in moved:
                undone += [(node, number) for node in transposes]
            elif readers & moved and transposes:
                forms[number] = transposes[0].outputs[0]
                continue
            elif not readers & moved:
                continue
            if maker == PERMUTED:
                forms[number] = tensor.inputs[0].inputs[0]
            elif maker in moved:
                forms[number] = self._form_made(tensor, bool(readers - moved - {PERMUTED}), names)
            else:
                forms[number] = self._form_beside(tensor, names)
        for key, (node, permutation) in self.nodes.items():
            if key in moved:
                self._rewrite(node, self.moves[key], permutation, forms, names)
        for node, number in undone:
            give_way(self.place.scope, node, forms[number])

    def _form_beside(self, tensor: gs.Tensor, names: _Names) -> gs.Tensor:
        """The permuted form of a tensor that stays as it is."""
        permutation = self.permutations[id(tensor)]
        form = gs.Variable(names.new(tensor, "permuted"), tensor.dtype, _permuted_shape(tensor, permutation))
        self._transpose(tensor, form, inverse(permutation), names)
        return form

    def _form_made(self, tensor: gs.Tensor, read_plainly: bool, names: _Names) -> gs.Tensor:
        """The permuted form of a tensor, which its node makes from now on."""
        permutation, made_by = self.permutations[id(tensor)], tensor.inputs[0]
        form = gs.Variable(names.new(tensor, "permuted"), tensor.dtype, _permuted_shape(tensor, permutation))
        made_by.outputs[next(i for i, output in enumerate(made_by.outputs) if output is tensor)] = form
        if read_plainly:
            self._transpose(form, tensor, permutation, names)
        return form

    def _transpose(self, source: gs.Tensor, made: gs.Tensor, permutation: Permutation, names: _Names) -> None:
        name, attrs = names.new(made, "transpose"), {"perm": list(permutation)}
        node = gs.Node("Transpose", name, attrs, [source], [made], domain=STANDARD)
        insert_before(self.place.scope, self.place.scope.nodes[0], node)  # sorted at the end

    def _rewrite(
        self, node: gs.Node, move: Move, permutation: Permutation, forms: dict[int, gs.Tensor], names: _Names
    ) -> None:
        for index in move.operands:
            tensor = node.inputs[index]
            values = values_of(tensor)
            if values is not None:
                form = gs.Constant(names.new(tensor, "permuted"), permuted_constant(values, permutation).copy())
                node.inputs[index] = form
            else:
                node.inputs[index] = forms[id(tensor)]
        node.attrs.update(move.attrs)
        for index, values in move.constants.items():
            constant = gs.Constant(names.new(node.inputs[0], f"constant{index}"), values)
            if index < len(node.inputs):
                node.inputs[index] = constant
            else:
                node.inputs.append(constant)


def _edges(number: int, maker: Hashable, readers: set[Hashable]) -> Iterator[tuple[Hashable, Hashable, int]]:
    """One tensor's share of the cut: 1 if its maker and any of its readers are on different sides."""
    to_plain, to_permuted = ("to plain", number), ("to permuted", number)
    yield maker, to_plain, 1
    yield to_permuted, maker, 1
    for reader in readers:
        yield to_plain, reader, UNCUT
        yield reader, to_permuted, UNCUT


def _permuted_shape(tensor: gs.Tensor, permutation: Permutation) -> list[Any] | None:
    return None if tensor.shape is None else [tensor.shape[axis] for axis in inverse(permutation)]
