"""A decoder's serving graph in TensorRT's own layers: attention over a linear KV cache, no plug-in.

1. PagedAttention(q, k, v, caches; do_rotary) -> TensorScatter(cache, rotated k or v, past_seqlens) for each cache, then
   Attention(rotated q, keys, values, nonpad_kv_seqlen; is_causal). ONNX Runtime runs these (opset 24), so that the
   graph can be judged on a CPU; TensorRT reads them as IKVCacheUpdateLayer, IRotaryEmbeddingLayer and, through
   `native_graph`, IAttention.
2. input_ids [tokens] -> input_ids [seqs, step], and position_ids from past_seqlens: every sequence of a call has `step`
   new tokens, so what lies between attentions stays packed, [seqs*step, ...].
3. A cache [blocks, block_size, kv_heads, head_dim] -> [seqs, kv_heads, max_context, head_dim]: a row for each sequence
   of the call, whose first past_seqlens positions are valid. Its output is the same memory.

With 16-bit `dtype` rotation, caches and attention are of that type; casts that undo one another are removed.

Knows graphs only; who owns a row is the runtime's (`engines.backends.linear_decoder`).
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from passes.base import Effect, Outcome, Pass
from passes.graph import graph_from_path, tidy
from passes.manager import run_passes
from passes.onnx_model import DECODER_METADATA, DecoderSpec, OnnxModel
from passes.pattern import input_of, is_op, producer, replace_uses, values_of
from passes.precision_islands import FP32, LOW_TYPES
from plugins.errors import KilnError
from plugins.paged_attention.schema import (
    ATTRIBUTES,
    INPUTS,
    OP_TYPE,
    CacheDtype,
    cache_names,
    cache_output_names,
)

OPSET = 24
"""The first that has TensorScatter, and Attention with lengths of its own."""
OLDEST_GRAPH = 18
"""Of the opsets that are raised to OPSET: from here on operators got types and attributes, no other meaning."""
INPUT_IDS, POSITIONS, PAST, LOGIT_ROWS = "input_ids", "position_ids", "past_seqlens", "logits_indices"
_INDEX = {spec.name: index for index, spec in enumerate(INPUTS)}
_FLOATS = {"float32": FP32, **LOW_TYPES}


@dataclass(frozen=True)
class _Heads:
    """Of one attention node."""

    query: int
    kv: int
    size: int
    capacity: int


def linear_graph(model: OnnxModel, target: Path, dtype: CacheDtype = "float32") -> OnnxModel:
    """Write the linear form of a serving graph, its weights beside it. Its decoder's block is a whole context.

    Raises KilnError for what is no serving graph, and for attributes that TensorRT's layers do not have.
    """
    if model.decoder is None:
        raise KilnError(f"{model.path} is no serving graph: it has no KV cache; build it without --attention")
    if dtype not in _FLOATS:
        raise KilnError(f"a linear cache of {dtype} is not there; expected {', '.join(_FLOATS)}")
    graph = graph_from_path(model.path)
    if graph.opset < OLDEST_GRAPH:
        raise KilnError(f"{model.path} has opset {graph.opset}; expected {OLDEST_GRAPH} or later: export it again")
    for node in graph.nodes:
        if node.op == OP_TYPE:
            _refuse_unknown(model.path, node)
    return rewritten(model, target, LinearCache(_decoder(model.decoder, dtype)))


def rewritten(model: OnnxModel, target: Path, graph_pass: Pass) -> OnnxModel:
    """What one pass makes of a model. Raises KilnError where it fails: without it the graph is of no use here."""
    made, (report,) = run_passes(model, target, [graph_pass])
    if report.rolled_back:
        raise KilnError(f"{model.path}: {graph_pass.name}: {report.rolled_back}")
    return made


class LinearCache:
    """Implements `passes.base.Pass`; `decoder` is what the graph will be, its blocks whole contexts."""

    name = "linear_cache"
    effect = Effect.REORDERS

    def __init__(self, decoder: DecoderSpec) -> None:
        self.decoder = decoder

    def call(self, graph: gs.Graph) -> Outcome:
        nodes = [node for node in graph.nodes if node.op == OP_TYPE]
        _Linear(graph, self.decoder).rewrite(nodes)
        remove_undone_casts(graph)
        tidy(graph)
        raise_opset(graph)
        return Outcome(len(nodes), metadata={DECODER_METADATA: self.decoder.to_json()})


def _decoder(decoder: DecoderSpec, dtype: CacheDtype) -> DecoderSpec:
    kv = replace(decoder.kv, block_size=decoder.max_context, dtype=dtype, value_dtype=None)
    return replace(decoder, kv=kv)


def _refuse_unknown(path: Path, node: gs.Node) -> None:
    if node.attrs.get("softcap", ATTRIBUTES["softcap"]):
        raise KilnError(
            f"{path}: node {node.name} caps its scores (softcap {node.attrs['softcap']:g}), which TensorRT's attention "
            "layer does not: build it with --attention plugin, or for another SKU"
        )
    if input_of(node, _INDEX["k_scale"]) is not None:
        raise KilnError(f"{path}: the KV cache is int8, which a linear cache is not; leave --kv-cache out")


class _Linear:
    """Rewrites one graph; tensors that all attentions share are made once."""

    def __init__(self, graph: gs.Graph, decoder: DecoderSpec) -> None:
        self.graph, self.decoder, self.dtype = graph, decoder, decoder.kv.dtype
        self.numpy = _FLOATS[self.dtype]
        self.nodes: list[gs.Node] = []
        inputs = {tensor.name: tensor for tensor in graph.inputs}
        self.past = inputs[PAST]
        self.ids = gs.Variable(INPUT_IDS, np.int32, ["seqs", "step"])
        self.rows = inputs[LOGIT_ROWS]
        old = inputs[INPUT_IDS]
        old.name = f"{INPUT_IDS}/flat"
        self.node("Reshape", [self.ids, self.constant("flat_shape", [-1])], [old])
        self.shape = self.made("Shape", [self.ids], "shape", np.int64)  # [seqs, step]
        self.offset = self.made("Cast", [self.past], "past64", np.int64, to=onnx.TensorProto.INT64)
        self.positions = self._positions(inputs.get(POSITIONS))
        step = self.made("Gather", [self.shape, self.constant("second", [1])], "step", np.int64)
        self.lengths = self.made("Add", [self.offset, step], "lengths", np.int64)

    def rewrite(self, attentions: list[gs.Node]) -> None:
        caches = [self.attention(layer, node) for layer, node in enumerate(attentions)]
        self.graph.nodes = [*self.nodes, *(n for n in self.graph.nodes if n.op != OP_TYPE)]
        logits = [tensor for tensor in self.graph.outputs if "cache_out" not in tensor.name]
        self.graph.inputs = [self.ids, self.past, self.rows, *(given for pair in caches for given, _ in pair)]
        self.graph.outputs = [*logits, *(made for pair in caches for _, made in pair)]

    def attention(self, layer: int, node: gs.Node) -> list[tuple[gs.Variable, gs.Variable]]:
        """The nodes in place of one; gives its caches, before and after."""
        geometry, dtype = self.decoder.kv.layers[layer], np.dtype(node.inputs[0].dtype)
        heads = _Heads(node.attrs["num_heads"], geometry.kv_heads, geometry.head_dim, self.decoder.max_context)
        query, key, value = self.operands(node, heads)
        if node.attrs.get("do_rotary", 0):
            query, key = self.rotated(node, query, heads), self.rotated(node, key, heads)
        shape = ["seqs", heads.kv, heads.capacity, heads.size]
        pairs, after = [], []
        for given, made, update in zip(cache_names(layer), cache_output_names(layer), (key, value), strict=True):
            cache, updated = gs.Variable(given, self.numpy, shape), gs.Variable(made, self.numpy, shape)
            self.node("TensorScatter", [cache, update, self.offset], [updated], axis=2, mode="linear")
            pairs.append((cache, updated))
            after.append(updated)
        attended = self.attended(node, query, after, heads)
        turned = self.made("Transpose", [attended], f"{node.name}/turned", self.numpy, perm=[0, 2, 1, 3])
        rows = self.constant(f"{node.name}/rows_shape", [-1, heads.query * heads.size])
        flat = self.made("Reshape", [turned, rows], f"{node.name}/flat", self.numpy)
        output = node.outputs[0]
        node.outputs.clear()
        node.inputs.clear()
        self.cast(flat, output, dtype)
        return pairs

    def operands(self, node: gs.Node, heads: _Heads) -> tuple[gs.Variable, gs.Variable, gs.Variable]:
        """Query, key and value, [seqs, heads, step, head_dim]."""
        key, value = (input_of(node, _INDEX[name]) for name in ("key", "value"))
        if key is not None and value is not None:
            return (
                self.by_head(node.inputs[0], f"{node.name}/query", heads.query, heads.size),
                self.by_head(key, f"{node.name}/key", heads.kv, heads.size),
                self.by_head(value, f"{node.name}/value", heads.kv, heads.size),
            )
        packed = self.by_head(node.inputs[0], f"{node.name}/packed", heads.query + 2 * heads.kv, heads.size)
        parts = [gs.Variable(f"{node.name}/{name}", self.numpy) for name in ("query", "key", "value")]
        counts = self.constant(f"{node.name}/counts", [heads.query, heads.kv, heads.kv])
        self.node("Split", [packed, counts], parts, axis=1)
        return parts[0], parts[1], parts[2]

    def by_head(self, tensor: gs.Tensor, name: str, count: int, size: int) -> gs.Variable:
        """[tokens, count*size] as [seqs, count, step, size]."""
        low = gs.Variable(f"{name}/low", self.numpy)
        self.cast(tensor, low, self.numpy)
        heads = self.constant(f"{name}/heads", [count, size])
        shape = self.made("Concat", [self.shape, heads], f"{name}/shape", np.int64, axis=0)
        split = self.made("Reshape", [low, shape], f"{name}/split", self.numpy)
        return self.made("Transpose", [split], f"{name}/heads4", self.numpy, perm=[0, 2, 1, 3])

    def rotated(self, node: gs.Node, tensor: gs.Variable, heads: _Heads) -> gs.Variable:
        tables = []
        for name in ("cos_cache", "sin_cache"):
            table = node.inputs[_INDEX[name]]
            values = values_of(table)
            if values is None:
                raise KilnError(f"node {node.name} computes its {name}; expected a constant: export the model again")
            tables.append(self.table(table, values))
        half = int(tables[0].shape[1])
        attrs = {"interleaved": int(node.attrs.get("rotary_interleaved", 0))}
        if 2 * half < heads.size:
            attrs["rotary_embedding_dim"] = 2 * half
        return self.made(
            "RotaryEmbedding", [tensor, *tables, self.positions], f"{tensor.name}/rotated", self.numpy, **attrs
        )

    def attended(self, node: gs.Node, query: gs.Variable, caches: list[gs.Variable], heads: _Heads) -> gs.Variable:
        window = node.attrs.get("local_window_size", ATTRIBUTES["local_window_size"])
        attrs = {"scale": float(node.attrs.get("scale", 0.0) or heads.size**-0.5)}
        if window > 0:
            return self.made(
                "Attention",
                [query, *caches, self.window_mask(window, heads)],
                f"{node.name}/heads",
                self.numpy,
                **attrs,
            )
        nothing = gs.Variable.empty()
        operands = [query, *caches, nothing, nothing, nothing, self.lengths]
        return self.made("Attention", operands, f"{node.name}/heads", self.numpy, is_causal=1, **attrs)

    def window_mask(self, window: int, heads: _Heads) -> gs.Variable:
        """Bool [seqs, 1, step, capacity]: the last `window` positions up to the query's own."""
        name = f"window{window}"
        known = next((n.outputs[0] for n in self.nodes if n.outputs[0].name == f"{name}/mask"), None)
        if known is not None:
            return known
        axes = self.constant(f"{name}/axes", [1, 3])
        own = self.made("Unsqueeze", [self.positions, axes], f"{name}/own", np.int64)
        keys = self.constant(f"{name}/keys", np.arange(heads.capacity).reshape(1, 1, 1, -1))
        oldest = self.made("Sub", [own, self.constant(f"{name}/size", [window])], f"{name}/oldest", np.int64)
        seen = self.made("LessOrEqual", [keys, own], f"{name}/seen", np.bool_)
        recent = self.made("Greater", [keys, oldest], f"{name}/recent", np.bool_)
        return self.made("And", [seen, recent], f"{name}/mask", np.bool_)

    def _positions(self, flat: gs.Variable | None) -> gs.Variable:
        """[seqs, step] int64; `flat` is the input that it replaces, whose readers get it as [tokens] int32."""
        step = self.made("Gather", [self.shape, self.constant("one", np.array(1))], "step_scalar", np.int64)
        zero, one = self.constant("zero", np.array(0)), self.constant("increment", np.array(1))
        within = self.made("Range", [zero, step, one], "within", np.int64)
        column = self.made("Unsqueeze", [self.offset, self.constant("last_axis", [1])], "past_column", np.int64)
        positions = self.made("Add", [column, within], "positions", np.int64)
        if flat is not None and flat.outputs:
            row = self.made("Reshape", [positions, self.constant("positions_shape", [-1])], "positions_row", np.int64)
            flat.name = f"{POSITIONS}/flat"
            self.node("Cast", [row], [flat], to=onnx.TensorProto.INT32)
        return positions

    def table(self, table: gs.Tensor, values: "np.ndarray") -> gs.Constant:
        """Cosines or sines in the type of the rotation; one for all layers."""
        name = f"{table.name}/{self.dtype}"
        known = next((t for n in self.nodes for t in n.inputs if t.name == name), None)
        return known if known is not None else gs.Constant(name, np.ascontiguousarray(values.astype(self.numpy)))

    def constant(self, name: str, values: "list[int] | np.ndarray") -> gs.Constant:
        return gs.Constant(f"linear/{name}", np.asarray(values, np.int64))

    def made(self, op: str, inputs: list[gs.Tensor], name: str, dtype: object, **attrs: object) -> gs.Variable:
        output = gs.Variable(f"linear/{name}" if "/" not in name else name, dtype)
        self.node(op, inputs, [output], **attrs)
        return output

    def node(self, op: str, inputs: list[gs.Tensor], outputs: list[gs.Variable], **attrs: object) -> None:
        self.nodes.append(gs.Node(op, f"{outputs[0].name}/{op}", attrs, inputs, outputs, ""))

    def cast(self, tensor: gs.Tensor, target: gs.Variable, dtype: "np.dtype") -> None:
        """`target` of a type; what casts needlessly goes at the end (`remove_undone_casts`)."""
        self.node("Cast", [tensor], [target], to=onnx.helper.np_dtype_to_tensor_dtype(dtype))


def raise_opset(graph: gs.Graph) -> None:
    """To OPSET; a graph states it twice."""
    graph.opset = OPSET
    for domain in graph.import_domains or ():
        if not domain.domain:
            domain.version = OPSET


def remove_undone_casts(graph: gs.Graph) -> None:
    """Cast(x) of x's own type, and Cast(Cast(x)) back to the type of x where the first one lost nothing."""
    for node in list(graph.nodes):
        if not is_op(node, "Cast") or any(node.outputs[0] is output for output in graph.outputs):
            continue
        source = node.inputs[0]
        before = producer(source, "Cast")
        if source.dtype is not None and np.dtype(source.dtype) == _target_of(node):
            replace_uses(graph, node.outputs[0], source)
        elif before is not None and before.inputs[0].dtype is not None:
            first = np.dtype(before.inputs[0].dtype)
            if first == _target_of(node) and np.can_cast(first, _target_of(before)):
                replace_uses(graph, node.outputs[0], before.inputs[0])


def _target_of(cast: gs.Node) -> "np.dtype":
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(cast.attrs["to"]))
