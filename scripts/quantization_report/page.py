"""docs/quantization.md: the guide (guide.md, beside this file), then what was measured."""

from collections.abc import Sequence
from pathlib import Path

from serving_bench.page import section

from quantization_report.findings import Findings

_GUIDE = Path(__file__).with_name("guide.md")


def page(command: str, machine: str, origin: str, findings: Sequence[Findings]) -> str:
    failed = [verdict for found in findings for verdict in found.verdicts if not verdict.holds]
    claims = sum(len(found.verdicts) for found in findings)
    summary = f"All {claims} claims hold." if not failed else f"{len(failed)} of {claims} claims do not hold:"
    head = [
        _GUIDE.read_text(encoding="utf-8"),
        "# What was measured",
        "",
        "This page is made by",
        "",
        f"    {command}",
        "",
        f"from `scripts/quantization_report/guide.md` on {machine}. Texts: {origin}. Every quantised "
        "bundle of a model is made from one float bundle, by the functions that `build-engine --quant` calls, and "
        "calibrated, where it needs ranges, on Python's documentation unless its table says otherwise; the "
        "gate's limits are its own.",
        "",
        summary,
        "",
        *(f"- {verdict.claim}: {verdict.found}" for verdict in failed),
        *([""] if failed else []),
    ]
    return "\n".join([*head, *map(section, findings)])
