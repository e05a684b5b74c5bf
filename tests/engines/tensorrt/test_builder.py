"""A real TensorRT builder, without a GPU, on small networks: what it takes, what must fail, and what it computes in."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from engines.backends.tensorrt.build import Plan, build_plan
from engines.backends.tensorrt.child import CACHE, LAYERS, LOG, PLAN
from engines.backends.tensorrt.layers import float_products
from engines.backends.tensorrt.options import TensorRtOptions
from engines.backends.tensorrt.profiles import Profile, Sizes
from passes.graph import graph_from_path
from passes.onnx_model import OnnxModel, onnx_model_from_path
from passes.quantization.tensorrt_placement import placement_faults
from plugins.errors import KilnError
from tests.passes import test_tensorrt_placement as rules

pytestmark = pytest.mark.slow
make = helper.make_node
DEFAULT = TensorRtOptions()
BATCH = Profile("batch", {"n": Sizes(1, 2, 4)})


def saved(proto: onnx.ModelProto, folder: Path, **external: object) -> OnnxModel:
    path = folder / "model.onnx"
    onnx.save(proto, path, **external)
    return onnx_model_from_path(path)


def network(folder: Path, dtype: int = TensorProto.FLOAT) -> OnnxModel:
    """Convolution, activation, mean and product, with weights in a file of their own."""
    rng, kind = np.random.default_rng(0), helper.tensor_dtype_to_np_dtype(dtype)
    nodes = [
        make("Conv", ["x", "w"], ["c"], "conv1", pads=[1, 1, 1, 1]),
        make("Relu", ["c"], ["r"], "relu1"),
        make("GlobalAveragePool", ["r"], ["p"], "pool"),
        make("Flatten", ["p"], ["f"], "flat"),
        make("MatMul", ["f", "v"], ["y"], "fc"),
    ]
    weights = {"w": rng.standard_normal((16, 3, 3, 3)), "v": rng.standard_normal((16, 10))}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", dtype, ["n", 3, 32, 32])],
        [helper.make_tensor_value_info("y", dtype, ["n", 10])],
        [numpy_helper.from_array(values.astype(kind), name) for name, values in weights.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    return saved(proto, folder, save_as_external_data=True, location="model.data", size_threshold=16)


def small(folder: Path, *nodes: onnx.NodeProto, inputs: dict | None = None, **constants: np.ndarray) -> OnnxModel:
    inputs = inputs or {"x": (TensorProto.FLOAT, ["n", 16])}
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(values, name) for name, values in constants.items()],
    )
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("kiln", 1)]
    return saved(helper.make_model(graph, opset_imports=domains, ir_version=10), folder)


def built(model: OnnxModel, folder: Path, options: TensorRtOptions = DEFAULT, *profiles: Profile) -> Plan:
    out = folder / "plan"
    out.mkdir()
    return build_plan(model, profiles or (BATCH,), options, out)


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT, TensorProto.FLOAT16])
def test_a_network_with_external_weights_builds(builder, tmp_path: Path, dtype: int) -> None:
    phases: list[str] = []
    out = tmp_path / "plan"
    out.mkdir()
    single = Profile("single", {"n": Sizes(1, 1, 1)})
    plan = build_plan(network(tmp_path, dtype), (single, BATCH), TensorRtOptions(), out, observe=phases.append)
    assert plan.path.stat().st_size > 100_000
    assert sorted(file.name for file in out.iterdir()) == sorted([PLAN, CACHE, LOG, LAYERS])
    assert plan.tensorrt.startswith("11.4")
    assert phases[0] == "parse"
    assert "Building engine" in phases
    nodes = {name for layer in plan.layers for name in layer.nodes}
    assert {"conv1", "relu1", "fc"} <= nodes
    assert any("[profile 1]" in layer.name or "_myl1_" in layer.name for layer in plan.layers)
    convolution = next(layer for layer in plan.layers if layer.nodes[:1] == ("conv1",))
    assert convolution.input_types[0] == {TensorProto.FLOAT: "Float", TensorProto.FLOAT16: "Half"}[dtype]
    assert plan.memory["weights"] > 0
    assert 50 * 2**20 < plan.peak_memory < plan.forecast_memory


def test_options_reach_the_builder(builder, tmp_path: Path) -> None:
    options = TensorRtOptions(
        workspace=64 * 2**20,
        optimization_level=1,
        weight_streaming=True,
        distributive_independence=True,
        hardware="ampere-plus",
        tf32=True,
    )
    plan = built(network(tmp_path), tmp_path, options)
    assert plan.path.is_file()
    assert any("setHardwareCompatibilityLevel" in warning for warning in plan.warnings), (
        "this harness has no such levels"
    )


def test_timings_of_an_earlier_build_are_used(builder, tmp_path: Path) -> None:
    first = built(network(tmp_path), tmp_path)
    (tmp_path / "again").mkdir()
    options = TensorRtOptions(timing_cache=first.path.parent / CACHE, error_on_cache_miss=True)
    second = built(network(tmp_path), tmp_path / "again", options)
    assert second.timings_added == 0
    assert second.timings_before == (first.timings_before or 0) + (first.timings_added or 0)


def test_a_timing_cache_that_cannot_be_read_is_refused(builder, tmp_path: Path) -> None:
    with pytest.raises(KilnError, match=r"timing cache .*missing\.cache cannot be read: No such file"):
        built(network(tmp_path), tmp_path, TensorRtOptions(timing_cache=tmp_path / "missing.cache"))


def test_what_the_builder_refuses_is_told_with_the_layer(builder, tmp_path: Path) -> None:
    """This machine has no lean runtime, and no GPU for refit: real failures of the builder itself."""
    with pytest.raises(
        KilnError, match=r"TensorRT failed to build the engine: API Usage Error: Unable to load library"
    ):
        built(network(tmp_path), tmp_path, TensorRtOptions(version_compatible=True))
    (tmp_path / "refit").mkdir()
    with pytest.raises(KilnError, match=r"TensorRT failed to build the engine.*whole log is .*build\.log"):
        built(network(tmp_path), tmp_path / "refit", TensorRtOptions(refit="all"))


def test_an_unknown_operator_is_named(builder, tmp_path: Path) -> None:
    model = small(tmp_path, make("PagedAttention", ["x"], ["y"], "attention", domain="kiln"))
    with pytest.raises(
        KilnError, match=r"cannot take .*model\.onnx: node attention \(PagedAttention\): .*Plugin not found"
    ):
        built(model, tmp_path)


def test_types_that_differ_are_named_with_the_layer(builder, tmp_path: Path) -> None:
    inputs = {"x": (TensorProto.FLOAT, ["n", 16]), "z": (TensorProto.FLOAT16, ["n", 16])}
    model = small(tmp_path, make("Add", ["x", "z"], ["y"], "mixed"), inputs=inputs)
    profile = Profile("odd", {"n": Sizes(1, 2, 4)})
    with pytest.raises(KilnError, match="mixed"):
        built(model, tmp_path, DEFAULT, profile)


@pytest.mark.parametrize("name", rules.RIGHT)
def test_right_places_of_q_and_d_are_computed_in_8_bits(builder, tmp_path: Path, name: str) -> None:
    model = saved(rules.model(*rules.RIGHT[name]), tmp_path)
    products = [node.name for node in graph_from_path(model.path).nodes if node.op == "Conv"]
    plan = built(model, tmp_path)
    expected = products if name == "no Q and D at all" else []
    assert float_products(plan.layers, products) == expected


FLOAT = {
    "has a float weight": ["conv1"],
    "has a float activation": ["conv1"],
    "has a Sigmoid in front": ["conv1"],
    "has scales along the wrong axis": ["conv1"],
}
REFUSED = {"has a zero point": "x_q", "keeps a bias in int32": "bi_d"}


@pytest.mark.parametrize("name", FLOAT)
def test_a_product_is_computed_in_float_because_it(builder, tmp_path: Path, name: str) -> None:
    model = saved(rules.model(*rules.WRONG[name][0]), tmp_path)
    assert float_products(built(model, tmp_path).layers, ["conv1"]) == FLOAT[name]
    assert [fault.node for fault in placement_faults(graph_from_path(model.path))] == FLOAT[name]


@pytest.mark.parametrize("name", REFUSED)
def test_the_parser_refuses_what(builder, tmp_path: Path, name: str) -> None:
    with pytest.raises(KilnError, match=REFUSED[name]):
        built(saved(rules.model(*rules.WRONG[name][0]), tmp_path), tmp_path)


def test_uint8_is_read_as_int8_without_an_error(builder, tmp_path: Path) -> None:
    """Why the rules refuse it: half of its values would be clipped and nobody told."""
    plan = built(saved(rules.model(*rules.WRONG["stores uint8"][0]), tmp_path), tmp_path)
    assert any("UINT8" in warning and "Defaulting to INT8" in warning for warning in plan.warnings)


def test_a_crash_of_the_builder_is_told(builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is not TensorRT's: the child dies while it loads it, and this process does not."""
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "tensorrt.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "bad"))
    with pytest.raises(KilnError, match=r"builder ended with signal SIGSEGV .* were forecast\. Its log is"):
        built(network(tmp_path), tmp_path)
    (tmp_path / "bad" / "tensorrt.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    (tmp_path / "again").mkdir()
    with pytest.raises(KilnError, match=r"was killed, most likely for want of memory: it had taken .* GiB"):
        built(network(tmp_path), tmp_path / "again")
