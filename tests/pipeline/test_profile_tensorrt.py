"""Profiles of TensorRT plans, over a stand-in for the engine in host memory: no TensorRT, no GPU."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from engines.backends.tensorrt.decoders import TensorRtLinearGraph
from engines.backends.tensorrt.key import EngineKey
from engines.backends.tensorrt.layer_times import LayerTimes
from engines.backends.tensorrt.layers import EngineLayer, layers_to_file
from engines.backends.tensorrt.linear_decoder import LinearDecoder
from engines.backends.tensorrt.linear_graph import linear_graph
from engines.backends.tensorrt.profiles import ServingShapes, derive_profiles
from engines.bundle import EngineBundle
from engines.manifest import BackendRecord, TensorRecord, TensorRtRecord
from pipeline.profile import Profile, ProfileConfig, backends, profile, profiling
from pipeline.profile.analysis import rows_from_phase
from pipeline.profile.html import html_from_profile
from pipeline.profile.on_tensorrt import UNKNOWN, run_of_layers
from pipeline.profile.report import json_from_profile, tables_from_profile
from pipeline.profile.trace import trace_from_profile
from pipeline.progress import Progress
from plugins.errors import KilnError
from tests.engines.host_runtime import HostRuntime
from tests.engines.tensorrt.host_engine import LAYERS, HostEngine
from tests.engines.tensorrt.serving import CONTEXT, Shape, serving_graph
from tests.engines.tensorrt.test_running import with_onnxruntime
from tests.manifests import manifest_of

SERVING = ServingShapes(max_running=4, tokens_per_step=32, kv_blocks=4)
CONFIG = ProfileConfig(prompt=40, batches=(1, 3), context=10, tokens=8, repetitions=2)
KEY = EngineKey(
    product="tensorrt", tensorrt="11.4.0.106", sku="l4", arch="sm_89", driver=None, plugin_abi=None,
    model_sha256="0" * 64, options="o", profiles="p",
)  # fmt: skip
PRODUCT = EngineLayer("fc_myl0_3", "gemm", "t", ("fc",), ("x",), ("Half",), ("Half",), ("Half",))


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineBundle:
    """With a linear decoder; what opens its plan gives a stand-in."""
    folder = tmp_path / "bundle"
    folder.mkdir()
    made = linear_graph(serving_graph(tmp_path / "model.onnx", Shape(packed=True)), tmp_path / "linear.onnx", "float16")
    assert made.decoder is not None
    profiles = derive_profiles(made.inputs, made.decoder, SERVING)
    layers_to_file(folder / "layers.json", [PRODUCT])
    record = TensorRtRecord(
        key=KEY, options={}, profiles=profiles, attention="native", build_memory=0, build_memory_forecast=0
    )
    manifest = manifest_of(
        folder,
        "linear",
        backend=BackendRecord(name="tensorrt", version="11.4.0.106", provider="TensorRT"),
        precision="fp16",
        decoder=made.decoder,
        tensorrt=record,
        inputs=tuple(map(TensorRecord.of, made.inputs)),
    )

    def opened(bundle, record, decoder, config, given, times: LayerTimes | None) -> LinearDecoder:
        assert not given
        engine = HostEngine(made, profiles, with_onnxruntime(made.path))
        graph = TensorRtLinearGraph(engine.opened(), made.inputs, profiles, HostRuntime(), made.decoder.kv, times)
        return LinearDecoder(graph, made.decoder.kv, graph.rows)

    found = EngineBundle(folder, manifest, "0" * 64)
    monkeypatch.setattr(profiling, "open_bundle", lambda path: found)
    monkeypatch.setattr(profiling, "CudaRuntime", HostRuntime)
    monkeypatch.setattr(backends, "tensorrt_decoder", opened)
    return found


@pytest.fixture
def profiled(bundle: EngineBundle, silent: Progress) -> Profile:
    return profile(bundle.path, CONFIG, silent)


def test_layers_have_the_times_that_tensorrt_reports(profiled: Profile) -> None:
    """A prompt of 40 takes two steps of at most 32 tokens, so its layers come twice."""
    assert [phase.name for phase in profiled.phases] == ["prefill_40", "decode_batch_1", "decode_batch_3"]
    assert (profiled.processor, profiled.threads, profiled.roofline) == ("host", None, None)
    for phase, steps in zip(profiled.phases, (2, 1, 1), strict=True):
        assert {(node.name, node.operator) for node in phase.operators} == {
            ("fc_myl0_3", "gemm"),
            ("conv1_myl0_2", UNKNOWN),
        }
        for node in phase.operators:
            assert node.seconds == pytest.approx(steps * LAYERS[node.name] / 1e3)
            assert node.bound == "device"
        assert phase.dispatch == 0
        assert len(profiled.traced[phase.name].runs) == steps
        assert [row.operator for row in rows_from_phase(phase)] == [UNKNOWN, "gemm"]


def test_wastes_are_those_of_a_plan(profiled: Profile) -> None:
    for phase in profiled.phases:
        wastes = {waste.name: waste for waste in profiled.wastes[phase.name]}
        product = wastes["layers with constants of Half"]
        assert product.switch == "kiln tensorrt build --quant int8"
        (own,) = [node for node in phase.operators if node.operator == "gemm"]
        assert product.seconds == pytest.approx(own.seconds / 2)
        assert all("kiln tensorrt" in waste.switch for waste in wastes.values())


def test_every_form_of_it_says_that_the_work_is_not_known(profiled: Profile) -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(tables_from_profile(profiled))
    text = console.export_text()
    assert "linear on host" in text
    assert "Roofline" not in text
    assert "By the roofline" not in text
    document = json.loads(json_from_profile(profiled))
    assert document["roofline"] is None
    assert {phase["seconds_with_half_the_bytes"] for phase in document["phases"]} == {None}
    verdicts = {phase["verdict"] for phase in document["phases"]}
    assert verdicts <= {"device", "host"}
    assert html_from_profile(profiled).count("<svg") == 1
    spans = [event for event in json.loads(trace_from_profile(profiled))["traceEvents"] if event["ph"] == "X"]
    assert len([event for event in spans if event["tid"] == 2]) == len(LAYERS) * 4


def test_runs_of_one_step_are_added_and_none_is_an_error() -> None:
    run = run_of_layers([("a", 1.0), ("b", 2.0), ("a", 3.0)], {"a": replace(PRODUCT, name="a")})
    assert [(call.index, call.name, call.operator, call.start) for call in run.calls] == [
        (0, "a", "gemm", 0.0),
        (1, "b", UNKNOWN, 1.0),
        (0, "a", "gemm", 3.0),
    ]
    assert run.seconds == run.in_operators == 6.0
    with pytest.raises(KilnError, match="reported no layers"):
        run_of_layers([], {})


def test_what_a_plan_cannot_take_is_refused(bundle: EngineBundle, silent: Progress) -> None:
    with pytest.raises(KilnError, match=r"batches go up to 9, but .* at most 4 sequences: give smaller --batches"):
        profile(bundle.path, replace(CONFIG, batches=(1, 9)), silent)
    with pytest.raises(KilnError, match=r"threads is 2, but .* runs on a GPU"):
        profile(bundle.path, replace(CONFIG, threads=2), silent)


def test_engines_of_onnx_runtimes_provider_are_refused(
    bundle: EngineBundle, silent: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = BackendRecord(name="onnxruntime", version="1.31", provider="TensorrtExecutionProvider")
    other = replace(bundle, manifest=bundle.manifest.model_copy(update={"backend": backend}))
    monkeypatch.setattr(profiling, "open_bundle", lambda path: other)
    with pytest.raises(KilnError, match=r"TensorrtExecutionProvider, whose engines show no layers; build a plan"):
        profile(bundle.path, CONFIG, silent)


def test_a_long_context_is_cut_to_what_the_plan_holds(bundle: EngineBundle, silent: Progress) -> None:
    found = profile(bundle.path, replace(CONFIG, prompt=10 * CONTEXT, batches=(1,)), silent)
    assert found.phases[0].name == f"prefill_{CONTEXT - 1}"
