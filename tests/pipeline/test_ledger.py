"""The ledger: what it keeps, whom it lets write, what it calls a regression, and the commands that fill it."""

import json
import multiprocessing
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from engines.bundle import open_bundle
from engines.manifest import PassRecord
from pipeline.cli import build_engine_command, kiln_group
from pipeline.ledger.entry import Entry, FigureValues, change_sentence, changes
from pipeline.ledger.judging import judge
from pipeline.ledger.recording import record
from pipeline.ledger.records import entry_from_build
from pipeline.ledger.store import Ledger, default_path
from pipeline.ledger.views import flags, judged
from pipeline.progress import Progress
from plugins.errors import KilnError

pytest.importorskip("onnxruntime")


def entry(value: float = 10.0, **changed: Any) -> Entry:
    base = Entry(
        kind="benchmark",
        created="2026-01-01T00:00:00Z",
        name="tiny",
        subject="ab" * 32,
        path="/tmp/tiny",
        facts={"kv": "float32", "machine.cpu": "a"},
        figures=(FigureValues("rate", "tokens/s", (value, value * 1.01), True),),
        document={"any": [1, 2]},
        passes=(PassRecord(name="fuse_gelu", changed=True, seconds=0.5, rewrites=2),),
    )
    return replace(base, **changed)


def test_an_entry_comes_back_as_it_was(tmp_path: Path) -> None:
    with Ledger(tmp_path / "deep" / "ledger.sqlite") as ledger:
        added = ledger.add(entry())
    with Ledger(tmp_path / "deep" / "ledger.sqlite", create=False) as ledger:
        assert ledger.entries() == [added]
        assert ledger.entry(added.number) == replace(entry(), number=added.number)


def test_the_parent_is_the_entry_with_the_fewest_changes(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l") as ledger:
        first = ledger.add(entry())
        far = ledger.add(entry(facts={"kv": "int8", "machine.cpu": "b"}))
        near = ledger.add(entry(facts={"kv": "float16", "machine.cpu": "a"}))
        same = ledger.add(entry())
        other = ledger.add(entry(name="another"))
    assert first.parent is None
    assert far.change == "2 things: kv: float32 -> int8; machine.cpu: a -> b"
    assert (near.parent, near.change) == (first.number, "kv: float32 -> float16")
    assert (same.parent, same.change) == (first.number, "nothing: repeated")
    assert other.parent is None


facts = st.dictionaries(st.sampled_from("abcd"), st.sampled_from("xyz"))


@given(facts, facts)
def test_changes_are_what_differs(before: dict[str, str], after: dict[str, str]) -> None:
    found = changes(before, after)
    assert len(found) == sum(before.get(name) != after.get(name) for name in {*before, *after})
    assert (change_sentence(found) == "nothing: repeated") == (before == after)


def _write(path: Path, writer: int, count: int) -> None:
    for number in range(count):
        with Ledger(path) as ledger:
            ledger.add(entry(float(writer * 1000 + number + 1)))


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    """Six processes on a file that none of them finds; one more is killed while it writes."""
    path = tmp_path / "ledger.sqlite"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(path, writer, 8)) for writer in range(6)]
    doomed = context.Process(target=_write, args=(path, 9, 10_000))
    for process in (*writers, doomed):
        process.start()
    for process in writers:
        process.join()
        assert process.exitcode == 0
    doomed.kill()
    doomed.join()
    with Ledger(path, create=False) as ledger:
        entries = ledger.entries()
    written = sorted(one.figures[0].values[0] for one in entries if one.figures[0].values[0] < 9000)
    assert written == [float(writer * 1000 + number + 1) for writer in range(6) for number in range(8)]
    assert all(len(one.figures[0].values) == 2 and len(one.passes) == 1 for one in entries)
    assert sum(one.parent is None for one in entries) == 1


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("hello, this is not a database at all" * 40)
    with pytest.raises(KilnError, match=r"text cannot be used: .*not a database.*--ledger"):
        Ledger(text)
    newer = tmp_path / "newer"
    with sqlite3.connect(newer) as connection:
        connection.execute("CREATE TABLE t (x)")
        connection.execute("PRAGMA user_version = 7")
    with pytest.raises(KilnError, match="version 7; this Kiln's ledger has version 1"):
        Ledger(newer)
    with pytest.raises(KilnError, match="there is no ledger at"):
        Ledger(tmp_path / "none", create=False)


