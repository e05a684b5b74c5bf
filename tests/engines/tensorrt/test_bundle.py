"""A bundle with a plan, built without a GPU: what is in it, and that nothing opens it where it does not belong."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from engines.backends.tensorrt.layers import layers_from_file
from engines.backends.tensorrt.options import TensorRtOptions
from engines.backends.tensorrt.profiles import ServingShapes, Sizes
from engines.bundle import open_bundle
from engines.runtime.engine import Engine
from engines.sku import resolve_sku
from engines.sku_detect import NoDriverError, own_gpus
from passes.onnx_model import OnnxModel, onnx_model_from_path
from pipeline.cli import kiln_group
from pipeline.progress import Progress
from pipeline.tensorrt import TensorRtBuild, build_tensorrt
from plugins.errors import KilnError


@pytest.fixture
def model(tmp_path: Path) -> OnnxModel:
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weight = np.random.default_rng(0).standard_normal((16, 10)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"], "fc"), helper.make_node("Relu", ["h"], ["y"], "relu")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 10])],
        [numpy_helper.from_array(weight, "w")],
    )
    path = tmp_path / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path)
    return onnx_model_from_path(path)


def has_driver() -> bool:
    try:
        return bool(own_gpus())
    except NoDriverError:
        return False


@pytest.mark.slow
def test_a_bundle_keeps_plan_timings_log_layers_and_key(builder, model: OnnxModel, tmp_path: Path) -> None:
    serving = ServingShapes(max_batch=4)
    config = TensorRtBuild(resolve_sku("l4"), tmp_path / "bundle", precision="fp16", serving=serving, check=False)
    bundle = open_bundle(build_tensorrt(model, config, Progress()).path)
    assert set(bundle.manifest.files) == {"engine.plan", "timing.cache", "build.log", "layers.json"}
    record = bundle.manifest.tensorrt
    assert record is not None
    assert bundle.manifest.backend.name == "tensorrt"
    assert (record.key.sku, record.key.arch, record.key.model_sha256) == ("l4", "sm_89", model.sha256)
    assert record.key.options == config.options.digest
    assert record.profiles[1].symbols == {"batch": Sizes(2, 4, 4)}
    assert [done.name for done in bundle.manifest.passes if done.changed] == ["cast_precision"]
    assert any("Half" in layer.input_types for layer in layers_from_file(bundle.path / "layers.json"))
    assert record.build_memory < record.build_memory_forecast
    if not has_driver():
        with pytest.raises(KilnError, match="nvidia-smi"):
            Engine.open(bundle.path)


@pytest.mark.slow
def test_a_failed_build_leaves_nothing(builder, model: OnnxModel, tmp_path: Path) -> None:
    options = TensorRtOptions(version_compatible=True)  # whose runtime this machine lacks
    config = TensorRtBuild(resolve_sku("l4"), tmp_path / "out" / "bundle", options=options, check=False)
    with pytest.raises(KilnError, match="Unable to load library"):
        build_tensorrt(model, config, Progress())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("backend", ["ort-trt", "ort-trt-rtx"])
def test_a_provider_that_is_not_there_builds_nothing(model: OnnxModel, tmp_path: Path, backend: str) -> None:
    if has_driver():
        pytest.skip("this machine has a GPU")
    out = tmp_path / "out" / "bundle"
    config = TensorRtBuild(resolve_sku("l4"), out, passes=False, backend=backend, check=False)
    with pytest.raises(KilnError, match=r"install onnxruntime-|GPU that it runs on"):
        build_tensorrt(model, config, Progress())
    assert not out.parent.exists()


def test_precision_needs_passes() -> None:
    with pytest.raises(KilnError, match="--no-passes leaves the graph as it is"):
        TensorRtBuild(resolve_sku("l4"), Path("out"), precision="fp16", passes=False)


def test_a_build_without_the_gpu_says_so(model: OnnxModel, tmp_path: Path) -> None:
    if has_driver():
        pytest.skip("this machine has a GPU")
    with pytest.raises(KilnError, match=r"builds on the GPU that it builds for, SKU l4; here: no nvidia-smi"):
        build_tensorrt(model, TensorRtBuild(resolve_sku("l4"), tmp_path / "bundle"), Progress())


def test_help_states_every_price() -> None:
    text = CliRunner().invoke(kiln_group, ["tensorrt", "build", "--help"]).output
    assert text.count("Price:") == len(TensorRtOptions.__dataclass_fields__)
    assert "--trt-distributive-independence" in text


def test_provider_options_are_printed(model: OnnxModel, tmp_path: Path) -> None:
    command = ["tensorrt", "provider-options", str(model.path), "--backend", "ort-trt", "--cache", "c"]
    text = CliRunner().invoke(kiln_group, [*command, "--max-batch", "4"]).output
    assert '"trt_profile_max_shapes": "x:1x16,x:4x16"' in text
