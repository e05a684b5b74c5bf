"""Efficiency and its knee on measurements made up for it; derived bundles and whole searches on real engines."""

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from engines.bundle import BundleError, EngineBundle, open_bundle, write_bundle
from engines.manifest import ServingRecord
from engines.runtime.engine import Engine
from engines.runtime.opening import default_config
from engines.runtime.request import SamplingParams
from engines.runtime.scheduler import SchedulerConfig
from passes.onnx_model import DecoderSpec, load_structure
from pipeline.cli import inspect_command
from pipeline.cli_tune import tune_command
from pipeline.load_test.report import Slo
from pipeline.load_test.targets import LoadError, LoadRequest, Usage
from pipeline.load_test.trace import Lengths, TraceRequest, Workload
from pipeline.progress import Progress
from pipeline.tune import TuneConfig, tune
from pipeline.tune.derive import derive_bundle, write_graph_with_block_size
from pipeline.tune.measure import DecoderMeasure, plain_sample
from pipeline.tune.report import html_from_tuning
from pipeline.tune.search import (
    Point,
    Sample,
    Setting,
    best_or_default,
    doubling,
    efficiency,
    knee,
    smallest_best,
    still_growing,
)
from plugins.errors import KilnError
from plugins.paged_attention.schema import DOMAIN, OP_TYPE, KvLayer, KvSpec

onnx = pytest.importorskip("onnx")


def point(batch: int, *rates: float, goodput: float | None = None) -> Point:
    return Point(Setting(batch), [Sample(rate, batch / rate, goodput=goodput) for rate in rates])


def sweep(latencies: dict[int, float]) -> list[Point]:
    """Points of a machine on which a batch of b takes so many seconds."""
    return [point(batch, batch / seconds) for batch, seconds in latencies.items()]


# Efficiency and choice


def test_efficiency_is_qps_over_batch_times_single_qps() -> None:
    points = sweep({1: 0.5, 2: 0.5, 4: 1.0, 8: 4.0})
    assert [efficiency(each, points[0]) for each in points] == pytest.approx([1.0, 1.0, 0.5, 0.125])
    assert points[2].rate == pytest.approx(4.0)
    single_latency = 0.5
    for each in points:
        assert efficiency(each, points[0]) == pytest.approx(each.rate / (each.setting.batch * (1 / single_latency)))


@pytest.mark.parametrize(
    ("latencies", "expected"),
    [
        ({1: 1.0, 2: 1.0, 4: 1.02, 8: 1.05, 16: 2.0, 32: 4.0}, (8, True)),
        ({1: 1.0, 2: 2.0, 4: 4.0}, (1, True)),
        ({1: 1.0, 2: 1.0, 4: 1.0}, (4, False)),
        ({1: 1.0}, (1, False)),
        ({1: 1.0, 2: 1.06, 4: 1.13, 8: 1.2}, (2, True)),  # little by little counts from the highest, not the last
        ({1: 1.0, 2: 0.8, 4: 0.95, 8: 0.95}, (2, True)),  # 0.84 of the highest, although above batch 1
        ({1: 1.0, 2: 1.5, 4: 0.9}, (1, True)),  # beyond the first fall nothing counts
    ],
)
def test_the_knee_is_the_batch_beyond_which_efficiency_falls(
    latencies: dict[int, float], expected: tuple[int, bool]
) -> None:
    assert knee(sweep(latencies)) == expected


def test_a_fall_within_the_noise_is_none() -> None:
    single = point(1, 1.0)
    assert knee([single, point(2, 1.6)]) == (1, True)
    assert knee([single, point(2, 1.3, 1.6, 1.9)]) == (1, True)  # 0.8 of 1, noise 0.19
    assert knee([single, point(2, 1.2, 1.6, 2.0)]) == (2, False)  # noise 0.25


def test_the_knee_needs_a_single_request() -> None:
    with pytest.raises(KilnError, match="a single request was not measured"):
        knee([point(2, 1.0)])


