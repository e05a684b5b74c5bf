"""`kiln tune` of a bundle for a GPU: what it checks and chooses there, over a stand-in device in host memory."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.bundle import EngineBundle, file_records, open_bundle, write_bundle
from engines.runtime.engine import Engine
from engines.runtime.opening import default_ladder
from passes.manager import link_or_copy
from passes.onnx_model import load_structure, onnx_model_from_path
from pipeline.expected import EXPECTED, expected_from_graph
from pipeline.progress import Progress
from pipeline.tune import TuneConfig, tune
from pipeline.tune.algorithms import AlgorithmFindings
from pipeline.tune.derive import dense_products, products_in, write_graph_with_products
from pipeline.tune.device import chosen_rows, kernel_rows_from, ladder_from
from plugins.cuda_runtime import PROVIDER
from plugins.dense.cuda_search import Choice, Product, Timed, choice_of, text_of
from plugins.errors import KilnError
from tests.engines.host_runtime import HostRuntime
from tests.pipeline.tune_material import TRACE, answers

onnx = pytest.importorskip("onnx")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for a CUDA device gets one in host memory."""
    for module in ("engines.runtime.opening", "pipeline.tune.device"):
        monkeypatch.setattr(f"{module}.CudaRuntime", HostRuntime)


def for_a_gpu(parent: Path, path: Path, wrong: bool = False) -> EngineBundle:
    """The CPU's bundle, which says that it is for a GPU and has never run there."""
    bundle = open_bundle(parent)
    manifest = bundle.manifest

    def fill(folder: Path):
        for name in manifest.files:
            link_or_copy(bundle.path / name, folder / name)
        expected = expected_from_graph(
            bundle.engine_path, onnx_model_from_path(bundle.engine_path), bundle.plugin_paths
        )
        if wrong:
            expected.rows[1][0] += 3
        expected.save(folder / EXPECTED)
        changes = {
            "sku": manifest.sku.model_copy(update={"name": "h200", "arch": "sm_90", "cpu_features": ()}),
            "backend": manifest.backend.model_copy(update={"provider": PROVIDER}),
            "unverified": ("the kernels",),
            "expected": EXPECTED,
            "files": file_records(folder),
        }
        return manifest.model_copy(update=changes)

    return write_bundle(path, fill)


def test_a_bundle_is_checked_on_the_device_and_its_steps_are_chosen(
    llama_bundle: Path, tmp_path: Path, silent: Progress, host: None
) -> None:
    parent = for_a_gpu(llama_bundle, tmp_path / "gpu")
    config = TuneConfig(budget=60.0, repetitions=1, window=0.02, max_batch=4, chunk_sizes=(64,), kv_blocks=40)
    tuning = tune(parent.path, tmp_path / "tuned", TRACE, "some workload", config, silent)
    written = tuning.write(tmp_path / "tuned")
    manifest = open_bundle(written.path).manifest
    assert manifest.parent == parent.sha256
    assert not manifest.unverified
    assert manifest.checks[-1].name == "logits on host against FP32"
    assert manifest.checks[-1].value <= manifest.checks[-1].limit
    steps = manifest.serving.decode_steps
    assert max(steps) == 4
    assert list(steps) == sorted(steps)
    assert manifest.serving.machine["gpu"] == "host"
    assert any("Captured decode steps" in remark for remark in tuning.remarks)
    with Engine.open(written.path) as engine:
        running = manifest.serving.max_running
        assert engine.backend.ladder == default_ladder(manifest, running)
        assert engine.backend.ladder[-1] == running
    assert answers(written.path) == answers(llama_bundle)


def test_an_engine_that_is_wrong_on_the_device_is_not_tuned(
    llama_bundle: Path, tmp_path: Path, silent: Progress, host: None
) -> None:
    parent = for_a_gpu(llama_bundle, tmp_path / "gpu", wrong=True)
    with pytest.raises(KilnError, match="the engine is wrong: logits on host against FP32"):
        tune(parent.path, tmp_path / "tuned", TRACE, "some workload", TuneConfig(), silent)
    assert not (tmp_path / "tuned").exists()


def test_a_gpu_of_another_architecture_is_refused(
    llama_bundle: Path, tmp_path: Path, host: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostRuntime, "arch", "sm_80")
    parent = for_a_gpu(llama_bundle, tmp_path / "gpu")
    with pytest.raises(KilnError, match=r"was built for h200 \(sm_90\), this machine's GPU is host \(sm_80\)"):
        Engine.open(parent.path)


