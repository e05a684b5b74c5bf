"""Options, keys, the log and the layers: what is refused, and what is read out of TensorRT's words."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from engines.backends.ort_tensorrt import BACKENDS, provider_options, session_from_options
from engines.backends.tensorrt.key import EngineKey, mismatches, refuse_mismatch
from engines.backends.tensorrt.layers import (
    float_products,
    layers_from_file,
    layers_from_log,
    layers_to_file,
    memory_from_log,
)
from engines.backends.tensorrt.log import BuildLog, layer_from_errors
from engines.backends.tensorrt.options import TensorRtOptions, options_from_dict
from engines.backends.tensorrt.profiles import Profile, Sizes
from passes.onnx_model import Tensor
from plugins.errors import KilnError

KEY = EngineKey("tensorrt", "11.4.0.106", "l4", "sm_89", "580.95.05", None, "a" * 64, "b" * 64, "c" * 64)


def test_every_option_says_what_it_gives_and_what_it_costs() -> None:
    for option in fields(TensorRtOptions):
        assert option.metadata["gives"].endswith(".")
        assert option.metadata["price"].endswith(".")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workspace": 0}, "positive size"),
        ({"optimization_level": 6}, "expected 0 to 5"),
        ({"refit": "some"}, "none, all, identical"),
        ({"hardware": "all"}, "this, ampere-plus, same-capability"),
        ({"strip_weights": True}, "add --trt-refit identical"),
        ({"exclude_lean_runtime": True}, "add --trt-version-compatible"),
        ({"error_on_cache_miss": True}, "give --trt-timing-cache"),
        ({"int8": True}, "has no option int8"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict, message: str) -> None:
    with pytest.raises(KilnError, match=message):
        options_from_dict(options)


def test_options_survive_json_and_their_digest_is_what_the_plan_depends_on() -> None:
    options = TensorRtOptions(workspace=1, refit="all", strip_weights=True, timing_cache=Path("a"))
    assert options_from_dict(options.to_dict()) == options
    assert replace(options, timing_cache=Path("b")).digest == options.digest
    assert replace(options, tf32=True).digest != options.digest
    assert options.flags == ("EDITABLE_TIMING_CACHE", "REFIT", "STRIP_PLAN")


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("tensorrt", "11.3.0.99"),
        ("sku", "a10"),
        ("arch", "sm_86"),
        ("driver", "570.1"),
        ("plugin_abi", "d" * 64),
        ("model_sha256", "d" * 64),
        ("options", "d" * 64),
        ("profiles", "d" * 64),
        ("product", "tensorrt_rtx"),
    ],
)
def test_a_plan_of_another_setting_is_refused_naming_both_sides(field: str, other: str) -> None:
    here = replace(KEY, **{field: other})
    assert mismatches(KEY, here) == (field,)
    with pytest.raises(KilnError) as error:
        refuse_mismatch(KEY, here, Path("engine.plan"))
    built = str(getattr(KEY, field) or "none")
    assert built[:12] in str(error.value)
    assert other[:12] in str(error.value)
    refuse_mismatch(KEY, KEY, Path("engine.plan"))


def test_a_plan_that_was_built_without_a_driver_is_opened_nowhere() -> None:
    with pytest.raises(KilnError, match=r"built for driver not recorded, here 580\."):
        refuse_mismatch(replace(KEY, driver=None), replace(KEY, driver="580.1"), Path("engine.plan"))


def test_compatible_plans_may_differ_as_far_as_they_say() -> None:
    later = replace(KEY, tensorrt="11.5.0.1")
    assert mismatches(replace(KEY, version_compatible=True), later) == ()
    assert mismatches(replace(later, version_compatible=True), KEY) == ("tensorrt",)
    a10 = replace(KEY, sku="a10", arch="sm_86")
    assert mismatches(replace(KEY, hardware="ampere-plus"), a10) == ()
    assert mismatches(replace(KEY, hardware="ampere-plus"), replace(KEY, sku="t4", arch="sm_75")) == ("arch",)
    assert mismatches(replace(KEY, hardware="same-capability"), replace(KEY, sku="l40s")) == ()
    assert mismatches(replace(KEY, hardware="same-capability"), a10) == ("arch",)


ERRORS = {
    'ModelImporter.cpp:140: While parsing node number 3 [DequantizeLinear -> "b_d"]:': "b_d",
    "ITensor::getDimensions: Error Code 4: API Usage Error (add_mixed: ElementWiseOperation SUM must have same input "
    "types. But they are of types Float and Half. In validateTypes at /_src/optimizer/nodes.cpp:40)": "add_mixed",
    "IBuilder::buildSerializedNetwork: Error Code 4: Internal Error (kOPT values for profile 0 violate shape "
    "constraints: IShuffleLayer bad_reshape: reshaping failed for tensor: x would change volume)": "bad_reshape",
    "IBuilder::buildSerializedNetwork: Error Code 10: Internal Error (Could not find any implementation for node "
    "{ForeignNode[conv1...relu1]}. In computeCosts at /_src/optimizer.cpp:42)": "conv1...relu1",
    "IBuilder::buildSerializedNetwork: Error Code 1: Myelin (graph_jit failed)": None,
}


@pytest.mark.parametrize("message", ERRORS)
def test_the_layer_is_found_in_tensorrts_own_words(message: str) -> None:
    assert layer_from_errors([message]) == ERRORS[message]


def test_the_cause_is_the_first_error_that_says_something() -> None:
    log = BuildLog()
    log.add(1, "[checkMacros.cpp::catchCudaError::250] Error Code 1: Cuda Runtime (In catchCudaError at /_src/c.cpp:1)")
    log.add(2, "a warning")
    log.add(1, "IBuilder::build: Error Code 6: API Usage Error (Unable to load library: x. In Impl at /_src/l.cpp:305)")
    message = str(log.error("build", "do this"))
    assert message == "TensorRT failed to build: API Usage Error: Unable to load library: x.; do this"
    assert log.warnings == ["a warning"]
    assert "gives no reason" in str(BuildLog().error("build", "do this"))


LOG = """\
[verbose] Name: conv1_myl0_2, LayerType: correlation, Inputs: [ { Name: a, Dimensions: [-1,8], Strides: [8,1], \
StrideOrder: [1,0], Datatype: Int8, Format: (Linear) Row major linear format }], Constants: [ { Name: w, Dimensions: \
[8], Strides: [1], StrideOrder: [0], Datatype: Int8, Format: (Linear) Row }], Outputs: [ { Name: o, Dimensions: [-1], \
Strides: [1], StrideOrder: [0], Datatype: Float, Format: (Linear) Row }], TacticName: sm80_xmma, StreamId: 0, \
Metadata: [ONNX Layer: conv1][ONNX Layer: x_q_d]
Name: fc_myl0_3, LayerType: gemm, Inputs: [ { Name: o, Dimensions: [-1], Strides: [1], StrideOrder: [0], Datatype: \
Float, Format: (Linear) Row }], Constants: [], Outputs: [], TacticName: , StreamId: 0, Metadata: [ONNX Layer: q+k+v]
[info] Total Activation Memory: 1024 bytes
[info] [MemUsageStats] Peak memory usage of TRT CPU/GPU memory allocators: CPU 86 MiB, GPU 4 MiB"""


def test_layers_tactics_and_memory_are_read_from_the_log(tmp_path: Path) -> None:
    convolution, product = layers = layers_from_log(LOG.splitlines())
    assert (convolution.name, convolution.kind, convolution.tactic) == ("conv1_myl0_2", "correlation", "sm80_xmma")
    assert convolution.nodes == ("conv1", "x_q_d")
    assert (convolution.input_types, convolution.constant_types) == (("Int8",), ("Int8",))
    assert product.nodes == ("q+k+v",)
    assert float_products(layers, ["conv1", "q+k+v"]) == ["q+k+v"]
    assert memory_from_log(LOG.splitlines()) == {"activations": 1024, "gpu_peak": 4 * 2**20}
    layers_to_file(tmp_path / "layers.json", layers)
    assert layers_from_file(tmp_path / "layers.json") == layers


INPUTS = (Tensor("x", "float32", ("n", 3)), Tensor("fixed", "float32", (1, 2)))
PROFILES = (Profile("single", {"n": Sizes(1, 1, 1)}), Profile("batch", {"n": Sizes(2, 4, 8)}))


def test_onnx_runtimes_providers_get_our_profiles_and_a_cache_in_the_bundle() -> None:
    options = TensorRtOptions(workspace=64, hardware="ampere-plus", refit="identical", strip_weights=True)
    found = provider_options("ort-trt", INPUTS, PROFILES, options, Path("bundle/engine-cache"))
    assert found["trt_profile_max_shapes"] == "x:1x3,x:8x3"
    assert found["trt_engine_cache_path"] == "bundle/engine-cache"
    assert found["trt_onnx_model_folder_path"] == "bundle"
    assert found["trt_engine_hw_compatible"] == found["trt_weight_stripped_engine_enable"] == "1"
    rtx = provider_options("ort-trt-rtx", INPUTS, PROFILES, TensorRtOptions(workspace=64), Path("c"))
    assert rtx["nv_profile_min_shapes"] == "x:1x3,x:2x3"
    assert rtx["nv_multi_profile_enable"] == "1"


@pytest.mark.parametrize("backend", BACKENDS)
def test_options_without_a_counterpart_are_refused(backend: str) -> None:
    with pytest.raises(KilnError, match=r"--trt-distributive-independence is True, which .* has no option for"):
        provider_options(backend, INPUTS, PROFILES, TensorRtOptions(distributive_independence=True), Path("c"))
    with pytest.raises(KilnError, match="same-capability"):
        provider_options(backend, INPUTS, PROFILES, TensorRtOptions(hardware="same-capability"), Path("c"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_provider_that_is_not_there_says_what_to_install(backend: str) -> None:
    import onnxruntime

    if "TensorrtExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("it is there")
    with pytest.raises(KilnError, match=r"install|GPU that it runs on"):
        session_from_options(Path("model.onnx"), backend, {})


@pytest.mark.slow
def test_option_names_are_those_of_the_provider(tensorrt_11) -> None:
    header = (tensorrt_11.rtx / "tensorrt_rtx_provider_options.h").read_text()
    options = provider_options("ort-trt-rtx", INPUTS, PROFILES, TensorRtOptions(workspace=1), Path("c"))
    assert [name for name in options if f'"{name}"' not in header] == []