def test_a_failing_ledger_costs_a_warning_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert record(tmp_path / "file" / "ledger", entry, Progress()) is None
    assert record(tmp_path / "ledger", lambda: 1 / 0, Progress()) is None  # type: ignore[arg-type, return-value]
    assert capsys.readouterr().err.count("warning: not recorded") == 2


def test_the_default_is_in_the_state_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "kiln" / "ledger.sqlite"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")  # which the specification says to ignore
    assert default_path() == Path.home() / ".local" / "state" / "kiln" / "ledger.sqlite"


FAST, SLOW = [(100.0,), (101.0,), (99.0,), (100.5,), (100.2,)], [(90.0,), (91.0,), (89.5,), (90.2,), (90.4,)]


def test_a_regression_takes_a_test_over_runs() -> None:
    assert judge(FAST, SLOW, higher_is_better=True).verdict == "worse"
    assert judge(FAST, SLOW, higher_is_better=False).verdict == "better"
    assert judge(SLOW, FAST, higher_is_better=True).verdict == "better"
    assert judge(FAST, FAST, higher_is_better=True).verdict == "same"
    odd = [*FAST[:4], (5.0,)]
    assert judge(FAST, odd, higher_is_better=True).verdict == "same"
    less = [(value * 0.99,) for (value,) in FAST]
    assert judge(FAST, less, higher_is_better=True).verdict == "same", "1 % is nothing"
    scattered = judge([(60.0,), (90.0,), (130.0,), (170.0,)], [(50.0,), (80.0,), (120.0,), (160.0,)], True)
    assert scattered.verdict == "unknown", "10 % that may be chance"


def test_few_runs_suspect_at_most() -> None:
    steady = [(100.0, 100.5, 99.8)]
    assert judge(steady, [(80.0, 80.5, 79.5)], higher_is_better=True).verdict == "suspected worse"
    assert judge(steady, [(60.0, 100.0, 140.0)], higher_is_better=True).verdict == "same"
    assert judge(steady, [(60.0, 90.0, 140.0)], higher_is_better=True).verdict == "unknown"
    assert judge([(100.0,)], [(50.0,)], higher_is_better=True).verdict == "unknown"
    assert not judge(steady, [(80.0, 80.5, 79.5)], higher_is_better=True).regressed


runs = st.lists(st.tuples(st.floats(1, 100)), min_size=1, max_size=7)


@given(runs, runs, st.sampled_from([0.25, 4.0]))
def test_a_judgement_does_not_depend_on_units_or_on_who_is_first(before: Any, after: Any, unit: float) -> None:
    found = judge(before, after, True)
    scaled = judge([(v * unit,) for (v,) in before], [(v * unit,) for (v,) in after], True)
    assert found.verdict == scaled.verdict
    swapped = judge(after, before, False)
    if found.p is not None:
        assert swapped.p == pytest.approx(found.p)
    assert judge(before, before, True).verdict == "same"


