"""Fuse rotary position embedding (RoFormer, arXiv 2104.09864) into the operator that attends, or into one of its own.

`passes.rotations` finds rotations, whatever their spelling: halves or interleaved pairs, the two-multiplication form, a
part of each head (rotary_dim < head_dim). Their angles come from `Gather(table [positions, columns], position_ids)`,
which HoistTables makes; linear, NTK, YaRN and Llama-3 scaling are other contents of the tables.

Target "paged_attention":

1. PagedAttention(views(rotate(q)), views(rotate(k)), v, ..., no tables)
   -> PagedAttention(views(q), views(k), v, ..., cos_cache, sin_cache; do_rotary=1, rotary_interleaved)
   q [.., tokens, .., head_dim] in any layout that the views turn into [tokens, heads*head_dim];
   cos_cache, sin_cache [positions, rotary_dim/2] float32, one pair for all layers with equal tables.
2. Reshape(views(x)), where only layout was undone that the rotation needed -> Reshape(x), for q, k and v of rule 1.

The operator rotates token t of sequence s at past_seqlens[s] + (t - cu[s]); a serving graph's `position_ids` holds just
that, so only positions from this input qualify. It stays an input of the graph, which nothing reads any more.

Target "rotary_embedding" (ONNX Runtime) or "standard" (opset 23, for TensorRT):

3. rotate(x) -> RotaryEmbedding(x, position_ids [batch, seq] int64, cos_cache, sin_cache), x [batch, heads, seq, dim]
4. rotate(x) -> Reshape(RotaryEmbedding(Reshape(x), ...; num_heads)), x [batch, seq, heads, dim] or [seq, heads, dim]

The tables must have equal halves (or pairs), which these operators take once; else a note says how far they are
apart. A query or key that something else reads rotated is left. Formula and tables stay; products may be contracted or
summed in another order. Negative positions, which Gather would count from the end, are taken to be absent.
"""

import hashlib
from typing import Literal

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from passes.base import Effect, Outcome, Refusal
from passes.dimensions import moved_axes, unify_symbols
from passes.pattern import (
    CONTRIB,
    STANDARD,
    input_of,
    is_output,
    new_constant,
    new_variable,
    only_consumer,
    producer,
    rank_of,
    replace_node,
    replace_uses,
    rewrite_nodes,
    static_dim,
    values_of,
)
from passes.rotation_terms import Entry
from passes.rotations import Angles, Rotation, Rotations
from plugins.paged_attention.schema import DOMAIN, EXPORT_DOMAIN, INPUTS, OP_TYPE

Target = Literal["paged_attention", "rotary_embedding", "standard"]
_POSITIONS = "position_ids"
_FLOATS = ("float32", "float16", "bfloat16")
_INDEX = {spec.name: index for index, spec in enumerate(INPUTS)}


class FuseRope:
    """Implements `passes.base.Pass`."""

    name = "fuse_rope"
    effect = Effect.REORDERS

    def __init__(self, target: Target = "paged_attention") -> None:
        self.target = target

    def call(self, graph: gs.Graph) -> Outcome:
        unify_symbols(graph)
        if self.target != "paged_attention":
            if self.target == "standard" and graph.opset < 23:
                return Outcome(notes=[f"RotaryEmbedding is standard from opset 23; the graph has {graph.opset}"])
            plain = _Plain(self.target == "standard")
            return rewrite_nodes(graph, plain.rule, ("Add", "Sub", "Concat", "Reshape"))
        paged = _Paged([tensor for tensor in graph.inputs if tensor.name == _POSITIONS and rank_of(tensor) == 1])
        outcome = Outcome()
        for domain in (EXPORT_DOMAIN, DOMAIN):
            part = rewrite_nodes(graph, paged.rule, (OP_TYPE,), domain)
            outcome.rewrites += part.rewrites
            outcome.notes += part.notes
        return outcome