def test_the_smallest_batch_as_good_as_the_best_is_chosen() -> None:
    points = [point(1, 1.0), point(2, 1.9), point(4, 2.97), point(8, 3.0), point(16, 2.9)]
    assert smallest_best(points, "throughput").setting.batch == 4
    points[2] = point(4, 2.8)
    assert smallest_best(points, "throughput").setting.batch == 8
    points[2] = point(4, 2.6, 2.8, 3.0)
    assert smallest_best(points, "throughput").setting.batch == 4


def test_goodput_chooses_by_what_is_within_the_limits() -> None:
    points = [point(1, 1.0, goodput=1.0), point(2, 1.9, goodput=1.5), point(4, 3.0, goodput=0.0)]
    assert smallest_best(points, "goodput").setting.batch == 2
    with pytest.raises(KilnError, match="no setting kept the limits"):
        smallest_best([points[2]], "goodput")


def test_another_setting_must_be_better_than_the_default_beyond_the_noise() -> None:
    default, slightly, better = point(4, 1.0), point(4, 1.01), point(4, 1.05)
    assert best_or_default([default, slightly], default, "throughput") is default
    assert best_or_default([default, slightly, better], default, "throughput") is better
    sometimes = point(4, 1.01, 1.5, 1.6)
    assert best_or_default([default, sometimes], default, "throughput") is default
    noisy = point(4, 0.8, 1.0, 1.2)
    assert best_or_default([noisy, point(4, 1.1, 1.15, 1.19)], noisy, "throughput") is noisy
    good = point(4, 0.5, goodput=0.5)
    assert best_or_default([point(4, 0.9, goodput=0.4), good], point(4, 1.0, goodput=0.3), "goodput") is good


def test_batches_grow_until_two_in_a_row_gain_nothing() -> None:
    rates = [1.0, 1.9, 2.0, 2.01]
    assert still_growing([point(1, rate) for rate in rates])
    assert still_growing([point(1, rate) for rate in (*rates, 2.5)])
    assert not still_growing([point(1, rate) for rate in (*rates, 2.0)])


def test_sizes_double_up_to_the_largest() -> None:
    assert [doubling(most) for most in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "speed"}, "the objective is 'speed'"),
        ({"objective": "goodput"}, "goodput needs a limit"),
        ({"budget": 0.0}, "budget is 0"),
        ({"window": float("nan")}, "window is nan"),
        ({"repetitions": 0}, "repetitions is 0"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"kv_blocks": 0}, "kv_blocks is 0"),
        ({"block_sizes": (8, 512)}, "block sizes from 1 to 256"),
    ],
)
def test_options_without_meaning_are_refused(options: dict, message: str) -> None:
    with pytest.raises(KilnError, match=message):
        TuneConfig(**options)


# Measurements


class Lockstep:
    """A target that gives a token to every request in flight each time the event loop comes round."""

    name, vocabulary = "lockstep", 50

    def __init__(self, fail_at: int | None = None) -> None:
        self.requests: list[LoadRequest] = []
        self.running = self.most = 0
        self._fail_at = fail_at

    async def answer(self, request: LoadRequest, deliver: Callable[[], None]) -> Usage:
        self.requests.append(request)
        if len(self.requests) == self._fail_at:
            raise LoadError("refused", "too long")
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for _ in range(request.output_tokens):
                await asyncio.sleep(0.001)
                deliver()
        finally:
            self.running -= 1
        return Usage(len(request.prompt), request.output_tokens)

    async def close(self) -> None:
        pass


TRACE = Workload(Lengths(20), Lengths(8)).draw(16, 0)


