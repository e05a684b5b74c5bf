"""A small serving graph with everything that an exported decoder's has: rotation, grouped heads, chosen rows.

Random weights; two layers of attention with residuals over an embedding, and a head. Evaluated by ONNX's reference
evaluator with `reference.py` for the attention.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from passes.onnx_model import DECODER_METADATA, DecoderSpec, OnnxModel, onnx_model_from_path
from plugins.paged_attention import reference
from plugins.paged_attention.reference import Attributes, Inputs
from plugins.paged_attention.schema import (
    EXPORT_DOMAIN,
    INPUTS,
    LOGITS,
    OP_TYPE,
    STEP_INPUTS,
    KvLayer,
    KvSpec,
    cache_names,
    cache_output_names,
)

HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCABULARY, CONTEXT, BLOCK = 4, 2, 64, 2, 31, 64, 16


@dataclass(frozen=True)
class Shape:
    """What an attention node looks like. `rotary` is the rotated part of a head, 0 for none."""

    rotary: int = HEAD_DIM
    interleaved: int = 0
    window: int = -1
    scale: float = 0.0
    packed: bool = False


class PagedAttention(OpRun):
    op_domain = EXPORT_DOMAIN

    def _run(self, *tensors, **attributes):
        given = {spec.name: tensor for spec, tensor in zip(INPUTS, tensors, strict=False)}
        own = {name: value for name, value in attributes.items() if value is not None}
        output, *caches = reference.paged_attention(Inputs(**given), Attributes(**own))
        return (output.astype(np.float32), *caches)


def serving_graph(path: Path, shape: Shape = Shape(), seed: int = 0) -> OnnxModel:
    """Write it, in the domain that the exporter uses."""
    rng = np.random.default_rng(seed)
    hidden, width = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    decoder = DecoderSpec(KvSpec((KvLayer(KV_HEADS, HEAD_DIM),) * LAYERS, BLOCK, "float32"), VOCABULARY, CONTEXT, (0,))
    weights = {
        "embedding": rng.standard_normal((VOCABULARY, hidden)),
        "head": rng.standard_normal((hidden, VOCABULARY)),
    }
    angles = np.arange(CONTEXT)[:, None] / 100.0 ** (np.arange(max(shape.rotary // 2, 1)) / max(shape.rotary // 2, 1))
    weights |= {"cos": np.cos(angles), "sin": np.sin(angles)}
    node, nodes = helper.make_node, [helper.make_node("Gather", ["embedding", "input_ids"], ["hidden0"], "embed")]
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT32, dims) for name, dims in STEP_INPUTS.items()]
    outputs = [helper.make_tensor_value_info(LOGITS, TensorProto.FLOAT, ["rows", VOCABULARY])]
    for layer in range(LAYERS):
        columns = {"q": hidden, "k": width, "v": width}
        for name, size in columns.items():
            weights[f"{name}{layer}"] = rng.standard_normal((hidden, size)) / np.sqrt(hidden)
        if shape.packed:
            weights[f"q{layer}"] = np.concatenate([weights.pop(f"{name}{layer}") for name in columns], axis=1)
            columns = {"q": hidden + 2 * width}
        nodes += [node("MatMul", [f"hidden{layer}", f"{x}{layer}"], [f"{x}_{layer}"], f"{x}.{layer}") for x in columns]
        caches, after = cache_names(layer), cache_output_names(layer)
        dims = ["blocks", "block_size", KV_HEADS, HEAD_DIM]
        inputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name in caches]
        outputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name in after]
        operands = [f"q_{layer}", *(["", ""] if shape.packed else [f"k_{layer}", f"v_{layer}"]), *caches]
        operands += ["cumulative_sequence_length", "past_seqlens", "block_table"]
        operands += ["cos", "sin"] if shape.rotary else ["", ""]
        nodes.append(
            node(
                *(OP_TYPE, [*operands, "slot_mapping"], [f"attention{layer}", *after], f"attention.{layer}"),
                domain=EXPORT_DOMAIN,
                num_heads=HEADS,
                kv_num_heads=KV_HEADS,
                do_rotary=int(shape.rotary > 0),
                rotary_interleaved=shape.interleaved,
                local_window_size=shape.window,
                scale=shape.scale,
            )
        )
        nodes.append(node("Add", [f"hidden{layer}", f"attention{layer}"], [f"hidden{layer + 1}"], f"add.{layer}"))
    nodes += [
        node("Gather", [f"hidden{LAYERS}", "logits_indices"], ["chosen"], "choose"),
        node("MatMul", ["chosen", "head"], [LOGITS], "lm_head"),
    ]
    initializers = [numpy_helper.from_array(values.astype(np.float32), name) for name, values in weights.items()]
    graph = helper.make_graph(nodes, "serving", inputs, outputs, initializers)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(EXPORT_DOMAIN, 1)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    helper.set_model_props(proto, {DECODER_METADATA: decoder.to_json()})
    onnx.save(proto, path)
    return onnx_model_from_path(path)


def evaluated_steps(model: OnnxModel, kv: KvSpec, seed: int = 0) -> Iterator[tuple[NDArray, dict[str, NDArray]]]:
    """Logits and inputs of a prompt, of a step that mixes, and of one that decodes; whoever gets them keeps the caches.

    Caches of the inputs are of `kv`'s type, and what the caller leaves in them goes into its next step.
    """
    rng, graph = np.random.default_rng(seed), ReferenceEvaluator(onnx.load(model.path), new_ops=[PagedAttention])
    dims = (4, BLOCK, KV_HEADS, HEAD_DIM)
    names = [name for layer in range(LAYERS) for name in cache_names(layer)]
    own = {name: np.zeros(dims, np.float32) for name in names}
    theirs = {name: np.zeros(dims, kv.dtype) for name in names}
    table = np.array([[2, 0], [3, 1]], np.int32)
    for new, past in (((18, 0), (0, 0)), ((5, 7), (18, 0)), ((1, 1), (23, 7))):
        positions = [np.arange(p, p + n) for n, p in zip(new, past, strict=True)]
        slots = [row[at // BLOCK] * BLOCK + at % BLOCK for row, at in zip(table, positions, strict=True)]
        cumulative = np.cumsum([0, *new]).astype(np.int32)
        step = {
            "input_ids": rng.integers(1, VOCABULARY, sum(new)).astype(np.int32),
            "position_ids": np.concatenate(positions).astype(np.int32),
            "logits_indices": np.unique(np.maximum(cumulative[1:] - 1, 0)).astype(np.int32),
            "cumulative_sequence_length": cumulative,
            "past_seqlens": np.array(past, np.int32),
            "block_table": table,
            "slot_mapping": np.concatenate(slots).astype(np.int32),
        }
        logits, *after = graph.run(None, {**step, **own})
        yield logits, {**step, **theirs}
        found = dict(zip([output.name for output in graph.proto_.graph.output][1:], after, strict=True))
        own = {name: found[name.replace("cache.", "cache_out.")] for name in names}
