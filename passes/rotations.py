"""Rotary position embedding as arithmetic, read symbolically. Knows no operator that could replace it.

RoFormer (arXiv 2104.09864, eq. 34) rotates the pairs of a head's elements by an angle per position; exporters write
that in many ways. Instead of one pattern per spelling, the last dimension is evaluated with symbols: x is the vector of
terms +x[0], +x[1], ...; a `Gather(table, positions)` is the vector of its columns; Slice, Split, Concat, Reshape,
Neg, Mul, Add, Sub and so on act on such vectors as they do on numbers. What comes out is a rotation if element i is

    x[i]                                              for i >= rotary_dim (passed through), else
    x[i] * c[i] + s[i] * x[partner(i)]

with partner(i) = i +- rotary_dim/2 (halves) or i XOR 1 (pairs), and c, s columns of tables or their negatives.
So halves, interleaved pairs, two-multiplication forms, partial rotation, repeated, sliced, stacked or packed tables
and swapped operands need no cases of their own.

Leading dimensions are followed by labels: each is a dimension of x, or one of the positions, or of size 1.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from passes.dimensions import same_size
from passes.pattern import producer, rank_of, scalar_of, static_dim
from passes.rotation_terms import (
    MOST_COLUMNS,
    STEPS,
    Block,
    Entry,
    Term,
    cells,
    laid_over,
    negative,
    table_rows,
    times,
    trailing_axis,
)

Angles = dict[int, tuple[gs.Tensor, Block | None]]
"""Blocks of tensors that come from tables only, None for those that do not; by identity, which the tensors keep."""
_MOST_STEPS = 48
"""Nodes that any known spelling of one rotation takes, generously."""


@dataclass(frozen=True)
class Rotation:
    """`out` is `x` with its last dimension rotated; both have one shape."""

    x: gs.Tensor
    out: gs.Tensor
    ids: gs.Tensor
    axes: tuple[tuple[int, int], ...]
    """(dimension of x, dimension of `ids` that gives its positions), sorted."""
    interleaved: bool
    cos: tuple[tuple[int, Entry], ...]
    sin: tuple[tuple[int, Entry], ...]
    """Sign and table column of each of the rotary_dim rotated elements, sin for the form x*cos + (-y, x)*sin."""


class Rotations:
    """Finds rotations in one scope, whose nodes are sorted when it is made."""

    def __init__(self, scope: gs.Graph, angles: Angles) -> None:
        self._position = {id(node): index for index, node in enumerate(scope.nodes)}
        self._angles = angles

    def ending_at(self, out: gs.Tensor) -> Rotation | None:
        """The rotation that `out` is the result of, None if it is none."""
        size = static_dim(out, -1)
        if size is None or size > MOST_COLUMNS:
            return None
        rotations = (self._between(x, out, size) for x in self._sources(out) if static_dim(x, -1) == size)
        return next((rotation for rotation in rotations if rotation is not None), None)

    def _between(self, x: gs.Tensor, out: gs.Tensor, size: int) -> Rotation | None:
        assert x.shape is not None
        lead = tuple(range(len(x.shape) - 1))
        reader = _Reader(self._angles, {id(x): Block(lead, cells((Term(1, i),) for i in range(size)))})
        block = reader.read(out)
        if block is None or block.lead != lead or block.terms.shape != (size,) or len(reader.uses) != 1:
            return None
        ((ids, axes),) = reader.uses.values()
        if not all(same_size(x, axis, ids, place) for axis, place in axes):
            return None
        return _rotation_from_terms(x, out, ids, axes, list(block.terms))

    def _sources(self, out: gs.Tensor) -> Iterator[gs.Tensor]:
        """Tensors that everything in `out` but angles comes from, past a multiplication by angles, nearest first."""
        frontier, multiplied = {id(out): out}, False
        for _ in range(_MOST_STEPS):
            latest = max(frontier.values(), key=self._index)
            node = producer(latest)
            if node is None or self._index(latest) < 0 or node.domain != "":
                return
            operands = [tensor for tensor in node.inputs if not isinstance(tensor, gs.Constant)]
            if node.op == "Mul":
                given = len(operands)
                operands = [tensor for tensor in operands if self._angle(tensor) is None]
                multiplied |= len(operands) < given
            elif node.op not in ("Add", "Sub", "Concat", *STEPS):
                return
            made = {id(tensor) for tensor in node.outputs}
            frontier = {key: tensor for key, tensor in frontier.items() if key not in made}
            frontier.update({id(tensor): tensor for tensor in operands})
            if not frontier:
                return
            if multiplied and len(frontier) == 1:
                yield next(iter(frontier.values()))

    def _index(self, tensor: gs.Tensor) -> int:
        return self._position.get(id(tensor.inputs[0]), -1) if len(tensor.inputs) == 1 else -1

    def _angle(self, tensor: gs.Tensor) -> Block | None:
        return _Reader(self._angles, {}).read(tensor)


class _Reader:
    """Evaluates tensors; `known` holds the blocks of x, `angles` those of tensors that come from tables only."""

    def __init__(self, angles: Angles, known: "dict[int, Block | None]") -> None:
        self.angles, self.known = angles, known
        self.uses: dict[tuple[int, tuple[tuple[int, int], ...]], tuple[gs.Tensor, tuple[tuple[int, int], ...]]] = {}
        """Every way in which positions were laid over x."""

    def read(self, tensor: gs.Tensor) -> Block | None:
        if id(tensor) in self.known:
            return self.known[id(tensor)]
        angle = self.angles.get(id(tensor))
        if angle is not None and (angle[1] is not None or not self.known):
            return angle[1]
        block = self._evaluate(tensor)
        if not self.known or (block is not None and block.is_angle):
            self.angles[id(tensor)] = (tensor, block)
        else:
            self.known[id(tensor)] = block
        return block

    def _evaluate(self, tensor: gs.Tensor) -> Block | None:
        node = producer(tensor)
        if node is None or node.domain != "" or not node.inputs:
            return None
        if node.op == "Gather" and isinstance(node.inputs[0], gs.Constant):
            return table_rows(node)
        if node.op in ("Add", "Sub"):
            return self._sum(node) if self.known else None  # angles are not added up
        if node.op == "Mul":
            return self._product(node)
        if node.op == "Concat":
            return self._concatenation(node)
        step = STEPS.get(node.op)
        block = self.read(node.inputs[0]) if step else None
        if step is None or block is None:
            return None
        moved = step(node, tensor, block)
        return moved if moved is not None and moved.terms.size <= MOST_COLUMNS else None

    def _sum(self, node: gs.Node) -> Block | None:
        first, second = (self.read(tensor) for tensor in node.inputs)
        if first is None or second is None or first.is_angle or second.is_angle or first.lead != second.lead:
            return None
        if first.terms.shape != second.terms.shape:
            return None
        sign = -1 if node.op == "Sub" else 1
        pairs = zip(first.terms.flat, second.terms.flat, strict=True)
        return Block(first.lead, cells((a + times(b, sign) for a, b in pairs), first.terms.shape))

    def _product(self, node: gs.Node) -> Block | None:
        for tensor, other in itertools.permutations(node.inputs):
            scale = scalar_of(other) if rank_of(other) in (0, 1) else None
            if scale in (1.0, -1.0):
                return negative(self.read(tensor), int(scale))
        if not self.known:
            return None
        first, second = (self.read(tensor) for tensor in node.inputs)
        if first is None or second is None or first.is_angle == second.is_angle:
            return None
        x, angle = (second, first) if first.is_angle else (first, second)
        laid = laid_over(angle, x)
        if laid is None:
            return None
        assert angle.ids is not None
        axes = tuple(sorted((a, b) for a, b in zip(x.lead, laid.lead, strict=True) if a is not None and b is not None))
        if any(a is None and b is not None for a, b in zip(x.lead, laid.lead, strict=True)):
            return None  # the product would be larger than x
        self.uses[(id(angle.ids), axes)] = (angle.ids, axes)
        products = []
        for terms, (factor, *rest) in zip(x.terms.flat, np.broadcast_to(laid.terms, x.terms.shape).flat, strict=True):
            if rest or any(term.entry is not None for term in terms):
                return None
            products.append(tuple(Term(t.sign * factor.sign, t.x, factor.entry) for t in terms))
        return Block(x.lead, cells(products, x.terms.shape))

    def _concatenation(self, node: gs.Node) -> Block | None:
        blocks = [self.read(tensor) for tensor in node.inputs]
        first = blocks[0]
        if first is None or any(b is None or b.lead != first.lead or b.ids is not first.ids for b in blocks):
            return None
        axis = trailing_axis(first, int(node.attrs["axis"]))
        parts = [block.terms for block in blocks if block is not None]
        if axis is None or any(part.ndim != first.terms.ndim for part in parts):
            return None
        joined = np.concatenate(parts, axis)
        return Block(first.lead, joined, first.ids) if joined.size <= MOST_COLUMNS else None


def _rotation_from_terms(
    x: gs.Tensor, out: gs.Tensor, ids: gs.Tensor, axes: tuple[tuple[int, int], ...], terms: list[tuple[Term, ...]]
) -> Rotation | None:
    width = next((i for i, sum_ in enumerate(terms) if len(sum_) == 1), len(terms))
    if width == 0 or width % 2 or any(sum_ != (Term(1, i),) for i, sum_ in enumerate(terms[width:], width)):
        return None
    half = width // 2
    layouts = {False: [(i + half) % width for i in range(width)], True: [i ^ 1 for i in range(width)]}
    for interleaved, partners in layouts.items():
        cos, sin = [], []
        for i, partner in enumerate(partners):
            own = [term for term in terms[i] if term.x == i and term.entry is not None]
            other = [term for term in terms[i] if term.x == partner and term.entry is not None]
            if len(terms[i]) != 2 or len(own) != 1 or len(other) != 1:
                break
            assert own[0].entry is not None
            assert other[0].entry is not None
            cos.append((own[0].sign, own[0].entry))
            sin.append((other[0].sign * (-1 if partner > i else 1), other[0].entry))
        else:
            return Rotation(x, out, ids, axes, interleaved, tuple(cos), tuple(sin))
    return None
