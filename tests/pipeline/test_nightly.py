"""Nightly rebuilds: what is skipped, built, judged, promoted and held back, and what each gate catches."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cryptography")
pytest.importorskip("onnxruntime")

from engines.sku import host_cpu_features
from pipeline.cli_nightly import BUSY, nightly_group, run_command
from pipeline.nightly.config import SpeedOptions, config_from_toml
from pipeline.nightly.determinism import distances, same
from pipeline.nightly.determinism import verdict as determinism_verdict
from pipeline.nightly.executor import Limits, LocalExecutor, Task
from pipeline.nightly.journal import AlreadyRunningError, Journal, only_run
from pipeline.nightly.report import EXIT_CODES, JobReport, NightlyReport, junit_from_report
from pipeline.nightly.speed import interval_of, measure
from pipeline.nightly.speed import verdict as speed_verdict
from pipeline.registry.records import chunk_key, release_key
from pipeline.registry.store import Store
from plugins.errors import KilnError
from tests.pipeline.nightly_material import InProcess, World, save_conv, save_embedding, save_mlp

SKU = "cpu-avx2"
pytestmark = pytest.mark.skipif(not {"avx2", "fma"} <= host_cpu_features(), reason="engines are built for AVX2")


@pytest.fixture
def world(tmp_path: Path) -> Callable[..., World]:
    return lambda *models, skus=(SKU,), settings="": World(tmp_path / "world", models, skus, settings)


def only(report: NightlyReport) -> JobReport:
    (job,) = report.jobs
    return job


def cases(job: JobReport) -> dict[str, str]:
    return {case.name: case.status for case in job.cases}


def text_of(job: JobReport, name: str) -> str:
    return next(case.text for case in job.cases if case.name == name)


# A night


def test_what_did_not_change_is_not_built(world, silent):
    made = world("mlp")
    first = only(made.night(silent))
    assert (first.status, first.version) == ("promoted", 1)
    assert cases(first) == {
        **{"build": "passed", "upload": "passed", "accuracy": "passed"},
        **{"determinism": "skipped", "speed": "skipped", "promote": "passed"},
    }
    content = made.content()
    again = only(made.night(silent))
    assert (again.status, again.version) == ("unchanged", 1)
    assert made.content() == content
    assert content[f"mlp {SKU} 1"][1] == ("candidate", "canary")
    assert f"mlp {SKU} stable" not in content, "that is for people"


@pytest.mark.parametrize("change", ["code", "model", "options", "force"])
def test_what_changed_is_built_again(world, silent, change):
    made = world("mlp")
    made.night(silent)
    if change == "model":
        save_mlp(made.models / "mlp.onnx", seed=1)
    elif change == "options":
        made.path.write_text(made.path.read_text() + 'build = { disable = ["fold_constants"] }\n')
    report = made.night(silent, "code-2" if change == "code" else "code-1", force=change == "force")
    assert only(report).version == 2


def test_a_rebuild_is_compared_with_stable_and_promoted(world, silent):
    made = world("mlp")
    made.night(silent)
    made.make_stable()
    job = only(made.night(silent, "code-2"))
    assert (job.status, job.version, job.stable) == ("promoted", 2, 1)
    assert set(cases(job).values()) == {"passed"}
    assert list(cases(job)) == ["build", "upload", "verify stable", "accuracy", "determinism", "speed", "promote"]
    assert "bit by bit" in text_of(job, "determinism")
    assert job.changes == {"code": "code-1 -> code-2"}
    assert "as they were when it was built" in text_of(job, "determinism")
    registry = made.registry()
    assert registry.channel("mlp", SKU, "stable").version == 1
    assert registry.channel("mlp", SKU, "canary").version == 2


# What gates catch


def test_a_poisoned_model_is_held_back_by_the_accuracy_gate(world, silent):
    """The graph is sound and the build's own check passes: only the comparison with stable shows it."""
    made = world("conv")
    made.night(silent)
    made.make_stable()
    save_conv(made.models / "conv.onnx", variance=4.0)
    report = made.night(silent)
    job = only(report)
    assert (job.status, report.exit_code) == ("held back", 3)
    assert cases(job)["build"] == "passed"
    assert cases(job)["accuracy"] == "failed"
    assert cases(job)["determinism"] == "skipped"
    registry = made.registry()
    assert {name: registry.channel("conv", SKU, name).version for name in ("candidate", "canary", "stable")} == {
        **{"candidate": 2, "canary": 1, "stable": 1}
    }
    again = made.night(silent)
    assert (only(again).status, again.exit_code) == ("held back", 3)
    assert "nothing changed since" in only(again).text
    with pytest.raises(KilnError, match="failed its last verification"):
        registry.promote("conv", SKU, "canary", 2)
    save_conv(made.models / "conv.onnx")
    assert only(made.night(silent)).status == "promoted"


