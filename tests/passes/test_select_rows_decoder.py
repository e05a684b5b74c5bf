"""Whole decoders compute their last layer for the chosen rows only, and keep their logits."""

import numpy as np
import pytest

from passes.graph import graph_from_path, proto_from_graph
from passes.manager import run_passes
from passes.select_rows import SelectRows
from passes.shapes import infer_shapes
from passes.standard import PassTarget, standard_passes
from passes.validate import check_graph
from passes.weights import consolidate
from plugins.build import cpu_library
from plugins.paged_attention.schema import LOGITS

TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def decoder(tiny_llama_folder, tmp_path_factory):
    """A tiny Llama as exported, and with the whole table of passes with and without this one."""
    from pipeline.config import BuildConfig
    from pipeline.export import export_model
    from pipeline.load import describe, load
    from pipeline.source import resolve_source

    folder = tmp_path_factory.mktemp("decoder")
    source = resolve_source(str(tiny_llama_folder))
    exported = export_model(load(source, describe(source)), folder / "model.onnx", BuildConfig())
    passes = standard_passes(PassTarget(decoder=exported.decoder))
    plain, _ = run_passes(exported, folder / "plain.onnx", [one for one in passes if one.name != "select_rows"])
    bound, _ = run_passes(exported, folder / "bound.onnx", passes[:1])
    return exported.decoder, {
        "table": (plain.path, run_passes(exported, folder / "table.onnx", passes)[0].path),
        "optimised": (plain.path, _selected(plain.path, folder / "optimised.onnx")),
        "raw": (bound.path, _selected(bound.path, folder / "raw.onnx")),
    }


def _selected(source, target):
    graph = graph_from_path(source)
    infer_shapes(graph)
    assert SelectRows().call(graph).rewrites == 1
    check_graph(graph)
    consolidate(graph, target.with_name(f"{target.name}.data"))
    target.write_bytes(proto_from_graph(graph).SerializeToString())
    return target


@pytest.mark.parametrize("kind", ["raw", "optimised", "table"])
def test_a_decoder_computes_its_last_layer_for_chosen_rows(kind, decoder):
    import onnxruntime

    from pipeline.packed import decoder_feeds, packed_logits

    spec, paths = decoder
    before, after = paths[kind]
    graph = graph_from_path(after)
    infer_shapes(graph)
    made = [node.outputs[0] for node in graph.nodes if node.op == "MatMul"]
    assert sum("rows" in map(str, tensor.shape) for tensor in made) == 5  # o_proj, gate, up, down, lm_head
    texts = [np.random.default_rng(seed).integers(0, spec.vocab_size, 24) for seed in (1, 2)]
    steps = [[9, 4], [1, 18], [12, 1], [1, 1], [1, 0]]
    for rows in (None, 3, 1):
        pair = (packed_logits(path, spec, [cpu_library()], texts, steps, last_rows=rows) for path in (before, after))
        for expected, found in zip(*pair, strict=True):
            assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()
    (prompt,) = decoder_feeds(spec, 11)
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(cpu_library()))
    sessions = [onnxruntime.InferenceSession(path, options) for path in (before, after)]
    for indices in ([], [10], [7, 2, 7, -1]):
        step = prompt | {"logits_indices": np.array(indices, np.int32)}
        expected, found = (session.run([LOGITS], step)[0] for session in sessions)
        assert found.shape == expected.shape == (len(indices), spec.vocab_size)
        difference = np.abs(found - expected).max(initial=0)
        assert difference <= TOLERANCE * np.abs(expected).max(initial=0)
