"""Kiln's token-wise CPU operators in a whole decoder: same logits, and every residual sum and gate is bound."""

from pathlib import Path

import numpy as np

from passes.graph import graph_from_path, proto_from_graph, tidy
from passes.shapes import infer_shapes
from passes.standard import PassSwitches, PassTarget, standard_passes
from passes.validate import check_graph
from passes.weights import consolidate
from pipeline.config import BuildConfig
from pipeline.export import export_model
from pipeline.load import describe, load
from pipeline.packed import packed_logits
from pipeline.source import resolve_source
from plugins.build import cpu_library

BOUND = ("bind_add_rms_norm", "bind_swiglu")
TOLERANCE = 1e-5


def test_tiny_llama_in_chunks(tiny_llama_folder: Path, tmp_path: Path) -> None:
    """Two sequences, prompts in chunks, then single tokens, with the standard passes."""
    source = resolve_source(str(tiny_llama_folder))
    exported = export_model(load(source, describe(source)), tmp_path / "model.onnx", BuildConfig())
    paths, counts = [], []
    for name, switches in (("plain", PassSwitches(disable=BOUND)), ("bound", PassSwitches())):
        graph = graph_from_path(exported.path)
        for graph_pass in standard_passes(PassTarget(decoder=exported.decoder), switches):
            infer_shapes(graph)
            graph_pass.call(graph)
            tidy(graph)
        check_graph(graph)
        consolidate(graph, tmp_path / f"{name}.onnx.data")
        paths.append(tmp_path / f"{name}.onnx")
        paths[-1].write_bytes(proto_from_graph(graph).SerializeToString())
        ops = [node.op for node in graph.nodes]
        counts.append(
            {op: ops.count(op) for op in ("SimplifiedLayerNormalization", "AddRmsNorm", "QuickGelu", "SwiGlu")}
        )
    assert list(counts[0].values()) == [5, 0, 2, 0]
    assert list(counts[1].values()) == [1, 4, 0, 2], "the first norm follows the embedding, no sum"
    texts = [np.random.default_rng(seed).integers(0, exported.decoder.vocab_size, 24) for seed in (1, 2)]
    steps = [[9, 4], [1, 18], [12, 1], [1, 1], [1, 0]]
    plain, bound = (packed_logits(path, exported.decoder, [cpu_library()], texts, steps) for path in paths)
    for expected, found in zip(plain, bound, strict=True):
        assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()
