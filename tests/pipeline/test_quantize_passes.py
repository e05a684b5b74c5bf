"""The quantising passes on an exported decoder: every product is rewritten, by its name, and the logits stay close."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

from passes.graph import graph_from_path
from passes.manager import run_passes
from passes.onnx_model import OnnxModel
from passes.quantization.layers import Layer, layers_of
from passes.quantization.plan import LayerPlan, PrecisionPlan
from passes.quantization.rewrite import check_plan, quantising_passes
from passes.quantization.table import CalibrationTable, Range, TensorStatistics
from passes.standard import BINDING_TABLE, FLOAT_TABLE, PassSwitches, PassTarget, standard_passes
from pipeline.config import BuildConfig
from pipeline.export import export_model
from pipeline.load import load
from pipeline.source import resolve_source
from plugins.build import cpu_library
from plugins.paged_attention.schema import LOGITS

TOKENS = 40


@pytest.fixture(scope="module")
def graph(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> OnnxModel:
    """The graph that is calibrated and quantised."""
    folder = tmp_path_factory.mktemp("quantise")
    exported = export_model(load(resolve_source(str(llama_folder))), folder / "exported.onnx", BuildConfig())
    target = PassTarget(decoder=exported.decoder)
    return run_passes(exported, folder / "float.onnx", standard_passes(target, PassSwitches(), FLOAT_TABLE))[0]


def run(path: Path, outputs: list[str]) -> list[NDArray]:
    """What a prompt gives, without a history."""
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(cpu_library()))
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    positions, blocks = np.arange(TOKENS, dtype=np.int32), -(-TOKENS // 16)
    feeds = {
        "input_ids": np.random.default_rng(0).integers(2, 512, TOKENS).astype(np.int32),
        "cumulative_sequence_length": np.array([0, TOKENS], np.int32),
        "past_seqlens": np.zeros(1, np.int32),
        "block_table": np.arange(blocks, dtype=np.int32)[None],
        **dict.fromkeys(("position_ids", "logits_indices", "slot_mapping"), positions),
    }
    for value in session.get_inputs():
        feeds.setdefault(value.name, np.zeros((blocks, 16, *value.shape[2:]), np.float32))
    return session.run(outputs, feeds)


@pytest.fixture(scope="module")
def seen(graph: OnnxModel) -> tuple[list[Layer], CalibrationTable, dict[str, NDArray]]:
    """Layers, ranges and second moments."""
    layers = layers_of(graph_from_path(graph.path))
    proto = onnx.load(graph.path, load_external_data=False)
    names = list(dict.fromkeys(layer.activation for layer in layers))
    proto.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names)
    watched = graph.path.with_name("watched.onnx")
    onnx.save(proto, watched)
    values = dict(zip(names, run(watched, names), strict=True))
    rows = {name: value.reshape(-1, value.shape[-1]).astype(np.float64) for name, value in values.items()}
    statistics = {
        name: TensorStatistics(Range(float(row.min()), float(row.max())), {}, tuple(np.abs(row).max(axis=0).tolist()))
        for name, row in rows.items()
    }
    table = CalibrationTable(graph.sha256, "d", "minmax", False, statistics, {})
    return layers, table, {layer.name: rows[layer.activation].T @ rows[layer.activation] for layer in layers}


SCHEMES = {
    "w8a8": (LayerPlan("w8a8", smooth=0.5), "MatMulIntegerToFloat", 0.99),
    "w8a8-dynamic": (LayerPlan("w8a8-dynamic"), "Int8MatMul", 0.995),
    "w8a8-dynamic, groups": (LayerPlan("w8a8-dynamic", 32, activation_group_size=32), "Int8MatMul", 0.995),
    "w4a8-dynamic": (LayerPlan("w4a8-dynamic", 16, "hqq"), "Int8MatMul", 0.9),
    "w8a16": (LayerPlan("w8a16"), "WeightMatMul", 0.999),
    "w4a16, gptq": (LayerPlan("w4a16", 16, "gptq"), "WeightMatMul", 0.95),
    "w4a16, awq": (LayerPlan("w4a16", 16, "awq"), "WeightMatMul", 0.9),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_all_products_of_a_decoder(graph, seen, name, tmp_path):
    (scheme, operator, least), (layers, table, moments) = SCHEMES[name], seen
    plan = PrecisionPlan(graph.sha256, {layer.name: scheme for layer in layers})
    target = PassTarget(decoder=graph.decoder)
    check_plan(plan, layers, target)
    passes = [*quantising_passes(plan, table, moments, target), *standard_passes(target, PassSwitches(), BINDING_TABLE)]
    _, reports = run_passes(graph, tmp_path / "quantised.onnx", passes)
    nodes = onnx.load(tmp_path / "quantised.onnx", load_external_data=False).graph.node
    assert [node.name for node in nodes if node.op_type == operator] == [layer.name for layer in layers]
    assert not [node for node in nodes if node.op_type in ("MatMul", "Gemm")]
    if operator == "Int8MatMul":
        kinds = [node.op_type for node in nodes]
        assert kinds.count("AddRmsNormQuantize") == 3
        assert kinds.count("SwiGluQuantize") == 2
    expected, found = (run(path, [LOGITS])[0] for path in (graph.path, tmp_path / "quantised.onnx"))
    cosine = np.vdot(found, expected) / np.linalg.norm(found) / np.linalg.norm(expected)
    assert cosine >= least, {report.name: report.notes for report in reports}
