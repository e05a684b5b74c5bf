"""Choose rows before the work on them instead of after it, where nobody needs the others.

A model's end often needs few tokens: logits of the last ones, a class from the first. Here f is token-wise work
(`passes.row_forms`: products, norms, activations, residual sums, views, ...) on x [..., tokens, ...], y, ...:

1. `Gather(f(x, y), i [rows], axis)` -> `f(Gather(x, i), Gather(y, i))`, along the axes that tokens have in x and y;
   operands without tokens (weights, scales, one row for all) stay as they are;
2. `GatherND(f(x, y), i [rows, 1])` -> the same with `i [rows]` and axis 0;
3. `Gather(f(x, y), i, axis)`, i a scalar -> `Squeeze(f(Gather(x, [i]), Gather(y, [i])), axis)`;
4. `Slice(f(x, y), start, end, axis)` of constant length -> `f(Slice(x), Slice(y))`.

f is the largest region of nodes whose results reach the rest of the graph only through this choice, possibly made at
several places; each tensor at its border is chosen from once. So `x + mlp(norm(x))` moves as a whole, and the ids of an
embedding are chosen instead of its rows. The region ends at operators that mix tokens (attention, convolutions), graph
inputs, graph outputs and tensors with another reader. It moves if a product, norm or reduction is in it: elementwise
work and views alone are not worth a choice from several tensors.

A choice must not be longer than what is chosen from, else choosing last is cheaper (repeating tokens by duration,
edges of a graph): slices never are; indices are known not to be if there is one, or by both sizes, or if they come from
a graph input named in `few`, whose caller passes each token at most once or so. Others are left alone, and so are
GatherND of several axes or with batch dimensions, and Slices of several axes.

The same operators run on fewer rows: a kernel may block its sums otherwise for another number of rows.
"""

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from passes.base import Effect, Outcome
from passes.dimensions import unify_symbols
from passes.graph import tidy
from passes.pattern import (
    STANDARD,
    axes_of,
    input_of,
    insert_before,
    is_op,
    new_constant,
    new_variable,
    producer,
    rank_of,
    replace_uses,
    static_dim,
    substitute,
    values_of,
)
from passes.row_forms import SUMMING, RowForm, row_form
from passes.scopes import scopes

_AXES_AS_INPUT_SINCE = 13
_OPEN = 2**31 - 1
"""Exporters' ends of slices that go on to the last element are at least this."""


class SelectRows:
    """Implements `passes.base.Pass`.

    `few` names graph inputs with indices of rows, in number at most as many as there are rows.
    """

    name = "select_rows"
    effect = Effect.REORDERS

    def __init__(self, few: Collection[str] = ("logits_indices",)) -> None:
        if isinstance(few, str):
            raise ValueError(f"few is the text '{few}'; it must be a list of input names")
        self.few = frozenset(few)

    def call(self, graph: gs.Graph) -> Outcome:
        outcome = Outcome()
        tidy(graph)
        unify_symbols(graph)
        while made := sum(self._move_one(scope) for scope in list(scopes(graph))):
            outcome.rewrites += made
            tidy(graph)
        return outcome

    def _move_one(self, scope: gs.Graph) -> int:
        """Move the first choice of a scope that is worth it."""
        choices: dict[tuple, list[_Choice]] = {}
        for node in scope.nodes:
            choice = _choice_of(node)
            if choice is not None and self._shortens(choice):
                choices.setdefault(choice.key, []).append(choice)
        for same in choices.values():
            region = _Region(scope, same)
            if region.pays:
                region.move()
                return 1
        return 0

    def _shortens(self, choice: "_Choice") -> bool:
        size, count = static_dim(choice.node.inputs[0], choice.axis), choice.count
        if size == 1:
            return False
        if size is not None and isinstance(count, int):
            return count < size
        return is_op(choice.node, "Slice") or count == 1 or self._are_few(choice.node.inputs[1])

    def _are_few(self, indices: gs.Tensor) -> bool:
        while (node := producer(indices, "Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze")) is not None:
            indices = node.inputs[0]
        return not indices.inputs and indices.name in self.few


