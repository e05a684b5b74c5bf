"""`kiln profile` on a CUDA device: every kernel has a node, and their times are those that the device takes.

    pytest -m gpu tests/pipeline/test_profile_gpu.py

Skipped without a device, or without torch's CUDA build, which the times come from.
"""

import json
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from engines.sku import sku_table
from engines.sku_detect import match_gpu, own_gpus
from passes.onnx_model import load_structure
from pipeline.build import build
from pipeline.config import BuildConfig
from pipeline.profile import Profile, ProfileConfig, profile
from pipeline.profile.analysis import Phase, rows_from_phase
from pipeline.profile.attribution import COPIES
from pipeline.profile.html import html_from_profile
from pipeline.profile.report import json_from_profile, remarks
from pipeline.profile.trace import trace_from_profile
from pipeline.profile.wastes import wastes_from_phase
from pipeline.progress import Progress
from pipeline.quantize.config import QuantizeConfig
from tests.pipeline.quantize_material import FEW, LOOSE

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("CUDAExecutionProvider" not in ort.get_available_providers(), reason="needs onnxruntime-gpu"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs torch with CUDA"),
]

SIZES = {
    "bf16": {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 4096},
    "int8": {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 2048},
}
"""Quantising one takes the CPU, so that it is smaller."""
CONFIG = ProfileConfig(prompt=256, batches=(1, 12), context=64, tokens=16, repetitions=4)


@pytest.fixture(scope="module", params=["bf16", "int8"])
def found(request: pytest.FixtureRequest, make_llama, tmp_path_factory, silent: Progress) -> Profile:
    """In 16 bits; and all products with weights of 8 bits, with keys and values of 8 bits."""
    folder = tmp_path_factory.mktemp("profiled")
    options = {}
    if request.param == "int8":
        (folder / "limits.toml").write_text(LOOSE)
        loose = {"search": "all", "keep_ends": False, "generate": 8, "calibration": FEW}
        options["quantize"] = QuantizeConfig("int8", kv="int8-kv", limits=folder / "limits.toml", **loose)
    sku = match_gpu(own_gpus()[0], sku_table()).sku
    config = BuildConfig(out=folder / "bundle", precision="bf16", verify_passes=False, **options)
    bundle = build(str(make_llama(**SIZES[request.param])), [sku.name], config, silent)[0].bundle
    return profile(bundle.path, CONFIG, silent)


def test_operators_sum_to_what_the_device_takes(found: Profile) -> None:
    """By its own clock and without a profiler: within a tenth, and 1 us for what lies between two kernels."""
    for phase in found.phases:
        device = phase.seconds - phase.host
        between = 1e-6 * max(len(run.calls) for run in found.traced[phase.name].runs)
        print(
            f"{phase.title}: pass {phase.seconds * 1e6:.1f} us, device {device * 1e6:.1f} us, operators "
            f"{phase.in_operators * 1e6:.1f} us in {len(phase.operators)} nodes"
        )
        assert phase.in_operators == pytest.approx(device, abs=0.1 * device + between)
        assert device <= phase.seconds


def test_every_kernel_has_a_node_of_the_graph(found: Profile) -> None:
    kinds = {node.op_type for node in load_structure(found.bundle.engine_path).graph.node}
    names = {node.name for node in load_structure(found.bundle.engine_path).graph.node}
    for phase in found.phases:
        rows = {row.operator: row for row in rows_from_phase(phase)}
        own = {node.name for node in phase.operators if node.operator.endswith(("Attention", "Linear", "SwiGlu"))}
        assert own <= names
        assert len(own) == 4 * 2 + 1 + 2
        assert set(rows) <= {*kinds, COPIES, "Cast", "MemcpyFromHost", "MemcpyToHost"}
        assert rows[COPIES].seconds < 0.5 * phase.in_operators
        products = [row for name, row in rows.items() if name.endswith(("Linear", "LinearSwiGlu"))]
        assert sum(row.calls for row in products) == 4 * 2 + 1
        assert rows["PagedAttention"].calls == 2
        assert rows["Sample"].calls == 1
        for run in found.traced[phase.name].runs:
            assert all(call.arguments["kernel"] for call in run.calls)


