"""What the graph passes did, for people and for programs: a table, JSON, and the manifest's records."""

import json
import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from engines.manifest import PassRecord
from passes.manager import PassReport


def record_from_report(report: PassReport) -> PassRecord:
    """As the manifest keeps it; a NaN, which JSON lacks, becomes None."""
    errors, timing = report.errors, report.timing
    return PassRecord(
        name=report.name,
        effect=report.effect.value,
        changed=report.changed,
        rewrites=report.rewrites,
        seconds=report.seconds,
        nodes_before=dict(report.nodes_before),
        nodes_after=dict(report.nodes_after),
        absolute_error=_finite(errors.absolute) if errors else None,
        relative_error=_finite(errors.relative) if errors else None,
        cosine=_finite(errors.cosine) if errors else None,
        limit=report.limit,
        seconds_before=timing.before if timing else None,
        seconds_after=timing.after if timing else None,
        timing_noise=timing.noise if timing else None,
        rolled_back=report.rolled_back,
        notes=report.notes,
    )


def json_from_reports(reports: Sequence[PassReport], **more: Any) -> str:
    """One line."""
    passes = [record_from_report(report).model_dump() for report in reports]
    return json.dumps({**more, "passes": passes}, allow_nan=False)


def table_from_reports(reports: Sequence[PassReport]) -> Table:
    """One row a pass; times only where they were measured."""
    measured = any(report.timing for report in reports)
    table = Table(title="graph passes", title_justify="left")
    table.add_column("pass")
    table.add_column("effect")
    for heading in ("rewrites", "nodes", "s", "abs error", "rel error", "cosine"):
        table.add_column(heading, justify="right")
    if measured:
        table.add_column("a run, ms", justify="right")
        table.add_column("pays")
    table.add_column("result", overflow="fold")
    for report in reports:
        before, after = sum(report.nodes_before.values()), sum(report.nodes_after.values())
        nodes = f"{before} -> {after}" if before != after else str(after)
        errors = report.errors
        row = [
            report.name,
            report.effect.value,
            str(report.rewrites),
            nodes,
            f"{report.seconds:.2f}",
            *([f"{errors.absolute:.1e}", f"{errors.relative:.1e}", f"{errors.cosine:.9f}"] if errors else [""] * 3),
        ]
        if measured:
            timing = report.timing
            row.append(f"{timing.before * 1e3:.1f} -> {timing.after * 1e3:.1f}" if timing else "")
            row.append({True: "yes", False: "no", None: "within noise"}[timing.pays] if timing else "")
        table.add_row(*row, result_of(report))
    return table


def result_of(report: PassReport) -> str:
    """In words."""
    if report.rolled_back is not None:
        return f"rolled back: {report.rolled_back}"
    if not report.rewrites:
        return "nothing to do"
    changes = {
        op: report.nodes_after.get(op, 0) - report.nodes_before.get(op, 0)
        for op in sorted({*report.nodes_before, *report.nodes_after})
    }
    largest = sorted((op for op in changes if changes[op]), key=lambda op: -abs(changes[op]))[:4]
    return ", ".join(f"{changes[op]:+d} {op}" for op in largest) or "changed in place"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