def test_a_measurement_keeps_a_batch_in_flight_and_counts_its_tokens() -> None:
    target = Lockstep()
    measure = DecoderMeasure(TRACE, Slo(first_token=60.0), seed=0)
    sample = measure(target, 4, window=0.05, deadline=float("inf"))
    assert sample is not None
    assert target.most == 4
    assert target.running == 0  # what was in flight is ended
    assert [request.output_tokens for request in target.requests[:6]] == [2, 4, 6, 8, 8, 8]
    assert sample.latency * sample.rate == pytest.approx(4)
    assert sample.goodput == pytest.approx(sample.rate)
    assert sample.first_token is not None
    assert sample.inter_token is not None
    assert 0 < sample.first_token < sample.latency
    before = {request.prompt for request in target.requests}
    assert len(before) == len(target.requests)
    measure(target, 4, window=0.0, deadline=float("inf"))
    assert len({request.prompt for request in target.requests}) == len(target.requests)  # nothing known from before


def test_a_measurement_ends_at_its_deadline_and_at_an_error() -> None:
    measure = DecoderMeasure(TRACE, Slo(), seed=0)
    assert measure(Lockstep(), 2, window=60.0, deadline=0.0) is None
    with pytest.raises(KilnError, match="20 prompt and 8 output tokens refused: too long"):
        measure(Lockstep(fail_at=3), 2, window=60.0, deadline=float("inf"))


def test_plain_batches_are_timed_by_the_clock() -> None:
    now = [0.0]
    durations = iter([9.0, 0.5, 1.0, 0.5])  # the first one is not counted

    def infer(feeds: object) -> None:
        now[0] += next(durations)

    sample = plain_sample(infer, {}, 8, window=2.0, deadline=100.0, most_latency=0.6, clock=lambda: now[0])
    assert sample is not None
    assert sample.rate == pytest.approx(8 * 3 / 2.0)
    assert sample.latency == pytest.approx(2.0 / 3)
    assert sample.goodput == pytest.approx(sample.rate * 2 / 3)
    assert plain_sample(lambda feeds: None, {}, 8, 2.0, 100.0, None, clock=lambda: 100.0) is None


# Derived bundles


def serving_record(**changes: object) -> ServingRecord:
    fields = {"objective": "throughput", "knee": 1, "falls": True, "workload": "w", "machine": {}, "threads": 1}
    return ServingRecord.model_validate({**fields, "measurements": (), **changes})


def answers(path: Path) -> list[tuple[int, ...]]:
    prompts = [np.random.default_rng(length).integers(1, 500, length).tolist() for length in (1, 7, 16, 33, 90)]
    with Engine.open(path, threads=1, config=SchedulerConfig(max_running=4)) as engine:
        return [c.token_ids for c in engine.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))]


def test_a_bundle_with_other_blocks_gives_the_same_tokens_from_the_same_weights(
    llama_bundle: Path, tmp_path: Path
) -> None:
    parent = open_bundle(llama_bundle)
    expected = answers(llama_bundle)
    for size in (8, 32):
        path = tmp_path / str(size)
        derived = derive_bundle(parent, path, block_size=size)
        assert open_bundle(path).manifest == derived.manifest
        assert derived.manifest.parent == parent.sha256 != derived.sha256
        assert derived.manifest.decoder is not None
        assert derived.manifest.decoder.kv.block_size == size
        assert derived.manifest.checks[-1].name == f"logits with blocks of {size} against 16"
        weights = f"{parent.manifest.engine}.data"
        assert (path / weights).samefile(llama_bundle / weights)
        assert answers(path) == expected


def test_a_bundle_with_other_settings_alone_shares_every_file(llama_bundle: Path, tmp_path: Path) -> None:
    parent = open_bundle(llama_bundle)
    serving = serving_record(max_running=3, tokens_per_step=64, kv_blocks=20)
    derived = derive_bundle(parent, tmp_path / "b", block_size=16, serving=serving)
    assert derived.manifest.checks == parent.manifest.checks
    assert all((derived.path / name).samefile(llama_bundle / name) for name in parent.manifest.files)
    assert default_config(derived.manifest) == SchedulerConfig(max_running=3, tokens_per_step=64)
    with Engine.open(derived.path, threads=1) as engine:
        assert engine.info.num_blocks == 20
    with Engine.open(derived.path, threads=1, kv_blocks=9) as engine:
        assert engine.info.num_blocks == 9
    result = CliRunner().invoke(inspect_command, [str(derived.path)], catch_exceptions=False)
    assert parent.sha256 in result.stdout
    assert "max_running 3, tokens_per_step 64, kv_blocks 20 for throughput" in result.stdout