def test_a_slower_engine_is_held_back_by_the_speed_gate(world, silent):
    made = world("embedding")
    made.night(silent)
    made.make_stable()
    save_embedding(made.models / "embedding.onnx", work=8)
    job = only(made.night(silent))
    assert job.status == "held back"
    assert cases(job)["accuracy"] == "passed"
    assert cases(job)["speed"] == "failed"
    assert "slower" in text_of(job, "speed")
    assert made.registry().channel("embedding", SKU, "canary").version == 1


class Truncating(Store):
    """Cuts off so many uploads of parts, for good or for once."""

    left = 0

    def put(self, key: str, data: bytes) -> None:
        if key.startswith("chunks/") and self.left > 0 and len(data) > 100:
            self.left -= 1
            data = data[:-1]
        super().put(key, data)


def test_a_truncated_upload_is_caught_by_the_upload_gate(world, silent):
    made = world("mlp")
    store = Truncating(str(made.folder / "registry"))
    store.left = 10**6
    report = made.night(silent, store=store)
    job = only(report)
    assert (job.status, report.exit_code) == ("failed", 4)
    assert cases(job) == {"build": "passed", "upload": "failed"}
    assert "publish the bundle again" in text_of(job, "upload")
    assert made.registry().pairs() == []
    store.left = 1
    job = only(made.night(silent, store=store))
    assert job.status == "promoted"
    assert "sent again" in text_of(job, "upload")
    assert made.content()[f"mlp {SKU} candidate"][1] == job.version


@pytest.mark.parametrize("channel", ["stable", "candidate"])
def test_a_tampered_signature_stops_the_job(world, silent, channel):
    made = world("mlp")
    made.night(silent)
    made.make_stable()
    made.night(silent, "code-2")
    registry = made.registry()
    key = release_key("mlp", SKU, 1 if channel == "stable" else 2)
    data = registry.store.read(key)
    registry.store.put(key, data[:-1] + b" }")
    report = made.night(silent, "code-3")
    job = only(report)
    assert (job.status, report.exit_code) == ("failed", 4)
    assert cases(job)["verify stable" if channel == "stable" else "registry"] == "error"
    assert "valid signature" in job.text
    assert registry.channel("mlp", SKU, "canary").version == 2
    assert registry.channel("mlp", SKU, "stable").version == 1


def test_a_damaged_stable_is_not_compared_with(world, silent):
    made = world("mlp")
    made.night(silent)
    made.make_stable()
    registry = made.registry()
    release = registry.release("mlp", SKU, 1)
    key = chunk_key(release.files["engine.onnx"].chunks[0])
    registry.store.put(key, registry.store.read(key)[:-1] + b"x")
    save_mlp(made.models / "mlp.onnx", seed=1)
    for path in (made.config.work / "jobs").rglob("engine.onnx"):
        path.unlink()
    job = only(made.night(silent))
    assert (job.status, cases(job)["verify stable"]) == ("failed", "error")
    assert "changed or damaged" in job.text


# Other machines


def test_what_cannot_be_executed_here_waits_for_a_machine_that_can(world, silent, monkeypatch):
    made = world("mlp", skus=("cpu-far", SKU))
    report = made.night(silent)
    assert [job.status for job in report.jobs] == ["unverified", "promoted"]
    assert report.exit_code == 0
    registry = made.registry()
    states = {item.release.sku: item.state for item in registry.listing()}
    assert states == {"cpu-far": "candidate, unverified", SKU: "candidate, canary, verified"}
    with pytest.raises(KilnError, match="kiln nightly verify"):
        registry.promote("mlp", "cpu-far", "canary")
    assert [job.status for job in made.nightly(silent).verify().jobs] == ["unverified", "unchanged"]

    features = host_cpu_features() | {"a-feature-of-other-machines"}
    monkeypatch.setattr("engines.bundle.host_cpu_features", lambda: features)
    capable = made.nightly(silent, machine=made.machine(more_features=("a-feature-of-other-machines",)))
    capable.journal.end()
    verified = capable.verify()
    assert [job.status for job in verified.jobs] == ["promoted", "unchanged"]
    assert registry.channel("mlp", "cpu-far", "canary").version == 1


# Failures


