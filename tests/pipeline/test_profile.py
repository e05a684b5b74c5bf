"""Verdicts on arithmetic done by hand, and whole profiles of tiny bundles."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from engines.bundle import open_bundle
from pipeline.cli_profile import profile_command
from pipeline.floors import decoder_work_from_graph
from pipeline.operator_work import CallWork
from pipeline.profile import Profile, ProfileConfig, profile
from pipeline.profile.analysis import (
    HALF_THE_BYTES,
    TWICE_THE_BATCH,
    Bound,
    Change,
    Phase,
    bound_of,
    phase_from_passes,
    rows_from_phase,
    seconds_if,
)
from pipeline.profile.html import html_from_profile
from pipeline.profile.ort_events import KernelCall, Run, runs_from_profile
from pipeline.profile.recording import Pass, Step
from pipeline.profile.report import json_from_profile, remarks, verdict_sentence
from pipeline.profile.roofline import Roofline, best_roofline
from pipeline.profile.trace import trace_from_profile
from pipeline.profile.wastes import wastes_from_phase
from pipeline.progress import Progress
from plugins.errors import KilnError

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

ROOF = Roofline(
    memory=1e9, cache=1e10, peak=1e11, products={"fp32": {1: 1e10, 16: 5e10}, "int8": {16: 2e11}}, cached=1000
)
MATVEC = CallWork(2e6, "fp32", 1, weights=4_000_000, cache=0, activations=100)


def phase_of(works: list[CallWork], times: list[float], wall: float, in_backend: float) -> Phase:
    steps = (Step(0, 0.0, in_backend),)
    calls = tuple(
        KernelCall(index, f"n{index}", "MatMul" if work.rows else "Add", 0.0, seconds, {})
        for index, (work, seconds) in enumerate(zip(works, times, strict=True))
    )
    run = Run(0.0, sum(times), calls)
    return phase_from_passes("decode_batch_1", "decode", 1, [Pass(steps, wall)], [[run]], dict(enumerate(works)), ROOF)


@pytest.mark.parametrize(
    ("work", "bound"),
    [
        (MATVEC, "bandwidth"),  # 4 ms of reading, 0.2 ms of products
        (replace(MATVEC, operations=2e9, rows=1000), "compute"),  # 40 ms of products
        (replace(MATVEC, operations=10.0, weights=0, rows=0), "launch"),
    ],
)
def test_an_operator_is_bound_by_what_takes_longer_at_best(work: CallWork, bound: Bound) -> None:
    assert bound_of(work, ROOF, 1e-6, streamed=True) == bound


def test_a_ceiling_is_that_of_the_next_number_of_rows() -> None:
    assert [ROOF.product_rate("fp32", rows) for rows in (1, 2, 16, 500)] == [1e10, 5e10, 5e10, 5e10]
    assert best_roofline(ROOF, replace(ROOF, memory=2e9, peak=1.0)) == replace(ROOF, memory=2e9)


@pytest.mark.parametrize(
    ("wall", "in_backend", "verdict"),
    [(0.011, 0.0105, "bandwidth"), (0.040, 0.0105, "host"), (0.041, 0.040, "launch")],
)
def test_a_phase_is_bound_by_what_most_of_its_time_goes_to(wall: float, in_backend: float, verdict: Bound) -> None:
    phase = phase_of([MATVEC, MATVEC], [0.005, 0.005], wall, in_backend)
    assert phase.verdict == verdict
    assert sum(phase.parts.values()) == pytest.approx(wall)


def test_half_the_bytes_help_where_reading_is_the_limit_and_a_larger_batch_is_free_there() -> None:
    reading = phase_of([MATVEC], [0.010], 0.010, 0.010)
    assert seconds_if(reading, ROOF, HALF_THE_BYTES) == pytest.approx(0.005, rel=0.01)
    assert seconds_if(reading, ROOF, TWICE_THE_BATCH) == pytest.approx(0.010, rel=0.01)
    computing = phase_of([replace(MATVEC, operations=2e9, rows=16)], [0.080], 0.080, 0.080)
    assert seconds_if(computing, ROOF, HALF_THE_BYTES) == pytest.approx(0.080)
    assert seconds_if(computing, ROOF, TWICE_THE_BATCH) == pytest.approx(0.160)


def test_a_damaged_profile_is_refused(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text('[{"name": "model_run"')
    with pytest.raises(KilnError, match=r"profile\.json is no profile"):
        runs_from_profile(tmp_path / "profile.json")


@pytest.fixture(scope="module")
def profiled(llama_bundle: Path, silent: Progress) -> Profile:
    config = ProfileConfig(prompt=48, batches=(1, 3), context=20, tokens=8, repetitions=2, threads=1)
    return profile(llama_bundle, config, silent)


def test_a_profile_counts_what_the_graph_says(profiled: Profile) -> None:
    """Operator by operator, the same work as `pipeline.floors` counts in the whole graph."""
    decoder = profiled.bundle.manifest.decoder
    assert decoder is not None
    whole = decoder_work_from_graph(profiled.bundle.engine_path, decoder)
    prefill = profiled.phases[0]
    assert [phase.name for phase in profiled.phases] == ["prefill_48", "decode_batch_1", "decode_batch_3"]
    products = sum(node.work.operations for node in prefill.operators if node.work.is_product)
    after_last_attention = 64 * 64 + 3 * 64 * 128  # select_rows computes it for one row, floors for all
    assert products == whole.prefill_operations(48) - 2 * 47 * after_last_attention
    for phase, batch in zip(profiled.phases[1:], (1, 3), strict=True):
        pasts = [step.past for step in profiled.traced[phase.name].steps[0].sequences]
        assert len(pasts) == batch
        nodes = [node for node in phase.operators if node.work.is_product]
        operations = sum(node.work.operations for node in nodes)
        assert operations == sum(whole.decode_operations(1, past + 1) for past in pasts)
        assert sum(node.work.cache for node in nodes) == sum(past + 2 for past in pasts) * whole.kv_bytes_per_token
        weights = sum(node.work.weights for node in phase.operators)
        assert 0 <= weights - whole.weight_bytes < 4 * 64 * (8 + batch)  # and the rows of tables


def test_parts_of_a_profile_fit_together(profiled: Profile) -> None:
    for phase in profiled.phases:
        assert sum(row.seconds for row in rows_from_phase(phase)) == pytest.approx(phase.in_operators)
        assert sum(row.calls for row in rows_from_phase(phase)) == len(phase.operators)
        assert all(node.seconds > 0 for node in phase.operators)
        traced = profiled.traced[phase.name]
        for step, run in zip(traced.steps, traced.runs, strict=True):
            assert run.in_operators < run.seconds * 1.05 < step.seconds * 1.1


def test_a_profile_as_json_trace_and_page(profiled: Profile) -> None:
    document = json.loads(json_from_profile(profiled))
    assert [phase["verdict"] in ("compute", "bandwidth", "launch", "host") for phase in document["phases"]] == [
        True
    ] * 3
    assert len(document["phases"][0]["nodes"]) == len(profiled.phases[0].operators)
    events = json.loads(trace_from_profile(profiled))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {1, 2, 3}
    for process in (1, 2, 3):
        steps = [event for event in spans if event["pid"] == process and event["name"] == "step"]
        begin, end = steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]
        operators = [event for event in spans if event["pid"] == process and event["tid"] == 2]
        assert len(operators) == len(profiled.phases[process - 1].operators)
        assert all(begin <= event["ts"] + 1 and event["ts"] + event["dur"] <= end + 1 for event in operators)
    page = html_from_profile(profiled)
    assert page.count("<svg") == 4
    assert "Roofline: prefill, 48 tokens" in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_wastes_name_a_switch_and_never_more_than_there_is(profiled: Profile) -> None:
    for phase in profiled.phases:
        for waste in wastes_from_phase(phase, profiled.roofline, profiled.bundle.manifest, 1):
            assert waste.switch
            assert 0 < waste.seconds <= phase.accounted


def test_predictions_do_not_depend_on_how_far_the_profiler_slowed_the_operators(profiled: Profile) -> None:
    for phase in profiled.phases:
        assert seconds_if(phase, profiled.roofline, Change()) == pytest.approx(phase.accounted)
        operators = tuple(replace(node, seconds=node.seconds * 3) for node in phase.operators)
        slowed = replace(phase, operators=operators, host=phase.host * 3, dispatch=phase.dispatch * 3)
        assert verdict_sentence(slowed, profiled.roofline) == verdict_sentence(phase, profiled.roofline)


def test_two_runs_that_do_not_belong_together_are_said_to(profiled: Profile) -> None:
    quiet = replace(profiled, phases=tuple(replace(phase, slowdown=1.1) for phase in profiled.phases))
    assert remarks(quiet) == []
    disturbed = replace(quiet, phases=(replace(quiet.phases[0], slowdown=2.0), *quiet.phases[1:]))
    assert "2.00 times as long" in remarks(disturbed)[0]


def test_a_model_without_a_cache(tmp_path: Path, silent: Progress) -> None:
    from pipeline.build import build
    from pipeline.config import BuildConfig

    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    weights = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"], "m"), helper.make_node("Softmax", ["h"], ["y"], "s")],
        "g",
        [helper.make_tensor_value_info("x", kind, ["batch", 64])],
        [helper.make_tensor_value_info("y", kind, ["batch", 32])],
        [onnx.numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, tmp_path / "plain.onnx")
    built = build(str(tmp_path / "plain.onnx"), ["cpu"], BuildConfig(out=tmp_path / "bundle"), silent)
    found = profile(built[0].bundle.path, ProfileConfig(batches=(1, 5), tokens=4, repetitions=2, threads=1), silent)
    assert [phase.name for phase in found.phases] == ["batch_1", "batch_5"]
    for phase, batch in zip(found.phases, (1, 5), strict=True):
        (product,) = [node for node in phase.operators if node.work.is_product]
        assert product.work.operations == 2 * batch * 64 * 32
        assert product.work.weights >= 64 * 32 * 4


def test_bad_input_is_refused_before_any_work(llama_bundle: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    for arguments, message in (
        ([str(tmp_path)], "has no manifest.json"),
        ([str(llama_bundle), "--batches", "1,x"], "expected whole numbers"),
        ([str(llama_bundle), "--batches", "0"], "expected numbers from 1"),
        ([str(llama_bundle), "--tokens", "2"], "expected at least 4"),
        ([str(llama_bundle), "--threads", "0"], "expected at least 1"),
    ):
        result = runner.invoke(profile_command, arguments)
        assert isinstance(result.exception, KilnError)
        assert message in str(result.exception)


def test_the_bundle_is_as_it_was(profiled: Profile, llama_bundle: Path) -> None:
    assert open_bundle(llama_bundle).sha256 == profiled.bundle.sha256