def test_a_parent_outlives_neither_its_children_nor_the_other_way(llama_bundle: Path, tmp_path: Path) -> None:
    parent = shutil.copytree(llama_bundle, tmp_path / "parent")
    derive_bundle(open_bundle(parent), tmp_path / "child")
    shutil.rmtree(parent)
    assert open_bundle(tmp_path / "child").manifest.parent


def test_a_parent_that_changed_is_refused(llama_bundle: Path, tmp_path: Path) -> None:
    path = shutil.copytree(llama_bundle, tmp_path / "parent")
    opened = open_bundle(path)

    def rebuilt(folder: Path):
        for name in opened.manifest.files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(llama_bundle / name, folder / name)
        return opened.manifest.model_copy(update={"created": "later"})

    write_bundle(path, rebuilt)
    with pytest.raises(BundleError, match=r"was changed after it was opened \(its identity\)"):
        derive_bundle(opened, tmp_path / "child")
    reopened = open_bundle(path)
    (path / "tokenizer" / "tokenizer_config.json").write_text("{}")
    with pytest.raises(BundleError, match=r"was changed .*tokenizer_config.json.*: nothing was written"):
        derive_bundle(reopened, tmp_path / "child")
    shutil.rmtree(path)
    with pytest.raises(BundleError, match="was changed"):
        derive_bundle(reopened, tmp_path / "child")
    assert [entry.name for entry in tmp_path.iterdir()] == []


def test_a_bundle_is_not_its_own_child(llama_bundle: Path) -> None:
    with pytest.raises(BundleError, match="is the bundle itself; choose another --out"):
        derive_bundle(open_bundle(llama_bundle), llama_bundle)


def serving_graph(path: Path, extra: str = "") -> DecoderSpec:
    """One layer with a fixed block size; not a whole model."""
    decoder = DecoderSpec(KvSpec((KvLayer(2, 4),), 16, "float32"), 10, 64, (0,))
    cache = "float[blocks,16,2,4]"
    text = f"""<ir_version: 10, opset_import: ["" : 21, "{DOMAIN}" : 1], metadata_props: ["other": "kept"]>
    main (float[t,8] q, {cache} key_cache.0, {cache} value_cache.0)
      => (float[t,8] y, {cache} key_cache_out.0, {cache} value_cache_out.0) {{
        y, key_cache_out.0, value_cache_out.0 = {DOMAIN}.{OP_TYPE} (q, q, q, key_cache.0, value_cache.0)
        {extra}
    }}"""
    text = text.replace("_cache.0", "_cache_0").replace("_out.0", "_out_0")
    model = onnx.parser.parse_model(text)
    for value in (*model.graph.input, *model.graph.output):
        value.name = value.name.replace("_cache_0", "_cache.0").replace("_out_0", "_out.0")
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [name.replace("_cache_0", "_cache.0").replace("_out_0", "_out.0") for name in names]
    onnx.helper.set_model_props(model, {"kiln.decoder": decoder.to_json(), "other": "kept"})
    path.write_bytes(model.SerializeToString())
    return decoder


def test_a_fixed_block_size_is_changed_wherever_the_graph_has_it(tmp_path: Path) -> None:
    decoder = serving_graph(tmp_path / "a.onnx")
    changed = replace(decoder, kv=replace(decoder.kv, block_size=32))
    write_graph_with_block_size(tmp_path / "a.onnx", tmp_path / "b.onnx", changed)
    proto = load_structure(tmp_path / "b.onnx")
    for value in (*proto.graph.input, *proto.graph.output):
        sizes = [size.dim_value for size in value.type.tensor_type.shape.dim]
        assert sizes == ([0, 32, 2, 4] if "cache" in value.name else [0, 8])
    properties = {entry.key: entry.value for entry in proto.metadata_props}
    assert properties["other"] == "kept"
    assert DecoderSpec.from_json(properties["kiln.decoder"]) == changed


