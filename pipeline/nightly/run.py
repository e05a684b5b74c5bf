"""A nightly run: for each model and SKU what changed is built, published as a candidate, judged, and promoted.

    build -> publish, read back -> verify stable -> accuracy, determinism, speed -> attest -> promote to canary

Every step may be killed and done again: a bundle is published once whatever happens, channels move forward only, and
what was finished is in the journal or in the registry itself. `stable` is only read: people promote to it.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engines.bundle import holds_bundle
from engines.sku import Sku, resolve_sku
from pipeline.nightly.config import ModelEntry, NightlyConfig
from pipeline.nightly.executor import Executor, Limits, Outcome, Task
from pipeline.nightly.fingerprint import Machine, changes, digest_of, inputs_of
from pipeline.nightly.journal import Journal
from pipeline.nightly.report import Case, CaseStatus, JobReport, JobStatus, NightlyReport
from pipeline.nightly.tasks import CANDIDATE, GATE_PAGE, OUTPUTS, STABLE, STABLE_OUTPUTS
from pipeline.progress import Progress
from pipeline.registry.pull import pull, pull_outputs
from pipeline.registry.records import Attestation, ChannelEntry, Release
from pipeline.registry.registry import Registry
from pipeline.registry.store import RegistryError
from pipeline.source import ModelSource, resolve_source
from plugins.errors import KilnError

GATES = ("accuracy", "determinism", "speed")
_SAME_ENGINE = ("model", "options", "sku")
"""Inputs that must be stable's for the outputs to be comparable bit by bit."""


class StepFailedError(KilnError):
    """A job cannot go on."""

    def __init__(self, case: Case) -> None:
        super().__init__(case.text)
        self.case = case


@dataclass(frozen=True)
class Nightly:
    """What all jobs of a run share. `force` builds what has not changed, too; `machines` knows who runs a SKU's tasks.

    Without `machines` it is `machine`, which is where the run itself is.
    """

    config: NightlyConfig
    registry: Registry
    executor: Executor
    machine: Machine
    journal: Journal
    progress: Progress
    force: bool = False
    machines: Callable[[str], Machine] | None = None

    def rebuild(self) -> NightlyReport:
        """Every job of the configuration."""
        return self._report(lambda job: job.rebuild())

    def verify(self) -> NightlyReport:
        """Candidates that nobody could judge so far, as far as this machine can."""
        return self._report(lambda job: job.verify())

    def _report(self, work: Callable[["Job"], JobReport]) -> NightlyReport:
        jobs = [Job(self, model, sku) for model, sku in self.config.jobs]
        slots = self.executor.slots
        reports: Sequence[JobReport]
        if slots == 1:
            reports = [work(job) for job in jobs]
        else:
            with ThreadPoolExecutor(slots) as pool:
                reports = list(pool.map(work, jobs))
        return NightlyReport(
            run=self.journal.run,
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            registry=self.config.registry,
            machine=self.machine.description,
            versions=self.machine.versions,
            jobs=tuple(reports),
            resumed=self.journal.resumed,
        )


