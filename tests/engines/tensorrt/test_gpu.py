"""On a GPU that TensorRT runs on, with the real `tensorrt`: what no other test here executes.

pytest -m tensorrt tests/engines/tensorrt/test_gpu.py
"""

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from engines.backends.onnxruntime import OnnxRuntimeModel
from engines.backends.tensorrt.layers import layers_from_file
from engines.backends.tensorrt.options import TensorRtOptions
from engines.backends.tensorrt.profiles import ServingShapes
from engines.bundle import EngineBundle, open_bundle
from engines.runtime.engine import Engine
from engines.runtime.request import SamplingParams
from engines.sku import sku_table
from engines.sku_detect import NoDriverError, match_gpu, own_gpus
from passes.onnx_model import OnnxModel, onnx_model_from_path
from pipeline.progress import Progress
from pipeline.tensorrt import build_tensorrt
from pipeline.tensorrt_config import TensorRtBuild
from plugins.errors import KilnError

from .serving import Shape, serving_graph

pytestmark = pytest.mark.tensorrt


@pytest.fixture
def sku():
    if importlib.util.find_spec("tensorrt") is None:
        pytest.skip("tensorrt is not installed: pip install tensorrt")
    try:
        gpus = own_gpus()
    except NoDriverError as error:
        pytest.skip(f"no GPU: {error}")
    match = match_gpu(gpus[0], sku_table())
    if match.sku is None:
        pytest.skip(f"the GPU is no SKU: {match.reason}")
    return match.sku


@pytest.fixture
def model(tmp_path: Path) -> OnnxModel:
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((16, 3, 3, 3)), "v": rng.standard_normal((16, 10))}
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w"], ["c"], "conv1", pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["c"], ["r"], "relu1"),
            helper.make_node("GlobalAveragePool", ["r"], ["p"], "pool"),
            helper.make_node("Flatten", ["p"], ["f"], "flat"),
            helper.make_node("MatMul", ["f", "v"], ["y"], "fc"),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 32, 32])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 10])],
        [numpy_helper.from_array(values.astype(np.float32), name) for name, values in weights.items()],
    )
    path = tmp_path / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path)
    return onnx_model_from_path(path)


def bundle_of(model: OnnxModel, sku, out: Path, options: TensorRtOptions) -> EngineBundle:
    return build_tensorrt(
        model, TensorRtBuild(sku, out, options=options, serving=ServingShapes(max_batch=8)), Progress()
    )