def test_without_a_driver_opening_says_so(llama_bundle: Path, tmp_path: Path) -> None:
    try:
        from plugins.cuda_runtime import cuda_driver

        cuda_driver()
    except KilnError:
        parent = for_a_gpu(llama_bundle, tmp_path / "gpu")
        with pytest.raises(KilnError, match=r"no CUDA driver|does not start"):
            Engine.open(parent.path)
    else:
        pytest.skip("this machine has a CUDA driver")


def test_only_sizes_that_save_time_are_captured() -> None:
    seconds = {1: 4.0e-3, 2: 4.0e-3, 4: 4.05e-3, 8: 5.0e-3, 16: 5.05e-3}
    assert ladder_from(seconds) == {4: 4.05e-3, 16: 5.05e-3}
    assert ladder_from({3: 1.0}) == {3: 1.0}


@given(st.dictionaries(st.integers(1, 64), st.floats(1e-3, 1e-2), min_size=1))
def test_a_batch_never_waits_much_longer_than_its_own_size_would(seconds: dict[int, float]) -> None:
    kept = ladder_from(seconds)
    assert max(kept) == max(seconds)
    for size, own in seconds.items():
        taken = next(one for one in sorted(kept) if one >= size)
        assert kept[taken] <= max(own / 0.98, own) * (1 + 1e-9)


def test_products_take_kilns_kernels_as_far_as_they_are_faster() -> None:
    cublas = {1: 4.0, 8: 4.2, 32: 5.0, 64: 6.0}
    assert kernel_rows_from(cublas, {1: 3.8, 8: 4.0, 32: 5.1, 64: 5.0}) == 8
    assert kernel_rows_from(cublas, {1: 3.8, 8: 4.0, 32: 4.5, 64: 5.0}) == 32
    assert kernel_rows_from(cublas, {1: 4.1, 8: 4.0, 32: 4.5, 64: 5.0}) == 0
    assert kernel_rows_from(cublas, {1: 3.8, 8: 4.0, 32: 4.5, 64: 5.0}, 64) == 64


def test_a_number_for_each_layer_stays_where_one_for_all_is_not_faster() -> None:
    """16-bit products have one number however they were built, so that it is chosen anew."""
    w8a8, kernels = {1: 3.3, 32: 4.4, 64: 5.1}, {1: 3.0, 32: 4.5, 64: 5.6}
    uniform = {1: 3.0, 32: 4.4, 64: 5.1}
    assert chosen_rows(w8a8, kernels, None, 64) == (1, uniform)
    assert chosen_rows(w8a8, kernels, {1: 3.1, 32: 4.6, 64: 5.3}, 64) == (1, uniform)
    built = {1: 3.0, 32: 4.3, 64: 5.1}
    assert chosen_rows(w8a8, kernels, built, 64) == (None, built)


@given(
    st.dictionaries(st.sampled_from([1, 8, 32, 64, 128]), st.tuples(*[st.floats(1e-3, 1e-2)] * 3), min_size=1),
    st.sampled_from([32, 64]),
)
def test_what_is_chosen_was_measured_and_is_no_slower(times: dict[int, tuple[float, float, float]], cap: int) -> None:
    library, kernels, built = ({size: all_[n] for size, all_ in times.items()} for n in range(3))
    rows, seconds = chosen_rows(library, kernels, built, cap)
    assert rows is None or rows <= cap
    for size, taken in seconds.items():
        assert taken == (built if rows is None else kernels if size <= rows else library)[size]
    means = [np.exp(np.mean(np.log(list(one.values())))) for one in (seconds, built)]
    assert means[0] <= means[1] * (1 + 1e-9)


