"""What a run found: frozen data, as JSON, JUnit XML and an exit code. `pipeline.nightly.page` draws it.

JUnit: a test suite for each model and SKU, a test case for each step; a gate that holds a candidate back is a failure,
what could not be done is an error.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal
from xml.etree import ElementTree

CaseStatus = Literal["passed", "failed", "error", "skipped"]
JobStatus = Literal["promoted", "unchanged", "unverified", "held back", "failed"]
EXIT_CODES: Mapping[str, int] = {"held back": 3, "failed": 4}
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Case:
    """One step of a job."""

    name: str
    status: CaseStatus
    text: str = ""
    seconds: float = 0.0
    figures: Mapping[str, float | str] = field(default_factory=dict)
    higher: Sequence[str] = ()
    """Figures of which more is better; of the others, less is."""
    peak: float | None = None
    """Bytes of resident memory of its process."""


@dataclass(frozen=True)
class JobReport:
    """One model on one SKU. `changes` are what differs from stable's inputs, in words."""

    model: str
    sku: str
    status: JobStatus
    text: str
    version: int | None = None
    stable: int | None = None
    bundle: str = ""
    """Identity of the version's bundle, "" where there is none."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """What it was made from, by name."""
    cases: tuple[Case, ...] = ()
    changes: Mapping[str, str] = field(default_factory=dict)
    attachments: Mapping[str, str] = field(default_factory=dict)
    """Name of a page of this job to its path, relative to the report's folder."""


@dataclass(frozen=True)
class NightlyReport:
    """One run."""

    run: str
    created: str
    registry: str
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    jobs: tuple[JobReport, ...]
    resumed: bool = False

    @property
    def exit_code(self) -> int:
        """0: all is promoted, unchanged or waits for its machine; 3: a gate held a candidate back; 4: a job failed."""
        return max((EXIT_CODES.get(job.status, 0) for job in self.jobs), default=0)

    def to_json(self) -> str:
        return json.dumps({"exit_code": self.exit_code, **asdict(self)}, indent=1, allow_nan=False)


def junit_from_report(report: NightlyReport) -> str:
    """The document that CI systems read."""
    root = ElementTree.Element("testsuites", name="kiln nightly")
    for job in report.jobs:
        counts = {status: sum(case.status == status for case in job.cases) for status in ("failed", "error", "skipped")}
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=f"{job.model} {job.sku}",
            timestamp=report.created.removesuffix("Z"),
            tests=str(len(job.cases)),
            failures=str(counts["failed"]),
            errors=str(counts["error"]),
            skipped=str(counts["skipped"]),
            time=f"{sum(case.seconds for case in job.cases):.3f}",
        )
        for case in job.cases:
            _add_case(suite, job, case)
    for name in ("tests", "failures", "errors", "skipped"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _add_case(suite: ElementTree.Element, job: JobReport, case: Case) -> None:
    element = ElementTree.SubElement(
        suite, "testcase", classname=f"{job.model}.{job.sku}", name=case.name, time=f"{case.seconds:.3f}"
    )
    text = _NOT_XML.sub("?", case.text)
    tags = {"failed": "failure", "error": "error", "skipped": "skipped"}
    if case.status in tags:
        ElementTree.SubElement(element, tags[case.status], message=text).text = text
    elif text:
        ElementTree.SubElement(element, "system-out").text = text