def test_a_model_that_cannot_be_built_fails_alone(world, silent):
    made = world("mlp", "conv")
    (made.models / "mlp.onnx").write_bytes(b"no model")
    report = made.night(silent)
    assert [job.status for job in report.jobs] == ["failed", "promoted"]
    assert report.exit_code == 4
    assert cases(report.jobs[0])["build"] == "error"


def local(tmp_path: Path, kind: str = "build", seconds: float = 60, memory: int | None = None, **options):
    return LocalExecutor().run(Task(kind, tmp_path, SKU, options), Limits(seconds, memory), lambda line: None)


def build_options(path: Path) -> dict:
    return {
        "out": "candidate",
        "source": str(path),
        "sku": SKU,
        "sku_file": None,
        "build": {},
        "determinism": None,
        "threads": None,
    }


def test_a_task_in_a_process_of_its_own(tmp_path):
    save_mlp(tmp_path / "mlp.onnx")
    done = local(tmp_path, **build_options(tmp_path / "mlp.onnx"))
    assert (done.status, done.message) == ("done", "")
    assert len(done.result["bundle"]) == 64
    assert done.peak > 1e6
    refused = local(tmp_path, **build_options(tmp_path / "none.onnx"))
    assert (refused.status, refused.result) == ("refused", None)
    assert "does not exist" in refused.message
    assert "does not exist" in (tmp_path / "build.log").read_text()
    crashed = local(tmp_path, kind="no such task")
    assert (crashed.status, crashed.result) == ("crashed", None)
    assert "KeyError" in crashed.message


def test_limits_of_time_and_memory(tmp_path):
    save_mlp(tmp_path / "mlp.onnx")
    options = build_options(tmp_path / "mlp.onnx")
    late = local(tmp_path, seconds=0.01, **options)
    assert late.status == "timeout"
    assert "within 0.01 s" in late.message
    (tmp_path / "hungry.py").write_text("import numpy\ndef model():\n    return numpy.ones(10**10)\n")
    limited = local(tmp_path, memory=3 << 30, **{**options, "source": "hungry:model"})
    assert limited.status in ("memory", "refused")  # as a module it is found only from its folder
    program = f"""
import os, sys
os.chdir({str(tmp_path)!r})
from pathlib import Path
from pipeline.nightly.executor import *
task = Task("build", Path("job"), {SKU!r}, {{**{options!r}, "source": "hungry:model"}})
print(LocalExecutor().run(task, Limits(60, 3 << 30), lambda line: None).status)
"""
    found = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "memory"


class Failing:
    """An executor whose tasks crash so many times."""

    slots = 1

    def __init__(self, crashes: int, inner) -> None:
        self.left, self.inner, self.tries = crashes, inner, 0

    def run(self, task, limits, told):
        from pipeline.nightly.executor import Outcome

        self.tries += 1
        if self.left:
            self.left -= 1
            return Outcome("crashed", None, "it ended with signal SIGSEGV", 0.1)
        return self.inner.run(task, limits, told)


@pytest.mark.parametrize(("crashes", "status", "tries"), [(1, "promoted", 3), (2, "failed", 2)])
def test_what_crashes_is_tried_again(world, silent, crashes, status, tries):
    made = world("mlp")
    executor = Failing(crashes, InProcess())
    job = only(made.night(silent, executor=executor))
    assert (job.status, executor.tries) == (status, tries)


def test_jobs_run_side_by_side_where_the_executor_has_slots(world, silent):
    made = world("mlp", "conv", skus=(SKU, "cpu-far"))
    executor = Failing(0, InProcess())
    executor.slots = 3
    report = made.night(silent, executor=executor)
    assert [job.status for job in report.jobs] == ["promoted", "unverified"] * 2
    assert made.content()["leftovers"] == []


# Parts


@given(st.lists(st.floats(0.1, 10), min_size=8, max_size=60), st.floats(0.6, 0.99))
def test_the_interval_holds_the_median_and_shifts_with_the_ratios(ratios, confidence):
    found = interval_of(ratios, confidence)
    assert found.lowest <= found.median <= found.highest
    assert {found.lowest, found.highest} <= set(ratios)
    shifted = interval_of([2 * ratio for ratio in ratios], confidence)
    assert shifted.lowest == 2 * found.lowest


def test_the_interval_covers_as_often_as_it_says():
    """Of 2000 draws with median 1, at most the allowed share lies outside; a heavy-tailed distribution."""
    random = np.random.default_rng(5)
    missed = 0
    for _ in range(2000):
        found = interval_of(np.exp(random.standard_t(1.5, 11)).tolist(), 0.95)
        missed += not found.lowest <= 1 <= found.highest
    assert missed / 2000 <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 2000)