def test_kernel_rows_are_written_into_products_alone(tmp_path: Path) -> None:
    helper = onnx.helper
    nodes = [
        helper.make_node("Linear", ["x", "w"], ["y"], domain="kiln", kernel_rows=0),
        helper.make_node("LinearSwiGlu", ["y", "w"], ["z"], domain="kiln", kernel_rows=0),
        helper.make_node("Linear", ["z", "w"], ["o"], domain="other", kernel_rows=0),
        helper.make_node("QuantLinear", ["o", "w", "w"], ["p"], domain="kiln", kernel_rows=0),
    ]
    value = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT16, None) for name in ("x", "w", "o")]
    model = helper.make_model(helper.make_graph(nodes, "products", value[:2], value[2:]))
    onnx.save(model, tmp_path / "a.onnx")
    write_graph_with_products(tmp_path / "a.onnx", tmp_path / "b.onnx", 8, {})
    rows = [helper.get_attribute_value(node.attribute[0]) for node in load_structure(tmp_path / "b.onnx").graph.node]
    np.testing.assert_array_equal(rows, [8, 8, 0, 8])
    assert products_in(tmp_path / "b.onnx") == {"Linear": 32, "LinearSwiGlu": 32, "QuantLinear": 64}
    write_graph_with_products(tmp_path / "a.onnx", tmp_path / "c.onnx", 64, {})
    rows = [helper.get_attribute_value(node.attribute[0]) for node in load_structure(tmp_path / "c.onnx").graph.node]
    np.testing.assert_array_equal(rows, [32, 32, 0, 64])


def test_algorithms_are_written_into_the_products_they_were_measured_for(tmp_path: Path) -> None:
    helper = onnx.helper
    nodes = [
        helper.make_node("Linear", ["x", "square"], ["y"], domain="kiln", kernel_rows=8, algorithms="old"),
        helper.make_node("Linear", ["y", "square", "b"], ["z"], domain="kiln", kernel_rows=8),
        helper.make_node("LinearSwiGlu", ["z", "tall"], ["p"], domain="kiln", kernel_rows=8),
        helper.make_node("Linear", ["p", "square"], ["q"], domain="kiln", kernel_rows=8),
        helper.make_node("Linear", ["q", "x"], ["o"], domain="kiln", kernel_rows=8),
    ]
    value = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT16, None) for name in ("x", "o")]
    shapes = {"square": [8, 8], "tall": [16, 8], "b": [8]}
    weights = [onnx.numpy_helper.from_array(np.zeros(shape, np.float16), name=name) for name, shape in shapes.items()]
    graph = helper.make_graph(nodes, "products", value[:1], value[1:], weights)
    onnx.save(helper.make_model(graph), tmp_path / "a.onnx")
    plain, biased, gated = (
        Product(8, 8, swiglu, bias, "float16") for swiglu, bias in ((False, False), (False, True), (True, False))
    )
    assert dense_products(tmp_path / "a.onnx") == {plain: 2, biased: 1, gated: 1}
    write_graph_with_products(tmp_path / "a.onnx", tmp_path / "b.onnx", None, {plain: "7 16:-", gated: "7 32:-"})
    written = [
        {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        for node in load_structure(tmp_path / "b.onnx").graph.node
    ]
    assert [one.get("algorithms") for one in written] == [b"7 16:-", None, b"7 32:-", b"7 16:-", None]
    assert [one["kernel_rows"] for one in written] == [8] * 5


def test_an_algorithm_is_chosen_where_it_gains_more_than_noise() -> None:
    usual, close, best = Timed((), 10.0), Timed((1,), 9.9), Timed((255, 0, 3), 9.0)
    assert choice_of(48, [usual, close, best]) == Choice(48, best, 10.0)
    assert choice_of(48, [usual, close]) == Choice(48, usual, 10.0)
    choices = [Choice(64, usual, 10.0), Choice(48, best, 10.0)]
    assert text_of(choices, 131) == "131 48:ff.0.3 64:-"
    assert text_of(choices[:1], 131) == ""


def test_findings_say_what_is_gained() -> None:
    usual, best = Timed((), 10.0), Timed((1,), 8.0)
    one, other = Product(8, 8, False, False, "float16"), Product(16, 8, False, False, "float16")
    findings = AlgorithmFindings(
        3, {one: [Choice(16, usual, 10.0), Choice(32, best, 10.0)], other: [Choice(n, usual, 10.0) for n in (16, 32)]}
    )
    assert findings.texts == {one: "3 16:- 32:1", other: ""}
    assert findings.sentence == "Algorithms of 2 products: time over that of cuBLAS's own choice, by rows: 32: 0.90."
    nothing = AlgorithmFindings(3, {other: [Choice(16, usual, 10.0)]})
    assert nothing.texts == {}
    assert "own choice is best" in nothing.sentence
