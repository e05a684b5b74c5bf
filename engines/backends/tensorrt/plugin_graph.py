"""A decoder's serving graph with the layers of the attention plug-in in place of its attention.

1. PagedAttention(q, k, v, caches; ...) -> each layer of `plugins.paged_attention.tensorrt_plugin.LAYERS`, whose fields
   hold the attributes and the plug-in ABI; q, k, v and both caches are 16-bit, the result is cast back.
2. Inputs of the graph that nothing reads are left out: TensorRT wants none.

Caches stay [blocks, block_size, kv_heads, head_dim], and a step's inputs stay those of the serving graph, so that the
runtime hands on what the scheduler gives it; beside them the graph has scratch memory that its layers use in turn, an
input that is also its output. Knows graphs only.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from engines.backends.tensorrt.linear_graph import remove_undone_casts, rewritten
from passes.base import Effect, Outcome
from passes.graph import graph_from_path, tidy
from passes.onnx_model import DECODER_METADATA, DecoderSpec, OnnxModel, load_structure
from passes.pattern import input_of
from passes.precision_islands import LOW_TYPES
from plugins.abi import abi_hash
from plugins.errors import KilnError
from plugins.paged_attention.schema import ATTRIBUTES, CUDA_BLOCK_GRAIN, INPUTS, OP_TYPE, cache_output_names
from plugins.paged_attention.tensorrt_plugin import LAYERS, NAMESPACE, SCRATCH, VERSION, Element, Fields, Kernels, Layer

_OPTIONAL = ("key", "value", "cos_cache", "sin_cache")
_FIELDS = "fields"
SCRATCH_OUT = f"{SCRATCH}_out"


@dataclass(frozen=True)
class PluginTarget:
    """What a plan is for: `multiprocessors` of its GPU, and the most sequences of a step."""

    architecture: str
    multiprocessors: int
    most_seqs: int
    element: Element = "float16"


def plugin_graph(model: OnnxModel, path: Path, target: PluginTarget) -> tuple[OnnxModel, Kernels]:
    """Write it, and say which kernels its layers need. Raises KilnError for what the kernels cannot do."""
    if model.decoder is None:
        raise KilnError(f"{model.path} is no serving graph: it has no KV cache; build it without --attention")
    kv = model.decoder.kv
    kernels = _kernels(model, target)
    if "int8" in kv.dtypes:
        raise KilnError(f"{model.path} has an int8 KV cache, which the attention plug-in lacks; leave --kv-cache out")
    if kv.block_size % CUDA_BLOCK_GRAIN:
        raise KilnError(
            f"{model.path} has blocks of {kv.block_size} tokens; the attention plug-in takes multiples of "
            f"{CUDA_BLOCK_GRAIN}: build it with --block-size {CUDA_BLOCK_GRAIN}"
        )
    decoder = replace(model.decoder, kv=replace(kv, dtype=target.element, value_dtype=None))
    return rewritten(model, path, PluginLayers(decoder, kernels)), kernels


def _kernels(model: OnnxModel, target: PluginTarget) -> Kernels:
    """All layers of a network use the same ones. Raises KilnError where they would need different ones."""
    assert model.decoder is not None
    nodes = [_fields_of(node) for node in graph_from_path(model.path).nodes if node.op == OP_TYPE]
    kinds = {
        (layer.head_dim, fields.num_heads // fields.kv_num_heads, fields.kv_num_heads)
        for layer, fields in zip(model.decoder.kv.layers, nodes, strict=True)
    }
    if len(kinds) > 1:
        found = "; ".join(f"{size} x {group} x {kv_heads}" for size, group, kv_heads in sorted(kinds))
        raise KilnError(
            f"the layers of {model.path} differ in head size, query heads of a KV head or KV heads ({found}); the "
            "attention plug-in takes one kind in a network: build it with --attention native"
        )
    size, group, kv_heads = kinds.pop()
    return Kernels(target.element, size, target.architecture, group, kv_heads, target.multiprocessors, target.most_seqs)


def abi_of(path: Path) -> str | None:
    """The plug-in ABI of a graph's layers, None without any. Raises KilnError where it is not this Kiln's."""
    found = None
    for node in load_structure(path).graph.node:
        if node.domain == NAMESPACE:
            text = next((attribute.s.decode() for attribute in node.attribute if attribute.name == _FIELDS), "")
            found = Fields.from_text(text).abi
    return found


class PluginLayers:
    """Implements `passes.base.Pass`; `decoder` is what the graph will be."""

    name = "plugin_layers"
    effect = Effect.PRECISION

    def __init__(self, decoder: DecoderSpec, kernels: Kernels) -> None:
        self.decoder, self.kernels = decoder, kernels

    def call(self, graph: gs.Graph) -> Outcome:
        nodes = [node for node in graph.nodes if node.op == OP_TYPE]
        scratch = gs.Variable(SCRATCH, np.dtype(np.int32), [self.kernels.scratch])
        graph.inputs.append(scratch)
        for number, node in enumerate(nodes):
            scratch = _Attention(graph, self.decoder, number, node).replace(scratch)
        scratch.name = SCRATCH_OUT
        graph.outputs.append(scratch)
        graph.nodes = [node for node in graph.nodes if node.op != OP_TYPE]
        remove_undone_casts(graph)
        tidy(graph)
        graph.inputs = [tensor for tensor in graph.inputs if tensor.outputs]
        return Outcome(len(nodes), metadata={DECODER_METADATA: self.decoder.to_json()})


class _Attention:
    """One node's replacement."""

    def __init__(self, graph: gs.Graph, decoder: DecoderSpec, number: int, node: gs.Node) -> None:
        self.graph, self.number, self.node = graph, number, node
        self.geometry = decoder.kv.layers[number]
        self.dtype = LOW_TYPES[decoder.kv.dtype]
        self.fields = _fields_of(node)

    def replace(self, scratch: gs.Variable) -> gs.Variable:
        """Takes the scratch memory as the layers before left it, and gives it back as those behind find it."""
        dtype = np.dtype(self.node.inputs[0].dtype)
        tensors = {**self.operands(), SCRATCH: scratch}
        for layer in LAYERS:
            tensors.update(self.layer(layer, tensors))
        output = self.node.outputs[0]
        self.node.outputs.clear()
        self.node.inputs.clear()
        self.add("Cast", [tensors["output"]], [output], to=_number(dtype))
        left: gs.Variable = tensors[SCRATCH]
        return left

    def operands(self) -> dict[str, gs.Tensor]:
        """By the names of `schema.INPUTS`, of the types that the kernels take."""
        given = {spec.name: input_of(self.node, index) for index, spec in enumerate(INPUTS)}
        found = {name: tensor for name, tensor in given.items() if tensor is not None and name not in _OPTIONAL}
        query = self.node.inputs[0]
        if given["key"] is None:
            found.update(self.unpacked(query))
        else:
            found.update({name: self.low(name, given[name]) for name in ("query", "key", "value")})
        for name in ("cos_cache", "sin_cache"):
            nothing = gs.Constant(f"{self.node.name}/{name}", np.zeros((1, 2), np.float32))
            found[name] = given[name] if given[name] is not None else nothing
        for name in ("key_cache", "value_cache"):
            found[name].dtype = self.dtype
        return found

    def unpacked(self, packed: gs.Tensor) -> dict[str, gs.Tensor]:
        size, heads, kv_heads = self.geometry.head_dim, self.fields.num_heads, self.fields.kv_num_heads
        widths = np.array([heads * size, kv_heads * size, kv_heads * size], np.int64)
        names = ("query", "key", "value")
        parts = [
            gs.Variable(f"{self.node.name}/{name}", self.dtype, ["tokens", int(width)])
            for name, width in zip(names, widths, strict=True)
        ]
        counts = gs.Constant(f"{self.node.name}/widths", widths)
        self.add("Split", [self.low("packed", packed), counts], parts, axis=1)
        return dict(zip(names, parts, strict=True))

    def low(self, name: str, tensor: gs.Tensor) -> gs.Variable:
        made = gs.Variable(f"{self.node.name}/{name}16", self.dtype, tensor.shape)
        self.add("Cast", [tensor], [made], to=_number(self.dtype))
        return made

    def layer(self, layer: Layer, tensors: dict[str, gs.Tensor]) -> dict[str, gs.Tensor]:
        """Adds it; gives what its outputs are to the layers behind it."""
        names = dict(zip(("key_cache", "value_cache"), cache_output_names(self.number), strict=True))
        made: dict[str, gs.Tensor] = {}
        for name in layer.outputs:
            source = tensors[name if name in layer.inputs else layer.like]
            fresh = gs.Variable(names.get(name, f"{self.node.name}/{layer.name}/{name}"), source.dtype, source.shape)
            self.graph.outputs = [fresh if old.name == fresh.name else old for old in self.graph.outputs]
            made[name] = fresh
        self.add(
            layer.name,
            [tensors[name] for name in layer.inputs],
            list(made.values()),
            NAMESPACE,
            **{_FIELDS: self.fields.text, "plugin_namespace": NAMESPACE, "plugin_version": VERSION},
        )
        return made

    def add(
        self, op: str, inputs: list[gs.Tensor], outputs: list[gs.Tensor], domain: str = "", **attrs: object
    ) -> None:
        self.graph.nodes.append(gs.Node(op, f"{outputs[0].name}/{op}", attrs, inputs, outputs, domain))


def _fields_of(node: gs.Node) -> Fields:
    known = {name: node.attrs.get(name, default) for name, default in ATTRIBUTES.items() if name != "compute_dtype"}
    if known["scale"] < 0:
        raise KilnError(f"node {node.name} has the scale {known['scale']:g}; the attention plug-in takes positive ones")
    return Fields(**known, abi=abi_hash())


def _number(dtype: "np.dtype") -> int:
    return int(onnx.helper.np_dtype_to_tensor_dtype(dtype))
