"""INT8 caches of a serving graph: what changes, what stays, and the runtime over the result."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from engines.backends.onnxruntime import OnnxRuntimeDecoder
from passes.onnx_model import DECODER_METADATA, DecoderSpec, onnx_model_from_path
from passes.quantize_cache import QuantizeCache
from passes.standard import PassSwitches, PassTarget, standard_passes
from pipeline.packed import packed_logits
from plugins.build import cpu_library
from plugins.errors import KilnError
from plugins.paged_attention.schema import (
    DOMAIN,
    EXPORT_DOMAIN,
    LOGITS,
    OP_TYPE,
    STEP_INPUTS,
    KvLayer,
    KvSpec,
    cache_names,
    cache_output_names,
)

from .conftest import Applied, apply_pass

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, VOCABULARY, LAYERS = 4, 2, 32, 8, 23, 2
HIDDEN = HEADS * HEAD_DIM
DECODER = DecoderSpec(KvSpec((KvLayer(KV_HEADS, HEAD_DIM),) * LAYERS, BLOCK_SIZE, "float32"), VOCABULARY, 256, (0,))
STEP = ["cumulative_sequence_length", "past_seqlens", "block_table", "", "", "slot_mapping"]


def serving_graph(domain: str = DOMAIN) -> onnx.ModelProto:
    """Embedding, two attention layers with residuals, and a head."""
    rng = np.random.default_rng(7)
    weights = {
        "embedding": rng.normal(size=(VOCABULARY, HIDDEN)),
        "positions": rng.normal(size=(DECODER.max_context, HIDDEN)),
        "head": rng.normal(size=(HIDDEN, VOCABULARY)),
    }
    node = helper.make_node
    nodes = [
        node("Gather", ["embedding", "input_ids"], ["tokens_in"]),
        node("Gather", ["positions", "position_ids"], ["places"]),
        node("Add", ["tokens_in", "places"], ["hidden0"]),
    ]
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT32, shape) for name, shape in STEP_INPUTS.items()]
    outputs = [helper.make_tensor_value_info(LOGITS, TensorProto.FLOAT, ["rows", VOCABULARY])]
    for layer in range(LAYERS):
        for name, width in (("q", HIDDEN), ("k", KV_HEADS * HEAD_DIM), ("v", KV_HEADS * HEAD_DIM)):
            weights[f"{name}{layer}"] = rng.normal(size=(HIDDEN, width)) / np.sqrt(HIDDEN)
            nodes.append(node("MatMul", [f"hidden{layer}", f"{name}{layer}"], [f"{name}_{layer}"]))
        caches, aliases = cache_names(layer), cache_output_names(layer)
        shape = ["blocks", BLOCK_SIZE, KV_HEADS, HEAD_DIM]
        inputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in caches]
        outputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in aliases]
        operands = [f"q_{layer}", f"k_{layer}", f"v_{layer}", *caches, *STEP]
        attention = node(OP_TYPE, operands, [f"attention{layer}", *aliases], domain=domain)
        attention.attribute.extend(
            helper.make_attribute(*item) for item in (("num_heads", HEADS), ("kv_num_heads", KV_HEADS))
        )
        nodes += [attention, node("Add", [f"hidden{layer}", f"attention{layer}"], [f"hidden{layer + 1}"])]
    nodes += [node("Gather", [f"hidden{LAYERS}", "logits_indices"], ["rows_in"])]
    nodes += [node("MatMul", ["rows_in", "head"], [LOGITS])]
    initializers = [onnx.numpy_helper.from_array(w.astype(np.float32), name) for name, w in weights.items()]
    graph = helper.make_graph(nodes, "serving", inputs, outputs, initializers)
    opsets = [helper.make_opsetid(name, version) for name, version in (("", 21), (EXPORT_DOMAIN, 1), (DOMAIN, 1))]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def saved(applied: Applied, path: Path) -> Path:
    """The rewritten model as the manager writes it, with what the pass says of it."""
    helper.set_model_props(applied.model, {DECODER_METADATA: DECODER.to_json(), **applied.outcome.metadata})
    onnx.save(applied.model, path)
    return path


def types_of(values) -> dict[str, str]:
    return {v.name: TensorProto.DataType.Name(v.type.tensor_type.elem_type) for v in values}


@pytest.mark.parametrize("values", [True, False])
def test_caches_become_int8_with_scales_and_the_runtime_follows(tmp_path: Path, values: bool):
    before = serving_graph()
    applied = apply_pass(before, QuantizeCache(DECODER, values=values))
    found = types_of((*applied.model.graph.input, *applied.model.graph.output))
    kinds = {"key_cache": "INT8", "value_cache": "INT8" if values else "FLOAT", "key_scale": "FLOAT"}
    kinds |= {"value_scale": "FLOAT"} if values else {}
    expected = {f"{k}{end}.{i}": t for k, t in kinds.items() for end in ("", "_out") for i in range(LAYERS)}
    assert found == {**types_of((*before.graph.input, before.graph.output[0])), **expected}
    assert applied.ops == [n.op_type if not n.domain else f"{n.domain}::{n.op_type}" for n in before.graph.node]

    model = onnx_model_from_path(saved(applied, tmp_path / "int8.onnx"))
    assert model.decoder is not None
    assert model.decoder.kv.dtypes == ("int8", "int8" if values else "float32")
    assert model.decoder.max_context == DECODER.max_context
    onnx.save(before, tmp_path / "float.onnx")
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, VOCABULARY, length) for length in (70, 33)]
    steps = [[40, 20], [1, 12], [29, 1]]
    plugins = [cpu_library()]
    exact = np.concatenate(packed_logits(tmp_path / "float.onnx", DECODER, plugins, texts, steps))
    logits = np.concatenate(packed_logits(model.path, model.decoder, plugins, texts, steps))
    error = np.abs(logits - exact).max() / np.abs(exact).max()
    assert 1e-5 < error < 2e-2


def test_blocks_move_with_their_scales(tmp_path: Path):
    applied = apply_pass(serving_graph(), QuantizeCache(DECODER))
    path = saved(applied, tmp_path / "m.onnx")
    kv = replace(DECODER.kv, dtype="int8")
    backend = OnnxRuntimeDecoder(path, kv, 4, host_blocks=2, plugins=[cpu_library()])
    arrays = backend._arrays
    assert sorted({name.split(".")[0] for name in arrays}) == ["key_cache", "key_scale", "value_cache", "value_scale"]
    assert sum(array.nbytes for array in arrays.values()) == 4 * kv.bytes_per_block
    for number, array in enumerate(arrays.values()):
        array[1] = number + 1
    backend.move_blocks([(1, 5), (5, 3)])
    for number, array in enumerate(arrays.values()):
        assert (array[3] == number + 1).all()
        assert not array[2].any()
    backend.close()


@pytest.mark.parametrize(("limit", "context"), [(100, 100), (1000, 256), (None, 256)])
def test_the_context_is_limited_to_what_was_shown(limit: int | None, context: int):
    applied = apply_pass(serving_graph(), QuantizeCache(DECODER, max_context=limit))
    assert DecoderSpec.from_json(applied.outcome.metadata[DECODER_METADATA]).max_context == context


def graph_that_reads_a_cache() -> onnx.ModelProto:
    model = serving_graph()
    model.graph.node.append(helper.make_node("Shape", ["key_cache.1"], ["shape"]))
    model.graph.output.append(helper.make_tensor_value_info("shape", TensorProto.INT64, [4]))
    return model


@pytest.mark.parametrize(
    ("model", "decoder", "note"),
    [
        (serving_graph(EXPORT_DOMAIN), DECODER, "used by PagedAttention .*; expected one kiln::PagedAttention"),
        (graph_that_reads_a_cache(), DECODER, "used by PagedAttention .*, Shape '.*'; expected one"),
        (serving_graph(), None, "has no KV cache"),
        (
            serving_graph(),
            replace(DECODER, kv=replace(DECODER.kv, dtype="float16")),
            "key_cache.0 is float32; expected",
        ),
        (
            serving_graph(),
            replace(DECODER, kv=replace(DECODER.kv, layers=DECODER.kv.layers * 2)),
            "the graph lacks key_cache.2 or key_cache_out.2",
        ),
    ],
)
def test_leaves_alone_what_it_cannot_carry(model: onnx.ModelProto, decoder: DecoderSpec | None, note: str):
    applied = apply_pass(model, QuantizeCache(decoder))
    assert not applied.outcome.changed
    assert not applied.outcome.metadata
    assert re.search(note, "\n".join(applied.outcome.notes))


def test_a_limit_below_one_token_is_refused():
    switches = PassSwitches(only=("quantize_cache",), options={"quantize_cache": {"max_context": 0}})
    with pytest.raises(KilnError, match="quantize_cache: max_context is 0; expected at least 1 token"):
        standard_passes(PassTarget(decoder=DECODER), switches)


def test_descriptions_of_before_still_open():
    """Bundles from before caches had two types name one."""
    text = DECODER.to_json().replace(', "value_dtype": null', "")
    assert "value_dtype" not in text
    assert DecoderSpec.from_json(text) == DECODER