@pytest.mark.parametrize(("slowdown", "noise", "passed"), [(1.0, 0.3, True), (1.3, 0.02, False), (1.3, 1.0, True)])
def test_only_what_is_shown_to_be_slower_fails(slowdown, noise, passed):
    random = np.random.default_rng(11)
    options = SpeedOptions(limit=0.05)
    interval = measure(
        lambda side: (slowdown if side else 1.0) * float(np.exp(random.normal(0, noise))), options, lambda n: None
    )
    found = speed_verdict(interval, options)
    assert found["passed"] is passed
    assert interval.pairs == (options.most_pairs if noise == 1.0 and interval.median > 1.05 else interval.pairs)
    assert found["text"].startswith("slower") is not passed


def test_more_pairs_are_measured_where_few_do_not_decide():
    ratios = iter([1.2] * 6 + [0.9] * 4 + [1.2] * 40)
    options = SpeedOptions(limit=0.05, pairs=10, most_pairs=40)
    interval = measure(lambda side: next(ratios) if side else 1.0, options, lambda n: None)
    assert interval.pairs == 40
    assert interval.lowest > 1.05


def test_differences_are_within_chance_or_beyond():
    assert determinism_verdict(1e-7, [1e-7, 3e-7], 2)["passed"]
    beyond = determinism_verdict(1e-3, [1e-7, 3e-7], 2)
    assert not beyond["passed"]
    assert "beyond chance" in beyond["text"]
    assert not determinism_verdict(1e-9, [0.0], 2)["passed"], "rebuilds that never differ allow nothing"


def test_distances_see_numbers_that_are_none_and_other_shapes():
    a = [{"y": np.array([1.0, np.nan, np.inf], np.float32)}]
    assert same(a, a)
    assert distances(a, a) == [0.0]
    for other in ([1.0, 2.0, np.inf], [1.0, np.nan, -np.inf]):
        b = [{"y": np.array(other, np.float32)}]
        assert not same(a, b)
        assert distances(a, b) == [np.inf]
    with pytest.raises(KilnError, match="another shape"):
        distances([{"y": np.zeros(2)}], [{"y": np.zeros(3)}])


def test_a_rebuild_that_computes_something_else_is_beyond_chance(world, silent, monkeypatch):
    """The same inputs by their digests, another engine: as if a library's update had changed results."""
    made = world("mlp")
    made.night(silent)
    made.make_stable()
    digest = only(made.night(silent)).version and made.registry().release("mlp", SKU, 1).inputs["model"]
    import onnx
    from onnx import numpy_helper

    path = made.models / "mlp.onnx"
    model = onnx.load(path)
    weight = numpy_helper.to_array(model.graph.initializer[0])
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array((weight * (1 + 1e-5)).astype(np.float32), "a"))
    onnx.save(model, path)
    monkeypatch.setattr("pipeline.source.ModelSource.sha256", digest)
    job = only(made.night(silent, "code-2"))
    assert job.status == "held back"
    assert cases(job) | {"determinism": "failed", "accuracy": "passed"} == cases(job)
    assert "beyond chance" in text_of(job, "determinism")


def test_an_update_that_changes_what_the_same_engine_computes_is_seen(world, silent, monkeypatch):
    """Both engines run with the new library and agree; what stable computed when it was built does not."""
    from pipeline.nightly import determinism

    made = world("mlp")
    made.night(silent)
    made.make_stable()
    run = determinism._run
    monkeypatch.setattr(
        determinism,
        "_run",
        lambda *arguments: [{name: value * 1.001 for name, value in one.items()} for one in run(*arguments)],
    )
    job = only(made.night(silent, "code-2"))
    assert (job.status, cases(job)["determinism"]) == ("held back", "failed")
    assert "as they were when it was built" in text_of(job, "determinism")
    options = made.config.determinism.model_copy(update={"seed": 7})
    folder = made.config.work / "jobs" / f"mlp-{SKU}"
    assert determinism._read_outputs(folder / "stable-outputs.npz", options) is None, "those of other inputs"


def test_the_journal_survives_a_cut_line_and_forgets_ended_runs(tmp_path):
    path = tmp_path / "journal.jsonl"
    first = Journal(path)
    first.note("job", "build", "key", {"bundle": "b"})
    with path.open("ab") as stream:
        stream.write(b'{"run": "' + first.run.encode() + b'", "event": "do')
    second = Journal(path)
    assert (second.resumed, second.run) == (True, first.run)
    assert second.find("job", "build", "key") == {"bundle": "b"}
    assert second.find("job", "build", "other key") is None
    second.note("job", "publish", "b", {"version": 1})
    assert Journal(path).find("job", "publish", "b") == {"version": 1}
    second.end()
    third = Journal(path)
    assert not third.resumed
    assert third.find("job", "build", "key") is None