@dataclass(frozen=True)
class _Choice:
    """A node that yields `count` rows of its first input along `axis`. Those with one `key` choose the same rows."""

    node: gs.Node
    axis: int
    count: int | str | None
    key: tuple


def _choice_of(node: gs.Node) -> _Choice | None:
    rank = rank_of(node.inputs[0]) if is_op(node, "Gather", "GatherND", "Slice") else None
    if not rank:
        return None
    if is_op(node, "Slice"):
        return _slice_choice(node, rank)
    indices = node.inputs[1]
    shape = indices.shape
    if is_op(node, "Gather") and shape is not None and len(shape) <= 1:
        axis = node.attrs.get("axis", 0) % rank
    elif is_op(node, "GatherND") and shape is not None and len(shape) == 2 and shape[1] == 1:
        axis = 0
        if node.attrs.get("batch_dims", 0):
            return None
    else:
        return None
    return _Choice(node, axis, shape[0] if len(shape) else 1, ("Gather", _content(indices)))


def _slice_choice(node: gs.Node, rank: int) -> _Choice | None:
    axes = axes_of(node, 3)
    values = [values_of(input_of(node, index)) for index in (1, 2)]
    step = values_of(input_of(node, 4)) if input_of(node, 4) is not None else np.array([1])
    if axes is None or len(axes) != 1 or values[0] is None or values[1] is None or step is None:
        return None
    start, end, stride = (int(value.reshape(-1)[0]) for value in (values[0], values[1], step))
    if end >= _OPEN:
        end = 0  # as from the end: then the start is negative too
    elif (start < 0) != (end < 0):
        return None
    if stride < 1 or end <= start:
        return None
    return _Choice(node, axes[0] % rank, math.ceil((end - start) / stride), ("Slice", start, end, stride))


def _content(tensor: gs.Tensor) -> Any:
    """What tells indices apart: a constant's values, a variable itself."""
    values = values_of(tensor)
    return id(tensor) if values is None else tuple(values.reshape(-1).tolist())


