"""How a night runs: tasks and their limits, crashes, the journal, the configuration, reports, the command line."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

pytest.importorskip("cryptography")
pytest.importorskip("onnxruntime")

from engines.sku import host_cpu_features
from pipeline.cli_nightly import BUSY, nightly_group, run_command
from pipeline.nightly.config import config_from_toml
from pipeline.nightly.executor import Limits, LocalExecutor, Task
from pipeline.nightly.journal import AlreadyRunningError, Journal, only_run
from pipeline.nightly.report import EXIT_CODES, JobReport, NightlyReport, junit_from_report
from plugins.errors import KilnError
from tests.pipeline.nightly_material import SKU, InProcess, cases, only, save_conv, save_mlp

pytestmark = pytest.mark.skipif(not {"avx2", "fma"} <= host_cpu_features(), reason="engines are built for AVX2")


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


# Journal and configuration


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