class _Paged:
    """Rules 1 and 2; `positions` is the graph's input of that name, in a list."""

    def __init__(self, positions: list[gs.Tensor]) -> None:
        self.positions = positions
        self.finder, self.tables = _Finder(), _Tables()

    def rule(self, scope: gs.Graph, node: gs.Node) -> bool:
        cos, sin = _INDEX["cos_cache"], _INDEX["sin_cache"]
        if node.attrs.get("do_rotary") or input_of(node, cos) or input_of(node, sin) or not input_of(node, 1):
            return False
        found = [rotated for index in range(2) if (rotated := self._rotated(scope, node, index))]
        if len(found) == 1:
            raise Refusal("only one of query and key is rotated; expected both or neither")
        if not found:
            return False
        (query, _), (key, _) = found
        caches = self.tables.halves(query)
        if query.interleaved != key.interleaved or caches != self.tables.halves(key):
            raise Refusal("query and key are rotated by different tables or in different ways; expected the same")
        for index, (rotation, path) in enumerate(found):
            if path:
                replace_uses(scope, rotation.out, rotation.x)
            else:
                node.inputs[index] = rotation.x
        for index in range(3):
            _shorten(node, index)
        node.inputs[cos], node.inputs[sin] = self.tables.constants(caches, np.dtype(np.float32))
        node.attrs.update(do_rotary=1, rotary_interleaved=int(query.interleaved))
        return True

    def _rotated(self, scope: gs.Graph, node: gs.Node, index: int) -> tuple[Rotation, list[gs.Node]] | None:
        """The rotation that input `index` comes from, and the views in between, last first."""
        tensor, path = node.inputs[index], []
        while (rotation := self.finder.rotation(scope, tensor)) is None:
            view = producer(tensor, "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity")
            if view is None:
                return None
            path.append(view)
            tensor = view.inputs[0]
        what = INPUTS[index].name
        for step in (rotation.out, *(view.outputs[0] for view in path)):
            if only_consumer(scope, step) is None:
                raise Refusal(f"the rotated {what} '{step.name}' is read elsewhere too; expected only by attention")
        if not any(rotation.ids is positions for positions in self.positions):
            raise Refusal(f"the {what} is rotated by '{rotation.ids.name}'; expected the graph's input '{_POSITIONS}'")
        heads = int(node.attrs["num_heads" if index == 0 else "kv_num_heads"])
        if not _is_row_per_token(rotation, path, heads):
            raise Refusal(f"the {what}'s layout between rotation and attention is not known to be [tokens, heads*size]")
        return rotation, path


def _is_row_per_token(rotation: Rotation, path: list[gs.Node], heads: int) -> bool:
    """Whether the views turn [.., tokens, .., size] into [tokens, heads*size], heads being a dimension."""
    sizes = list(rotation.x.shape)
    if len(rotation.axes) != 1 or not isinstance(sizes[-1], int):
        return False
    token, last = rotation.axes[0][0], len(sizes) - 1
    labels: list[int | str | None] = [
        axis if axis in (token, last) or sizes[axis] != 1 else None for axis in range(last + 1)
    ]
    head = [axis for axis in range(last) if axis != token and labels[axis] is not None]
    if [sizes[axis] for axis in head] != ([] if heads == 1 and not head else [heads]):
        return False
    for view in reversed(path):
        moves, after = moved_axes(view), view.outputs[0].shape
        if moves is not None:
            labels = [None if move is None else labels[move] for move in moves]
            continue
        wide = heads * sizes[-1]
        if view.op != "Reshape" or after is None or after[-1] != wide or sum(size != 1 for size in after) != 2:
            return False
        if [label for label in labels if label is not None] != [token, *head, last]:
            return False
        labels = [None if size == 1 else token for size in after[:-1]] + ["heads"]
    return labels in ([token, "heads"], [token, last])


def _shorten(node: gs.Node, index: int) -> None:
    """Rule 2: let the Reshape in front of an input read the earliest tensor that has the same elements in order."""
    reshape = producer(node.inputs[index], "Reshape")
    target = values_of(reshape.inputs[1]) if reshape is not None else None
    if reshape is None or target is None or (0 in target and not reshape.attrs.get("allowzero")):
        return
    tensor, source = reshape.inputs[0], reshape.inputs[0]
    order: list[int | None] | None = None  # of `tensor`'s dimensions in the Reshape's input; None while unpermuted
    while (view := producer(tensor, "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity")) is not None:
        if order is None and view.op != "Transpose":
            tensor = source = view.inputs[0]
            continue
        moves = moved_axes(view)
        if moves is None:
            break
        tensor = view.inputs[0]
        order = moves if order is None else [None if axis is None else moves[axis] for axis in order]
        kept = [axis for axis in order if axis is not None and static_dim(tensor, axis) != 1]
        if kept == sorted(kept):
            order, source = None, tensor
    reshape.inputs[0] = source