def test_flags_are_those_of_all_runs_like_both(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l") as ledger:
        for (fast,), (slow,) in zip(FAST, SLOW, strict=True):
            first = ledger.add(entry(fast))
            last = ledger.add(entry(slow, facts={"kv": "int8", "machine.cpu": "a"}, subject="cd" * 32))
        assert flags(ledger, last) == ["rate"]
        assert flags(ledger, first) == []
        assert judged(ledger, first, last)["rate"][1].runs == (5, 5)


def test_a_build_says_what_it_was_made_from(llama_bundle: Path) -> None:
    bundle = open_bundle(llama_bundle)
    made = entry_from_build(bundle, {"export": 1.0, "check": 2.0})
    assert made.subject == bundle.sha256
    assert made.facts["kv.dtype"] == "float32"
    assert made.facts["pass.fuse_rope"] == "on"
    assert made.passes == bundle.manifest.passes
    assert made.figure("build_seconds") == FigureValues("build_seconds", "s", (3.0,), False)
    assert set(made.digests) == {"bundle", "model", *bundle.manifest.files}


def test_commands_fill_it_and_read_it(llama_folder: Path, tmp_path: Path) -> None:
    runner, out = CliRunner(), tmp_path / "bundle"
    at = ["--ledger", str(tmp_path / "ledger.sqlite")]

    def kiln(*arguments: str, code: int = 0) -> str:
        result = runner.invoke(kiln_group, [*arguments, *at])
        assert result.exit_code == code, result.output
        return result.stdout

    for options in ([], ["--disable", "fuse_swiglu,bind_swiglu"]):
        built = runner.invoke(build_engine_command, [str(llama_folder), "--out", str(out), *options, *at])
        assert built.exit_code == 0, built.output
    kiln("compare", str(llama_folder), str(out), "--tokens", "2", "--text-tokens", "64", "--json")
    second, first = json.loads(kiln("ledger", "list", "--kind", "build", "--json"))
    assert second["parent"] == first["entry"]
    assert "pass.fuse_swiglu: on -> none" in second["change"]
    shown = json.loads(kiln("ledger", "show", str(out), "--json"))
    assert shown["document"]["manifest"]["memory"]["phases"]
    difference = json.loads(kiln("ledger", "diff", str(first["entry"]), str(out), "--kind", "build", "--json"))
    assert difference["regressed"] == []
    assert "check/logits against torch" in difference["figures"]
    explained = json.loads(kiln("explain", str(out), "--json"))
    assert [step["entry"] for step in explained["builds"]] == [first["entry"], second["entry"]]
    assert "compare/kl_mean" in explained["builds"][-1]["figures"]
    assert "█" in kiln("ledger", "plot", "bundle_bytes", "--html", str(tmp_path / "p.html"))
    assert "<svg" in (tmp_path / "p.html").read_text()
    for arguments, message in (
        (["ledger", "show", "99"], "no entry 99"),
        (["ledger", "show", "beef"], "of 'beef'"),
        (["ledger", "plot", "nothing"], "known are build_seconds, bundle_bytes"),
        (["ledger", "diff", "1", "3"], "one is|of one kind"),
    ):
        failed = runner.invoke(kiln_group, [*arguments, *at])
        assert isinstance(failed.exception, KilnError)
        assert any(part in str(failed.exception) for part in message.split("|"))


def test_without_a_ledger_nothing_is_recorded(llama_bundle: Path, tmp_path: Path) -> None:
    arguments = ["compare", str(llama_bundle), str(llama_bundle), "--tokens", "1", "--text-tokens", "8"]
    at = ["--ledger", str(tmp_path / "ledger"), "--no-ledger"]
    assert CliRunner().invoke(kiln_group, [*arguments, *at]).exit_code == 0
    assert not (tmp_path / "ledger").exists()


def test_nightly_jobs_are_entries_with_their_gates_figures(tmp_path):
    from pipeline.ledger.nightly import entries_from_nightly
    from pipeline.nightly.report import Case, JobReport, NightlyReport

    def night(status: str, cases: tuple[Case, ...], driver: str = "1") -> NightlyReport:
        job = JobReport("mlp", "cpu-avx2", status, "", 2, 1, "b" * 64, {"driver": driver}, cases)
        return NightlyReport("run", "2026-01-01T00:00:00Z", "registry", {"cpu": "c"}, {"onnx": "1"}, (job,))

    build = Case("build", "passed", "", 2.0, peak=1e6)
    accuracy = Case("accuracy", "passed", "", 1.0, {"agreement": 1.0, "error": 0.5, "snr": "inf"}, ("agreement",))
    speed = Case("speed", "passed", "", 1.0, {"ratio": 1.01, "limit": 1.05})
    unchanged = night("unchanged", (Case("gates", "passed"), Case("speed", "skipped")))
    assert entries_from_nightly(unchanged) == []
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        for report in (night("promoted", (build,)), night("promoted", (build, accuracy, speed), driver="2")):
            (entry,) = entries_from_nightly(report)
            entry = ledger.add(entry)
    assert (entry.kind, entry.subject, entry.change) == ("nightly", "b" * 64, "input.driver: 1 -> 2")
    assert entry.facts["version.onnx"] == "1"
    directions = {figure.name: figure.higher_is_better for figure in entry.figures if "/" in figure.name}
    assert directions == {"accuracy/agreement": True, "accuracy/error": False, "speed/ratio": False}
    assert entry.figure("build_peak").values == (1e6,)