SETTINGS = {
    "as it comes": TensorRtOptions(),
    "without weights": TensorRtOptions(refit="identical", strip_weights=True),
    "refittable": TensorRtOptions(refit="all"),
    "streaming": TensorRtOptions(weight_streaming=True),
    "version-compatible": TensorRtOptions(version_compatible=True),
    "ampere-plus": TensorRtOptions(hardware="ampere-plus"),
    "level 5": TensorRtOptions(optimization_level=5, distributive_independence=True, tf32=True),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_an_engine_computes_what_the_model_does_at_every_batch(model, sku, tmp_path: Path, name: str) -> None:
    bundle = bundle_of(model, sku, tmp_path / "bundle", SETTINGS[name])
    assert (bundle.path / "inspector.json").is_file()
    reference = OnnxRuntimeModel(model.path)
    with Engine.open(bundle.path) as engine:
        for _ in range(4):  # from the third call on a CUDA graph
            for batch in (1, 2, 5, 8):
                x = np.random.default_rng(batch).standard_normal((batch, 3, 32, 32)).astype(np.float32)
                expected, found = reference.infer({"x": x})["y"], engine.infer({"x": x})["y"]
                assert np.abs(found - expected).max() <= 2e-3 * np.abs(expected).max()


@pytest.mark.parametrize("backend", ["ort-trt", "ort-trt-rtx", "tensorrt_rtx"])
def test_other_backends_compute_the_same(model, sku, tmp_path: Path, backend: str) -> None:
    module = {"ort-trt": "onnxruntime", "ort-trt-rtx": "onnxruntime_ep_nv_tensorrt_rtx", "tensorrt_rtx": "tensorrt_rtx"}
    if importlib.util.find_spec(module[backend]) is None:
        pytest.skip(f"{module[backend]} is not installed")
    config = TensorRtBuild(sku, tmp_path / "bundle", backend=backend, serving=ServingShapes(max_batch=8))
    bundle = build_tensorrt(model, config, Progress())
    x = np.ones((5, 3, 32, 32), np.float32)
    with Engine.open(bundle.path) as engine:
        expected, found = OnnxRuntimeModel(model.path).infer({"x": x})["y"], engine.infer({"x": x})["y"]
        assert np.abs(found - expected).max() <= 2e-3 * np.abs(expected).max()
    assert EngineBundle(bundle.path, bundle.manifest, bundle.sha256) == open_bundle(bundle.path), "nothing was written"


def test_a_profile_has_the_time_of_every_layer(model, sku, tmp_path: Path) -> None:
    from pipeline.profile import ProfileConfig, profile

    bundle = bundle_of(model, sku, tmp_path / "bundle", TensorRtOptions())
    names = {layer.name for layer in layers_from_file(bundle.path / "layers.json")}
    found = profile(bundle.path, ProfileConfig(batches=(1, 8), tokens=8), Progress())
    assert [phase.name for phase in found.phases] == ["batch_1", "batch_8"]
    for phase in found.phases:
        assert {node.name for node in phase.operators} <= names
        assert 0 < phase.in_operators < phase.seconds * 1.1


def test_a_timing_cache_repeats_the_build(model, sku, tmp_path: Path) -> None:
    first = bundle_of(model, sku, tmp_path / "first", TensorRtOptions())
    cache = first.path / "timing.cache"
    second = bundle_of(model, sku, tmp_path / "second", TensorRtOptions(timing_cache=cache, error_on_cache_miss=True))
    assert second.manifest.tensorrt is not None
    assert second.manifest.tensorrt.timings_added == 0


def test_a_plan_of_another_driver_is_refused_before_it_is_read(model, sku, tmp_path: Path) -> None:
    from engines.backends.tensorrt.opening import model_from_plan

    bundle = bundle_of(model, sku, tmp_path / "bundle", TensorRtOptions())
    record = bundle.manifest.tensorrt
    assert record is not None
    with pytest.raises(KilnError, match=r"driver 1\.2, here"):
        model_from_plan(bundle.engine_path, replace(record.key, driver="1.2"), model.inputs, record.profiles)


@pytest.mark.parametrize("form", ["plugin", "native"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(
    "shape",
    [Shape(), Shape(packed=True, window=6), Shape(rotary=32, interleaved=1)],
    ids=["plain", "window", "partial"],
)
def test_a_decoder_answers_as_the_paged_cache_on_the_cpu_does(
    sku, tmp_path: Path, form: str, precision: str, shape: Shape
) -> None:
    """The build compares logits with the CPU's; then requests go through chunks, captured steps and reused rows."""
    if form == "plugin" and not sku.runs_attention_plugin:
        pytest.skip(f"{sku.name} is {sku.arch}: the plug-in does not run there")
    model = serving_graph(tmp_path / "model.onnx", shape)
    serving = ServingShapes(max_running=4, tokens_per_step=16, kv_blocks=32)
    config = TensorRtBuild(sku, tmp_path / "bundle", precision, serving=serving, attention=form)
    bundle = build_tensorrt(model, config, Progress())
    assert bundle.manifest.checks[-1].value <= bundle.manifest.checks[-1].limit
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1, 31, size).tolist() for size in (3, 40, 17, 9, 30, 1, 25, 3)]
    with Engine.open(bundle.path) as engine:
        sampling = SamplingParams(max_tokens=12, temperature=0)
        together = [answer.token_ids for answer in engine.generate(prompts, sampling)]
        alone = [engine.generate([prompt], sampling)[0].token_ids for prompt in prompts]
    assert all(together)
    agreeing = sum(a[:4] == b[:4] for a, b in zip(together, alone, strict=True))
    assert agreeing >= len(prompts) - 1, "ties apart, a request's tokens do not depend on its company"