def test_a_graph_that_looks_at_its_cache_keeps_its_block_size(tmp_path: Path) -> None:
    decoder = serving_graph(tmp_path / "a.onnx", "shape = Shape (key_cache_0)")
    with pytest.raises(KilnError, match=r"Shape .* uses a cache; .* --block-size 16"):
        write_graph_with_block_size(tmp_path / "a.onnx", tmp_path / "b.onnx", decoder)


# Whole searches


def test_a_decoder_is_tuned_and_the_new_bundle_is_served_so(
    llama_bundle: Path, tmp_path: Path, silent: Progress
) -> None:
    pytest.importorskip("matplotlib")
    config = TuneConfig(
        slo=Slo(60.0, 60.0),
        budget=120.0,
        repetitions=2,
        window=0.05,
        max_batch=4,
        chunk_sizes=(64,),
        block_sizes=(8,),
        kv_blocks=40,
        threads=1,
    )
    trace = Workload(Lengths(20), Lengths(6)).draw(8, 0)
    tuning = tune(llama_bundle, tmp_path / "tuned", trace, "some workload", config, silent)
    step = SchedulerConfig().tokens_per_step
    assert [found.setting for found in tuning.batch_points] == [Setting(size, step, 16) for size in (1, 2, 4)]
    assert all(len(found.samples) == 2 and found.rate > 0 for found in tuning.points)
    batch = tuning.batch_points[-1].setting.batch
    assert {found.setting.tokens_per_step for found in tuning.points} == {64, step}
    assert {found.setting.block_size for found in tuning.points} == {8, 16}
    assert tuning.efficiency(tuning.batch_points[0]) == pytest.approx(1.0)
    assert not list(tmp_path.iterdir())  # variants are gone, and nothing is written yet
    written = tuning.write(tmp_path / "tuned")
    serving = open_bundle(written.path).manifest.serving
    assert serving is not None
    assert serving.max_running == tuning.chosen.setting.batch <= batch
    assert (serving.tokens_per_step, serving.knee) == (tuning.chosen.setting.tokens_per_step, tuning.knee)
    assert serving.slo == {"first_token": 60.0, "inter_token": 60.0}
    assert len(serving.measurements) == len(tuning.points)
    with Engine.open(written.path, threads=1) as engine:
        assert engine.info.num_blocks == 40 * 16 // engine.info.block_size
        assert engine.info.block_size == tuning.chosen.setting.block_size
    assert answers(written.path) == answers(llama_bundle)
    page = html_from_tuning(tuning)
    assert page.count("<svg") == 3
    assert "<script" not in page


def test_a_budget_that_is_too_short_says_so(llama_bundle: Path, tmp_path: Path, silent: Progress) -> None:
    with pytest.raises(KilnError, match=r"a single request was not measured.*raise --budget"):
        tune(llama_bundle, tmp_path / "t", TRACE, "w", TuneConfig(budget=1e-3, threads=1, max_batch=2), silent)
    assert not list(tmp_path.iterdir())


def test_a_trace_with_text_is_refused(llama_bundle: Path, tmp_path: Path, silent: Progress) -> None:
    trace = (TraceRequest(prompt="Hello", output_tokens=2),)
    with pytest.raises(KilnError, match="expected prompt_tokens on each line"):
        tune(llama_bundle, tmp_path / "t", trace, "w", TuneConfig(threads=1), silent)


