"""A bundle with a plan, built without a GPU: what is in it, and that nothing opens it where it does not belong."""

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from engines.backends.tensorrt.layers import layers_from_file
from engines.backends.tensorrt.options import TensorRtOptions
from engines.backends.tensorrt.profiles import ServingShapes, Sizes
from engines.bundle import open_bundle
from engines.runtime.engine import Engine
from engines.runtime.opening import default_config
from engines.runtime.scheduler import SchedulerConfig
from engines.sku import resolve_sku, sku_table
from engines.sku_detect import NoDriverError, own_gpus
from passes.onnx_model import OnnxModel, onnx_model_from_path
from pipeline.cli import kiln_group
from pipeline.progress import Progress
from pipeline.quantize.config import QuantizeConfig
from pipeline.tensorrt import build_tensorrt
from pipeline.tensorrt_config import TensorRtBuild
from pipeline.tensorrt_decoder import attention_for, multiprocessors
from plugins.errors import KilnError

from .serving import CONTEXT, serving_graph


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


@pytest.fixture
def decoder(tmp_path: Path) -> OnnxModel:
    return serving_graph(tmp_path / "decoder.onnx")


@pytest.mark.slow
def test_a_decoders_bundle_has_its_cache_in_the_profiles(builder, decoder: OnnxModel, tmp_path: Path) -> None:
    """Built, like what a user gets, from a serving graph; checked in ONNX Runtime before the builder sees it."""
    serving = ServingShapes(max_running=4, tokens_per_step=16)
    config = TensorRtBuild(
        resolve_sku("l4"), tmp_path / "bundle", "fp16", serving=serving, check=False, attention="native"
    )
    bundle = open_bundle(build_tensorrt(decoder, config, Progress()).path)
    manifest = bundle.manifest
    assert manifest.tensorrt is not None
    assert manifest.decoder is not None
    assert (manifest.precision, manifest.tensorrt.attention, manifest.decoder.kv.dtype) == ("fp16", "native", "float16")
    assert manifest.decoder.kv.block_size == CONTEXT
    assert [check.name for check in manifest.checks] == ["linear graph against the serving graph on a CPU"]
    assert manifest.checks[0].value < manifest.checks[0].limit
    assert manifest.tensorrt.key.plugin_abi is None
    assert "driver not recorded" in manifest.tensorrt.sentence() or has_driver()
    config_found = default_config(manifest)
    assert (config_found.max_running, config_found.tokens_per_step, config_found.headroom) == (4, 16, 0.0)
    if not has_driver():
        with pytest.raises(KilnError, match="nvidia-smi"):
            Engine.open(bundle.path)
    with pytest.raises(KilnError, match=r"window is 8, but a TensorRT plan has its cache fixed"):
        Engine.open(bundle.path, kv="static", window=8)
    with pytest.raises(KilnError, match=r"max_running is 8 and tokens_per_step 16, but .* built for at most 4 and 16"):
        Engine.open(bundle.path, config=SchedulerConfig(8, 16))


@pytest.mark.slow
def test_int8_multiplies_in_8_bits_but_at_the_ends(builder, tmp_path: Path) -> None:
    import numpy as np
    import onnx
    from onnx import helper, numpy_helper

    rng, nodes = np.random.default_rng(0), []
    for layer in range(4):
        product, result = f"h{layer}", "y" if layer == 3 else f"x{layer + 1}"
        nodes.append(helper.make_node("MatMul", [f"x{layer}", f"w{layer}"], [product], f"fc{layer}"))
        nodes.append(helper.make_node("Relu", [product], [result], f"relu{layer}"))
    weights = [numpy_helper.from_array(rng.standard_normal((64, 64)).astype(np.float32), f"w{i}") for i in range(4)]
    inputs, outputs = ([helper.make_tensor_value_info(name, 1, ["batch", 64])] for name in ("x0", "y"))
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", x0=rng.standard_normal((32, 64)).astype(np.float32))
    command = ["tensorrt", "build", str(tmp_path / "m.onnx"), "--sku", "l4", "--quant", "int8", "--no-check"]
    command += ["--calibration", str(tmp_path / "data.npz"), "--out", str(tmp_path / "bundle")]
    done = CliRunner().invoke(kiln_group, command)
    assert done.exit_code == 0, done.output
    layers = layers_from_file(open_bundle(tmp_path / "bundle").path / "layers.json")
    fused = {name for layer in layers if layer.multiplies_in_8_bits for name in layer.nodes}
    assert {"fc1", "fc2"} <= fused
    assert not {"fc0", "fc3"} & fused


def test_quantising_needs_the_passes() -> None:
    with pytest.raises(KilnError, match="leave --no-passes out"):
        TensorRtBuild(resolve_sku("l4"), Path("out"), quantize=QuantizeConfig("w8a8"), passes=False)


def test_without_a_driver_the_sku_says_how_many_multiprocessors_there_are() -> None:
    if has_driver():
        pytest.skip("this machine has a GPU")
    assert multiprocessors(resolve_sku("l4")) == 58
    with_plugin = [sku for sku in sku_table().values() if sku.runs_attention_plugin and not sku.is_cpu]
    assert all(sku.multiprocessors for sku in with_plugin)


def test_a_decoders_attention_is_chosen_by_the_sku() -> None:
    l4, t4 = resolve_sku("l4"), resolve_sku("t4")
    assert attention_for(l4, None, "tensorrt") == "plugin"
    assert attention_for(l4, None, "tensorrt_rtx") == "native"
    assert attention_for(t4, None, "tensorrt") == "native"
    with pytest.raises(KilnError, match=r"t4 is sm_75.*kiln tensorrt build MODEL --sku t4 .* --attention native"):
        attention_for(t4, "plugin", "tensorrt")
    with pytest.raises(KilnError, match="TensorRT-RTX takes no plug-ins"):
        attention_for(l4, "plugin", "tensorrt_rtx")
    with pytest.raises(KilnError, match=r"plans of TensorRT itself; found --backend ort-trt"):
        attention_for(l4, None, "ort-trt")


def test_what_a_decoder_cannot_have_is_refused_before_any_work(decoder, model, tmp_path: Path) -> None:
    options = TensorRtOptions(refit="identical", strip_weights=True)
    config = TensorRtBuild(resolve_sku("l4"), tmp_path / "b", options=options, check=False, attention="plugin")
    with pytest.raises(KilnError, match="leave --trt-strip-weights out, or build with --attention native"):
        build_tensorrt(decoder, config, Progress())
    if not has_driver():
        unknown = config.sku.model_copy(update={"multiprocessors": None})
        with pytest.raises(KilnError, match="no CUDA driver"):
            build_tensorrt(decoder, replace(config, options=TensorRtOptions(), sku=unknown), Progress())
    with pytest.raises(KilnError, match="no decoder's serving graph: leave --attention plugin out"):
        build_tensorrt(model, config, Progress())
    assert not (tmp_path / "b").exists()


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
