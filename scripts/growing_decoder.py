"""A small decoder whose activations grow with position: calibrated on short texts, it breaks on long ones.

One attention layer, then a feed-forward block whose input is multiplied by a factor of the position, 1 up to `flat`
tokens and `growth` at the end of the context, and whose result is divided by it again. In floats the factor changes
nothing; in integers whose range comes from short texts, everything beyond `flat` is clipped. It shows what the coverage
gate and the gate on long data are for; no model that was trained is like this.

    python scripts/growing_decoder.py /tmp/growing.onnx
"""

import sys
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from passes.onnx_model import DECODER_METADATA, DecoderSpec, OnnxModel, onnx_model_from_path
from plugins.paged_attention.schema import (
    DOMAIN,
    LOGITS,
    OP_TYPE,
    STEP_INPUTS,
    KvLayer,
    KvSpec,
    cache_names,
    cache_output_names,
)

VOCABULARY, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 61, 4, 2, 32, 16
HIDDEN, INNER = HEADS * HEAD_DIM, 256


def growing_decoder(path: Path, max_context: int = 2048, growth: float = 6.0, flat: int = 64) -> OnnxModel:
    """Write the serving graph, float32, with the description of its cache in its metadata."""
    weights = _weights(max_context, growth, flat)
    caches, aliases = cache_names(0), cache_output_names(0)
    shape = ["blocks", BLOCK_SIZE, KV_HEADS, HEAD_DIM]
    value, real = helper.make_tensor_value_info, TensorProto.FLOAT
    inputs = [value(name, TensorProto.INT32, sizes) for name, sizes in STEP_INPUTS.items()]
    inputs += [value(name, real, shape) for name in caches]
    outputs = [value(LOGITS, real, ["rows", VOCABULARY]), *(value(name, real, shape) for name in aliases)]
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(_nodes(caches, aliases), "growing", inputs, outputs, tensors)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    spec = DecoderSpec(KvSpec((KvLayer(KV_HEADS, HEAD_DIM),), BLOCK_SIZE, "float32"), VOCABULARY, max_context, (0,))
    helper.set_model_props(model, {DECODER_METADATA: spec.to_json()})
    onnx.save(model, path)
    return onnx_model_from_path(path)


def _weights(max_context: int, growth: float, flat: int) -> dict[str, NDArray[np.float32]]:
    generator = np.random.default_rng(5)

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return (generator.normal(size=(rows, columns)) / np.sqrt(rows)).astype(np.float32)

    past_flat = np.maximum(np.arange(max_context) - flat, 0) / max(1, max_context - 1 - flat)
    return {
        "embedding": generator.normal(size=(VOCABULARY, HIDDEN)).astype(np.float32),
        "growth": (1 + (growth - 1) * past_flat).astype(np.float32)[:, None],
        "wq": matrix(HIDDEN, HIDDEN),
        "wk": matrix(HIDDEN, KV_HEADS * HEAD_DIM),
        "wv": matrix(HIDDEN, KV_HEADS * HEAD_DIM),
        "wo": matrix(HIDDEN, HIDDEN),
        "w_up": matrix(HIDDEN, INNER),
        "w_down": matrix(INNER, HIDDEN),
        "w_head": 4 * matrix(HIDDEN, VOCABULARY),
    }


def _nodes(caches: tuple[str, str], aliases: tuple[str, str]) -> list[onnx.NodeProto]:
    def node(op: str, inputs: list[str], outputs: list[str], name: str = "", **attributes: object) -> onnx.NodeProto:
        return helper.make_node(op, inputs, outputs, name=name or outputs[0], **attributes)

    step = ["cumulative_sequence_length", "past_seqlens", "block_table", "", "", "slot_mapping"]
    return [
        node("Gather", ["embedding", "input_ids"], ["tokens"]),
        node("Gather", ["growth", "position_ids"], ["factor"]),
        *(node("MatMul", ["tokens", f"w{x}"], [f"{x}"], f"layers.0.attention.{x}_proj") for x in "qkv"),
        node(
            OP_TYPE,
            ["q", "k", "v", *caches, *step],
            ["attention", *aliases],
            domain=DOMAIN,
            num_heads=HEADS,
            kv_num_heads=KV_HEADS,
        ),
        node("MatMul", ["attention", "wo"], ["projected"], "layers.0.attention.o_proj"),
        node("Add", ["tokens", "projected"], ["residual"]),
        node("Mul", ["residual", "factor"], ["grown"]),
        node("MatMul", ["grown", "w_up"], ["up"], "layers.0.mlp.up_proj"),
        node("Relu", ["up"], ["active"]),
        node("MatMul", ["active", "w_down"], ["down"], "layers.0.mlp.down_proj"),
        node("Div", ["down", "factor"], ["shrunk"]),
        node("Gather", ["shrunk", "logits_indices"], ["rows_of_head"]),
        node("MatMul", ["rows_of_head", "w_head"], [LOGITS], "head"),
    ]


if __name__ == "__main__":
    print(growing_decoder(Path(sys.argv[1])).sha256)
