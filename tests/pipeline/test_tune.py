"""Whole searches of `kiln tune` on real engines: a decoder, and plain models with and without a batch to choose."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from engines.bundle import EngineBundle, open_bundle
from engines.runtime.engine import Engine
from engines.runtime.scheduler import SchedulerConfig
from pipeline.cli_tune import tune_command
from pipeline.load_test.report import Slo
from pipeline.load_test.trace import Lengths, TraceRequest, Workload
from pipeline.progress import Progress
from pipeline.tune import TuneConfig, tune
from pipeline.tune.report import html_from_tuning
from pipeline.tune.search import Setting
from plugins.errors import KilnError
from tests.pipeline.tune_material import TRACE, answers

onnx = pytest.importorskip("onnx")


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