class Job:
    """One model on one SKU."""

    def __init__(self, nightly: Nightly, model: str, sku: str) -> None:
        self._nightly, self.model, self.sku_name = nightly, model, sku
        self._config, self._registry, self._journal = nightly.config, nightly.registry, nightly.journal
        self._entry: ModelEntry = nightly.config.models[model]
        self.folder = nightly.config.work / "jobs" / f"{model}-{sku}"
        self._cases: list[Case] = []
        self._changes: dict[str, str] = {}
        self._release: Release | None = None

    def rebuild(self) -> JobReport:
        """Build what changed and see how far it gets."""
        return self._reported(self._rebuild)

    def verify(self) -> JobReport:
        """Judge the candidate if nobody has."""
        return self._reported(self._verify)

    def _reported(self, work: Callable[[], JobReport]) -> JobReport:
        try:
            report = work()
        except StepFailedError as failed:
            self._cases.append(failed.case)
            report = self._end("failed", f"{failed.case.name}: {failed.case.text}")
        except KilnError as error:
            self._cases.append(Case("registry", "error", str(error)))
            report = self._end("failed", str(error))
        self._say(f"{report.status}: {report.text}")
        return report

    def _rebuild(self) -> JobReport:
        sku = resolve_sku(self.sku_name, self._config.sku_file)
        source = self._step("model", lambda: resolve_source(self._entry.source))
        inputs = inputs_of(source.sha256, sku, self._entry.build, self._machine)
        release = None if self._nightly.force else self._published(inputs)
        if release is None:
            release = self._publish(self._build(source, sku, inputs), inputs)
            fresh = True
        else:
            fresh = self._journal.find(self._name, "publish", release.bundle) is not None
        return self._judged(release, sku, fresh)

    def _verify(self) -> JobReport:
        sku = resolve_sku(self.sku_name, self._config.sku_file)
        head = self._registry.channel(self.model, self.sku_name, "candidate")
        if head is None:
            return self._end("unchanged", "there is no candidate")
        return self._judged(self._registry.release(self.model, self.sku_name, head.version), sku, fresh=False)

    def _published(self, inputs: dict[str, str]) -> Release | None:
        """The candidate, if it was made from the same inputs."""
        head = self._registry.channel(self.model, self.sku_name, "candidate")
        if head is None:
            return None
        release = self._registry.release(self.model, self.sku_name, head.version)
        return release if release.inputs == inputs else None

    # From model to candidate

    def _build(self, source: ModelSource, sku: Sku, inputs: dict[str, str]) -> Path:
        path, key = self.folder / CANDIDATE, digest_of(inputs)
        done = self._journal.find(self._name, "build", key)
        if done is None or not holds_bundle(path, done["bundle"]):
            runs_here = self._machine.can_run(sku)
            recorded = self._gate_options("determinism") if runs_here else {"determinism": None}
            options = {**self._build_options, **recorded, "out": CANDIDATE, "threads": self._config.threads}
            outcome = self._run("build", options)
            if outcome.status != "done":
                raise StepFailedError(_case_of("build", outcome, "error"))
            assert outcome.result is not None
            done = {**outcome.result, "seconds": outcome.seconds, "peak": outcome.peak}
            self._journal.note(self._name, "build", key, done)
        self._cases.append(Case("build", "passed", done["bundle"][:12], done["seconds"], peak=done["peak"]))
        return path

    @property
    def _build_options(self) -> dict[str, Any]:
        sku_file = self._config.sku_file
        return {
            "source": self._entry.source,
            "sku": self.sku_name,
            "sku_file": None if sku_file is None else str(sku_file),
            "build": self._entry.build.model_dump(mode="json"),
        }

    def _publish(self, path: Path, inputs: dict[str, str]) -> Release:
        """The upload gate: what was sent is read back and compared with its digests; once it is sent again."""
        start = time.monotonic()
        self._say("publish")
        release, problem = self._send(path, inputs, repair=False)
        told = "" if release is not None else f"{problem}; sent again"
        if release is None:
            release, problem = self._send(path, inputs, repair=True)
        seconds = time.monotonic() - start
        if release is None:
            raise StepFailedError(Case("upload", "failed", problem, seconds))
        self._journal.note(self._name, "publish", release.bundle, {"version": release.version})
        self._cases.append(Case("upload", "passed", told or f"version {release.version}", seconds))
        return release

    def _send(self, path: Path, inputs: dict[str, str], repair: bool) -> tuple[Release | None, str]:
        """The release, or what was wrong with it."""
        try:
            outputs = self.folder / OUTPUTS
            computed = outputs if outputs.is_file() else None
            release = self._registry.publish(path, self.model, inputs=inputs, outputs=computed, repair=repair)
        except RegistryError as error:
            return None, str(error)
        problems = self._registry.check(release)
        return (None, problems[0]) if problems else (release, "")

    # From candidate to canary

    def _judged(self, release: Release, sku: Sku, fresh: bool) -> JobReport:
        self._release = release
        judged = self._registry.attestation(self.model, self.sku_name, release.version)
        if judged is None and not self._machine.can_run(sku):
            self._cases.append(Case("gates", "skipped", f"this machine cannot execute {self.sku_name}"))
            text = "built, and waits for kiln nightly verify" if fresh else "waits for kiln nightly verify"
            return self._end("unverified", f"{text} on a machine of that type")
        stable = self._step("verify stable", lambda: self._registry.channel(self.model, self.sku_name, "stable"))
        if judged is None:
            fresh = True
            judged = self._judge(release, stable)
        elif not fresh:
            self._cases.append(Case("gates", "passed" if judged.passed else "failed", _findings(judged)))
        if not judged.passed:
            again = "" if fresh else "nothing changed since; "
            return self._end("held back", again + _findings(judged), stable)
        if not self._promote(release) and not fresh:
            return self._end("unchanged", "it was made from the same inputs", stable)
        return self._end("promoted", "canary has it", stable)

    def _promote(self, release: Release) -> bool:
        """Whether canary moved."""
        head = self._registry.channel(self.model, self.sku_name, "canary")
        if head is not None and head.version >= release.version:
            return False
        self._registry.promote(self.model, self.sku_name, "canary", release.version)
        self._cases.append(Case("promote", "passed", f"canary has version {release.version}"))
        return True

    def _judge(self, release: Release, stable: ChannelEntry | None) -> Attestation:
        self._bring(release, CANDIDATE)
        before = None
        if stable is not None:
            before = self._step("verify stable", lambda: self._stable(stable.version))
            self._cases.append(Case("verify stable", "passed", f"version {stable.version}"))
            self._changes = changes(before.inputs, release.inputs)
        cases = [self._gate(gate, release, before) for gate in GATES]
        self._cases += [case for case in cases if case.status != "error"]
        for rebuilt in self.folder.glob("rebuild-*"):
            shutil.rmtree(rebuilt, ignore_errors=True)
        if broken := next((case for case in cases if case.status == "error"), None):
            raise StepFailedError(broken)
        findings = {case.name: f"{case.status}: {case.text}" for case in cases}
        passed = all(case.status != "failed" for case in cases)
        return self._registry.attest(release, passed, self._machine.description, findings)

    def _stable(self, version: int) -> Release:
        release = self._registry.release(self.model, self.sku_name, version)
        self._bring(release, STABLE)
        (self.folder / STABLE_OUTPUTS).unlink(missing_ok=True)
        pull_outputs(self._registry, release, self.folder / STABLE_OUTPUTS)
        return release

    def _bring(self, release: Release, name: str) -> None:
        """Have a release in the job's folder, verified."""
        path = self.folder / name
        if not holds_bundle(path, release.bundle):
            pull(self._registry, self.model, self.sku_name, path, version=release.version, allow_downgrade=True)

    def _gate(self, gate: str, release: Release, stable: Release | None) -> Case:
        if stable is None and gate != "accuracy":
            return Case(gate, "skipped", "there is no stable to compare with")
        if gate == "determinism":
            assert stable is not None
            if changed := [name for name in _SAME_ENGINE if stable.inputs.get(name) != release.inputs.get(name)]:
                return Case(gate, "skipped", f"other outputs are meant: {', '.join(changed)} changed since stable")
        options = {**self._gate_options(gate), "threads": self._config.threads}
        if gate == "accuracy":
            options["source"] = None if stable is not None else self._entry.source
        if gate == "determinism":
            options |= self._build_options
        key = digest_of([release.bundle, None if stable is None else stable.bundle, options])
        done = self._journal.find(self._name, gate, key)
        if done is None:
            case = _case_of(gate, self._run(gate, options), "failed")
            if case.status == "error":
                return case
            self._journal.note(self._name, gate, key, vars(case))
            return case
        return Case(**done)

    def _gate_options(self, gate: str) -> dict[str, Any]:
        own = getattr(self._entry, gate)
        chosen = getattr(self._config, gate) if own is None else own
        return {gate: chosen.model_dump(mode="json")}

    # Helpers

    @property
    def _machine(self) -> Machine:
        """What runs its tasks."""
        machines = self._nightly.machines
        return self._nightly.machine if machines is None else self._step("node", lambda: machines(self.sku_name))

    @property
    def _name(self) -> str:
        return f"{self.model}/{self.sku_name}"

    def _run(self, kind: str, options: dict[str, Any]) -> Outcome:
        """Run a task, again where it crashed or ran out of time or memory."""
        limits = Limits(self._config.timeout, self._config.memory)
        task = Task(kind, self.folder, self.sku_name, options)
        self._say(kind)
        for attempt in range(self._config.retries + 1):
            outcome = self._nightly.executor.run(task, limits, self._nightly.progress.detail)
            if outcome.status in ("done", "refused"):
                break
            self._say(f"{kind}: {outcome.message}" + ("; again" if attempt < self._config.retries else ""))
        return outcome

    def _step(self, name: str, work: Callable[[], Any]) -> Any:
        start = time.monotonic()
        try:
            return work()
        except KilnError as error:
            raise StepFailedError(Case(name, "error", str(error), time.monotonic() - start)) from error

    def _say(self, text: str) -> None:
        self._nightly.progress.note(f"{self.model} {self.sku_name}: {text}")

    def _end(self, status: JobStatus, text: str, stable: ChannelEntry | None = None) -> JobReport:
        page = self.folder / GATE_PAGE
        judged = any(case.name == "accuracy" and case.status in ("passed", "failed") for case in self._cases)
        return JobReport(
            model=self.model,
            sku=self.sku_name,
            status=status,
            text=text,
            version=None if self._release is None else self._release.version,
            stable=None if stable is None else stable.version,
            bundle="" if self._release is None else self._release.bundle,
            inputs={} if self._release is None else self._release.inputs,
            cases=tuple(self._cases),
            changes=self._changes,
            attachments={"accuracy": str(page)} if judged and page.is_file() else {},
        )


def _case_of(name: str, outcome: Outcome, refused: CaseStatus) -> Case:
    """A gate that refuses what it was given holds it back; a build that does has failed."""
    if outcome.status == "refused":
        return Case(name, refused, outcome.message, outcome.seconds)
    if outcome.result is None:
        return Case(name, "error", outcome.message, outcome.seconds)
    passed = outcome.result["passed"]
    case = Case(name, "passed" if passed else "failed", outcome.result["text"], outcome.seconds)
    figures, higher = outcome.result["figures"], outcome.result.get("higher", ())
    return replace(case, figures=figures, higher=higher, peak=outcome.peak)


def _findings(judged: Attestation) -> str:
    bad = [f"{name} {text}" for name, text in judged.findings.items() if text.startswith("failed")]
    return "; ".join(bad or [f"{name} {text}" for name, text in judged.findings.items()])