def test_nodes_that_do_the_same_take_the_same_kernels(found: Profile) -> None:
    """Two layers are alike, but that a prompt's last one has one row behind its attention; so are their kernels."""
    for phase in found.phases:
        for run in found.traced[phase.name].runs:
            kernels: dict[str, list[str]] = {}
            for call in run.calls:
                gated = call.operator.endswith("LinearSwiGlu") and not phase.name.startswith("prefill")
                if call.operator == "PagedAttention" or gated:
                    kernels.setdefault(f"{call.operator} {call.name}", []).append(call.arguments["kernel"])
            for kind in {name.partition(" ")[0] for name in kernels}:
                first, second = (own for name, own in kernels.items() if name.startswith(f"{kind} "))
                assert first == second


def test_work_is_that_of_the_model(found: Profile) -> None:
    """Products of each layer and of the head, for the tokens of a phase; a batch of 12 is run as one of 16."""
    eight = found.bundle.manifest.quantization is not None
    sizes = SIZES["int8" if eight else "bf16"]
    hidden, narrow, wide = sizes["hidden_size"], sizes["num_key_value_heads"] * 64, sizes["intermediate_size"]
    layers = 2 * (hidden * (hidden + 2 * narrow) + hidden * hidden + 3 * hidden * wide)
    for phase, rows in zip(found.phases, (256, 1, 16), strict=True):
        nodes = [node for node in phase.operators if node.work.is_product and node.operator != "PagedAttention"]
        most = 2 * rows * (layers + hidden * 512)
        assert 0.3 * most < sum(node.work.operations for node in nodes) <= most
        if not phase.name.startswith("prefill"):  # whose last layer computes one row behind its attention
            assert sum(node.work.operations for node in nodes) == most
        weights = sum(node.work.weights for node in nodes)
        assert weights == pytest.approx((layers + hidden * 512) * (1 if eight else 2), rel=0.02)
        assert all(node.seconds > 0.2 * node.best for node in nodes), "far faster than the roofline"


def test_verdicts_and_switches_are_those_of_a_gpu(found: Profile) -> None:
    assert found.roofline.memory > 1e11
    assert found.roofline.products["16-bit"][8192] > found.roofline.products["16-bit"][256] * 0.8
    for phase in found.phases:
        assert isinstance(phase, Phase)
        for waste in wastes_from_phase(phase, found.roofline, found.bundle.manifest, None):
            assert not any(own in waste.switch for own in ("--threads", "--kv-dtype", "w8a8", "--attention"))
            assert 0 < waste.seconds <= phase.accounted
    assert not remarks(found)


def test_documents_are_whole(found: Profile) -> None:
    document = json.loads(json_from_profile(found))
    assert [phase["name"] for phase in document["phases"]] == ["prefill_256", "decode_batch_1", "decode_batch_12"]
    assert np.isfinite([node["seconds"] for phase in document["phases"] for node in phase["nodes"]]).all()
    spans = [event for event in json.loads(trace_from_profile(found))["traceEvents"] if event["ph"] == "X"]
    assert any("kernel" in event["args"] for event in spans)
    if pytest.importorskip("matplotlib"):
        assert html_from_profile(found).count("<svg") == 4


def test_a_model_without_a_cache(tmp_path: Path, silent: Progress) -> None:
    import onnx

    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    weights = np.random.default_rng(0).normal(size=(512, 256)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"], "m"), helper.make_node("Softmax", ["h"], ["y"], "s")],
        "g",
        [helper.make_tensor_value_info("x", kind, ["batch", 512])],
        [helper.make_tensor_value_info("y", kind, ["batch", 256])],
        [onnx.numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, tmp_path / "plain.onnx")
    sku = match_gpu(own_gpus()[0], sku_table()).sku
    config = BuildConfig(out=tmp_path / "bundle", verify_passes=False)
    bundle = build(str(tmp_path / "plain.onnx"), [sku.name], config, silent)[0].bundle
    found = profile(bundle.path, ProfileConfig(batches=(1, 64), tokens=8, repetitions=4), silent)
    assert [phase.name for phase in found.phases] == ["batch_1", "batch_64"]
    for phase, batch in zip(found.phases, (1, 64), strict=True):
        (product,) = [node for node in phase.operators if node.work.is_product]
        assert product.work.operations == 2 * batch * 512 * 256
        assert {"Softmax", COPIES} <= {row.operator for row in rows_from_phase(phase)}
        assert phase.in_operators < phase.seconds
