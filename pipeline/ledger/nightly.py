"""Entries from nightly jobs: what was built and judged, with every figure of the gates."""

import math
from collections.abc import Mapping
from dataclasses import asdict

from pipeline.ledger.entry import Entry, FigureValues
from pipeline.nightly.report import Case, JobReport, NightlyReport

_WORK = ("build", "accuracy", "determinism", "speed")
"""Steps that find something out; without any of them a job has only been looked at."""


def entries_from_nightly(report: NightlyReport) -> list[Entry]:
    """One for each job in which something was built or judged; what has not changed is no news."""
    return [_entry(report, job) for job in report.jobs if any(_worked(case) for case in job.cases)]


def _entry(report: NightlyReport, job: JobReport) -> Entry:
    version = "" if job.version is None else f" {job.version}"
    return Entry(
        kind="nightly",
        created=report.created,
        name=job.model,
        subject=job.bundle,
        path=f"{report.registry} {job.model} {job.sku}{version}",
        facts={
            "sku": job.sku,
            **{f"input.{name}": text for name, text in job.inputs.items() if name != "backend"},  # versions, one by one
            **{f"machine.{name}": text for name, text in report.machine.items()},
            **{f"version.{name}": text for name, text in _versions(report, job).items()},
        },
        figures=tuple(figure for case in job.cases if _worked(case) for figure in _figures(case)),
        document={"run": report.run, "registry": report.registry, "job": asdict(job)},
        digests={"bundle": job.bundle} if job.bundle else {},
    )


def _versions(report: NightlyReport, job: JobReport) -> dict[str, str]:
    """Of the libraries where the job ran: "onnx 1.2, torch 2.3"; the run's own where it did not get so far."""
    return dict(part.split(" ", 1) for part in job.inputs.get("backend", "").split(", ") if part) or dict(
        report.versions
    )


def _worked(case: Case) -> bool:
    return case.name in _WORK and case.status != "skipped"


def _figures(case: Case) -> list[FigureValues]:
    found = [
        FigureValues(f"{case.name}/{name}", "", (float(value),), name in case.higher)
        for name, value in _finite(case.figures).items()
        if name != "limit"  # a setting
    ]
    found.append(FigureValues(f"{case.name}_seconds", "s", (case.seconds,), False))
    if case.peak is not None:
        found.append(FigureValues(f"{case.name}_peak", "bytes", (case.peak,), False))
    return found


def _finite(figures: Mapping[str, float | str]) -> dict[str, float]:
    """Texts stand for what is no number: those are in the document."""
    return {name: value for name, value in figures.items() if not isinstance(value, str) and math.isfinite(value)}