class _Plain:
    """Rules 3 and 4."""

    def __init__(self, standard: bool) -> None:
        self.domain = STANDARD if standard else CONTRIB
        self.finder, self.tables = _Finder(), _Tables()

    def rule(self, scope: gs.Graph, node: gs.Node) -> bool:
        out = node.outputs[0]
        rotation = self.finder.rotation(scope, out)
        if rotation is None:
            return False
        x, dtype, layout = rotation.x, rotation.x.dtype, _layout(rotation)
        if layout is None or dtype is None or np.dtype(dtype).name not in _FLOATS:
            raise Refusal(f"{x.shape} rotated by positions {rotation.ids.shape} has no layout that the operator takes")
        heads_first, heads, size = layout
        caches = self.tables.constants(self.tables.halves(rotation), np.dtype(dtype))
        attrs: dict[str, int] = {"interleaved": int(rotation.interleaved)}
        if len(rotation.cos) < size:
            attrs["rotary_embedding_dim"] = len(rotation.cos)
        if not heads_first or "rotary_embedding_dim" in attrs:
            attrs["num_heads"] = heads
        new, ids = _batched_positions(rotation, heads_first)
        given, result = x, out
        if not heads_first:
            packed = [0, 0, -1] if len(x.shape) == 4 else [1, -1, heads * size]
            given, result = new_variable(out, "x"), new_variable(out, "rotated")
            new.append(gs.Node("Reshape", inputs=[x, new_constant(out, "packed", np.array(packed))], outputs=[given]))
        order = (ids, *caches) if self.domain == CONTRIB else (*caches, ids)
        node.outputs.clear()
        new.append(gs.Node("RotaryEmbedding", f"{out.name}/rope", attrs, [given, *order], [result], domain=self.domain))
        if not heads_first:
            shape = [0, 0, heads, size] if len(x.shape) == 4 else [-1, heads, size]
            new.append(gs.Node("Reshape", inputs=[result, new_constant(out, "shape", np.array(shape))], outputs=[out]))
        feeders = list(node.inputs)
        replace_node(scope, node, *new)
        _remove_unused(scope, feeders)
        return True


def _remove_unused(scope: gs.Graph, tensors: list[gs.Tensor]) -> None:
    """Detach the nodes of a rewritten rotation, so that a part of it is not taken for a rotation of its own."""
    while tensors:
        node = producer(tensors.pop())
        if node is not None and not any(tensor.outputs or is_output(scope, tensor) for tensor in node.outputs):
            tensors += list(node.inputs)
            node.inputs.clear()
            node.outputs.clear()


def _layout(rotation: Rotation) -> tuple[bool, int, int] | None:
    """(heads before sequence, heads, head size) of a rotation's x; None for one that the operators do not take."""
    x, rank = rotation.x, len(rotation.x.shape)
    size, places = static_dim(x, -1), dict(rotation.axes)
    sequence = [axis for axis, place in places.items() if place == (rank_of(rotation.ids) or 0) - 1]
    if size is None or len(sequence) != 1 or rank_of(rotation.ids) not in (1, 2):
        return None
    head = {(4, 2): 1, (4, 1): 2, (3, 0): 1}.get((rank, sequence[0]))
    heads = static_dim(x, head) if head is not None else None
    if head is None or heads is None or any(axis not in (sequence[0], 0) for axis in places):
        return None
    return sequence[0] == 2, heads, size


