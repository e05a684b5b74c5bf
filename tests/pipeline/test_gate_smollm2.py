"""The gate on SmolLM2: one layer with 3-bit weights is found, and everything else is within its limits."""

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from engines.bundle import EngineBundle
from engines.runtime.tokenizer import Tokenizer
from passes.graph import graph_from_path
from passes.manager import link_or_copy
from passes.onnx_model import external_files, load_structure
from passes.pattern import values_of
from passes.quantization.layers import layers_of
from pipeline.compare.material import default_text
from pipeline.gate import GateConfig, GateLimits, run_gate
from pipeline.gate.generation import GenerationConfig
from pipeline.gate.material import Cut, decoder_data_from_tokens
from pipeline.progress import Progress

pytestmark = pytest.mark.slow


def with_coarse_layer(path: Path, layer: str, folder: Path) -> Path:
    """The graph with one layer's weights rounded to -3..3 by channel; the others are linked."""
    graph, proto = graph_from_path(path), load_structure(path)
    weight = next(found.weight for found in layers_of(graph) if found.name == layer)
    values = np.asarray(values_of(graph.tensors()[weight]))
    scale = np.abs(values).max(axis=0, keepdims=True) / 3
    coarse = (np.rint(values / scale) * scale).astype(np.float32)
    tensor = next(tensor for tensor in proto.graph.initializer if tensor.name == weight)
    tensor.CopyFrom(onnx.numpy_helper.from_array(coarse, weight))
    for file in external_files(path, load_structure(path)):
        link_or_copy(file, folder / file.relative_to(path.parent))
    (folder / path.name).write_bytes(proto.SerializeToString())
    return folder / path.name


def test_one_coarse_layer_is_found(smollm2_bundle: EngineBundle, silent: Progress, tmp_path: Path) -> None:
    tokens = Tokenizer(smollm2_bundle.path / "tokenizer").encode(default_text())
    cuts = (Cut("short", 64, 64, 16), Cut("long", 256, 256, 200))
    data = decoder_data_from_tokens([tokens], cuts, "Kiln's own text", prompts=1)
    names = [layer.name for layer in layers_of(graph_from_path(smollm2_bundle.engine_path))]
    coarse = names[len(names) // 2]
    candidate = with_coarse_layer(smollm2_bundle.engine_path, coarse, tmp_path)
    config = GateConfig(schemes=("w8a16",), generation=GenerationConfig(greedy=8, continuation=0), noise=False)
    report = run_gate(smollm2_bundle.path, candidate, data, GateLimits(), config, silent)
    shutil.rmtree(tmp_path)
    assert report.advice is not None, report.sentence()
    assert report.advice.ranking == (coarse,)
    assert {"kl_mean"} <= {check.check.name for check in report.failures}
    assert not report.unmatched_layers
    layers = {row.name: row for row in report.strata[1].layers}
    assert list(layers) == names
    assert all(layers[name].snr_db > 100 for name in names[: names.index(coarse)])