class _Region:
    """The nodes whose results are read only by `choices`, which choose the same rows, and by each other."""

    def __init__(self, scope: gs.Graph, choices: list[_Choice]) -> None:
        self.scope, self.choices = scope, choices
        self.members: dict[int, tuple[gs.Node, RowForm, int]] = {}
        """Node, form and axis of the rows in its outputs; a reader before whom it reads."""
        self.chosen: dict[tuple[int, int], gs.Tensor] = {}
        self._axes: dict[int, int | None] = {}
        """Where a tensor's rows lie; None where readers differ."""
        self._reads: Counter[int] = Counter()
        graphs = (scope, *scope.subgraphs(recursive=True))
        self._outputs = {id(tensor) for graph in graphs for tensor in graph.outputs}
        ends = {id(choice.node) for choice in choices}
        for choice in choices:
            self._read(choice.node.inputs[0], choice.axis)
        for node in reversed(scope.nodes):
            if id(node) not in ends:
                self._join(node)

    def _read(self, tensor: gs.Tensor, axis: int) -> None:
        self._reads[id(tensor)] += 1
        if self._axes.setdefault(id(tensor), axis) != axis:
            self._axes[id(tensor)] = None

    def _join(self, node: gs.Node) -> None:
        """Take a node in if all who read it are in, or are the choices."""
        made = [tensor for tensor in node.outputs if not tensor.is_empty()]
        axes = {self._axes.get(id(tensor)) for tensor in made if tensor.outputs}
        axis = axes.pop() if len(axes) == 1 else None
        read_here = all(self._reads[id(t)] == len(t.outputs) and id(t) not in self._outputs for t in made)
        form = row_form(node, axis, self.scope.opset) if axis is not None and read_here else None
        if form is not None and axis is not None:
            self.members[id(node)] = (node, form, axis)
            for index, place in form.operands.items():
                self._read(node.inputs[index], place)

    @property
    def pays(self) -> bool:
        return any(node.op in SUMMING for node, _, _ in self.members.values())

    def _made_inside(self, tensor: gs.Tensor) -> bool:
        return any(id(node) in self.members for node in tensor.inputs)

    def move(self) -> None:
        """Choose at the border. New nodes go to the front of the scope, to be sorted."""
        ends = [choice for choice in self.choices if self._made_inside(choice.node.inputs[0])]
        first, count = ends[0].node, ends[0].count if is_op(ends[0].node, "Gather", "GatherND") else None
        indices = None if is_op(first, "Slice") else self._indices(first)
        for node, form, axis in self.members.values():
            for index, place in form.operands.items():
                tensor = node.inputs[index]
                if not self._made_inside(tensor):
                    node.inputs[index] = self._choose(first, indices, tensor, place, count)
            for index, values in form.constants.items():
                node.inputs[index] = new_constant(node.outputs[0], "selected_shape", values)
            for tensor in node.outputs:
                if tensor.shape is not None:
                    tensor.shape = _resized(tensor, axis, count)
        for choice in ends:
            self._end(choice)

    def _indices(self, choice: gs.Node) -> gs.Tensor:
        """The indices of a Gather or GatherND in one dimension."""
        indices, values = choice.inputs[1], values_of(choice.inputs[1])
        if rank_of(indices) == 1:
            return indices
        if values is not None:
            return new_constant(choice.outputs[0], "indices", values.reshape(-1))
        count = 1 if rank_of(indices) == 0 else indices.shape[0]
        flat = new_variable(choice.outputs[0], "indices", [count], indices.dtype)
        shape = new_constant(choice.outputs[0], "indices_shape", np.array([-1], np.int64))
        self._add("Reshape", {}, [indices, shape], flat)
        return flat

    def _choose(
        self, choice: gs.Node, indices: gs.Tensor | None, tensor: gs.Tensor, axis: int, count: int | str | None
    ) -> gs.Tensor:
        if (id(tensor), axis) not in self.chosen:
            number = len(self.chosen)
            rows = new_variable(choice.outputs[0], f"rows{number}", _resized(tensor, axis, count), tensor.dtype)
            if indices is not None:
                self._add("Gather", {"axis": axis}, [tensor, indices], rows)
            else:
                axes = new_constant(choice.outputs[0], f"axes{number}", np.array([axis], np.int64))
                self._add("Slice", {}, [tensor, *choice.inputs[1:3], axes, *choice.inputs[4:]], rows)
            self.chosen[id(tensor), axis] = rows
        return self.chosen[id(tensor), axis]

    def _add(self, op: str, attrs: dict[str, Any], inputs: list[gs.Tensor], made: gs.Tensor) -> None:
        node = gs.Node(op, made.name, attrs, inputs, [made], STANDARD)
        insert_before(self.scope, self.scope.nodes[0], node)

    def _end(self, choice: _Choice) -> None:
        """What read the choice reads its first input, which has no other rows now."""
        node = choice.node
        rows, result = node.inputs[0], node.outputs[0]
        if is_op(node, "Gather") and rank_of(node.inputs[1]) == 0:
            if self.scope.opset < _AXES_AS_INPUT_SINCE:
                substitute(self.scope, node, "Squeeze", rows, axes=[choice.axis])
            else:
                axes = new_constant(result, "selected_axes", np.array([choice.axis], np.int64))
                substitute(self.scope, node, "Squeeze", rows, axes)
            return
        node.inputs.clear()
        replace_uses(self.scope, result, rows)


def _resized(tensor: gs.Tensor, axis: int, count: int | str | None) -> list[Any] | None:
    return None if tensor.shape is None else [count if i == axis else size for i, size in enumerate(tensor.shape)]