def test_one_run_at_a_time(tmp_path):
    with only_run(tmp_path), pytest.raises(AlreadyRunningError), only_run(tmp_path):
        pytest.fail("two at once")
    with only_run(tmp_path):
        pass


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("memory = '8 GB'", "field 'memory'"),
        ("retries = -1", "field 'retries'"),
        ("memroy = 1", "field 'memroy'"),
        ("skus = []", "has no SKU"),
        ("timeout = 0", "field 'timeout'"),
        ("= 1", "is not TOML"),
    ],
)
def test_a_bad_configuration_is_named(tmp_path, line, reason):
    path = tmp_path / "nightly.toml"
    rest = 'registry = "r"\nkey = "k"\ntrust = "t"\nwork = "w"\n'
    path.write_text(f'{rest}{line}\n[models.a]\nsource = "a"\n')
    with pytest.raises(KilnError, match=reason):
        config_from_toml(path)
    path.write_text(f'{rest}memory = "1.5 GiB"\nskus = ["x"]\n[models]\n')
    with pytest.raises(KilnError, match="names no model"):
        config_from_toml(path)


# Reports and command line


def test_the_command_line_runs_reports_and_tells_cron(world, tmp_path):
    made = world("conv", settings="memory = '8 GiB'\ntimeout = 120")
    run = CliRunner()
    first = run.invoke(nightly_group, [str(made.path), "--json"])
    assert first.exit_code == 0, first.output
    document = json.loads(first.stdout)
    assert [job["status"] for job in document["jobs"]] == ["promoted"]
    made.make_stable()
    save_conv(made.models / "conv.onnx", variance=4.0)
    second = run.invoke(nightly_group, [str(made.path), "--reports", str(tmp_path / "reports")])
    assert second.exit_code == 3, second.output
    assert "held back" in second.stdout
    page = (tmp_path / "reports" / "report.html").read_text()
    assert "held back" in page
    assert f"conv-{SKU}-accuracy.html" in page
    assert (tmp_path / "reports" / f"conv-{SKU}-accuracy.html").is_file()
    suites = ElementTree.parse(tmp_path / "reports" / "junit.xml").getroot()
    assert suites.get("failures") == "1"
    assert [case.get("name") for case in suites.iter("testcase") if case.find("failure") is not None] == ["accuracy"]
    with only_run(made.config.work):
        assert run.invoke(nightly_group, [str(made.path)]).exit_code == 75
    assert run.invoke(nightly_group, ["verify", str(made.path)]).exit_code == 3, "it was judged, and stays where it is"


def test_the_examples_are_what_they_say():
    examples = Path(__file__).parents[2] / "docs" / "nightly"
    config = config_from_toml(examples / "nightly.toml")
    assert config.jobs[:2] == (("smollm2", "cpu-avx512"), ("smollm2", "cpu-avx2"))
    assert config.memory == 12 << 30
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((examples / "cronjob.yaml").read_text())["spec"]["jobTemplate"]["spec"]
    rules = job["podFailurePolicy"]["rules"]
    assert rules[0]["onExitCodes"]["values"] == [2, *sorted(EXIT_CODES.values())]
    workflow = yaml.safe_load((examples / "github-actions.yml").read_text())
    commands = [step.get("run", "") for step in workflow["jobs"]["nightly"]["steps"]]
    unit = (examples / "kiln-nightly.service").read_text()
    container = job["template"]["spec"]["containers"][0]
    for text in ("\n".join(commands), " ".join(container["args"]), unit):
        words = text[text.index("kiln nightly") :].split("\n")[0].split()[2:]
        assert run_command.make_context("run", words).params["config"].name == "nightly.toml"
    assert f"SuccessExitStatus={BUSY}" in unit


def test_reports_hold_whatever_is_said():
    from pipeline.nightly.report import Case

    odd = "<b>&\x00\x1b\ud800 'x'"
    job = JobReport("m", "s", "failed", odd, cases=(Case("build", "error", odd, 1.0),))
    report = NightlyReport("r", "2026-01-01T00:00:00Z", "url", {"cpu": "c"}, {}, (job,))
    suites = ElementTree.fromstring(junit_from_report(report).encode())
    assert suites.find(".//error").text == "<b>&??? 'x'"
    assert suites.get("errors") == "1"
    assert report.exit_code == 4
