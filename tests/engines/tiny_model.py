"""A serving graph that is small and whole, and the same model in float64 NumPy."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from passes.onnx_model import DecoderSpec
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


class TinyModel:
    """A serving graph on disk: token and position embedding, two attention layers with residuals, and a head."""

    vocabulary, heads, kv_heads, head_dim, block_size = 61, 4, 2, 32, 8

    def __init__(self, path: Path, dtype: str = "float32", max_context: int = 256) -> None:
        self.path = path
        self.max_context = max_context
        self.kv = KvSpec((KvLayer(self.kv_heads, self.head_dim),) * 2, self.block_size, dtype)
        self.decoder = DecoderSpec(self.kv, self.vocabulary, self.max_context, (0,))
        rng = np.random.default_rng(7)
        hidden, width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.weights = {
            "embedding": rng.normal(size=(self.vocabulary, hidden)).astype(np.float32),
            "positions": rng.normal(size=(self.max_context, hidden)).astype(np.float32),
            "head": rng.normal(size=(hidden, self.vocabulary)).astype(np.float32),
        }
        for layer in range(2):
            for name, columns in (("q", hidden), ("k", width), ("v", width), ("o", hidden)):
                weight = rng.normal(size=(hidden, columns)) / np.sqrt(hidden)
                self.weights[f"{name}{layer}"] = weight.astype(np.float32)
        self._save(path, dtype)

    def _save(self, path: Path, dtype: str) -> None:
        cache_type = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
        node = helper.make_node
        nodes = [
            node("Gather", ["embedding", "input_ids"], ["tokens"]),
            node("Gather", ["positions", "position_ids"], ["places"]),
            node("Add", ["tokens", "places"], ["hidden0"]),
        ]
        inputs = [helper.make_tensor_value_info(n, TensorProto.INT32, s) for n, s in STEP_INPUTS.items()]
        outputs = [helper.make_tensor_value_info(LOGITS, TensorProto.FLOAT, ["rows", self.vocabulary])]
        for layer in range(2):
            nodes += [node("MatMul", [f"hidden{layer}", f"{x}{layer}"], [f"{x}_{layer}"]) for x in "qkv"]
            caches, aliases = cache_names(layer), cache_output_names(layer)
            shape = ["blocks", self.block_size, self.kv_heads, self.head_dim]
            inputs += [helper.make_tensor_value_info(name, cache_type[dtype], shape) for name in caches]
            outputs += [helper.make_tensor_value_info(name, cache_type[dtype], shape) for name in aliases]
            step = ["cumulative_sequence_length", "past_seqlens", "block_table", "", "", "slot_mapping"]
            nodes += [
                node(
                    OP_TYPE,
                    [f"q_{layer}", f"k_{layer}", f"v_{layer}", *caches, *step],
                    [f"attention{layer}", *aliases],
                    domain=DOMAIN,
                    num_heads=self.heads,
                    kv_num_heads=self.kv_heads,
                ),
                node("MatMul", [f"attention{layer}", f"o{layer}"], [f"projected{layer}"]),
                node("Add", [f"hidden{layer}", f"projected{layer}"], [f"hidden{layer + 1}"]),
            ]
        nodes += [
            node("Gather", ["hidden2", "logits_indices"], ["rows"]),
            node("MatMul", ["rows", "head"], [LOGITS]),
        ]
        initializers = [numpy_helper.from_array(weight, name) for name, weight in self.weights.items()]
        graph = helper.make_graph(nodes, "tiny", inputs, outputs, initializers)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)

    def logits(self, token_ids: list[int], window: int | None = None) -> np.ndarray:
        """The same model in float64 NumPy without a cache: [tokens, vocabulary]; each token sees `window` ones."""
        weights = {name: weight.astype(np.float64) for name, weight in self.weights.items()}
        count, group = len(token_ids), self.heads // self.kv_heads
        hidden = weights["embedding"][token_ids] + weights["positions"][:count]
        mask = np.triu(np.full((count, count), -np.inf), 1)
        if window is not None:
            mask += np.tril(np.full((count, count), -np.inf), -window)
        for layer in range(2):
            q = (hidden @ weights[f"q{layer}"]).reshape(count, self.heads, self.head_dim)
            k, v = (
                (hidden @ weights[f"{x}{layer}"]).reshape(count, self.kv_heads, self.head_dim).repeat(group, axis=1)
                for x in "kv"
            )
            scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(self.head_dim) + mask
            probabilities = np.exp(scores - scores.max(-1, keepdims=True))
            probabilities /= probabilities.sum(-1, keepdims=True)
            attention = np.einsum("hqk,khd->qhd", probabilities, v).reshape(count, -1)
            hidden = hidden + attention @ weights[f"o{layer}"]
        return hidden @ weights["head"]
