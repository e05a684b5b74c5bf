"""What a part of the report found: tables with claims, of the same form as the serving report's."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from serving_bench.setting import Findings, Verdict

from pipeline.gate.report import GateReport

__all__ = ["Findings", "Verdict", "at_least", "at_most", "findings_from_json", "findings_to_json", "gate_in_words"]


def at_most(claim: str, value: float, limit: float, form: str = ".2%") -> Verdict:
    return Verdict(f"{claim} at most {limit:{form}}", f"{value:{form}}", bool(value <= limit))


def at_least(claim: str, value: float, limit: float, form: str = ".4f") -> Verdict:
    return Verdict(f"{claim} at least {limit:{form}}", f"{value:{form}}", bool(value >= limit))


def gate_in_words(report: GateReport | None) -> str:
    """The gate's verdict for a table's cell."""
    if report is None:
        return "not asked"
    judged = sum(check.judged for check in report.checks)
    if report.passed:
        return f"passes, {judged} checks"
    first = report.failures[0]
    more = f" and {len(report.failures) - 1} more" if len(report.failures) > 1 else ""
    return f"refuses: {first.check.title} on {first.stratum}{more}"


def findings_to_json(findings: Sequence[Findings]) -> str:
    return json.dumps([asdict(found) for found in findings], indent=1)


def findings_from_json(text: str) -> list[Findings]:
    """What `findings_to_json` wrote; keys of `data` that were numbers are strings then, as in any JSON."""
    found = []
    for part in json.loads(text):
        verdicts = [Verdict(**verdict) for verdict in part.pop("verdicts")]
        rows, columns = [tuple(row) for row in part.pop("rows")], tuple(part.pop("columns"))
        found.append(Findings(**part, rows=rows, columns=columns, verdicts=verdicts))
    return found