def _batched_positions(rotation: Rotation, heads_first: bool) -> tuple[list[gs.Node], gs.Tensor]:
    """Nodes that turn the positions into int64 [batch, seq], and that tensor."""
    x, ids, nodes = rotation.x, rotation.ids, []

    def step(op: str, suffix: str, inputs: list[gs.Tensor], attrs: dict | None = None) -> gs.Tensor:
        result = new_variable(rotation.out, suffix, dtype=np.int64)
        nodes.append(gs.Node(op, result.name, attrs or {}, inputs, [result]))
        return result

    if ids.dtype != np.int64:
        ids = step("Cast", "positions", [ids], {"to": 7})
    if rank_of(rotation.ids) != 2:
        flat = new_constant(rotation.out, "row", np.array([1, -1]))
        ids = step("Reshape", "positions_row", [ids, flat])
    batched = len(x.shape) == 4 and static_dim(x, 0) != 1
    if batched and 0 not in dict(rotation.axes):
        first, one = (new_constant(rotation.out, name, np.array([i])) for i, name in enumerate(("first", "one")))
        batch = step("Gather", "batch", [step("Shape", "x_shape", [x]), first], {"axis": 0})
        ids = step("Expand", "positions_batch", [ids, step("Concat", "positions_shape", [batch, one], {"axis": 0})])
    return nodes, ids


class _Finder:
    """Rotations of all scopes; positions of nodes are those before the first rewrite."""

    def __init__(self) -> None:
        self.angles: Angles = {}
        self.scopes: dict[int, Rotations] = {}

    def rotation(self, scope: gs.Graph, out: gs.Tensor) -> Rotation | None:
        if id(scope) not in self.scopes:
            self.scopes[id(scope)] = Rotations(scope, self.angles)
        return self.scopes[id(scope)].ending_at(out)


Halves = tuple[str, str]
"""Digests of the contents of a cos and a sin cache."""


class _Tables:
    """Half tables for all rotations, each content once."""

    def __init__(self) -> None:
        self._values: dict[int, NDArray] = {}
        self._halves: dict[object, str] = {}
        self._contents: dict[str, tuple[gs.Constant, NDArray]] = {}
        self._constants: dict[tuple[str, np.dtype], gs.Constant] = {}

    def halves(self, rotation: Rotation) -> Halves:
        """Raises Refusal where the two halves, or the pairs, of a table are not equal."""
        return (
            self._half(rotation.cos, rotation.interleaved, "cos"),
            self._half(rotation.sin, rotation.interleaved, "sin"),
        )

    def constants(self, halves: Halves, dtype: np.dtype) -> list[gs.Constant]:
        made = []
        for digest, role in zip(halves, ("cos", "sin"), strict=True):
            if (digest, dtype) not in self._constants:
                table, values = self._contents[digest]
                taken = {constant.name for constant in self._constants.values()}
                suffix = f"{role}_cache"
                while f"{table.name}/{suffix}" in taken:
                    suffix += "_"
                self._constants[digest, dtype] = new_constant(table, suffix, values.astype(dtype))
            made.append(self._constants[digest, dtype])
        return made

    def _half(self, columns: tuple[tuple[int, Entry], ...], interleaved: bool, role: str) -> str:
        key = (interleaved, *((sign, id(entry.table), entry.column, entry.dtypes) for sign, entry in columns))
        if key not in self._halves:
            values = np.stack([sign * self._column(entry) for sign, entry in columns], axis=1)
            width = len(columns) // 2
            first, second = (
                (values[:, 0::2], values[:, 1::2]) if interleaved else (values[:, :width], values[:, width:])
            )
            if not np.array_equal(first, second):
                apart = np.abs(first.astype(np.float64) - second.astype(np.float64)).max()
                raise Refusal(f"the {role} table's halves differ by up to {apart:.3g}; expected equal ones")
            content = np.ascontiguousarray(first)
            digest = hashlib.sha256(f"{content.dtype}{content.shape}".encode() + content.tobytes()).hexdigest()
            self._halves[key] = digest
            self._contents.setdefault(digest, (columns[0][1].table, content))
        return self._halves[key]

    def _column(self, entry: Entry) -> NDArray:
        if id(entry.table) not in self._values:
            values = values_of(entry.table)
            assert values is not None
            self._values[id(entry.table)] = values
        column = self._values[id(entry.table)][:, entry.column]
        for dtype in entry.dtypes:
            column = column.astype(dtype)
        return column