@pytest.fixture(scope="module")
def plain_bundle(tmp_path_factory: pytest.TempPathFactory, silent: Progress) -> Callable[[str], EngineBundle]:
    """One product, with a batch dimension as named."""
    pytest.importorskip("onnxruntime")
    from pipeline.build import build
    from pipeline.config import BuildConfig

    def make(batch: str) -> EngineBundle:
        folder = tmp_path_factory.mktemp("plain")
        text = f"""<ir_version: 10, opset_import: ["" : 21]>
        main (float[{batch},16] x) => (float[{batch},16] y) {{ y = MatMul (x, w) }}"""
        model = onnx.parser.parse_model(text)
        weight = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
        onnx.save(model, folder / "m.onnx")
        return build(str(folder / "m.onnx"), ["cpu"], BuildConfig(out=folder / "bundle"), silent)[0].bundle

    return make


def test_a_plain_model_gets_its_batch_size(plain_bundle: Callable[[str], EngineBundle], tmp_path: Path) -> None:
    parent = plain_bundle("n")
    options = ["--max-batch", "8", "--window", "0.02", "--repetitions", "2", "--threads", "1", "--json"]
    arguments = [str(parent.path), "--out", str(tmp_path / "tuned"), *options, "--slo-latency", "60"]
    arguments += ["--objective", "goodput", "--html", str(tmp_path / "page.html")]
    result = CliRunner().invoke(tune_command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    serving = open_bundle(tmp_path / "tuned").manifest.serving
    assert serving is not None
    assert serving.max_batch == document["max_batch"] in (1, 2, 4, 8)
    assert serving.max_running is None
    assert serving.slo == {"latency": 60.0}
    assert document["written"]["sha256"] == open_bundle(tmp_path / "tuned").sha256
    assert document["measurements"][0]["efficiency"] == pytest.approx(1.0)
    assert document["efficiency_is"].startswith("QPS(b) / (b x QPS(1))")
    assert (tmp_path / "page.html").read_text().count("<svg") == 3
    assert "requests/s" in result.stderr


def test_a_dry_run_writes_nothing(plain_bundle: Callable[[str], EngineBundle]) -> None:
    parent = plain_bundle("n")
    arguments = [str(parent.path), "--dry-run", "--max-batch", "2", "--window", "0.01", "--threads", "1"]
    result = CliRunner().invoke(tune_command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "Efficiency" in result.stdout
    assert not parent.path.with_name("bundle-tuned").exists()


@pytest.mark.parametrize(("options", "lane"), [([], "batch"), (["--lane", "interactive"], "interactive")])
def test_throughput_is_measured_in_the_batch_lane(
    llama_bundle: Path, tmp_path: Path, options: list[str], lane: str
) -> None:
    sizes = ["--max-batch", "2", "--chunk-sizes", "256", "--block-sizes", "16", "--output-tokens", "4"]
    rounds = ["--window", "0.01", "--repetitions", "1", "--threads", "1", "--prompt-tokens", "8", "--json"]
    arguments = [str(llama_bundle), "--dry-run", "--out", str(tmp_path / "t"), *sizes, *rounds, *options]
    result = CliRunner().invoke(tune_command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["workload"].endswith(f"seed 0, lane {lane}")


def test_a_trace_names_its_own_lanes(tmp_path: Path) -> None:
    (tmp_path / "t").write_text('{"prompt_tokens": 5, "output_tokens": 1}')
    arguments = [str(tmp_path), "--trace", str(tmp_path / "t"), "--lane", "batch"]
    with pytest.raises(KilnError, match="--lane has no meaning beside it"):
        CliRunner().invoke(tune_command, arguments, catch_exceptions=False)


def test_a_fixed_batch_leaves_nothing_to_choose(plain_bundle: Callable[[str], EngineBundle]) -> None:
    for options, message in (
        ([], "takes batches of 4 only"),
        (["--slo-first-token", "1"], "generates no tokens; limit its --slo-latency"),
    ):
        with pytest.raises(KilnError, match=message):
            CliRunner().invoke(tune_command, [str(plain_bundle("4").path), *options], catch_exceptions=False)
